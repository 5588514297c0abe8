"""Frames of files, images, folders and streams: their times, sizes, colors and orientations, and broken sources."""

import wave

import numpy as np
import pytest
from PIL import Image

from clips import RATE, TCPServer, encode, grays


av = pytest.importorskip("av", reason="videos need PyAV")

from traffic_vlm.images_traffic_vlm import Region  # noqa: E402
from traffic_vlm.serving import video  # noqa: E402
from traffic_vlm.serving.annotation import video_size  # noqa: E402
from traffic_vlm.serving.video import hide_password, open_source  # noqa: E402


CORNERS = np.kron([[250, 170], [90, 10]], np.ones((24, 32)))[..., None].repeat(3, axis=2).astype(np.uint8)


def levels_of(frames):
    return [np.asarray(frame.image).mean() for frame in frames]


def same_size(width, height):
    return width, height


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi", "ts"])
def test_every_frame_of_a_file_has_its_time(tmp_path, suffix):
    levels = range(0, 250, 10)
    path = encode(tmp_path / f"clip.{suffix}", grays(levels), codec="mpeg4" if suffix == "avi" else "libx264")
    source = open_source(str(path))
    frames = list(source.frames(size=32))
    assert [frame.index for frame in frames] == list(range(25))
    assert [frame.seconds for frame in frames] == pytest.approx([index / RATE for index in range(25)], abs=2e-3)
    assert levels_of(frames) == pytest.approx(list(levels), abs=3)
    assert frames[0].image.size == (32, 32) and frames[0].picture is None
    assert (source.is_live, source.rate, source.duration) == (False, RATE, pytest.approx(2.5))
    assert not source.notes and not source.problems


def as_shown(picture, matrix):
    """The picture with each pixel moved to where the definition of the display matrix puts it."""
    (a, b, c, d), (y, x) = matrix, np.indices(picture.shape[:2])
    left, top = a * x + c * y, b * x + d * y
    left, top = left - left.min(), top - top.min()
    shown = np.zeros((top.max() + 1, left.max() + 1, 3), np.uint8)
    shown[top, left] = picture
    return shown


@pytest.mark.parametrize("matrix", [(1, 0, 0, 1), (-1, 0, 0, -1), (0, 1, -1, 0), (0, -1, 1, 0)])
def test_rotated_frames_are_shown_upright(tmp_path, matrix):
    expected = as_shown(CORNERS, matrix)
    path = encode(tmp_path / "turned.mp4", [CORNERS] * 3, matrix=matrix)
    frame = next(open_source(str(path)).frames(32, picture_size=same_size))
    assert np.abs(np.asarray(frame.picture).astype(int) - expected).mean() < 5
    quadrants = [level for row in (4, 27) for level in np.asarray(frame.image)[row, [4, 27], 0]]
    height, width, _ = expected.shape
    assert quadrants == pytest.approx([expected[y, x, 0] for y in (0, height - 1) for x in (0, width - 1)], abs=5)
    frame = next(open_source(str(path)).frames(32, region=Region.of("0,0,0.5,0.5")))  # of the upright frame
    assert np.asarray(frame.image).mean() == pytest.approx(expected[0, 0, 0], abs=5)


@pytest.mark.parametrize(
    ("rate", "fps", "indices"),
    [(30, 10, [0, 3, 6, 9]), (30, None, list(range(10))), (25, 10, [0, 3, 5, 8]), (10, 30, list(range(10)))],
)
def test_fps_selects_the_first_frame_of_each_interval(tmp_path, rate, fps, indices):
    for index in range(10):
        Image.new("RGB", (20, 10)).save(tmp_path / f"{index}.png")
    frames = list(open_source(str(tmp_path), frame_rate=rate).frames(size=8, fps=fps))
    assert [frame.index for frame in frames] == indices
    assert [frame.seconds for frame in frames] == pytest.approx([index / rate for index in indices])


def test_images_of_a_folder_are_ordered_by_number_and_broken_ones_are_skipped(tmp_path):
    for level in (10, 9, 2, 100):
        Image.new("RGB", (20, 10), (level,) * 3).save(tmp_path / f"frame{level}.png")
    (tmp_path / "frame11.png").write_text("not an image")
    Image.new("1", (20000, 20000)).save(tmp_path / "frame12.png")
    (tmp_path / "notes.txt").write_text("not an image")
    source = open_source(str(tmp_path))
    frames = list(source.frames(256))
    assert levels_of(frames) == pytest.approx([2, 9, 10, 100], abs=1)
    assert [frame.index for frame in frames] == [0, 1, 2, 5]
    assert "25 per second are assumed (--frame_rate)" in source.notes[0]
    assert source.notes[1] == f"{tmp_path}: files left out: 1 .txt"
    assert source.broken == 2 and "frame11.png cannot be read as an image" in source.problems[0]


@pytest.mark.parametrize("suffix", ["jpg", "png", "tiff", "avif", "heic", "gif"])
def test_one_image_is_one_frame(tmp_path, suffix):
    if suffix == "heic":
        pytest.importorskip("pillow_heif")
    path = tmp_path / f"still.{suffix}"
    exif = Image.Exif()
    is_mirrored = suffix not in ("gif", "heic")  # whose writers drop the orientation
    exif[0x0112] = 2 if is_mirrored else 1
    Image.fromarray(CORNERS).save(path, exif=exif)
    source = open_source(str(path))
    [frame] = source.frames(32, picture_size=same_size)
    expected = CORNERS[:, ::-1] if is_mirrored else CORNERS
    assert np.abs(np.asarray(frame.picture).astype(int) - expected).mean() < 5
    assert (frame.index, frame.seconds, source.problems, source.notes) == (0, 0.0, [], [])


@pytest.mark.parametrize("name", ["[1].mp4", "a%d.mp4", "12:30.mp4", "a%03d.gif", "[a-z]%d.png", "a?.mp4", "#1.mp4"])
def test_names_of_files_are_taken_literally(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    if name.endswith("mp4"):
        encode(tmp_path / "plain.mp4", grays([90] * 3)).rename(tmp_path / name)
    else:
        Image.new("RGB", (20, 10), (90,) * 3).save(name)
    assert levels_of(open_source(name).frames(8))[0] == pytest.approx(90, abs=3)


def test_passwords_are_hidden():
    assert hide_password("rtsp://user:p@ss/word@camera:554/a") == "rtsp://***@camera:554/a"
    assert hide_password("http://camera/stream?quality=1") == "http://camera/stream?quality=1"
    with pytest.raises(ValueError) as caught:
        open_source("http://user:secret@127.0.0.1:9/stream")
    assert str(caught.value).startswith("http://***@127.0.0.1:9/stream: no such camera or stream")
    assert caught.value.__cause__ is None  # whose text would hold the password


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.mp4", "missing.mp4: no such file, folder, camera or stream"),
        ("text.jpg", "text.jpg cannot be read as an image"),
        ("empty.mp4", "empty.mp4: cannot be read as a video"),
        ("cut.mp4", "cut.mp4: cannot be read as a video"),
        ("sound.wav", "sound.wav: has no video stream that can be decoded, only audio"),
        ("nothing", "nothing: has no images"),
        ("large.y4m", "15000 x 10000 pixels are more than 67,108,864, the limit"),
        ("larger.y4m", "larger.y4m: "),
        ("large.png", "large.png has too many pixels"),
        ("/dev/video97", "no such camera or stream"),
        ("97", "no such camera or stream"),
        ("tcp://127.0.0.1:9/stream", "no such camera or stream"),
    ],
)
def test_an_unusable_source_is_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jpg").write_text("This is not a video.\n" * 50)
    (tmp_path / "empty.mp4").touch()
    whole = encode(tmp_path / "whole.mp4", grays(range(0, 200, 10))).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])  # its index is at the end
    with wave.open("sound.wav", "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(8000))
    (tmp_path / "nothing").mkdir()
    if name == "large.png":
        Image.new("1", (20000, 20000)).save(name)
    for file, size in (("large.y4m", "W15000 H10000"), ("larger.y4m", "W20000 H20000")):
        (tmp_path / file).write_bytes(f"YUV4MPEG2 {size} F25:1 Ip A1:1 C420jpeg\nFRAME\n".encode() + bytes(1000))
    with pytest.raises(ValueError) as caught:
        open_source(name)
    assert message in str(caught.value)


def test_time_continues_where_a_second_recording_of_another_size_starts(tmp_path):
    parts = [encode(tmp_path / f"{size}.ts", grays([90] * 10, (size, 64))) for size in (48, 32)]
    path = tmp_path / "both.ts"
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    frames = list(open_source(str(path)).frames(256, picture_size=video_size))
    assert len(frames) == 20
    assert frames[-1].seconds == pytest.approx(1.9, abs=0.15)
    assert len({frame.picture.size for frame in frames}) == 1


def test_without_time_stamps_the_frame_rate_counts(tmp_path):
    path = encode(tmp_path / "raw.h264", grays(range(0, 200, 10)))
    frames = list(open_source(str(path), frame_rate=5).frames(256))
    assert [frame.seconds for frame in frames] == pytest.approx([index / 5 for index in range(20)])


@pytest.mark.parametrize(
    ("hang_up", "problem"), [(True, "the camera or stream ended after"), (False, "no data for 1.5 s")]
)
def test_frames_of_a_lost_stream_are_kept(tmp_path, monkeypatch, hang_up, problem):
    monkeypatch.setattr(video, "TIMEOUT", 1.5)
    data = encode(tmp_path / "clip.ts", grays([200] * 60)).read_bytes()
    with TCPServer([data[: len(data) * 2 // 3]], hang_up) as address:
        source = open_source(address)
        assert source.is_live
        frames = list(source.frames(256))
    assert 20 <= len(frames) <= 50
    assert any(problem in text for text in source.problems)
