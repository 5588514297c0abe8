"""One split of a labeled folder: its images, found by the names that annotations write, and its problems."""

import json
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from ...common.image_files import IMAGE_SUFFIXES, select_files
from .mapping import SourceMapping
from .reading import Folder, parse_lists


ANNOTATIONS = (".txt", ".xml", ".json", ".jsonl", ".yaml", ".yml", ".csv")  # nobody takes them for images
ImageEntry = tuple[str, str, Any]  # path below the image folder; file and record, for messages; annotation
Entry = tuple[str, dict[str, Any]]  # file and record, for messages; JSON object


@dataclass
class Problems:
    """Problems found in the input."""

    keep: int = 1000
    counts: Counter[str] = field(default_factory=Counter)  # by kind
    messages: list[str] = field(default_factory=list)  # the first `keep`, and the first one of each kind
    expected: set[str] = field(default_factory=set)  # kinds that are not errors, such as images of another split

    def add(self, kind: str, where: object, message: str, expected: bool = False, count: int = 1) -> None:
        """Count a problem at `where`: file:line, or file and record."""
        if len(self.messages) < self.keep or kind not in self.counts:
            self.messages.append(f"{where}: {message}")
        self.counts[kind] += count
        self.expected |= {kind} if expected else set()


def read_json_lines(
    path: Path, parse: Callable[[dict[str, Any]], Any], problems: Problems, kind: str
) -> Iterator[tuple[str, Any]]:
    """Yield (file:line, `parse` of the JSON object) for each line of a file. Invalid lines are `problems`."""
    for where, line in Folder(path.parent).lines(path):
        try:
            yield where, parse(json.loads(line))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            problems.add(kind, where, f"{type(error).__name__}: {error}")


class Split:
    """One split of a labeled folder. All methods raise `Unusable` for a file that cannot be read.

    Attributes:
        images: all images in its folder, {path without suffix: [paths]}.
        selected: paths of those that "only", "except" and "list" of the split select.
    """

    def __init__(self, folder: Folder, mapping: SourceMapping, name: str, problems: Problems):
        self.folder, self.mapping, self.problems, self.layout = folder, mapping, problems, mapping.splits[name]
        self.paths = {key: folder.root / value for key, value in self.layout.items() if isinstance(value, str)}
        files = [name for name in folder.files(self.paths["images"]) if not name.lower().endswith(ANNOTATIONS)]
        names, note = select_files(files)
        if note:
            problems.add("files left out", self.paths["images"], note, expected=True)
        self.images = index_files(names)
        only, excepted = self.layout.get("only", ["*"]), self.layout.get("except", [])
        stems = set(self.images)
        if "list" in self.paths:  # VOC adds a column to the names
            stems &= {line.split()[0] for _, line in folder.lines(self.paths["list"])}
        stems = {stem for stem in stems if any(fnmatchcase(stem, one) for one in only)}
        stems -= {stem for stem in stems if any(fnmatchcase(stem, one) for one in excepted)}
        self.selected = {name for stem in stems for name in self.images[stem]}

    def records(self, file: str, *keys: str) -> list[list[Entry]]:
        """The objects of each list `keys` of a JSON file."""
        path = self.paths[file]
        lists = self.folder.read(path, partial(parse_lists, keys=keys))
        return [
            [(f"{path}: {key}[{i}] ({one.get('id', one.get('name'))})", one) for i, one in enumerate(lists[key])]
            for key in keys
        ]

    def pairs(self, key: str, *suffixes: str) -> Iterator[ImageEntry]:
        """Entries of images with their file in the folder `key`: 1.jpg with 1.txt, images/1.jpg with labels/1.txt."""
        folder, entries = self.paths[key], list[ImageEntry]()
        for name in select_files(self.folder.files(folder), suffixes)[0]:
            stem = os.path.splitext(plain_name(name))[0]
            image = stem if stem in self.images else replace_last(stem, key, "images")
            if image in self.images:
                entries.append((image, str(folder / name), folder / name))
            elif PurePosixPath(name).name != "classes.txt":  # LabelImg's list of classes
                self.problems.add("annotation without image", folder / name, f"has no image in {self.paths['images']}")
        return self.by_name(sorted(entries))

    def by_name(self, entries: Sequence[ImageEntry]) -> Iterator[ImageEntry]:
        """Yield entries whose image name has been resolved to a file; a problem if it is none, several, or used twice.

        Images that no entry names are counted: they may belong to another split, or have lost their annotation.
        """
        folder, found = self.paths["images"], [find_by_name(self.images, written) for written, _, _ in entries]
        uses = Counter(names[0] for names in found if len(names) == 1)
        for names, (written, where, annotation) in zip(found, entries):
            if not names:
                self.problems.add("missing image", where, f"image {written!r} is missing in {folder}")
            elif self.selected.isdisjoint(names):
                continue
            elif len(names) > 1:
                message = f"image {written!r} may be {' or '.join(names)} in {folder}"
                self.problems.add("two files of one name", where, message)
            elif uses[names[0]] > 1:  # each entry may lack the labels of the others
                self.problems.add("bad record", where, f"image {names[0]} is listed {uses[names[0]]} times")
            else:
                yield names[0], where, annotation
        if rest := sorted(self.selected.difference(*found)):
            message = f"images without annotation: {len(rest)}, such as {', '.join(rest[:3])}"
            self.problems.add("image without annotation", folder, message, expected=True, count=len(rest))


def replace_last(path: str, old: str, new: str) -> str:
    """Path with its last folder named `old` renamed to `new`."""
    head, found, tail = f"/{path}/".rpartition(f"/{old}/")
    return f"{head}/{new}/{tail}".strip("/") if found else path


def plain_name(name: str) -> str:
    """A path as all systems write it: "/" between folders, and an accent in one character with its letter (NFC)."""
    return unicodedata.normalize("NFC", name.replace("\\", "/"))


def index_files(names: Iterable[str]) -> dict[str, list[str]]:
    """Files by their plain path without suffix: {"cam1/7": ["cam1/7.jpg", "cam1/7.png"]}."""
    index: dict[str, list[str]] = {}
    for name in names:
        index.setdefault(os.path.splitext(plain_name(name))[0], []).append(name)
    return index


def find_by_name(index: Mapping[str, list[str]], written: str) -> list[str]:
    """Images that a name in an annotation can mean, by `index_files`; of several suffixes, the one as written.

    The name may lead from another machine's root: its longest end that is the path of an image counts.
    """
    parts = [part for part in plain_name(written).split("/") if part not in ("", ".")]
    for start in range(len(parts)):
        path = "/".join(parts[start:])
        stem, suffix = os.path.splitext(path)
        if found := index.get(stem if suffix.lower() in IMAGE_SUFFIXES else path):
            return [file for file in found if plain_name(file).lower() == path.lower()] or found
    return []
