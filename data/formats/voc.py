"""Pascal VOC: an XML file of boxes for each image, with the attributes of CVAT."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree

from .reading import to_number
from .scene_builder import SceneBuilder
from .split import ImageEntry, Split


def list_images(split: Split) -> Iterator[ImageEntry]:
    """Images; the annotation is the path of the XML file."""
    return split.pairs("annotations", ".xml")


def add_labels(scene: SceneBuilder, path: Path) -> None:
    """Add the objects of one image."""
    root = scene.split.folder.read(path, parse_xml)
    scene.scale_from(*(to_number(root.findtext(f"size/{key}")) for key in ("width", "height")))
    for i, item in enumerate(root.iterfind("object")):
        marks = {part.tag: part.text for part in item}
        marks |= {str(one.findtext("name")): one.findtext("value") for one in item.iterfind("attributes/attribute")}
        written = [item.findtext(f"bndbox/{key}") for key in ("xmin", "ymin", "xmax", "ymax")]
        left, top, right, bottom = map(to_number, written)
        # The first pixel is number 1 in the original data, and 0 for some tools.
        box = left - (left >= 1), top - (top >= 1), right, bottom
        scene.add(str(item.findtext("name")), box, f"{path}, object {i}", written, marks)


def parse_xml(file: BinaryIO) -> ElementTree.Element:
    """Root of a Pascal VOC file. Another root is a ValueError."""
    root = ElementTree.parse(file).getroot()
    if root.tag != "annotation":
        raise ValueError(f"its root is <{root.tag}>, not <annotation> of Pascal VOC")
    return root
