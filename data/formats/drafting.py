"""Draft a mapping for a folder that has none: with YOLO's data.yaml or obj.names, COCO JSON or Pascal VOC XML files.

Classes are matched by name. The notes of a draft say which have no category, and what is assumed to be exhaustive.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from ...common.files import DataError, atomic_write_text
from ...common.image_files import select_files
from ..scene import CLASSES, LIGHT_STATES, classes_of
from .coco import LISTS
from .mapping import MAPPINGS, SourceMapping, normalize, parse_mapping
from .reading import Folder, Unusable, parse_lists
from .split import index_files, plain_name, replace_last
from .voc import parse_xml
from .yolo import DATA_FILES, read_data


SPLITS = ("train", "val", "test")


@dataclass
class Found:
    """The labels of a folder."""

    format: str
    splits: dict[str, dict[str, str]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)  # of classes
    exhaustive: set[str] | None = None  # normalized names of what every file labels exhaustively; None: all
    is_stated: bool = False  # the files say what is exhaustive
    notes: list[str] = field(default_factory=list)  # for the reader of the mapping


def draft_mapping(folder: Folder, path: Path) -> tuple[SourceMapping, str]:
    """(mapping, text) for a folder: the text says how its classes are read. The mapping is also saved, at `path`.

    Raises:
        DataError: the folder has no labels that are read, or `path` exists with other content, as an edited draft.
    """
    root, use, notes = folder.root, f"--source {path}={folder.root}", list[str]()
    for find in (_find_yolo, _find_coco, _find_voc):
        found = find(folder)
        if found.splits:
            break
        notes += found.notes
    else:
        labels = "a data.yaml with image folders, COCO JSON files or Pascal VOC XML files"
        message = f"{root} has none of {labels}: export one of these, or write a mapping file (docs/data.md)"
        raise DataError("; ".join([message, *notes[:3]]))
    content: dict[str, Any] = {"name": root.resolve().name, "format": found.format, "splits": found.splits}
    content |= match_classes(found)
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    if path.exists() and path.read_bytes() != text.encode():
        why = f"{path} differs from the draft for {root}: it was edited, the folder changed, or it is of another one"
        raise DataError(f"{why}. {use} uses it as it is; for a new draft, delete it or choose another --output_dir")
    atomic_write_text(path, text)
    mapping = parse_mapping(content)
    meanings = ((name, mapping.classes[normalize(name)].category) for name in content["classes"])
    read_as = ", ".join(f"{name} = {category or 'ignored'}" for name, category in meanings)
    lines = [f"{root} is read as {found.format}, by {path}:", read_as, *content["notes"], f"To change it: {use}"]
    return mapping, "\n  ".join(line for line in lines if line)


def match_classes(found: Found) -> dict[str, Any]:
    """The keys "classes", "exhaustive", "attributed" and "notes" of a mapping file, by the names of the classes."""
    known, own = _known_names()
    keys = {name: normalize(name) for name in found.names}
    meanings = {name: dict(known[key]) for name, key in keys.items() if key in known}
    everywhere = set(keys.values()) if found.exhaustive is None else found.exhaustive
    exhaustive = {known[key]["class"] for key in own & everywhere & set(keys.values())}
    if found.is_stated:
        if {entry.get("state") for name, entry in meanings.items() if keys[name] in everywhere} >= set(LIGHT_STATES):
            exhaustive.add("traffic light")  # only with all states: "redlight" does not cover green lights
        broad = exhaustive & {wider for category in exhaustive for wider in classes_of(category)[1:]}
        for entry in meanings.values():
            if entry["class"] in broad:  # such as a vehicle of none of the listed kinds
                entry["maybe"] = []
    says = "is labeled, as the source says" if found.is_stated else "is taken to be labeled"
    notes = [f"Every visible object of 'exhaustive' {says}: {', '.join(sorted(exhaustive)) or 'none'}.", *found.notes]
    ridden = {name: entry for name, entry in meanings.items() if entry["class"] in ("motorcycle", "bicycle")}
    if ridden and "person" in exhaustive and "rider" not in {entry["class"] for entry in meanings.values()}:
        for entry in ridden.values():
            entry["maybe"] = ["person"]
        unless = "Take 'maybe' out where they have boxes as persons."
        notes.append(f"Riders may be a part of {' and '.join(ridden)}: then 'no person' is not known. {unless}")
    if unmatched := [name for name in found.names if name not in meanings]:
        unknown = "nothing is known to be absent from their images. Add them to 'classes', with a category or null."
        notes.append(f"No category for {', '.join(unmatched)}: {unknown}")
    classes = {name: entry if len(entry) > 1 else entry["class"] for name, entry in meanings.items()}
    content = {"classes": classes, "exhaustive": sorted(exhaustive), "notes": notes}
    states = {entry.get("state") for name, entry in meanings.items() if keys[name] in everywhere}
    has_states = {"red", "green"} <= states  # of a source of red lights alone, nobody knows the green ones
    return content | ({"attributed": {"traffic light": ["state"]}} if has_states else {})


@cache
def _known_names() -> tuple[dict[str, dict[str, Any]], Set[str]]:
    """Entries of a mapping by name from `normalize`, and which of these names are of our categories.

    The others are of lights in one state, and of classes of COCO.
    """
    own = {normalize(form): {"class": name} for name, (one, many, _) in CLASSES.items() for form in (name, one, many)}
    coco = json.loads((MAPPINGS / "coco.json").read_text(encoding="utf-8"))["classes"]
    others = {normalize(name): entry if isinstance(entry, dict) else {"class": entry} for name, entry in coco.items()}
    lights = {f"{state}light": {"class": "traffic light", "state": state} for state in LIGHT_STATES}
    return others | lights | own, own.keys()


def _find_yolo(folder: Folder) -> Found:
    """By data.yaml of Ultralytics and Roboflow, or obj.names of YOLO 1.1, whose splits are folders."""
    found, root = Found("yolo"), folder.root
    path = next((root / name for name in (*DATA_FILES, "obj.names") if (root / name).is_file()), None)
    if path is None:
        return found
    data = read_data(path, folder, keep=True)
    found.names = list(data["names"].values())
    values = {split: data[split] for split in SPLITS if data.get(split)}
    if path.name == "obj.names":
        values = {_split_of(place): place.name for place in sorted(root.glob("obj_*_data"))}
    for split, value in values.items():
        # Roboflow writes "../train/images" for "train/images" next to data.yaml, others the path on their machine.
        parts = [part for part in plain_name(str(value)).split("/") if part not in ("", ".", "..")]
        ends = ("/".join(parts[start:]) for start in range(len(parts)))
        if images := next((end for end in ends if (root / end).is_dir()), None):
            # Like Ultralytics: in place of the last folder "images", otherwise in the folder of the images.
            found.splits[split] = {"images": images, "labels": replace_last(images, "images", "labels")}
        else:
            found.notes.append(f"Left out: {split}: {value} of {path.name} is no folder inside of {root}.")
    return found


def _find_coco(folder: Folder) -> Found:
    """By COCO JSON files in a folder or one level below."""
    found, root, stated = Found("coco"), folder.root, list[bool]()
    files = [Path(name) for name in folder.files(root) if name.endswith(".json") and name.count("/") < 2]
    # COCO itself also has files of captions and keypoints of the same images.
    for path in [path for path in files if path.name.startswith("instances_")] or files:
        try:
            data = folder.read(root / path, partial(parse_lists, keys=LISTS), keep=True)
        except Unusable as error:
            found.notes.append(f"Left out: {error}.")
            continue
        names = {str(entry.get("id")): str(entry.get("name")) for entry in data["categories"]}
        used = {str(label.get("category_id")) for label in data["annotations"]}
        used |= {str(key) for image in data["images"] for key in image.get("neg_category_ids") or ()}
        listed = [str(image.get("file_name") or image.get("coco_url")) for image in data["images"]]
        exhaustive = (data.get("info") or {}).get("exhaustive")
        _add_split(found, folder, path, listed, {"annotations": path})
        found.names += [name for key, name in names.items() if key in used or name in (exhaustive or ())]
        stated.append(exhaustive is not None)
        labeled = {normalize(str(name)) for name in (names.values() if exhaustive is None else exhaustive)}
        found.exhaustive = labeled if found.exhaustive is None else found.exhaustive & labeled
    found.names, found.is_stated = list(dict.fromkeys(found.names)), all(stated)
    return found


def _find_voc(folder: Folder) -> Found:
    """By Pascal VOC XML files anywhere in a folder. The files of ImageSets/Main beside theirs are splits."""
    found, root, listed = Found("voc"), folder.root, dict[Path, list[str]]()
    for path in (Path(name) for name in folder.files(root) if name.endswith(".xml")):
        try:
            content = folder.read(root / path, parse_xml, keep=True)
        except Unusable as error:
            found.notes.append(f"Left out: {error}.")
            continue
        found.names += [str(item.findtext("name")).strip() for item in content.iterfind("object")]
        listed.setdefault(path.parent, []).append(f"{path.stem}.jpg")
    found.names = list(dict.fromkeys(found.names))
    for annotations, images in listed.items():
        lists = [annotations.parent / "ImageSets" / "Main" / f"{split}.txt" for split in SPLITS]
        for path in [path for path in lists if (root / path).is_file()] or [annotations]:
            files = {"annotations": annotations} | ({"list": path} if path in lists else {})
            _add_split(found, folder, path, images, files)
    return found


def _add_split(found: Found, folder: Folder, path: Path, listed: list[str], files: dict[str, Path]) -> None:
    """Add the split that `path` names, with these files and the folder of most of the listed images."""
    stems = [os.path.splitext(plain_name(name))[0].split("/") for name in listed]
    ends = {"/".join(stem[start:]) for stem in stems for start in range(len(stem))}
    split, counts = _split_of(path), Counter[PurePosixPath]()
    for image in map(PurePosixPath, index_files(select_files(folder.files(folder.root))[0])):
        counts.update(parent for parent in image.parents if image.relative_to(parent).as_posix() in ends)
    if not counts:
        such = f", such as {listed[0]!r}" if listed else ""
        raise DataError(f"{folder.root / path}: {folder.root} has none of its {len(listed)} images{such}")
    if split in found.splits:
        other = folder.root / found.splits[split]["annotations"]
        raise DataError(f"{other} and {folder.root / path} both have the split {split}")
    # The images of several splits may have equal names.
    images = max(counts, key=lambda one: (counts[one], _split_of(one) == split, -len(one.parts)))
    found.splits[split] = {key: value.as_posix() for key, value in ({"images": images} | files).items()}


def _split_of(path: PurePath) -> str:
    """The last of "train", "val" and "test" that begins a word of the path; "train" if there is none."""
    return ["train", *re.findall(r"(?<![a-z])(train|val|test)", path.as_posix().lower())][-1]
