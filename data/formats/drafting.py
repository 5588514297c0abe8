"""Draft a mapping for a folder that has none: with a YOLO data.yaml, COCO JSON files or Pascal VOC XML files.

Classes are matched by name. The draft is also saved as a file like any other mapping, to be read and edited: its notes
say which classes have no category yet, and what is assumed to be labeled exhaustively.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from ...common.files import DataError, atomic_write_text
from ...common.image_files import select_files
from ..scene import CLASSES, LIGHT_STATES, classes_of
from .coco import to_key
from .mapping import MAPPINGS, SourceMapping, normalize, parse_mapping
from .names import keys_of, plain_name, stem_of
from .reading import Unusable, read_json, read_xml
from .source import list_files, replace_last
from .yolo import DATA_FILES, read_data


SPLITS = ("train", "val", "test")
BY_HAND = "a mapping file tells how to read it: --source MAPPING.json={folder}, see docs/data.md"
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
    splits: dict[str, dict[str, Any]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    exhaustive: set[str] | None = None
    notes: list[str] = field(default_factory=list)


def draft_mapping(folder: Path, path: Path) -> tuple[SourceMapping, str]:
    """(mapping, text) for a folder: the text says how its classes are read. The mapping is also saved as a file.

    Args:
        folder: with `data.yaml`, COCO JSON or Pascal VOC XML files.
        path: the file to save.

    Raises:
        DataError: the folder has none of these, or a link out of it; none of its classes has the name of one of our
            categories; or `path` exists with other content, such as an edited draft.
    """
    reasons: list[str] = []
    for find in (_find_yolo, _find_coco, _find_voc):
        found = find(folder, reasons)
        if found.splits:
            break
    else:
        message = f"{folder} has none of a data.yaml with image folders, COCO JSON files or Pascal VOC XML files"
        raise DataError("; ".join([message, *reasons[:3], BY_HAND.format(folder=folder)]))
    classes = _draft_classes(found)
    draft = {"name": folder.resolve().name, "format": found.format, "splits": found.splits} | classes
    text, use = json.dumps(draft, indent=2, ensure_ascii=False) + "\n", f"--source {path}={folder}"
    if not path.exists():
        atomic_write_text(path, text)
    elif path.read_bytes() != text.encode():
        raise DataError(
            f"{path} differs from the draft for {folder}: it was edited, the folder has changed, or it belongs to "
            f"another one. {use} uses it as it is; for a new draft, delete it or choose another --output_dir"
        )
    if found.names and not any(classes["classes"].values()):
        raise DataError(
            f"{folder}: none of its classes ({', '.join(found.names)}) has the name of one of our categories: map "
            f"them under 'classes' of {path}, and use {use}"
        )
    read_as = ", ".join(f"{name} = {_category(entry) or 'ignored'}" for name, entry in classes["classes"].items())
    lines = [f"{folder} is read as {found.format}, by {path}:", read_as, *classes["notes"], f"To change it: {use}"]
    return parse_mapping(draft), "\n  ".join(line for line in lines if line)


def _draft_classes(found: Found) -> dict[str, Any]:
    """Keys of a mapping file: classes, exhaustive, attributed and notes."""
    classes, exhaustive = match_classes(found.names)
    says, notes = "is taken to be labeled", list(found.notes)
    if found.exhaustive is not None:
        stated = {normalize(name) for name in found.exhaustive}
        entries = [entry for name, entry in classes.items() if normalize(name) in stated]
        if {entry["state"] for entry in entries if _is_light(entry)} == set(LIGHT_STATES):
            exhaustive.append("traffic light")  # only with all states: "redlight" does not cover green lights
        exhaustive = sorted(set(exhaustive) & {_category(entry) for entry in entries})
        says = "is labeled, as the source says"
        broad = {wider for category in exhaustive for wider in classes_of(category)[1:]} & set(exhaustive)
        for name, category in classes.items():
            if not isinstance(category, dict) and category in broad:
                classes[name] = {"class": category, "maybe": []}  # such as a vehicle of none of the listed kinds
    draft: dict[str, Any] = {"classes": classes, "exhaustive": exhaustive}
    categories = {name: _category(entry) for name, entry in classes.items()}
    lights = [classes[name] for name, category in categories.items() if category == "traffic light"]
    if lights and all(map(_is_light, lights)):
        draft["attributed"] = {"traffic light": ["state"]}
    notes.insert(0, f"Every visible object of 'exhaustive' {says}: {', '.join(exhaustive) or 'none'}.")
    ridden = [name for name, category in categories.items() if category in RIDDEN]
    if ridden and "person" in exhaustive and "rider" not in categories.values():
        classes |= {name: {"class": categories[name], "maybe": ["person"]} for name in ridden}
        notes.append(
            f"Riders may be a part of {' and '.join(ridden)}: with one there, 'no person' is not known. Take 'maybe' "
            "out where they have boxes as persons."
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


def _category(entry: Any) -> str | None:
    return entry["class"] if isinstance(entry, dict) else entry


def match_classes(names: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Match class names with our categories, whatever their case, "_", "-" and spaces.

    Returns:
        {class name: entry of a mapping's "classes"} for names that match, and the categories of which every object can
        be assumed to be labeled: those that a class names exactly.
    """
    own, others = _known_names()
    keys = {name: normalize(name).replace(" ", "") for name in names}
    classes = {name: (own | others)[key] for name, key in keys.items() if key in own or key in others}
    return classes, sorted({own[key] for key in keys.values() if key in own})


@cache
def _known_names() -> tuple[dict[str, str], dict[str, Any]]:
    """Names without spaces: {of our categories: category}, {of other classes of COCO, and of lights: entry}."""
    own = {
        form.replace(" ", ""): category
        for category, (singular, plural, _) in CLASSES.items()
        for form in (category, singular, plural)
    }
    coco = json.loads((MAPPINGS / "coco.json").read_text(encoding="utf-8"))["classes"]
    others = {normalize(name).replace(" ", ""): entry for name, entry in coco.items()} | {"hydrant": None} | LIGHTS
    return own, {name: entry for name, entry in others.items() if name not in own}


def _find_yolo(folder: Path, _: list[str]) -> Found:
    """By `data.yaml` of Ultralytics and Roboflow, whose splits are folders."""
    found = Found("yolo")
    path = next((folder / name for name in DATA_FILES if (folder / name).is_file()), None)
    if path is None:
        return found
    data = read_data(path, folder)
    found.names = list(data["names"].values())
    missing: list[str] = []
    for split in SPLITS:
        value = data.get(split)
        images = _find_images(folder, value, data) if isinstance(value, str) else None
        if images is not None:
            # Like Ultralytics: in place of the last folder "images", otherwise in the folder of the images.
            labels = Path(replace_last(images.as_posix(), "images", "labels"))
            if not (folder / labels).is_dir() and (folder / images / "labels").is_dir():
                labels = images / "labels"
            found.splits[split] = {"images": images.as_posix(), "labels": labels.as_posix()}
        elif value:
            missing.append(f"{split}: {value}")
    if not found.splits:
        message = f"{path}: train, val and test are not folders inside of {folder}"
        raise DataError(f"{message}: {', '.join(missing) or 'none is given'}; {BY_HAND.format(folder=folder)}")
    if missing:
        found.notes.append(f"Not folders inside of {folder}, and left out: {', '.join(missing)} of {path.name}.")
    return found


def _find_images(folder: Path, value: str, data: dict[str, Any]) -> Path | None:
    """The folder of images, relative to `folder`, that a value of data.yaml names; None if there is none inside."""
    parts, root = PurePosixPath(plain_name(value)).parts, folder.resolve()
    # Roboflow writes "../train/images" for "train/images" next to data.yaml, others the path on their machine.
    options = [Path(plain_name(str(data.get("path", ""))), *parts), *(Path(*parts[i:]) for i in range(len(parts)))]
    places = [(root / option).resolve() for option in options]
    found = next((place.relative_to(root) for place in places if place.is_relative_to(root) and place.is_dir()), None)
    return found / "images" if found is not None and (root / found / "images").is_dir() else found


def _find_coco(folder: Path, reasons: list[str]) -> Found:
    """By COCO JSON files in a folder or one level below."""
    found = Found("coco")
    files = sorted([*folder.glob("*.json"), *folder.glob("*/*.json")])
    # COCO itself also has files of captions and keypoints of the same images.
    files = [path for path in files if path.name.startswith("instances_")] or files
    exhaustive: list[set[str] | None] = []
    for path in files:
        try:
            data = read_json(path, folder)
            names = {str(entry["name"]): to_key(entry["id"]) for entry in data["categories"]}
            used = {to_key(label.get("category_id")) for label in data["annotations"]}
            listed = [str(entry["file_name"]) for entry in data["images"]]
            stated = (data.get("info") or {}).get("exhaustive")
            exhaustive.append(None if stated is None else set(map(str, stated)))
        except Unusable as error:
            _note(error, reasons)
            continue
        except (LookupError, TypeError, AttributeError):
            continue  # a JSON file of another format
        _add_split(found, folder, path, listed, {"annotations": path})
        kept = [name for name, key in names.items() if key in used or name in (exhaustive[-1] or ())]
        found.names = list(dict.fromkeys([*found.names, *kept]))
    found.notes += [f"Left out: {reason}." for reason in reasons]
    if exhaustive and None not in exhaustive:
        found.exhaustive = set.intersection(*(names for names in exhaustive if names is not None))
    return found


def _find_voc(folder: Path, reasons: list[str]) -> Found:
    """By Pascal VOC XML files anywhere in a folder."""
    found, names = Found("voc"), Counter[str]()
    stems: dict[Path, list[str]] = {}
    for path in sorted(folder.rglob("*.xml")):
        try:
            root = read_xml(path, folder)
        except Unusable as error:  # a problem for the reader, if there are others
            _note(error, reasons)
            continue
        if root.tag == "annotation":
            names.update(str(item.findtext("name")).strip() for item in root.iterfind("object"))
            stems.setdefault(path.parent, []).append(f"{path.stem}.jpg")
    found.names = list(names)
    for annotations, listed in stems.items():
        lists = [annotations.parent / "ImageSets" / "Main" / f"{split}.txt" for split in SPLITS]
        for path in [path for path in lists if path.is_file()] or [annotations]:
            files = {"annotations": annotations} | ({"list": path} if path in lists else {})
            _add_split(found, folder, path, listed, files)
    return found


def _note(error: Unusable, reasons: list[str]) -> None:
    """Note why a file cannot be read. Raises the error if it is a link out of the folder."""
    if error.args[0] == "refused file":
        raise error
    reasons.append(str(error))


def _add_split(found: Found, folder: Path, path: Path, listed: list[str], files: dict[str, Path]) -> None:
    """Add the split that `path` names, with these files and the folder of the listed images."""
    split = _split_of(path.relative_to(folder))
    images = _image_folder(folder, path, split, listed)
    if split in found.splits:
        other = folder / found.splits[split]["annotations"]
        raise DataError(f"{other} and {path} both have the split {split}; {BY_HAND.format(folder=folder)}")
    layout = {"images": folder / images} | files
    found.splits[split] = {key: value.relative_to(folder).as_posix() for key, value in layout.items()}


def _image_folder(folder: Path, path: Path, split: str, listed: list[str]) -> Path:
    """The folder, relative to `folder`, with most of the images that the file `path` lists."""
    images = [PurePosixPath(name) for name in select_files(list_files(folder))[0]]
    counts: Counter[PurePosixPath] = Counter()
    for whole in (True, False):
        keys = {key for name in listed for key in keys_of(name, whole)}
        for image in images if not counts else []:
            counts.update(p for p in image.parents if stem_of(image.relative_to(p).as_posix()) in keys)
    if not counts:
        such = f", such as {listed[0]!r}" if listed else ""
        message = f"{path}: {folder} has none of its {len(listed)} images{such}"
        raise DataError(f"{message}; {BY_HAND.format(folder=folder)}")
    return Path(max(counts, key=lambda parent: (counts[parent], _split_of(parent) == split)))


def _split_of(path: PurePath) -> str:
    """The last of "train", "val" and "test" that begins a word of the path; "train" if there is none."""
    return ["train", *re.findall(r"(?<![a-z])(train|val|test)", path.as_posix().lower())][-1]
