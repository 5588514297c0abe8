"""Images from untrusted files: opened within limits, with errors that name the file."""

import io
import math
import re
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ..files import DataError, check_file
from ..images_traffic_vlm import to_rgb


MAX_PIXELS = 40_000_000  # an 8K frame has 33 million
MAX_BYTES = 200_000_000  # of a file: MAX_PIXELS without compression are 120 million
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # other formats are rare, or start programs
SUFFIXES = {suffix for suffix, image_format in Image.registered_extensions().items() if image_format in FORMATS}


def open_picture(source: str | Path | bytes, name: str = "", max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Open an image file, or the bytes of one, as RGB.

    Args:
        name: how errors refer to the image; by default the name of the file.

    Raises:
        ValueError: not an image, an animated image, or one of more than `max_pixels`, which is not decoded.
    """
    name = name or ("the image" if isinstance(source, bytes) else Path(source).name)
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            width, height = image.size
            # A phone's JPEG (MPO) has further images: previews, or the other eye's view.
            # Frames are not counted: for a small file with a million frames that takes minutes.
            is_animated = image.format != "MPO" and getattr(image, "is_animated", False)
            if not is_animated and width * height <= max_pixels:
                return to_rgb(image)
    except Image.DecompressionBombError as error:
        raise ValueError(f"{name} has too many pixels; at most {max_pixels:,} are read.") from error
    except Exception as error:  # on broken bytes Pillow raises whatever the decoder of the format raises
        raise ValueError(f"{name} is no image that can be read.") from error
    if is_animated:
        raise ValueError(f"{name} is animated: ask about one of its frames, or use scripts/watch.py.")
    raise ValueError(f"{name} has {width} × {height} pixels; at most {max_pixels:,} in all are read.")


@dataclass(frozen=True)
class Region:
    """A part of an image, in fractions of its width and height: small objects are larger in it.

    Raises:
        ValueError: it is empty, or not all of it lies in the image.
    """

    left: float
    top: float
    width: float
    height: float

    def __post_init__(self) -> None:
        sides = ((self.left, self.width), (self.top, self.height))
        # A little above 1 is rounding, as in 0.7 + 0.3.
        if not all(start >= 0 and size > 0 and start + size <= 1 + 1e-6 for start, size in sides):
            text = ",".join(f"{value:g}" for value in (self.left, self.top, self.width, self.height))
            raise ValueError(f"region {text}: x, y, width and height are fractions, and x + width and y + height <= 1")

    @classmethod
    def from_text(cls, text: str) -> "Region":
        """Read "x,y,width,height", such as "0.25,0.25,0.5,0.5" for the middle of an image.

        Raises:
            ValueError: these are not four numbers, or not a region.
        """
        try:
            left, top, width, height = map(float, text.split(","))
        except ValueError as error:
            message = "expected x,y,width,height in fractions of the image, such as 0.25,0.25,0.5,0.5"
            raise ValueError(f"region {text!r}: {message}") from error
        return cls(left, top, width, height)

    def box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Left, top, right and bottom in pixels of an image of this size: at least one pixel."""
        left, top = min(int(self.left * width), width - 1), min(int(self.top * height), height - 1)
        right, bottom = math.ceil((self.left + self.width) * width), math.ceil((self.top + self.height) * height)
        return left, top, min(max(right, left + 1), width), min(max(bottom, top + 1), height)


def list_images(folder: Path) -> list[Path]:
    """List the image files of a folder by name, numbers in names by value: 9.jpg comes before 10.jpg.

    Raises:
        DataError: there is none, or one is a link out of the folder.
    """
    found = [path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file()]
    if not found:
        raise DataError(f"{folder}: has no images ({', '.join(sorted(SUFFIXES))})")
    for path in found:
        check_file(path, folder)
    # Odd parts of a name are its numbers. The name itself keeps 1.png and 01.png in a fixed order.
    parts = {path: re.split(r"(\d+)", path.name) for path in found}
    return sorted(found, key=lambda path: ([int(p) if i % 2 else p for i, p in enumerate(parts[path])], path.name))
