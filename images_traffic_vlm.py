"""Convert images of any kind to RGB, as an image viewer shows them.

What is special here:
- a photograph is rotated upright (EXIF), and transparent pixels become white, not the hidden color of the file;
- colors of another space (the ICC profile of a phone or a printer) become those of screens (sRGB);
- 16-bit gray is scaled to 8 bits, where Pillow alone would clip values above 255 to white;
- 16-bit gray of a narrow band, as a thermal camera has it, is stretched: at full range it would be one gray;
- one rule scales the pixels of arrays, tensors and PIL images; where it cannot decide, there is an error;
- an image that cannot be read is an error that names the file or the array;
- files are read without torch and transformers, for `scripts/ask_onnx.py`.
"""

import base64
import io
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError


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
INTEGER_WHITES = (255, 1023, 4095, 65535)  # of 8, 10, 12 and 16 bits
NARROW = 32  # 16-bit pixels that span less than a 32nd of their range, 8 of 256 grays, are stretched
# Color space of an ICC profile: the modes of images that it fits. An image is converted to the first of these modes.
PROFILED = {"RGB": ("RGB", "RGBA", "P", "PA", "L", "LA"), "GRAY": ("L", "LA"), "CMYK": ("CMYK",)}


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
        # A little above 1 is rounding.
        if not all(start >= 0 and size > 0 and start + size <= 1 + 1e-6 for start, size in sides):
            text = ",".join(f"{value:g}" for value in self)
            raise ValueError(f"region {text}: x, y, width and height are fractions, and x + width and y + height <= 1")

    def __iter__(self) -> Iterator[float]:
        return iter((self.left, self.top, self.width, self.height))

    @classmethod
    def of(cls, value: Any) -> "Region":
        """A region from a region, four numbers, or a text that `from_text` reads. Other values raise `ValueError`."""
        if isinstance(value, str):
            return cls.from_text(value)
        # A region is read as four numbers: with remote code, that of the processor is of another class `Region`.
        try:
            left, top, width, height = map(float, value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"a region is left, top, width and height as fractions, got {value!r:.80}") from error
        return cls(left, top, width, height)

    @classmethod
    def from_text(cls, text: str) -> "Region":
        """A region from "x,y,width,height", such as "0.25,0.25,0.5,0.5"; other texts raise `ValueError`."""
        try:
            left, top, width, height = map(float, text.split(","))
        except ValueError as error:
            message = "expected x,y,width,height in fractions of the image, such as 0.25,0.25,0.5,0.5"
            raise ValueError(f"region {text!r:.80}: {message}") from error
        return cls(left, top, width, height)

    def crop(self, image: Image.Image) -> Image.Image:
        """The part of an image that is in the region."""
        return image.crop(self.box(*image.size))

    def box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Left, top, right and bottom in pixels of an image of this size: at least one pixel."""
        left, top = min(int(self.left * width), width - 1), min(int(self.top * height), height - 1)
        right, bottom = math.ceil((self.left + self.width) * width), math.ceil((self.top + self.height) * height)
        return left, top, min(max(right, left + 1), width), min(max(bottom, top + 1), height)


def to_rgb(image: Any, channels_first: bool | None = None) -> Image.Image:
    """Convert ``image`` to a PIL image of mode RGB.

    Args:
        image: a PIL image of any mode; an image file: its path, its bytes, an open binary file, base64 data, a URL, or
            a cell of the library `datasets` that is not decoded, {"bytes": ..., "path": ...}; or an array or tensor of
            shape [H,W], [H,W,C] or [C,H,W] with C of 1 (gray), 3 (RGB) or 4 (RGBA). Booleans are black and white.
            Other pixels are scaled by type and maximum: integers as 8, 10, 12 or 16 bits, the fewest that hold the
            maximum (with a warning if the type suggests others); floats as 0..1 up to 1.05, as 0..255 above 16.
            Integers above 4095 that span less than 2048 are stretched from black to white, with a warning.
        channels_first: how to read an array whose first and last dimensions could both be channels; by default a
            tensor is [C,H,W] and an array [H,W,C].

    Raises:
        TypeError: the value is not an image. ValueError: it cannot be read; the message names the file or the value.
    """
    if hasattr(image, "read"):
        image = read_file(image)
    try:
        if isinstance(image, Image.Image):
            return _convert(image)
        if isinstance(image, np.ndarray) or _is_tensor(image):
            return _convert(_array_to_image(image, channels_first))
        with _open(image) as opened:
            return _convert(opened)
    except Exception as error:  # for damaged files, Pillow raises errors of any type
        raise _unreadable(image, error) from error


def read_file(file: Any) -> dict[str, Any]:
    """The content of an open binary file, from its start, and its name: {"bytes": ..., "path": ...}.

    Raises:
        TypeError: the file is open as text. ValueError: it cannot be read.
    """
    try:
        with suppress(AttributeError, OSError):  # a pipe has no start
            file.seek(0)
        if not isinstance(file.read(0), bytes):
            raise TypeError("expected a file that is open in binary mode")
        return {"bytes": file.read(), "path": getattr(file, "name", None)}
    except Exception as error:
        raise _unreadable(file, error) from error


def _unreadable(image: Any, error: Exception) -> TypeError | ValueError:
    """An error of at most 190 letters that names an image by its file, or by its type with its size or value."""
    path, content = image, image
    if isinstance(image, Mapping):
        path, content = image.get("path"), image.get("bytes")
    elif isinstance(image, Image.Image):
        path = getattr(image, "filename", None) or None
    if isinstance(path, str | os.PathLike):
        text = os.fspath(path)
        name = f"image {text!r}" if len(text) <= 80 else f"image {text[:20]!r}...{text[-60:]!r}"
    elif isinstance(content, BYTES):
        name = f"image of {len(content):,} bytes"
    elif hasattr(image, "shape"):
        name = f"{type(image).__name__} of shape {tuple(image.shape)}"
    else:
        name = f"{type(image).__name__} {image!r:.50}"
    reason = "Pillow cannot identify its format" if isinstance(error, UnidentifiedImageError) else error
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"cannot read the {name}: {reason}"[:190])


def _is_tensor(image: Any) -> bool:
    return hasattr(image, "detach")


def _open(source: Any) -> Image.Image:
    if isinstance(source, Mapping):
        source = source.get("path") if source.get("bytes") is None else source["bytes"]
    if isinstance(source, BYTES):
        return Image.open(io.BytesIO(source))
    if not isinstance(source, str | os.PathLike):
        kinds = "a PIL image, an array, a tensor, a path, a URL, base64 text, the bytes of a file or an open file"
        raise TypeError(f"expected {kinds}")
    name = os.fspath(source)
    if os.path.isfile(name):
        return Image.open(name)
    if name.startswith(("http://", "https://")):
        from transformers.image_utils import load_image

        return load_image(name)  # already RGB: the library does not return the mode of the file
    try:
        data = name.partition(",")[2] if name.startswith("data:image/") else name
        return Image.open(io.BytesIO(base64.b64decode("".join(data.split()), validate=True)))
    except Exception as error:
        raise ValueError("no such file, and it is neither a URL nor base64 image data") from error


def _convert(image: Image.Image) -> Image.Image:
    if 0 in image.size:
        raise ValueError(f"it has no pixels: width x height is {image.width} x {image.height}")
    if image.format == "TIFF" and getattr(image, "is_animated", False) and image.tell() == 0:
        warnings.warn("a TIFF of several pages is read as its first page", stacklevel=2)
    image.load()
    try:
        is_rotated = image.getexif().get(ORIENTATION, 1) != 1
    except Exception:  # with a damaged EXIF block, the pixels are still readable
        is_rotated = False
    if is_rotated:
        image = ImageOps.exif_transpose(image)
    if image.mode == "F" or image.mode.startswith("I"):
        image = Image.fromarray(_to_uint8(np.asarray(image)))
    if image.mode in ("La", "RGBa"):  # premultiplied alpha
        image = image.convert(image.mode.upper())
    image = _to_srgb(image)
    if image.has_transparency_data:
        background = Image.new("RGBA", image.size, "white")
        background.alpha_composite(image.convert("RGBA"))
        image = background
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_srgb(image: Image.Image) -> Image.Image:
    """The image in the colors of screens, by its ICC profile. A damaged profile is ignored."""
    if not (content := image.info.get("icc_profile")):
        return image
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(content))
        modes = PROFILED[profile.profile.xcolor_space.strip()]
        if "srgb" in ImageCms.getProfileDescription(profile).lower() or image.mode not in modes:
            return image
        alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
        srgb = ImageCms.createProfile("sRGB")
        converted: Any = ImageCms.profileToProfile(image.convert(modes[0]), profile, srgb, outputMode="RGB")
    except Exception:  # viewers ignore a profile that does not fit
        return image
    if alpha is not None:
        converted.putalpha(alpha)
    return converted


def _array_to_image(array: Any, channels_first: bool | None) -> Image.Image:
    if _is_tensor(array):
        channels_first = True if channels_first is None else channels_first
        array = (array.float() if array.is_floating_point() else array).detach().cpu().numpy()  # NumPy has no bfloat16
    if array.ndim not in (2, 3) or array.size == 0:
        raise ValueError("expected [H,W], [H,W,C] or [C,H,W], no dimension zero")
    if array.ndim == 3:
        first, last = array.shape[0] in CHANNELS, array.shape[-1] in CHANNELS
        if not first and not last:
            raise ValueError(f"expected one of {CHANNELS} channels, as the first or the last dimension")
        if first and (channels_first or not last):
            array = np.moveaxis(array, 0, -1)
        if array.shape[-1] == 1:
            array = array[..., 0]
    return Image.fromarray(np.ascontiguousarray(_to_uint8(array)))


def _to_uint8(array: np.ndarray) -> np.ndarray:
    """Scale pixels of any number type to 0..255; `to_rgb` has the rule."""
    if array.dtype == np.uint8:
        return array
    kind = array.dtype.kind
    if kind == "b":
        return array.astype(np.uint8) * np.uint8(255)
    if kind not in "uif":
        raise TypeError(f"expected numbers as pixels, got {array.dtype}")
    low, high = float(array.min()), float(array.max())
    if not math.isfinite(low + high):
        raise ValueError("some pixels are NaN or infinite")
    black: float = 0
    white: float = _float_white(array.dtype, low, high) if kind == "f" else _integer_white(array.dtype, low, high)
    if white == INTEGER_WHITES[-1] and 0 < high - low < white / NARROW:
        warnings.warn(
            f"{array.dtype} pixels span less than 1/{NARROW} of 0..{white}, as those of thermal cameras: they are "
            "stretched from black to white; convert to uint8 if this is wrong",
            stacklevel=2,
        )
        black, white = low, high
    return np.rint((array.astype(np.float32) - black) * (255 / (white - black))).clip(0, 255).astype(np.uint8)


def _float_white(dtype: np.dtype, low: float, high: float) -> int:
    """The value that is white in float pixels of low..high."""
    if low >= 1 - UNIT and high <= UNIT:
        return 1
    if low < 0 or not BYTE < high <= 255:
        ranges = f"0..1 (up to {UNIT}) or 0..255 (the maximum above {BYTE})"
        raise ValueError(f"{dtype} pixels must be in {ranges}, not normalized, got {low:g}..{high:g}")
    return 255


def _integer_white(dtype: np.dtype, low: float, high: float) -> int:
    """The value that is white in integer pixels of low..high, with a warning if the type suggests another."""
    white = next((white for white in INTEGER_WHITES if high <= white), 0)
    if low < 0 or not white:
        raise ValueError(f"{dtype} pixels must be in 0..255 or 0..65535, got {low:g}..{high:g}")
    is_16_bit = dtype.kind == "u" and dtype.itemsize == 2
    if high > 0 and white not in ((65535,) if is_16_bit else (255, 65535)):
        # The maximum is not named: the text is then the same, and shown once, for all images of a camera.
        reading = f"{dtype} pixels of at most {white} are read as 0..{white}; convert to uint8 if this is wrong"
        warnings.warn(reading, stacklevel=2)
    return white
