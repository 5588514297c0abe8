"""Readers of annotated images: COCO, YOLO, Pascal VOC, KITTI, BDD100K and masks → records of image and scene.

- A mapping file says what the class names of a source mean, and which categories are labeled exhaustively. `drafting`
  writes one for a YOLO, COCO or Pascal VOC folder.
- A label that is unclear or unusable limits only the scene of its image: see `SceneBuilder`.
- Bad input is counted and skipped; messages in `Problems` name the file and the line or record.
- Only the header of an image is read; masks are decoded.
- Files outside of the source are not read, not even through links.

The module of each format has two functions: `list_images` yields the images of a `Source`, and `add_labels` adds the
labels of one image to a `SceneBuilder`.
"""

from collections.abc import Iterator
from pathlib import Path

from ...common.files import DataError
from . import bdd100k, coco, kitti, masks, voc, yolo
from .mapping import SourceMapping, load_mapping
from .mapping import check_sources as check_sources
from .reading import Unusable
from .scene_builder import Record, SceneBuilder
from .source import Problems, Source


READERS = {"coco": coco, "yolo": yolo, "voc": voc, "kitti": kitti, "bdd100k": bdd100k, "masks": masks}


def read_source(
    root: str | Path, mapping: SourceMapping | str | Path, split: str = "train", problems: Problems | None = None
) -> Iterator[Record]:
    """Records of one split of a source, read one by one, in the order of its annotations.

    Args:
        root: the source's folder.
        mapping: a mapping, the path of its file, or the name of one in `data/formats/mappings`.
        split: a key of the mapping's "splits".
        problems: collects what is wrong with the input; without it, bad input is skipped silently.

    Raises:
        DataError: there is no such split, or the mapping is invalid.
    """
    mapping = mapping if isinstance(mapping, SourceMapping) else load_mapping(mapping)
    if split not in mapping.splits:
        raise DataError(f"source {mapping.name!r} has no split {split!r}; it has {', '.join(mapping.splits)}")
    return _read(Source(Path(root), mapping, split, Problems() if problems is None else problems))


def _read(source: Source) -> Iterator[Record]:
    reader, is_empty = READERS[source.mapping.format], True
    try:
        for name, where, annotation in reader.list_images(source):
            try:
                scene = SceneBuilder(source, name, where)
                reader.add_labels(scene, annotation)
            except Unusable as error:
                source.problems.add(*error.args)
                continue
            if (record := scene.finish()) is not None:
                is_empty = False
                yield record
    except Unusable as error:  # a file that all images need
        source.problems.add(*error.args)
    if is_empty:
        message = f"split {source.split!r} of source {source.mapping.name!r} has no usable image"
        source.problems.add("empty source", source.root, message)
