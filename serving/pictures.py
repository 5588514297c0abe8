"""Images from untrusted files: opened within limits, with errors that name the file."""

import io
import re
from pathlib import Path

from PIL import Image

from ..files import DataError, check_file
from ..images_traffic_vlm import Region, to_rgb


MAX_PIXELS = 40_000_000  # an 8K frame has 33 million
MAX_BYTES = 200_000_000  # of a file: MAX_PIXELS without compression are 120 million
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # other formats are rare, or start programs
SUFFIXES = {suffix for suffix, image_format in Image.registered_extensions().items() if image_format in FORMATS}


def open_picture(source: str | Path | bytes, name: str = "", max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image of a file, or of the bytes of one, as RGB.

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


def cut(picture: Image.Image, region: Region | None) -> Image.Image:
    """The part of a picture that is asked about."""
    return picture if region is None else picture.crop(region.box(*picture.size))


def list_images(folder: Path) -> list[Path]:
    """The image files of a folder by name, numbers in names by value: 9.jpg comes before 10.jpg.

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
