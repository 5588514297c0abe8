"""One split of a source: its images, found by the names that annotations write, and the problems of its files."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from ...common.image_files import select_files
from .mapping import SourceMapping
from .names import find_by_name, index_files, stem_of
from .reading import Folder, Unusable


ANNOTATIONS = (".txt", ".xml", ".json", ".jsonl", ".yaml", ".yml", ".csv")  # nobody takes them for images
FOLDERS = ("labels", "annotations", "masks")  # of a split, besides "images"
ImageEntry = tuple[str, str, Any]  # path below the image folder; file and record, for messages; annotation
Entry = tuple[str, dict[str, Any]]  # file and record, for messages; JSON object


@dataclass
class Problems:
    """Problems found in the input: counts by kind, and the first `keep` messages.

    Attributes:
        expected: kinds that are not errors, such as images of another split.
    """

    keep: int = 1000
    counts: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)
    expected: set[str] = field(default_factory=set)

    def add(self, kind: str, where: object, message: str, expected: bool = False, count: int = 1) -> None:
        """Count a problem at `where`: file:line, or file and record."""
        self.counts[kind] += count
        if expected:
            self.expected.add(kind)
        if len(self.messages) < self.keep:
            self.messages.append(f"{where}: {message}")


@dataclass(frozen=True)
class Source:
    """One split of a source: its folder, its mapping, and the problems found in it."""

    folder: Folder
    mapping: SourceMapping
    split: str
    problems: Problems

    @property
    def layout(self) -> dict[str, Any]:
        return self.mapping.splits[self.split]

    def path(self, key: str) -> Path:
        """File or folder that the split names as `key`."""
        return self.folder.root / self.layout[key]

    def records(self, file: str, *keys: str) -> list[list[Entry]]:
        """The objects of each list `keys` of a JSON file. A file that is a list, or JSON lines, is the first list.

        Raises:
            Unusable: the file cannot be read, or lacks a list.
        """
        path = self.path(file)
        data = self.folder.json(path)
        data = {keys[0]: data} if isinstance(data, list) else data
        if not (isinstance(data, dict) and all(isinstance(data.get(key), list) for key in keys)):
            raise Unusable("bad file", path, f"is not a JSON object with the lists {', '.join(keys)}")
        found: list[list[Entry]] = [[] for _ in keys]
        for key, entries in zip(keys, found):
            for i, entry in enumerate(data[key]):
                if isinstance(entry, dict):
                    known = entry.get("id", entry.get("name"))
                    entries.append((f"{path}: {key}[{i}]" + ("" if known is None else f" ({known})"), entry))
                else:
                    self.problems.add("bad record", f"{path}: {key}[{i}]", "is not a JSON object")
        return found

    @cached_property
    def images(self) -> dict[str, list[str]]:
        """Images of the split's folder, {path without suffix: [paths]}, without masks in a folder below it."""
        folder = self.path("images")
        below = [os.path.relpath(self.path(key), folder) + "/" for key in FOLDERS if key in self.layout]
        files = [name for name in self.folder.files(folder) if not name.startswith(tuple(below))]
        names, note = select_files(name for name in files if not name.lower().endswith(ANNOTATIONS))
        if note:
            self.problems.add("files left out", folder, note, expected=True)
        return index_files(names)

    def selects(self, stem: str) -> bool:
        """Whether "only", "except" and "list" of the split select the image with this path, without suffix."""
        patterns = [self.layout.get("only", ["*"]), self.layout.get("except", [])]
        is_included, is_excluded = (any(fnmatchcase(stem, one) for one in listed) for listed in patterns)
        return is_included and not is_excluded and (self.listed is None or stem in self.listed)

    @cached_property
    def listed(self) -> set[str] | None:
        """Image paths, without suffix, in the split's file "list"; None if it has none."""
        if "list" not in self.layout:
            return None
        stems: set[str] = set()
        for where, line in self.folder.lines(self.path("list")):
            # VOC adds a column to the name. A path may have spaces.
            found = find_by_name(self.images, line) or find_by_name(self.images, line.split()[0])
            if not found:
                self.problems.add("missing image", where, f"image {line!r} is missing in {self.path('images')}")
            stems.update(map(stem_of, found))
        return stems

    def by_name(self, entries: Sequence[ImageEntry]) -> Iterator[ImageEntry]:
        """Yield entries whose image name has been resolved to a file below the image folder.

        A name is a problem if no image has it, if several may have it, or if another entry has it, too. Images that no
        entry names are counted: they may belong to another split, or have lost their annotation.
        """
        folder, found = self.path("images"), [find_by_name(self.images, written) for written, _, _ in entries]
        uses = Counter(names[0] for names in found if len(names) == 1)
        for names, (written, where, annotation) in zip(found, entries):
            if not self.selects(stem_of(names[0] if names else written)):
                continue
            if not names:
                self.problems.add("missing image", where, f"image {written!r} is missing in {folder}")
            elif len(names) > 1:
                message = f"image {written!r} may be {' or '.join(names)} in {folder}"
                self.problems.add("two files of one name", where, message)
            elif uses[names[0]] > 1:  # each entry may lack the labels of the others
                self.problems.add("bad record", where, f"image {names[0]} is listed {uses[names[0]]} times")
            else:
                yield names[0], where, annotation
        listed = set().union(*found)
        rest = sorted(name for names in self.images.values() for name in names if name not in listed)
        rest = [name for name in rest if self.selects(stem_of(name))]
        if listed and rest:
            message = f"does not list {len(rest)} images of {folder}, such as {', '.join(rest[:3])}"
            self.problems.add("image not listed", self.path("annotations"), message, expected=True, count=len(rest))

    def pairs(self, key: str, *suffixes: str) -> Iterator[ImageEntry]:
        """Entries of images with their file in the split's folder `key`. Their paths are equal except for the suffix.

        The folders may differ in one name: a/images/1.jpg and a/labels/1.txt belong together, too.
        """
        annotations: dict[str, list[str]] = {}
        for stem, names in index_files(select_files(self.folder.files(self.path(key)), suffixes)[0]).items():
            image = stem if stem in self.images else replace_last(stem, key, "images")
            annotations.setdefault(image if image in self.images else stem, []).extend(names)
        for stem in filter(self.selects, sorted(self.images.keys() | annotations.keys())):
            images, found = self.images.get(stem, []), annotations.get(stem, [])
            twins, folder = (images, "images") if len(images) > 1 else (found, key)
            if len(twins) > 1:
                message = f"{' and '.join(twins)} differ only in the suffix: none is read"
                self.problems.add("two files of one name", self.path(folder), message)
            elif not found:
                where = self.path("images") / images[0]
                self.problems.add("image without annotation", where, f"has no annotation in {self.path(key)}")
            elif images:
                yield images[0], str(self.path(key) / found[0]), self.path(key) / found[0]
            elif PurePosixPath(found[0]).name != "classes.txt":  # LabelImg's list of classes
                where = self.path(key) / found[0]
                self.problems.add("annotation without image", where, f"has no image in {self.path('images')}")


def replace_last(path: str, old: str, new: str) -> str:
    """Path with its last folder named `old` renamed to `new`."""
    parts = list(PurePosixPath(path).parts)
    if old in parts:
        parts[len(parts) - 1 - parts[::-1].index(old)] = new
    return PurePosixPath(*parts).as_posix()
