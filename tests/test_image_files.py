"""Image files: the formats that are read, the files of folders that are left out, and errors that name the format."""

import io
import warnings

import pytest
from PIL import Image

from traffic_vlm.files import DataError
from traffic_vlm.image_files import READABLE, find_images, list_images, open_image, select_files


RED = (250, 20, 30)


def encode(image_format, **options):
    stream = io.BytesIO()
    Image.new("RGB", (32, 24), RED).save(stream, image_format, **options)
    return stream.getvalue()


@pytest.mark.parametrize("image_format", READABLE)
def test_every_listed_format_is_read(image_format):
    if image_format == "MPO":
        content = encode("MPO", save_all=True, append_images=[Image.new("RGB", (32, 24), "blue")])
    else:
        content = encode(image_format)
    image = open_image(content)
    assert (image.mode, image.size) == ("RGB", (32, 24))
    pixel = image.getpixel((16, 12))
    assert isinstance(pixel, tuple) and all(abs(a - b) < 12 for a, b in zip(pixel, RED))


HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
PAGES = {"save_all": True, "append_images": [Image.new("RGB", (32, 24), "blue")]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "x.jpg is empty: it has 0 bytes"),
        (b"a list of frames\n", "x.jpg cannot be read as an image: it is text. Readable are AVIF, BMP"),
        (b"%PDF-1.7", "it is PDF"),
        (b"<!doctype html><html>", "it is HTML"),
        (b"\0\0\0\x20ftypisom\0\0\2\0", "it is MP4 video"),
        (b"\x01\x02\x03", "of an unknown format"),
        (encode("JPEG")[:300], "x.jpg is JPEG, but damaged"),
        (encode("PNG")[:60], "x.jpg is PNG, but damaged"),
        (encode("GIF", **PAGES), "x.jpg is animated: ask about one of its frames"),
        (encode("WEBP", **PAGES), "x.jpg is animated"),
    ],
)
def test_the_error_of_an_unreadable_file_names_its_format(content, message):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        open_image(content, "x.jpg")
    assert message in str(error.value)


def test_heic_without_pillow_heif_says_what_reads_it(monkeypatch):
    monkeypatch.setattr("traffic_vlm.image_files.READABLE", ["JPEG", "PNG"])
    with pytest.raises(
        ValueError, match=r"it is HEIC \(pip install pillow-heif reads HEIC\)\. Readable are JPEG, PNG"
    ):
        open_image(HEIC, "photo.heic")


def test_too_many_pixels_are_not_decoded():
    content = encode("PNG")
    assert open_image(content, max_pixels=32 * 24).size == (32, 24)
    with pytest.raises(ValueError, match="32 × 24 pixels; at most 767 in all are read"):
        open_image(content, max_pixels=767)
    stream = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(stream, "PNG")
    with pytest.raises(ValueError, match="pixels; at most 40,000,000"):
        open_image(stream.getvalue())


def test_the_first_page_of_a_tiff_is_read_with_a_warning():
    with pytest.warns(UserWarning, match="a TIFF of several pages is read as its first page"):
        assert open_image(encode("TIFF", **PAGES)).getpixel((0, 0)) == RED
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_image(encode("TIFF"))


def test_files_that_are_no_images_are_left_out_and_counted():
    hidden = [".DS_Store", "__MACOSX/a.jpg", "@eaDir/a.jpg", ".ipynb_checkpoints/a.png"]
    names = [*hidden, "b.JPG", "a.avif", "c.txt", "d.txt", "e"]
    found, note = select_files(names)
    assert found == ["b.JPG", "a.avif"]
    assert note == "files left out: 4 hidden, 2 .txt, 1 no suffix"
    assert select_files(["/home/me/.cache/a.jpg"], root="/home/me/.cache") == (["/home/me/.cache/a.jpg"], "")
    note = select_files(["a.heic"], suffixes=(".jpg",))[1]
    assert note == "files left out: 1 .heic (pip install pillow-heif reads HEIC)"
    assert "1 .raw" in select_files([f"a.{kind}" for kind in ("raw", "b", "c", "d")])[1]


def test_folders_patterns_and_brackets(tmp_path):
    folder = tmp_path / "clip [1]"
    folder.mkdir()
    for name in ("10.jpg", "9.jpg", ".9.jpg", "notes.txt"):
        (folder / name).write_bytes(encode("JPEG"))
    for name in (folder, str(folder)):
        found, note = find_images(name)
        assert [path.name for path in found] == ["9.jpg", "10.jpg"]  # by number
        assert note == "files left out: 1 hidden, 1 .txt"
    assert [path.name for path in find_images(f"{folder}/*.jpg")[0]] == ["10.jpg", "9.jpg"]
    assert find_images(folder / "9.jpg") == ([folder / "9.jpg"], "")
    (folder / "a[2].jpg").write_bytes(encode("JPEG"))
    assert find_images(folder / "a[2].jpg")[0] == [folder / "a[2].jpg"]


def test_nothing_found_is_an_error_that_says_what_is_there(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match=r"has no images \(AVIF.*files left out: 1 \.txt"):
        list_images(tmp_path)
    with pytest.raises(DataError, match="no such image, no folder with images and no pattern that matches one"):
        find_images(tmp_path / "b*.jpg")
