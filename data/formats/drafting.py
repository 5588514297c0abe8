"""Draft a mapping file for a folder that has none: with a YOLO data.yaml, COCO JSON files or Pascal VOC XML files.

Classes are matched by name and by the synonyms of the tokenizer. The draft is a file like any other mapping, to be
read and edited: its notes say which classes have no category yet, what is assumed to be labeled exhaustively, and by
which folder and digest a later draft knows whether this one was edited.
"""

import glob
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePath, PurePosixPath
from typing import Any
from xml.etree import ElementTree

from ...answer_kind_traffic_vlm import LIGHT_STATES
from ...files import DataError, atomic_write_text, open_inside
from ...image_files import decode_text, find_by_name, index_files, keys_of, plain_name, select_files, stem_of
from ...tokenization_traffic_vlm import TrafficVLMTokenizer
from ..scene import CLASSES
from .base import parse_json, replace_last
from .coco import to_key
from .mapping import MAPPINGS, normalize
from .voc import XML_ERRORS
from .yolo import DATA_FILES, READ_ERRORS, parse_data, parse_names


ROOT = Path(__file__).resolve().parents[2]
Splits = dict[str, dict[str, Any]]
BY_HAND = "a mapping file tells how to read it: --source MAPPING.json={folder}, see docs/fine-tuning.md"
LIGHTS = {f"{state}light": {"class": "traffic light", "state": state} for state in LIGHT_STATES}
RIDDEN = ("motorcycle", "bicycle")


@dataclass
class Found:
    """What a folder holds: its format, splits and class names.

    Attributes:
        exhaustive: class names of which the source itself says that every visible object is labeled; None if it does
            not say.
        notes: for the reader of the mapping.
    """

    format: str
    splits: Splits = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    exhaustive: set[str] | None = None
    notes: list[str] = field(default_factory=list)


def draft_mapping(folder: Path, path: Path) -> str:
    """Write a mapping file for a folder, and return a text that says how its classes are read.

    Args:
        folder: with `data.yaml`, COCO JSON or Pascal VOC XML files.
        path: the file to write.

    Raises:
        DataError: the folder has none of these, or a link out of it; none of its classes has the name of one of our
            categories; or `path` has something else, such as an edited draft.
    """
    reasons: list[str] = []
    for find in (_find_yolo, _find_coco, _find_voc):
        found = find(folder, reasons)
        if found.splits:
            break
    else:
        message = f"{folder} has none of a data.yaml with image folders, COCO JSON files or Pascal VOC XML files"
        raise DataError("; ".join([message, *reasons[:3], BY_HAND.format(folder=folder)]))
    draft = {"name": folder.resolve().name, "format": found.format, "splits": found.splits} | _draft_classes(found)
    classes, notes = draft["classes"], draft["notes"]
    use = f"--source {path}={folder}"
    if path.exists():
        _check_same(path, draft, folder, use)
    else:
        draft["notes"] = [*notes, f"Drafted for {_full_name(folder)}, digest {_digest(draft)}."]
        atomic_write_text(path, json.dumps(draft, indent=2, ensure_ascii=False) + "\n")
    if found.names and not any(classes.values()):
        raise DataError(
            f"{folder}: none of its classes ({', '.join(found.names)}) has the name of one of our categories: map "
            f"them under 'classes' of {path}, and use {use}"
        )
    read_as = ", ".join(f"{name} = {_category(entry) or 'ignored'}" for name, entry in classes.items())
    lines = [f"{folder} is read as {found.format}, by {path}:", read_as, *notes, f"To change it: {use}"]
    return "\n  ".join(line for line in lines if line)


def _draft_classes(found: Found) -> dict[str, Any]:
    """Keys of a mapping file: classes, exhaustive, attributed and notes."""
    classes, exhaustive = match_classes(found.names)
    categories = {name: _category(entry) for name, entry in classes.items()}
    says, notes = "is taken to be labeled", list(found.notes)
    if found.exhaustive is not None:
        stated = {normalize(name) for name in found.exhaustive}
        named = {category for name, category in categories.items() if normalize(name) in stated}
        lights = {entry["state"] for name, entry in classes.items() if _is_light(entry) and normalize(name) in stated}
        # Lights of one color say nothing of the others.
        exhaustive += ["traffic light"] if lights == set(LIGHT_STATES) else []
        exhaustive = sorted(category for category in set(exhaustive) if category in named)
        says = "is labeled, as the source says"
        broad = {CLASSES[category][2] for category in exhaustive}
        for name in [name for name, entry in classes.items() if entry in exhaustive and entry in broad]:
            classes[name] = {"class": classes[name], "maybe": []}  # a vehicle that is none of those with a class
    draft: dict[str, Any] = {"classes": classes, "exhaustive": exhaustive}
    if all(_is_light(classes[name]) for name, category in categories.items() if category == "traffic light"):
        draft |= {"attributed": {"traffic light": ["state"]}} if "traffic light" in categories.values() else {}
    notes.insert(0, f"Every visible object of 'exhaustive' {says}: {', '.join(exhaustive) or 'none'}.")
    if "person" in exhaustive and "rider" not in categories.values():
        ridden = [name for name, category in categories.items() if category in RIDDEN]
        for name in ridden:
            classes[name] = {"class": categories[name], "maybe": ["person"]}
        if ridden:
            notes.append(
                f"Riders may be a part of {' and '.join(ridden)}: with one there, 'no person' is not known. Take "
                "'maybe' out where they have boxes as persons."
            )
    if unmatched := [name for name in found.names if name not in classes]:
        notes.append(
            f"No category for {', '.join(unmatched)}: nothing is known to be absent from images with them. Add them "
            "to 'classes', with a category or null."
        )
    if not found.names:
        notes.append("No object is labeled: only --scene_labels or questions of your own tell what the images show.")
    return draft | {"notes": notes}


def _is_light(entry: Any) -> bool:
    return isinstance(entry, dict) and "state" in entry


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
    """Names without spaces: {of our categories: category}, {of COCO's classes and lights: entry}; the tokenizer."""
    own = {
        form.replace(" ", ""): category
        for category, (singular, plural, _) in CLASSES.items()
        for form in (category, singular, plural)
    }
    coco = json.loads((MAPPINGS / "coco.json").read_text(encoding="utf-8"))["classes"]
    others = {normalize(name).replace(" ", ""): entry for name, entry in coco.items()} | {"hydrant": None} | LIGHTS
    return own, others, TrafficVLMTokenizer.from_pretrained(ROOT)


def _category(entry: Any) -> str | None:
    return entry["class"] if isinstance(entry, dict) else entry


def _find_yolo(folder: Path, _: list[str]) -> Found:
    """By `data.yaml` of Ultralytics and Roboflow: a split is a folder, several folders, or a text file of images."""
    path = next((folder / name for name in DATA_FILES if (folder / name).is_file()), folder / DATA_FILES[0])
    if not path.is_file():
        return Found("yolo")
    found = Found("yolo")
    missing: list[str] = []
    try:
        with open_inside(path, folder) as file:
            data = parse_data(decode_text(file.read()))
        found.names = list(parse_names(data.get("names")).values())
        for split in ("train", "val", "test"):
            values = data.get(split) or []
            places = [
                place
                for value in (values if isinstance(values, list) else [values])
                if (place := _find_place(folder, path, split, str(value), str(data.get("path", "")), missing))
            ]
            if places:
                found.splits[split] = _yolo_layout(folder, path, split, places)
    except DataError:
        raise
    except READ_ERRORS as error:
        raise DataError(f"{path}: splits and class names cannot be read: {' '.join(str(error).split())}") from error
    if not found.splits:
        message = f"{path}: train, val and test are no folders, and no lists of images"
        raise DataError(f"{message}: {', '.join(missing) or 'none is given'}; {BY_HAND.format(folder=folder)}")
    if missing:
        found.notes.append(f"Not found, and left out: {', '.join(missing)} of {path.name}.")
    return found


def _find_place(folder: Path, path: Path, split: str, value: str, base: str, missing: list[str]) -> Path | None:
    """Folder or list that a value of data.yaml names, below `folder`; what does not exist is added to `missing`."""
    parts = PurePosixPath(plain_name(value)).parts
    # Roboflow writes "../train/images" for "train/images" beside data.yaml, others the path on their machine.
    options = [Path(plain_name(base), *parts), *(Path(*parts[i:]) for i in range(len(parts)))]
    found = [option for option in options if (folder / option).exists()]
    inside = [option for option in found if (folder / option).resolve().is_relative_to(folder.resolve())]
    if found and not inside:
        raise DataError(
            f"{path}: {split}: {value} is outside of {folder}: files of other folders are not read. Write a "
            "mapping file for a folder that holds both, see docs/fine-tuning.md"
        )
    if not inside:
        missing.append(f"{split}: {value}")
        return None
    return Path(os.path.relpath((folder / inside[0]).resolve(), folder.resolve()))


def _yolo_layout(folder: Path, path: Path, split: str, places: list[Path]) -> dict[str, Any]:
    """Layout of a split with these folders, or with one list of images."""
    lists = [place for place in places if (folder / place).is_file()]
    if lists and len(places) > 1:
        raise DataError(f"{path}: {split} has a list of images, {lists[0]}, beside others: write all into one list")
    if lists:
        with open_inside(folder / lists[0], folder) as file:
            lines = [line.strip() for line in decode_text(file.read()).splitlines()]
        index = index_files(path.as_posix() for path in _list_images(folder))
        found = [Path(name).parent for line in lines if line for name in find_by_name(index, line)]
        if not found:
            raise DataError(f"{path}: {split}: {folder} has none of the images of {lists[0]}, such as {lines[:1]}")
        places = sorted(set(found))
    else:
        places = [place / "images" if (folder / place / "images").is_dir() else place for place in places]
    images = Path(os.path.commonpath(places))
    more: dict[str, Any] = {"list": lists[0].as_posix()} if lists else {}
    if images not in places and not lists:
        more = {"only": [f"{glob.escape(place.relative_to(images).as_posix())}/*" for place in places]}
    # As Ultralytics: in place of the last folder "images", otherwise beside the images.
    labels = Path(replace_last(images.as_posix(), "images", "labels"))
    if not (folder / labels).is_dir() and (folder / images / "labels").is_dir():
        labels = images / "labels"
    return {"images": images.as_posix(), "labels": labels.as_posix()} | more


def _find_coco(folder: Path, reasons: list[str]) -> Found:
    """By COCO JSON files in a folder or one level below."""
    found = Found("coco")
    files = sorted([*folder.glob("*.json"), *folder.glob("*/*.json")])
    # COCO itself has captions and keypoints of the same images beside these.
    files = [path for path in files if path.name.startswith("instances_")] or files
    images: list[Path] = []
    exhaustive: list[set[str] | None] = []
    for path in files:
        try:
            with open_inside(path, folder) as file:
                data = parse_json(decode_text(file.read()))
            names = {str(entry["name"]): to_key(entry["id"]) for entry in data["categories"]}
            used = {to_key(label.get("category_id")) for label in data["annotations"]}
            listed = [str(entry["file_name"]) for entry in data["images"]]
            info = data.get("info") or {}
            exhaustive.append({str(name) for name in info["exhaustive"]} if "exhaustive" in info else None)
        except DataError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            reasons.append(f"{path} cannot be read: {error}")
            continue
        except (KeyError, TypeError, AttributeError):
            continue  # a JSON file of another format
        images = images or _list_images(folder)
        layout = {"annotations": path.relative_to(folder).as_posix()}
        _add_split(found.splits, folder, path, layout, images, listed)
        kept = [name for name, key in names.items() if key in used or name in (exhaustive[-1] or ())]
        found.names = list(dict.fromkeys([*found.names, *kept]))
    if exhaustive and None not in exhaustive:
        found.exhaustive = set.intersection(*(names for names in exhaustive if names is not None))
    return found


def _find_voc(folder: Path, reasons: list[str]) -> Found:
    """By Pascal VOC XML files anywhere in a folder."""
    found = Found("voc")
    names: dict[str, None] = {}
    stems: dict[Path, list[str]] = {}
    for path in sorted(folder.rglob("*.xml")):
        try:
            with open_inside(path, folder) as file:
                annotation = ElementTree.parse(file).getroot()
        except DataError:
            raise
        except XML_ERRORS as error:  # a problem for the reader, if there are others
            reasons.append(f"{path} cannot be read: {error}")
            continue
        if annotation.tag == "annotation":
            names |= dict.fromkeys(str(item.findtext("name")).strip() for item in annotation.iterfind("object"))
            stems.setdefault(path.parent, []).append(f"{path.stem}.jpg")
    found.names = list(names)
    images = _list_images(folder) if stems else []
    for annotations, listed in stems.items():
        layout = {"annotations": annotations.relative_to(folder).as_posix()}
        lists = [annotations.parent / "ImageSets" / "Main" / f"{split}.txt" for split in ("train", "val", "test")]
        for path in [path for path in lists if path.is_file()] or [annotations]:
            more = {"list": path.relative_to(folder).as_posix()} if path.suffix == ".txt" else {}
            _add_split(found.splits, folder, path, layout | more, images, listed)
    return found


def _list_images(folder: Path) -> list[Path]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    return [Path(name) for name in select_files(names)[0]]


def _add_split(
    splits: Splits, folder: Path, path: Path, layout: dict[str, str], images: list[Path], listed: list[str]
) -> None:
    """Add the split that `path` names, with the folder that has most of the listed images."""
    split = _split_of(path.relative_to(folder))
    counts: Counter[Path] = Counter()
    for whole in (True, False):
        keys = {key for name in listed for key in keys_of(name, whole)}
        for image in images if not counts else []:
            counts.update(p for p in image.parents if stem_of(image.relative_to(p).as_posix()) in keys)
    if not counts:
        message = f"{path}: {folder} has none of its {len(listed)} images{f', such as {listed[0]!r}' * bool(listed)}"
        raise DataError(f"{message}; {BY_HAND.format(folder=folder)}")
    best = max(counts, key=lambda parent: (counts[parent], _split_of(parent) == split))
    if split in splits:
        other = folder / splits[split]["annotations"]
        raise DataError(f"{other} and {path} both have the split {split}; {BY_HAND.format(folder=folder)}")
    splits[split] = {"images": best.as_posix()} | layout


def _split_of(path: PurePath) -> str:
    """The last of "train", "val" and "test" that begins a word of the path; "train" if there is none."""
    return ["train", *re.findall(r"(?<![a-z])(train|val|test)", path.as_posix().lower())][-1]
