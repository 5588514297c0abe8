"""Image files that people have: which formats are read, which files of a folder are images, and errors that name them.

All commands, the service and the readers of data sets share this list of formats. HEIC is in it if the package
pillow-heif is installed.
"""

import io
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from ..images_traffic_vlm import to_rgb
from .files import DataError


MAX_PIXELS = 40_000_000  # to decode; an 8K frame has 33 million
MAX_JPEG_PIXELS = Image.MAX_IMAGE_PIXELS = 200_000_000  # of a JPEG that is decoded smaller, as of recent phones
# Pillow reads more formats. The others are rare, or start programs.
FORMATS = ("AVIF", "BMP", "DIB", "GIF", "HEIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
IMAGE_SUFFIXES = frozenset(suffix for suffix, name in Image.registered_extensions().items() if name in FORMATS)
READABLE = sorted(set(FORMATS) & set(Image.OPEN))
FORMATS_READ = ", ".join(READABLE) + ("" if "HEIF" in READABLE else "; HEIC after pip install pillow-heif")
SYSTEM_FOLDERS = {"__MACOSX", "@eaDir"}  # macOS and Synology keep previews in them


def open_image(source: str | Path | bytes, name: str = "", max_pixels: int = MAX_PIXELS) -> Image.Image:
    """RGB image of a file or of its bytes; the first frame of several, with a warning.

    A JPEG of more than `max_pixels` is decoded at a half, a quarter or an eighth of its size.

    Args:
        name: how errors refer to the image; by default the name of the file.

    Raises:
        FileNotFoundError, PermissionError: the file cannot be opened.
        ValueError: not an image, a damaged one, or one of more than `max_pixels`, which is not decoded.
    """
    name = name or ("the image" if isinstance(source, bytes) else Path(source).name)
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        try:
            with Image.open(file, formats=READABLE) as image:
                width, height = image.size
                if max_pixels < width * height <= MAX_JPEG_PIXELS:
                    scales = (scale for scale in (2, 4, 8) if -(-width // scale) * -(-height // scale) <= max_pixels)
                    scale = next(scales, 1)
                    image.draft(None, (width // scale, height // scale))  # nothing happens to other formats
                    width, height = image.size
                if width * height <= max_pixels:
                    return to_rgb(image)
        except UnidentifiedImageError as error:
            raise ValueError(f"{name} cannot be read as an image. Readable are {FORMATS_READ}.") from error
        except Exception as error:  # on broken bytes Pillow raises whatever the decoder of the format raises
            reason = f"it is damaged, or has far more than {max_pixels:,} pixels"
            raise ValueError(f"{name} cannot be decoded: {reason}.") from error
    raise ValueError(f"{name} has {width} × {height} pixels; at most {max_pixels:,} in all are read.")


@contextmanager
def image_warnings() -> Iterator[list[str]]:
    """Yield a list that gets the warnings of `open_image` inside the block, such as that one frame of several is read.

    Only one thread of a process may be in such a block.
    """
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", module=r".*images_traffic_vlm")
        yield texts
    texts += dict.fromkeys(str(one.message) for one in caught if one.filename.endswith("images_traffic_vlm.py"))


def select_files(
    names: Iterable[str], suffixes: Collection[str] = IMAGE_SUFFIXES, root: str = ""
) -> tuple[list[str], str]:
    """(names that end in one of the suffixes, note): the note counts the others and gives the reasons.

    Hidden files are left out: a part of their path starts with a dot or is in SYSTEM_FOLDERS. Folders end in "/".

    Args:
        root: a folder that the user named. It may be hidden itself.
    """
    selected, left_out = list[str](), Counter[str]()
    for name in names:
        if any(part.startswith(".") or part in SYSTEM_FOLDERS for part in Path(name.removeprefix(root)).parts):
            left_out["hidden"] += 1
        elif name.lower().endswith(tuple(suffixes)):
            selected.append(name)
        elif name.endswith("/"):
            left_out["subfolders"] += 1
        else:
            left_out[Path(name).suffix.lower() or "no suffix"] += 1
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.most_common())
    return selected, f"files left out: {reasons}" if reasons else ""


def list_images(path: Path) -> tuple[list[Path], str]:
    """(image files of a folder without its subfolders, or the file itself; note on what is left out).

    They are in the order of the numbers in their names: 9.jpg comes before 10.jpg.

    Raises:
        DataError: there is none.
    """
    if path.is_file():
        return [path], ""
    if not path.is_dir():
        raise DataError(f"{path}: no such image and no folder with images")
    names, note = select_files(sorted(one.name + "/" * one.is_dir() for one in path.iterdir()))
    if not names:
        raise DataError(f"{path}: has no images ({FORMATS_READ}) outside of subfolders. {note}".rstrip(" ."))
    parts = {name: re.split(r"(\d+)", name) for name in names}  # text and number in turns
    names = sorted(parts, key=lambda name: [int(part) if part.isdecimal() else part for part in parts[name]])
    return [path / name for name in names], note
