"""Image files: the formats that are read, the files of folders that are left out, and errors that name the file."""

import io
import struct
import warnings
import zlib

import pytest
from PIL import Image

from traffic_vlm.common.files import DataError
from traffic_vlm.common.image_files import READABLE, list_images, open_image, select_files


RED, BLUE = Image.new("RGB", (32, 24), (250, 20, 30)), Image.new("RGB", (32, 24), "blue")
PAGES = {"save_all": True, "append_images": [BLUE]}


def encode(image_format, **options):
    stream = io.BytesIO()
    RED.save(stream, image_format, **options)
    return stream.getvalue()


def png_of_size(width, height):
    """A PNG whose header claims this size."""
    png = encode("PNG")
    header = png[12:16] + struct.pack(">II", width, height) + png[24:29]
    return png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]


@pytest.mark.parametrize("image_format", READABLE)
def test_every_listed_format_is_read(image_format):
    image = open_image(encode(image_format, **(PAGES if image_format == "MPO" else {})))
    assert (image.mode, image.size) == ("RGB", RED.size)
    assert image.getpixel((16, 12)) == pytest.approx((250, 20, 30), abs=12)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "x.heic cannot be read as an image. Readable are "),
        (b"%PDF-1.7", "x.heic cannot be read as an image"),
        (encode("JPEG")[:300], "x.heic cannot be decoded: it is damaged"),
        (encode("PNG")[:60], "x.heic cannot be decoded: it is damaged"),
        (png_of_size(8_001, 5_000), "x.heic has 8001 × 5000 pixels; at most 40,000,000"),
        (png_of_size(30_000, 30_000), "or has far more than 40,000,000 pixels"),
    ],
)
def test_the_error_of_an_unreadable_file_names_it(content, message):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        open_image(content, "x.heic")
    assert message in str(error.value)


@pytest.mark.parametrize(("size", "limit", "scale"), [((80, 60), 4799, 2), ((80, 60), 300, 4), ((81, 60), 88, 8)])
def test_a_large_jpeg_is_decoded_smaller(size, limit, scale):
    stream, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # rotated: the other way round
    RED.resize(size).save(stream, "JPEG", exif=exif)
    image = open_image(stream.getvalue(), max_pixels=limit)
    assert image.size == (-(-size[1] // scale), -(-size[0] // scale))
    assert image.getpixel((1, 1)) == pytest.approx((250, 20, 30), abs=12)
    with pytest.raises(ValueError, match=r"at most 70 in all are read"):
        open_image(stream.getvalue(), max_pixels=70)


def test_the_largest_photographs_of_phones_are_read(tmp_path):
    Image.new("L", (16_320, 12_240)).save(tmp_path / "a.jpg")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_image(tmp_path / "a.jpg").size == (4080, 3060)


def test_files_that_are_no_images_are_left_out_and_counted():
    hidden = [".DS_Store", "__MACOSX/a.jpg", "@eaDir/a.jpg", ".ipynb_checkpoints/a.png"]
    found, note = select_files([*hidden, "b.JPG", "a.avif", "c.txt", "d.txt", "e"])
    assert found == ["b.JPG", "a.avif"]
    assert note == "files left out: 4 hidden, 2 .txt, 1 no suffix"
    assert select_files(["/home/me/.cache/a.jpg"], root="/home/me/.cache") == (["/home/me/.cache/a.jpg"], "")


def test_images_of_folders_and_files_are_found_in_order(tmp_path):
    for name in ("10.jpg", "9.jpg", ".9.jpg", "notes.txt", "a[2].jpg"):
        (tmp_path / name).touch()
    for name in ("day/a/1.jpg", "day/2.jpg", "night/3.txt", ".git/4.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found, note = list_images(tmp_path)
    assert [path.name for path in found] == ["9.jpg", "10.jpg", "a[2].jpg"]  # by number
    assert note == "files left out: 2 hidden, 2 subfolders, 1 .txt"
    assert list_images(tmp_path / "a[2].jpg") == ([tmp_path / "a[2].jpg"], "")


def test_nothing_found_is_an_error_that_says_what_is_there(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match=r"has no images \(AVIF.*files left out: 1 \.txt"):
        list_images(tmp_path)
    with pytest.raises(DataError, match=r"b\.jpg: no such image and no folder with images"):
        list_images(tmp_path / "b.jpg")
