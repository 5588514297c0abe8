"""Image files that people have: which formats are read, which files of a folder are images, and errors that name them.

All commands, the service and the readers of data sets share this list of formats. HEIC is in it if the package
pillow-heif is installed.
"""

import glob
import importlib
import io
import re
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from ..images_traffic_vlm import to_rgb
from .files import DataError


MAX_PIXELS = 40_000_000  # an 8K frame has 33 million
MAX_BYTES = 200_000_000  # of a file: MAX_PIXELS without compression are 120 million
# Pillow reads more formats. The others are rare, or start programs.
FORMATS = ("AVIF", "BMP", "DIB", "GIF", "HEIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
IMAGE_SUFFIXES = frozenset(suffix for suffix, name in Image.registered_extensions().items() if name in FORMATS)
READABLE = sorted(set(FORMATS) & set(Image.OPEN))
if "AVIF" in READABLE:  # one thread: each of the processes that read images would start one for every core
    avif_plugin: Any = importlib.import_module("PIL.AvifImagePlugin")
    avif_plugin.DEFAULT_MAX_THREADS = 1
HEIC = "pip install pillow-heif reads HEIC"
HEIC_SUFFIXES = (".heic", ".heif", ".hif")
SYSTEM_FOLDERS = {"__MACOSX", "@eaDir"}  # macOS and Synology keep previews in them


def open_image(source: str | Path | bytes, name: str = "", max_pixels: int = MAX_PIXELS) -> Image.Image:
    """RGB image of a file or of its bytes; the first page of a TIFF with several, with a warning.

    Args:
        name: how errors refer to the image; by default the name of the file.

    Raises:
        FileNotFoundError, PermissionError: the file cannot be opened.
        ValueError: not an image, an animated image, or one of more than `max_pixels`, which is not decoded.
    """
    name = name or ("the image" if isinstance(source, bytes) else Path(source).name)
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        try:
            with Image.open(file, formats=READABLE) as image:
                width, height = image.size
                # Frames are not counted: for a small file with a million frames that takes minutes.
                is_animated = image.format in ("GIF", "PNG", "WEBP") and getattr(image, "is_animated", False)
                if not is_animated and width * height <= max_pixels:
                    return to_rgb(image)
        except Image.DecompressionBombError as error:
            raise ValueError(f"{name} has too many pixels; at most {max_pixels:,} are read.") from error
        except UnidentifiedImageError as error:
            hint = f" ({HEIC})" if "HEIF" not in READABLE and name.lower().endswith(HEIC_SUFFIXES) else ""
            readable = f"Readable are {', '.join(READABLE)}{hint}."
            raise ValueError(f"{name} cannot be read as an image. {readable}") from error
        except Exception as error:  # on broken bytes Pillow raises whatever the decoder of the format raises
            raise ValueError(f"{name} is damaged: it cannot be decoded.") from error
    if is_animated:
        raise ValueError(f"{name} is animated: ask about one of its frames, or use scripts/watch.py.")
    raise ValueError(f"{name} has {width} × {height} pixels; at most {max_pixels:,} in all are read.")


def select_files(
    names: Iterable[str], suffixes: Collection[str] = IMAGE_SUFFIXES, root: str = ""
) -> tuple[list[str], str]:
    """(names that end in one of the suffixes, note): the note counts the others and gives the reasons.

    Hidden files are left out: their name, or that of a folder, starts with a dot or is in SYSTEM_FOLDERS.

    Args:
        root: a folder that the user named. It may be hidden itself.
    """
    selected, endings = tuple(suffixes), Counter[str]()
    found, hidden = [], 0
    for name in names:
        parts = Path(name.removeprefix(root)).parts
        if any(part.startswith(".") or part in SYSTEM_FOLDERS for part in parts):
            hidden += 1
        elif name.lower().endswith(selected):
            found.append(name)
        else:
            endings[Path(name).suffix.lower() or "no suffix"] += 1
    reasons = [f"{hidden:,} hidden"] if hidden else []
    reasons += [f"{count:,} {ending}" for ending, count in sorted(endings.items(), key=lambda one: (-one[1], one[0]))]
    if len(reasons) > 6:
        reasons[6:] = [f"{len(reasons) - 6} more kinds"]
    hint = f" ({HEIC})" if endings.keys() & set(HEIC_SUFFIXES) else ""
    return found, f"files left out: {', '.join(reasons)}{hint}" if reasons else ""


def list_images(folder: Path) -> tuple[list[Path], str]:
    """(image files of a folder in the order of the numbers in their names: 9.jpg, 10.jpg; note on other files).

    Raises:
        DataError: there is none.
    """
    names, note = select_files(path.name for path in folder.iterdir() if path.is_file())
    if not names:
        raise DataError(f"{folder}: has no images ({', '.join(READABLE)}). {note}".rstrip(" ."))
    # Odd parts of a name are its numbers. The name itself keeps 1.png and 01.png in a fixed order.
    parts = {name: re.split(r"(\d+)", name) for name in names}
    names.sort(key=lambda name: ([int(part) if i % 2 else part for i, part in enumerate(parts[name])], name))
    return [folder / name for name in names], note


def find_images(name: str | Path) -> tuple[list[Path], str]:
    """(images of a file, a folder or a pattern such as "frames/*.jpg", in order; note on other files).

    Brackets that are a part of a path, as in "clip [1]/*.jpg", are found, too.

    Raises:
        DataError: there is none.
    """
    path = Path(name)
    if path.is_dir():
        return list_images(path)
    if path.exists():
        return [path], ""
    found = glob.glob(str(name), recursive=True) or glob.glob(escape_brackets(str(name)), recursive=True)
    files = sorted(name for name in found if Path(name).is_file())
    names, note = select_files(files, root=fixed_part(str(name)))
    if not names:
        message = f"{name}: no such image, no folder with images and no pattern that matches one. {note}"
        raise DataError(message.rstrip(" ."))
    return [Path(name) for name in names], note


def escape_brackets(pattern: str) -> str:
    """The pattern with its brackets as literal characters."""
    return pattern.replace("[", "[[]")


def fixed_part(pattern: str) -> str:
    """The folder before the first wildcard of a pattern."""
    return re.split(r"[*?[]", pattern)[0].rpartition("/")[0]
