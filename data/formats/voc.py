"""Pascal VOC: an XML file of boxes beside each image, as LabelImg and CVAT write them too."""

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from .base import VISIBLE_IF_FLAGGED, ImageEntry, SceneBuilder, SkippedImage, Source, to_flag, to_number


XML_ERRORS = (OSError, ValueError, LookupError, ElementTree.ParseError)  # raised for bad files


def list_images(source: Source) -> Iterator[ImageEntry]:
    """Images; the annotation is the path of the XML file."""
    return source.pairs("annotations", ".xml")


def add_labels(scene: SceneBuilder, path: Path, where: str) -> None:
    """Add the boxes of one image. A difficult object is there, but no question is about its category."""
    try:
        with scene.source.open(path) as file:
            annotation = ElementTree.parse(file).getroot()
    except XML_ERRORS as error:
        raise SkippedImage("bad file", f"cannot be read: {error}") from error
    if annotation.tag != "annotation":
        raise SkippedImage("bad file", f"is not Pascal VOC: its root is <{annotation.tag}>, not <annotation>")
    width, height = (to_number(annotation.findtext(f"size/{key}")) for key in ("width", "height"))
    scale_x, scale_y = scene.scale_from(width, height)
    for i, item in enumerate(annotation.iterfind("object")):
        written = [item.findtext(f"bndbox/{key}") for key in ("xmin", "ymin", "xmax", "ymax")]
        left, top, right, bottom = map(to_number, written)
        # The first pixel is 1 in the original data and 0 by some tools.
        box = (max(left - 1, 0.0) * scale_x, max(top - 1, 0.0) * scale_y, right * scale_x, bottom * scale_y)
        flags = [to_flag(item.findtext(key)) for key in ("occluded", "truncated")]
        visible = 0.0 if to_flag(item.findtext("difficult")) else VISIBLE_IF_FLAGGED ** sum(flags)
        scene.add(str(item.findtext("name")), box, f"{where}, object {i}", visible, written=written)
