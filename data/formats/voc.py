"""Pascal VOC: an XML file for each image, of boxes, turned boxes (of roLabelImg), outlines, attributes (of CVAT)."""

import math
from collections.abc import Iterator
from pathlib import Path

from .reading import around, parse_xml, to_number
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
        turned, outline = item.find("robndbox"), item.find("polygon")
        if turned is not None:
            written = [turned.findtext(key) for key in ("cx", "cy", "w", "h", "angle")]
            x, y, width, height, angle = map(to_number, written)
            box = x - width / 2, y - height / 2, x + width / 2, y + height / 2
            marks["rotation"] = str(math.degrees(angle))
        elif outline is not None and item.find("bndbox") is None:
            # Tags are x1, y1, x2, y2, ..., or x and y of each point.
            written = [one.text for one in outline.iter() if one.tag[0] in "xy"]
            box = around(*([one.text for one in outline.iter() if one.tag[0] == axis] for axis in "xy"))
        else:
            written = [item.findtext(f"bndbox/{key}") for key in ("xmin", "ymin", "xmax", "ymax")]
            left, top, right, bottom = map(to_number, written)
            # The first pixel is number 1 in the original data, and 0 for some tools.
            box = left - (left >= 1), top - (top >= 1), right, bottom
        scene.add(str(item.findtext("name")), box, f"{path}, object {i}", written, marks)
