"""Names of images in annotations of other people: paths of other systems, suffixes, encodings."""

import os
import unicodedata
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

from ...common.image_files import IMAGE_SUFFIXES


def plain_name(name: str) -> str:
    """A path as all systems write it: "/" between folders, and an accent in one character with its letter (NFC)."""
    return unicodedata.normalize("NFC", name.replace("\\", "/"))


def stem_of(name: str) -> str:
    """The path of a file without its suffix, in the form of `plain_name`."""
    return os.path.splitext(plain_name(name))[0]


def index_files(names: Iterable[str]) -> dict[str, list[str]]:
    """Files by their path without suffix: {"cam1/7": ["cam1/7.jpg", "cam1/7.png"]}."""
    index: dict[str, list[str]] = {}
    for name in names:
        index.setdefault(stem_of(name), []).append(name)
    return index


def keys_of(written: str) -> list[str]:
    """The keys of `index_files` that a name in an annotation may mean, the closest first.

    The name may be a path of another machine or system ("C:\\data\\images\\a.jpg"), percent-encoded, without suffix.
    """
    keys = []
    for text in dict.fromkeys((written, unquote(written))):
        parts = [part for part in plain_name(text).split("/") if part not in ("", ".")]
        for start in range(len(parts)):
            name = "/".join(parts[start:])
            keys.append(stem_of(name) if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES else name)
    return keys


def find_by_name(index: Mapping[str, list[str]], written: str) -> list[str]:
    """The images that a name in an annotation can mean, by `index_files` of their folder.

    Of files that differ only in the suffix, it is the one with the suffix as written, if there is one.
    """
    found: list[str] = next((index[key] for key in keys_of(written) if key in index), [])
    for change in (str, str.lower):
        ends = tuple(change(plain_name(text)) for text in (written, unquote(written)))
        if same := [file for file in found if any(end.endswith(change(plain_name(file))) for end in ends)]:
            return same
    return found
