"""Draft a mapping file for a folder that has none: with a YOLO data.yaml, COCO JSON files or Pascal VOC XML files.

Classes are matched by name and by the synonyms of the tokenizer. The draft is a file like any other mapping, to be
read and edited: its notes say which classes have no category yet, what is assumed to be labeled exhaustively, and by
which folder and digest a later draft knows whether this one was edited.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path, PurePath
from typing import Any
from xml.etree import ElementTree

import yaml

from ...files import DataError, atomic_write_text, open_inside
from ...image_files import select_files
from ...tokenization_traffic_vlm import TrafficVLMTokenizer
from ..scene import CLASSES
from .coco import to_key
from .mapping import MAPPINGS, normalize
from .voc import XML_ERRORS


ROOT = Path(__file__).resolve().parents[2]
Splits = dict[str, dict[str, Any]]
BY_HAND = "a mapping file tells how to read it: --source MAPPING.json={folder}, see docs/fine-tuning.md"


def draft_mapping(folder: Path, path: Path) -> str:
    """Write a mapping file for a folder, and return a text that says how its classes are read.

    Args:
        folder: with `data.yaml`, COCO JSON or Pascal VOC XML files.
        path: the file to write.

    Raises:
        DataError: the folder has none of these, or a link out of it; none of its classes has the name of one of our
            categories; or `path` has something else, such as an edited draft.
    """
    for find in (_find_yolo, _find_coco, _find_voc):
        format, splits, names = find(folder)
        if splits:
            break
    else:
        formats = "a data.yaml with image folders, COCO JSON files or Pascal VOC XML files"
        raise DataError(f"{folder} has none of {formats}; {BY_HAND.format(folder=folder)}")
    classes, exhaustive = match_classes(names)
    unmatched = [name for name in names if name not in classes]
    notes = [f"Every visible object of 'exhaustive' is taken to be labeled: {', '.join(exhaustive) or 'none'}."]
    if unmatched:
        notes.append(
            f"No category for {', '.join(unmatched)}: nothing is known to be absent from images with them. Add them "
            "to 'classes', with a category or null."
        )
    draft = {"name": folder.resolve().name, "format": format, "splits": splits, "classes": classes}
    draft |= {"exhaustive": exhaustive, "notes": notes}
    use = f"--source {path}={folder}"
    if path.exists():
        _check_same(path, draft, folder, use)
    else:
        draft["notes"] = [*notes, f"Drafted for {_full_name(folder)}, digest {_digest(draft)}."]
        atomic_write_text(path, json.dumps(draft, indent=2, ensure_ascii=False) + "\n")
    if not any(classes.values()):
        raise DataError(
            f"{folder}: none of its classes ({', '.join(names)}) has the name of one of our categories: map them "
            f"under 'classes' of {path}, and use {use}"
        )
    read_as = ", ".join(f"{name} = {_category(entry) or 'ignored'}" for name, entry in classes.items())
    return "\n  ".join([f"{folder} is read as {format}, by {path}:", read_as, *notes, f"To change it: {use}"])


def _full_name(folder: Path) -> str:
    return repr(str(folder.resolve()))  # it need not be UTF-8


def _digest(draft: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(draft).encode()).hexdigest()[:16]


def _check_same(path: Path, draft: dict[str, Any], folder: Path, use: str) -> None:
    """Raise `DataError` if a file is not this draft, and say why."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        [(origin, digest)] = re.findall("^Drafted for (.*), digest (.*)[.]$", found["notes"].pop())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{path} was edited: {use} uses it. For a new draft, delete it") from None
    if _digest(found) == _digest(draft):
        return
    if origin != _full_name(folder):
        raise DataError(f"{path} belongs to {origin}: choose another --output_dir, or rename {folder}")
    reason = "was edited" if _digest(found) != digest else "was not edited, but the source has changed"
    raise DataError(f"{path} {reason}: {use} uses it. For a new draft, delete it")


def match_classes(names: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Match class names with our categories.

    Returns:
        {class name: entry of a mapping's "classes"} of those that match, and the categories of which every object can
        be assumed to be labeled. A synonym may be narrower than its category: "sedan" is a car, but not every car.
    """
    own, others, tokenizer = _known_names()
    classes: dict[str, Any] = {}
    exhaustive = set()
    for name in names:
        words = normalize(name)
        spellings = [words, words.replace(" ", "")]  # "motor bike" and "motorbike"
        synonyms = ["".join(tokenizer.tokenize(spelling)) for spelling in spellings]
        if spellings[1] in own:
            classes[name] = own[spellings[1]]
            exhaustive.add(classes[name])
        elif known := [own[synonym] for synonym in synonyms if synonym in own]:
            classes[name] = known[0]
        elif spellings[1] in others:
            classes[name] = others[spellings[1]]
    return classes, sorted(exhaustive)


@cache
def _known_names() -> tuple[dict[str, str], dict[str, Any], Any]:
    """Names without spaces: {of our categories: category}, {of COCO's classes: entry}; and the tokenizer."""
    own = {
        form.replace(" ", ""): category
        for category, (singular, plural, _) in CLASSES.items()
        for form in (category, singular, plural)
    }
    coco = json.loads((MAPPINGS / "coco.json").read_text(encoding="utf-8"))["classes"]
    others = {normalize(name).replace(" ", ""): entry for name, entry in coco.items()}
    return own, others, TrafficVLMTokenizer.from_pretrained(ROOT)


def _category(entry: Any) -> str | None:
    return entry["class"] if isinstance(entry, dict) else entry


def _find_yolo(folder: Path) -> tuple[str, Splits, list[str]]:
    """Return the format, splits and class names by `data.yaml` of Ultralytics and Roboflow; no splits without it."""
    path, splits = folder / "data.yaml", {}
    if not path.is_file():
        return "yolo", {}, []
    try:
        with open_inside(path, folder) as file:
            data = yaml.load(file, yaml.BaseLoader)
        if not isinstance(data, dict) or "names" not in data:
            raise ValueError("it has no 'names'")
        names = data["names"]
        names = list(names.values()) if isinstance(names, dict) else list(names)
        for split in ("train", "val", "test"):
            value = str(data.get(split, ""))
            # Roboflow writes "../train/images" for the folder "train/images" beside data.yaml.
            options = [Path(str(data.get("path", "")), value), Path(value), Path(value.removeprefix("../"))]
            found = [option for option in options if value and (folder / option).is_dir()]
            inside = [option for option in found if (folder / option).resolve().is_relative_to(folder.resolve())]
            if not found:
                continue
            if not inside:
                raise DataError(
                    f"{path}: {split}: {value} is outside of {folder}: files of other folders are not read. Write a "
                    "mapping file for a folder that holds both, see docs/fine-tuning.md"
                )
            images = inside[0]
            if (folder / images / "images").is_dir():
                images /= "images"
            labels = list(images.parts)
            if "images" in labels:  # the last one, like Ultralytics; otherwise they are beside the images
                labels[len(labels) - 1 - labels[::-1].index("images")] = "labels"
            splits[split] = {"images": images.as_posix(), "labels": Path(*labels).as_posix()}
    except DataError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise DataError(f"{path}: splits and class names cannot be read: {' '.join(str(error).split())}") from error
    if not splits:
        raise DataError(f"{path}: train, val and test are no folders; {BY_HAND.format(folder=folder)}")
    return "yolo", splits, names


def _find_coco(folder: Path) -> tuple[str, Splits, list[str]]:
    """Return the format, splits and class names by COCO JSON files in a folder or one level below."""
    splits: Splits = {}
    names: dict[str, None] = {}
    files = sorted([*folder.glob("*.json"), *folder.glob("*/*.json")])
    # COCO itself has captions and keypoints of the same images beside these.
    files = [path for path in files if path.name.startswith("instances_")] or files
    images: list[Path] = []
    for path in files:
        try:
            with open_inside(path, folder) as file:
                data = json.load(file)
            used = {to_key(label["category_id"]) for label in data["annotations"]}
            found = [str(entry["name"]) for entry in data["categories"] if to_key(entry["id"]) in used]
            stems = {os.path.splitext(entry["file_name"])[0] for entry in data["images"]}
        except DataError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # a JSON file of another format
        images = images or _list_images(folder)
        _add_split(splits, folder, path, {"annotations": path.relative_to(folder).as_posix()}, images, stems)
        names |= dict.fromkeys(found)
    return "coco", splits, list(names)


def _find_voc(folder: Path) -> tuple[str, Splits, list[str]]:
    """Return the format, splits and class names by Pascal VOC XML files anywhere in a folder."""
    splits: Splits = {}
    names: dict[str, None] = {}
    stems: dict[Path, set[str]] = {}
    for path in sorted(folder.rglob("*.xml")):
        try:
            with open_inside(path, folder) as file:
                annotation = ElementTree.parse(file).getroot()
        except DataError:
            raise
        except XML_ERRORS:  # a problem for the reader
            continue
        if annotation.tag == "annotation":
            names |= dict.fromkeys(str(item.findtext("name")) for item in annotation.iterfind("object"))
            stems.setdefault(path.parent, set()).add(path.stem)
    images = _list_images(folder) if stems else []
    for annotations, found in stems.items():
        layout = {"annotations": annotations.relative_to(folder).as_posix()}
        lists = [annotations.parent / "ImageSets" / "Main" / f"{split}.txt" for split in ("train", "val", "test")]
        for path in [path for path in lists if path.is_file()] or [annotations]:
            more = {"list": path.relative_to(folder).as_posix()} if path.suffix == ".txt" else {}
            _add_split(splits, folder, path, layout | more, images, found)
    return "voc", splits, list(names)


def _list_images(folder: Path) -> list[Path]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    return [Path(name) for name in select_files(names)[0]]


def _add_split(
    splits: Splits, folder: Path, path: Path, layout: dict[str, str], images: list[Path], stems: set[str]
) -> None:
    """Add the split that `path` names, with the folder that has most images of these paths without suffix."""
    split = _split_of(path.relative_to(folder))
    counts: Counter[Path] = Counter()
    for image in images:
        counts.update(p for p in image.parents if image.relative_to(p).with_suffix("").as_posix() in stems)
    if not counts:
        raise DataError(f"{path}: {folder} has none of its {len(stems)} images; {BY_HAND.format(folder=folder)}")
    best = max(counts, key=lambda parent: (counts[parent], _split_of(parent) == split))
    if split in splits:
        other = folder / splits[split]["annotations"]
        raise DataError(f"{other} and {path} both have the split {split}; {BY_HAND.format(folder=folder)}")
    splits[split] = {"images": best.as_posix()} | layout


def _split_of(path: PurePath) -> str:
    """Return "train", "val" or "test": the last that begins a word of the path; "train" if there is none."""
    return ["train", *re.findall(r"(?<![a-z])(train|val|test)", path.as_posix().lower())][-1]
