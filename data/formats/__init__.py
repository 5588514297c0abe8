"""Readers of annotated images: COCO, YOLO, Pascal VOC, KITTI, BDD100K and masks → records of image and scene.

- A mapping file says what the class names of a source mean, and which categories are labeled exhaustively. `drafting`
  writes one for a YOLO, COCO or Pascal VOC folder.
- A label that is unclear or unusable limits only its own scene: see `SceneBuilder`.
- Bad input is counted and skipped (`Problems`), or with `strict=True` an error that names the file and the line or
  record.
- Of an image only the header is read; masks are decoded.
- Files outside of the source are not read, not even through links.

The module of each format has two functions: `list_images` yields the images of a `Source`, and `add_labels` adds the
labels of one image to a `SceneBuilder`.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ...files import DataError
from ...image_files import stem_of
from . import bdd100k, coco, kitti, masks, voc, yolo
from .base import Problems, Record, SceneBuilder, SkippedImage, Source
from .mapping import SourceMapping, load_mapping
from .mapping import check_sources as check_sources


READERS = {"coco": coco, "yolo": yolo, "voc": voc, "kitti": kitti, "bdd100k": bdd100k, "masks": masks}


def read_source(
    root: str | Path, mapping: SourceMapping | str | Path, split: str = "train", problems: Problems | None = None
) -> Iterator[Record]:
    """Read the records of one split of a source, in the order of its annotations.

    Args:
        root: the source's folder.
        mapping: a mapping, the path of its file, or the name of one in `data/formats/mappings`.
        split: a key of the mapping's "splits".
        problems: collects what is wrong with the input; without it, bad input is skipped silently.

    Raises:
        DataError: there is no such split, the mapping is invalid, or `problems.strict` and the input has a problem.
    """
    mapping = mapping if isinstance(mapping, SourceMapping) else load_mapping(mapping)
    if split not in mapping.splits:
        raise DataError(f"source {mapping.name!r} has no split {split!r}; it has {', '.join(mapping.splits)}")
    return _read(Source(Path(root), mapping, split, Problems() if problems is None else problems))


def _read(source: Source) -> Iterator[Record]:
    reader, is_empty = READERS[source.mapping.format], True
    try:
        images = [entry for entry in reader.list_images(source) if source.selects(stem_of(entry[0]))]
    except SkippedImage as skipped:
        kind, message = skipped.args
        source.problems.add(kind, source.root, message)
        images = []
    uses = Counter(PurePosixPath(name) for name, _, _ in images)
    for name, where, annotation in images:
        if (times := uses[PurePosixPath(name)]) > 1:  # each entry may lack the labels of the others
            source.problems.add("bad record", where, f"image {name} is listed {times} times")
            continue
        try:
            scene = SceneBuilder(source, name)
            reader.add_labels(scene, annotation, where)
        except SkippedImage as skipped:
            kind, message = skipped.args
            source.problems.add(kind, where, message)
            continue
        record = scene.finish()
        if record is not None:
            is_empty = False
            yield record
    if is_empty:
        message = f"split {source.split!r} of source {source.mapping.name!r} has no usable image"
        source.problems.add("empty source", source.root, message)
