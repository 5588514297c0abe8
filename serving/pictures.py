"""Pictures that strangers send: opened within limits, and refused by name."""

import io
from pathlib import Path

from PIL import Image

from ..images_traffic_vlm import to_rgb


MAX_PIXELS = 40_000_000  # an 8K frame has 33 million
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # others run programs, or are rare


def open_picture(source: str | Path | bytes, name: str = "", max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The picture in a file, or in its bytes, as RGB.

    Args:
        name: what errors call it; by default the file's own.

    Raises:
        ValueError: no image, an animated one, or one of more than `max_pixels`, which is not decoded.
    """
    name = name or ("the image" if isinstance(source, bytes) else Path(source).name)
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            width, height = image.size
            # The further pictures of a phone's JPEG (MPO) are previews, or for a second eye.
            # Not counted: of a small file with a million frames that takes minutes.
            is_animated = image.format != "MPO" and getattr(image, "is_animated", False)
            if not is_animated and width * height <= max_pixels:
                return to_rgb(image)
    except Image.DecompressionBombError as error:
        raise ValueError(f"{name} has too many pixels; at most {max_pixels:,} are read.") from error
    except Exception as error:  # on broken bytes Pillow raises whatever the code of the format happens to raise
        raise ValueError(f"{name} is no image that can be read.") from error
    if is_animated:
        raise ValueError(f"{name} is animated: ask about one of its frames, or use scripts/watch.py.")
    raise ValueError(f"{name} has {width} × {height} pixels; at most {max_pixels:,} in all are read.")
