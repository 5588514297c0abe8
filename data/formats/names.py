"""Names of images in annotations of other people: paths of other systems, addresses, suffixes, encodings."""

import os
import re
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


def spellings(written: str) -> list[str]:
    """Paths that a name may mean: the name, or the path in an address (a.jpg?key=1, ?d=a.jpg), percent-encoded."""
    local = re.findall(r"[?&]d=([^&]+)", written)  # a file of Label Studio
    texts = [written, *local, written.partition("?")[0]]
    return [plain_name(text) for text in dict.fromkeys([*texts, *map(unquote, texts)])]


def keys_of(written: str) -> list[str]:
    """Keys of `index_files` that a name may mean, the longest first. It may lead from another machine's root."""
    keys = []
    for text in spellings(written):
        parts = [part for part in text.split("/") if part not in ("", ".")]
        for name in ("/".join(parts[start:]) for start in range(len(parts))):
            keys.append(stem_of(name) if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES else name)
    return sorted(keys, key=lambda key: -key.count("/"))


def find_by_name(index: Mapping[str, list[str]], written: str) -> list[str]:
    """The images that a name in an annotation can mean, by `index_files` of their folder.

    Of files that differ only in the suffix, it is the one with the suffix as written, if there is one.
    """
    found: list[str] = next((index[key] for key in keys_of(written) if key in index), [])
    for change in (str, str.lower):
        ends = tuple(change(text) for text in spellings(written))
        if same := [file for file in found if any(end.endswith(change(plain_name(file))) for end in ends)]:
            return same
    return found
