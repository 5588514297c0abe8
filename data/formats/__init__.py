"""Readers of annotated images: COCO, YOLO, Pascal VOC, KITTI, BDD100K and masks → records of image and scene.

A mapping file says what the class names of a source mean, and which categories are labeled exhaustively. Bad input is
counted, and limits the scene of its image. Only the header of an image is read, and no file outside of the source.
The module of each format has two functions: `list_images` yields the images of a `Split`, and `add_labels` adds the
labels of one image to a `SceneBuilder`.
"""

from ...common.files import DataError
from . import bdd100k, coco, kitti, masks, voc, yolo
from .mapping import SourceMapping
from .reading import Folder, Unusable
from .scene_builder import Record, SceneBuilder, upright_size
from .split import Problems, Split


READERS = {"coco": coco, "yolo": yolo, "voc": voc, "kitti": kitti, "bdd100k": bdd100k, "masks": masks}


def read_source(folder: Folder, mapping: SourceMapping, split: str, problems: Problems) -> list[Record]:
    """Records of one split of a source, in the order of its annotations. `problems` gets what is wrong with the input.

    Raises:
        DataError: there is no such split.
    """
    if split not in mapping.splits:
        raise DataError(f"source {mapping.name!r} has no split {split!r}; it has {', '.join(mapping.splits)}")
    reader, records = READERS[mapping.format], list[Record]()
    try:
        images = Split(folder, mapping, split, problems)
        for name, where, annotation in reader.list_images(images):
            try:
                image = images.paths["images"] / name
                scene = SceneBuilder(images, name, where, *folder.read(image, upright_size))
                reader.add_labels(scene, annotation)
                records += [record] if (record := scene.finish()) else []
            except Unusable as error:
                problems.add(*error.args)
            except Exception as error:  # values of other types raise almost anything
                problems.add("bad record", where, f"{type(error).__name__}: {error}")
    except Unusable as error:  # a file that all images need
        problems.add(*error.args)
    if not records:
        problems.add("empty source", folder.root, f"split {split!r} of source {mapping.name!r} has no usable image")
    return records
