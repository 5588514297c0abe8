"""Images of any kind become RGB as an image viewer shows them; what cannot be read is named."""

import base64
import io
import warnings

import httpx
import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from traffic_vlm.images_traffic_vlm import Region, to_rgb


RGB, RED, GREEN, BLUE, WHITE = (200, 100, 50), (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
EXIF_ORIENTATION = 0x0112


def assert_color(image, color, position=(0, 0), tolerance=0):
    assert image.mode == "RGB"
    assert np.abs(np.subtract(image.getpixel(position), color)).max() <= tolerance, image.getpixel(position)


# --- arrays, tensors and modes of Pillow ---

HWC = np.broadcast_to(np.array(RGB, dtype=np.uint8), (6, 5, 3))
PICTURES = {
    "HWC": (HWC, RGB),
    "CHW": (HWC.transpose(2, 0, 1), RGB),
    "tensor CHW": (torch.tensor(HWC.transpose(2, 0, 1).copy()), RGB),
    "unit floats": (HWC / 255, RGB),
    "byte floats": (HWC.astype(np.float32), RGB),
    "gray 1HW": (np.full((1, 6, 5), 90, dtype=np.uint8), (90,) * 3),
    "transparent RGBA": (np.zeros((6, 5, 4), dtype=np.uint8), WHITE),
    "mode RGBA": (Image.new("RGBA", (5, 6), (0, 0, 0, 102)), (153, 153, 153)),
    "mode LA": (Image.new("LA", (5, 6), (0, 0)), WHITE),
    "mode CMYK": (Image.new("CMYK", (5, 6), (0, 255, 255, 0)), RED),
}


@pytest.mark.parametrize("name", PICTURES)
def test_arrays_tensors_and_modes(name):
    picture, seen = PICTURES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = to_rgb(picture)
    assert_color(image, seen)
    assert image.size == (5, 6)


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [(np.uint16, 0, 65_535), (np.uint16, 29_800, 30_310), (np.int32, -500, 800)]
)
def test_integers_beyond_bytes_are_scaled_from_their_own_range_with_a_warning(tmp_path, dtype, low, high):
    """Thermal cameras and depth: Pillow alone would clip them to white."""
    gray = np.linspace(low, high, 256).round().reshape(16, 16).astype(dtype)
    Image.fromarray(gray).save(tmp_path / "gray.tif")
    for source in (gray, torch.from_numpy(gray), Image.fromarray(gray), tmp_path / "gray.tif"):
        with pytest.warns(UserWarning, match=r"int\d+ pixels are scaled from their own range to black and white"):
            seen = np.asarray(to_rgb(source))
        expected = (gray.astype(float) - low) * (255 / (high - low))
        assert seen.shape == (16, 16, 3) and np.abs(seen - expected[..., None]).max() <= 0.5
    with pytest.warns(UserWarning, match="own range"):
        assert_color(to_rgb(np.full((4, 4), high, dtype)), (0, 0, 0))  # one value has no range


# --- files as a viewer shows them ---


@pytest.mark.parametrize("name", ["palette.png", "palette.gif"])
def test_transparent_pixels_of_files_are_white(tmp_path, name):
    """The left half of the picture is transparent, and its hidden color is not white."""
    picture = Image.new("P", (8, 4), 1)
    picture.putpalette([*GREEN, *BLUE])
    picture.paste(0, (0, 0, 4, 4))
    picture.save(tmp_path / name, transparency=0)
    assert_color(to_rgb(tmp_path / name), WHITE)
    assert_color(to_rgb(tmp_path / name), BLUE, (7, 0))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path, orientation):
    upright = Image.new("RGB", (32, 16), BLUE)
    upright.paste(RED, (0, 0, 16, 8))
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the inverse transposition
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(back[orientation]))
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    stored.save(tmp_path / "photo.png", exif=exif)
    assert to_rgb(tmp_path / "photo.png").tobytes() == upright.tobytes()


SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
# Red and green have changed places; the description is not that of sRGB.
SWAPPED = (
    SRGB.replace(b"\0s\0R\0G\0B", b"\0w\0i\0d\0e")
    .replace(b"rXYZ", b"?")
    .replace(b"gXYZ", b"rXYZ")
    .replace(b"?", b"gXYZ")
)


@pytest.mark.parametrize(
    ("mode", "fill", "profile", "seen"),
    [
        ("RGB", GREEN, SWAPPED, RED),
        ("RGBA", (*GREEN, 128), SWAPPED, (255, 127, 127)),
        ("RGB", GREEN, SRGB, GREEN),
    ],
)
def test_colors_are_those_of_the_icc_profile(tmp_path, mode, fill, profile, seen):
    Image.new(mode, (4, 3), fill).save(tmp_path / "a.png", icc_profile=profile)
    assert_color(to_rgb(tmp_path / "a.png"), seen, tolerance=1)


# --- sources ---


def test_all_sources_give_the_same_picture(monkeypatch, tmp_path):
    array = np.random.default_rng(1).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    picture, path = Image.fromarray(array), tmp_path / "scene.png"
    picture.save(path)
    encoded = base64.b64encode(path.read_bytes()).decode()
    url = "https://a.test/b.png"
    content = path.read_bytes()
    answer = httpx.Response(200, content=content, request=httpx.Request("GET", url))
    monkeypatch.setattr(httpx, "get", lambda name, **options: {url: answer}[name])
    written, cells = io.BytesIO(), [{"bytes": content, "path": None}, {"bytes": None, "path": str(path)}]
    picture.save(written, "png")  # it is at its end
    sources = [picture, array, path, str(path), encoded, "data:image/png;base64," + encoded, url]
    sources += [content, bytearray(content), written, *cells]
    with open(path, "rb") as file:
        for source in [*sources, file, file]:  # twice
            assert np.array_equal(to_rgb(source), array)


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        (np.full((4, 4, 3), np.nan), ValueError, r"ndarray of shape \(4, 4, 3\).*NaN or infinite"),
        (np.zeros((7, 5, 2)), ValueError, r"shape \(7, 5, 2\).*channels"),
        (Image.new("RGB", (0, 5)), ValueError, r"no pixels.*0 x 5"),
        (np.linspace(-2, 2.5, 16).reshape(4, 4), ValueError, r"0\.\.1 .*or 0\.\.255 .*not normalized, got -2\.\.2\.5"),
        ("no/such/file.png", ValueError, r"'no/such/file\.png'.*no such file"),
        (b"\xff" * 10_000, ValueError, r"image of 10,000 bytes: cannot identify image file"),
        (None, TypeError, r"NoneType None: expected a PIL image"),
    ],
)
def test_bad_images_are_errors_that_name_the_value(image, error, message):
    with pytest.raises(error, match=message) as caught:
        to_rgb(image)
    assert len(str(caught.value)) <= 200


# --- regions ---


def test_a_region_lies_in_the_image():
    places = np.stack(np.broadcast_arrays(*np.ogrid[:40, :50], 0), -1).astype(np.uint8)  # y, x in red and green
    for text, (left, top, right, bottom) in {
        "0,0,1,1": (0, 0, 50, 40),
        "0.7,0,0.3,1": (35, 0, 50, 40),
        "0.7,0,0.3000001,1": (35, 0, 50, 40),  # rounded
        "0.5,0.25,0.001,0.5": (25, 10, 26, 30),  # never empty
    }.items():
        part = np.asarray(Region.of(text).crop(Image.fromarray(places)))
        assert np.array_equal(part, places[top:bottom, left:right])
    for text in ("0,0,1.1,1", "0.5,0,0.6,1", "-0.1,0,0.5,1", "0,0,0,1", "0,0,nan,1", "0,0,1", "a,b,c,d"):
        with pytest.raises(ValueError, match=r"region .*fractions"):
            Region.of(text)
