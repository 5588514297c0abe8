"""Convert images of any kind to RGB, as an image viewer shows them.

- A photograph is rotated upright (EXIF), and transparent pixels become white, not the hidden color of the file.
- Colors of another space (the ICC profile of a phone, such as Display P3) become the colors of screens (sRGB).
- Integers beyond 0..255, as of 16-bit gray, are scaled from their own range; Pillow alone would clip them to white.
- An image that cannot be read is an error that names the file or the array.
"""

import base64
import io
import math
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageCms, ImageOps


try:
    from pillow_heif import register_heif_opener

    register_heif_opener()  # photographs of phones
except ImportError:
    pass


BYTES = bytes | bytearray | memoryview
ORIENTATION = 0x0112  # the EXIF tag
CHANNELS = (1, 3, 4)
# Floats with a maximum up to UNIT are 0..1 (resampling can overshoot), above BYTE 0..255; between is an error.
UNIT, BYTE = 1.05, 16


class Region(NamedTuple):
    """A part of an image, in fractions of its width and height: small objects are larger in it."""

    left: float
    top: float
    width: float
    height: float

    @classmethod
    def of(cls, value: Any) -> "Region":
        """A region from four numbers, or from a text such as "0.25,0.25,0.5,0.5".

        Raises:
            ValueError: another value, or the region is empty, or not all of it lies in the image.
        """
        try:
            left, top, width, height = region = cls(*map(float, value.split(",") if isinstance(value, str) else value))
            # A little above 1 is rounding.
            is_part = min(left, top) >= 0 and min(width, height) > 0 and max(left + width, top + height) <= 1 + 1e-6
        except (TypeError, ValueError):
            is_part = False
        if not is_part:
            limits = "x, y, width and height are fractions, and x + width and y + height <= 1"
            raise ValueError(f"region {value!r:.80}: {limits}")
        return region

    def box(self, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """(left, top, right, bottom) of the region of an image of (width, height) pixels: at least one pixel."""
        left, top = (min(int(start * side), side - 1) for start, side in zip(self[:2], size))
        right, bottom = (min(math.ceil((self[i] + self[i + 2]) * size[i]), size[i]) for i in range(2))
        return left, top, max(right, left + 1), max(bottom, top + 1)

    def crop(self, image: Image.Image) -> Image.Image:
        """The part of an image that is in the region."""
        return image.crop(self.box(image.size))


def to_rgb(image: Any) -> Image.Image:
    """A PIL image of mode RGB.

    Args:
        image: a PIL image of any mode; an image file: its path, its bytes, an open binary file, base64 data, a URL, or
            a cell of the library `datasets` that is not decoded, {"bytes": ..., "path": ...}; or an array or tensor of
            shape [H,W], [H,W,C] or [C,H,W] with C of 1 (gray), 3 (RGB) or 4 (RGBA). If the first and the last
            dimension could both be channels, a tensor is [C,H,W] and an array [H,W,C]. Booleans are black and white.
            Floats are 0..1, up to 1.05, or 0..255, above 16. Integers are 0..255; others are scaled from their own
            range to black and white, with a warning.

    Raises:
        TypeError: the value is not an image. ValueError: it cannot be read; the message names the file or the value.
    """
    try:
        if isinstance(image, Image.Image):
            return _convert(image)
        if isinstance(image, np.ndarray) or hasattr(image, "is_floating_point"):
            return _convert(_array_to_image(image))
        with _open(image) as opened:
            return _convert(opened)
    except Exception as error:  # for damaged files, Pillow raises errors of any type
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"cannot read the {_name(image)}: {error}") from error


def _name(image: Any) -> str:
    """An image for errors: its file, or its type with its size or value."""
    if isinstance(image, Mapping):
        image = image.get("path") or image.get("bytes")
    path = getattr(image, "filename", None) or getattr(image, "name", None) or image
    if isinstance(path, str | os.PathLike):
        return f"image {os.fspath(path)[-100:]!r}"
    if isinstance(image, BYTES):
        return f"image of {len(image):,} bytes"
    if hasattr(image, "shape"):
        return f"{type(image).__name__} of shape {tuple(image.shape)}"
    return f"{type(image).__name__} {image!r:.50}"


def _open(source: Any) -> Image.Image:
    if isinstance(source, Mapping):
        source = source.get("path") if source.get("bytes") is None else source["bytes"]
    if isinstance(source, BYTES):
        source = io.BytesIO(source)
    if hasattr(source, "read"):
        return Image.open(source)  # from its start
    if not isinstance(source, str | os.PathLike):
        raise TypeError("expected a PIL image, an array, a tensor, a path, a URL, base64 text, bytes or an open file")
    name = os.fspath(source)
    if os.path.isfile(name):
        return Image.open(name)
    if name.startswith(("http://", "https://")):
        import httpx  # comes with transformers, whose own reader loses what is transparent or has 16 bits

        answer = httpx.get(name, follow_redirects=True, timeout=60)
        return Image.open(io.BytesIO(answer.raise_for_status().content))
    try:
        return Image.open(io.BytesIO(decode_base64(name)))
    except Exception as error:
        raise ValueError("no such file, and it is neither a URL nor base64 image data") from error


def decode_base64(text: str) -> bytes:
    """Bytes of base64 text or of a data URL; both may have line breaks. Raises a ValueError."""
    return base64.b64decode("".join(text.rpartition(",")[2].split()), validate=True)


def _convert(image: Image.Image) -> Image.Image:
    if 0 in image.size:
        raise ValueError(f"it has no pixels: width x height is {image.width} x {image.height}")
    image.load()
    with suppress(Exception):  # a damaged EXIF block: the pixels are still readable
        if image.getexif().get(ORIENTATION, 1) != 1:  # otherwise the library would copy it
            image = ImageOps.exif_transpose(image)
    if image.mode == "F" or image.mode.startswith("I"):
        image = Image.fromarray(_to_uint8(np.asarray(image)))
    profile, mode = image.info.get("icc_profile"), "RGBA" if image.has_transparency_data else "RGB"
    image = image if image.mode == mode else image.convert(mode)
    if profile is not None:
        with suppress(Exception):  # viewers ignore a damaged profile, too, and one for gray or CMYK
            colors = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            if "srgb" not in ImageCms.getProfileDescription(colors).lower():
                image = ImageCms.profileToProfile(image, colors, ImageCms.createProfile("sRGB")) or image
    if mode == "RGBA":
        background = Image.new("RGBA", image.size, "white")
        background.alpha_composite(image)
        image = background.convert("RGB")
    return image


def _array_to_image(array: Any) -> Image.Image:
    is_tensor = hasattr(array, "is_floating_point")
    if is_tensor:
        array = (array.float() if array.is_floating_point() else array).detach().cpu().numpy()  # NumPy has no bfloat16
    if array.ndim not in (2, 3) or array.size == 0:
        raise ValueError("expected [H,W], [H,W,C] or [C,H,W], no dimension zero")
    if array.ndim == 3:
        first, last = array.shape[0] in CHANNELS, array.shape[-1] in CHANNELS
        if not first and not last:
            raise ValueError(f"expected one of {CHANNELS} channels, as the first or the last dimension")
        if first and (is_tensor or not last):
            array = np.moveaxis(array, 0, -1)
        if array.shape[-1] == 1:
            array = array[..., 0]
    return Image.fromarray(np.ascontiguousarray(_to_uint8(array)))


def _to_uint8(array: np.ndarray) -> np.ndarray:
    """Pixels of any number type, scaled to 0..255; `to_rgb` has the rule."""
    if array.dtype == np.uint8:
        return array
    kind, black, white = array.dtype.kind, 0.0, 255.0
    if kind not in "buif":
        raise TypeError(f"expected numbers as pixels, got {array.dtype}")
    low, high = float(array.min()), float(array.max())
    if not math.isfinite(low + high):
        raise ValueError("some pixels are NaN or infinite")
    if kind == "b" or (kind == "f" and low >= 1 - UNIT and high <= UNIT):
        white = 1.0
    elif kind == "f" and (low < 0 or not BYTE < high <= 255):
        ranges = f"0..1 (up to {UNIT}) or 0..255 (the maximum above {BYTE})"
        raise ValueError(f"{array.dtype} pixels must be in {ranges}, not normalized, got {low:g}..{high:g}")
    elif low < 0 or high > 255:
        warnings.warn(f"{array.dtype} pixels are scaled from their own range to black and white", stacklevel=1)
        black, white = low, max(high, low + 1)
    return np.rint((array.astype(np.float64) - black) * (255 / (white - black))).clip(0, 255).astype(np.uint8)
