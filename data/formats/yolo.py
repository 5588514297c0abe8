"""YOLO: a text file of boxes or outlines beside each image, and a file with the class names."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import yaml

from .base import ImageEntry, SceneBuilder, Source, to_number


def list_images(source: Source) -> Iterator[ImageEntry]:
    """Yield the images; the annotation is (path of the text file, {id: class name})."""
    names = _read_names(source)
    for name, where, path in source.pairs("labels", ".txt"):
        yield name, where, (path, names)


def add_labels(scene: SceneBuilder, annotation: Any, where: str) -> None:
    """Add lines `class x y width height` (fractions of the image) or `class x1 y1 x2 y2 ...` of an outline."""
    path, names = annotation
    for line_where, fields in scene.source.read_lines(path):
        class_id, values = to_number(fields[0]), np.array([to_number(value) for value in fields[1:]])
        if len(values) == 4 and class_id.is_integer():
            corners = np.stack([values[:2] - values[2:] / 2, values[:2] + values[2:] / 2])
        elif len(values) >= 6 and len(values) % 2 == 0 and class_id.is_integer():
            corners = np.stack([values.reshape(-1, 2).min(0), values.reshape(-1, 2).max(0)])
        else:
            message = f"{' '.join(fields)[:80]!r} is not a class id with a box or an outline"
            scene.reject("bad record", line_where, message)
            continue
        box = (corners * (scene.width, scene.height)).ravel().tolist()
        scene.add(names.get(int(class_id), f"id {class_id:g}"), box, line_where)


def _read_names(source: Source) -> dict[int, str]:
    """Read {id: class name} from lines of `classes.txt` or from "names" of `data.yaml`, a list or {id: name}.

    An id without a name, or with a blank one, is left out. Without such a file the names are those of the mapping.
    """
    options = [source.layout["classes"]] if "classes" in source.layout else ["data.yaml", "classes.txt"]
    path = next((source.root / name for name in options if (source.root / name).is_file()), source.root / options[0])
    if source.mapping.names and not path.is_file():
        return source.class_names({}, path)
    try:
        text = source.read_text(path)
        # BaseLoader keeps every value as text: a class may be named "no" or "050".
        names = text.splitlines() if path.suffix == ".txt" else yaml.load(text, yaml.BaseLoader).get("names", {})
        names = dict(enumerate(names) if isinstance(names, list) else names)
        found = {int(class_id): name.strip() for class_id, name in names.items() if name.strip()}
        if not found:
            raise ValueError("there are none")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        source.problems.add("bad file", path, f"class names cannot be read: {' '.join(str(error).split())}")
        return {}
    return source.class_names(found, path)
