"""Pascal VOC: an XML file of boxes for each image, which LabelImg and CVAT write, too."""

from collections.abc import Iterator
from pathlib import Path

from .reading import Unusable, to_flag, to_number
from .scene_builder import SceneBuilder, visible_by
from .source import ImageEntry, Source


CORNERS = ("xmin", "ymin", "xmax", "ymax")


def list_images(source: Source) -> Iterator[ImageEntry]:
    """Images; the annotation is the path of the XML file."""
    return source.pairs("annotations", ".xml")


def add_labels(scene: SceneBuilder, path: Path) -> None:
    """Add the boxes of one image. A difficult object is there, but no question is about its category."""
    root = scene.source.folder.xml(path)
    if root.tag != "annotation":
        raise Unusable("bad file", path, f"is not Pascal VOC: its root is <{root.tag}>, not <annotation>")
    scene.scale_from(*(to_number(root.findtext(f"size/{key}")) for key in ("width", "height")))
    for i, item in enumerate(root.iterfind("object")):
        written = [item.findtext(f"bndbox/{key}") for key in CORNERS]
        left, top, right, bottom = map(to_number, written)
        # The first pixel is number 1 in the original data, and 0 for some tools.
        box = (max(left - 1, 0.0), max(top - 1, 0.0), right, bottom)
        visible = visible_by(item.findtext("occluded"), item.findtext("truncated"))
        if to_flag(item.findtext("difficult")):
            visible = 0.0
        scene.add(str(item.findtext("name")), box, f"{path}, object {i}", written, visible)
