"""Frames of files, images, folders and streams: their times, sizes and orientations, and broken sources."""

import io
from itertools import count, islice
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from clips import RATE, TCPServer, encode, grays, noise


av = pytest.importorskip("av", reason="videos need PyAV")

from traffic_vlm.serving.video import VideoSource, hide_password, open_source  # noqa: E402


CORNERS = np.kron([[250, 170], [90, 10]], np.ones((24, 32)))[..., None].repeat(3, axis=2).astype(np.uint8)


def levels_of(frames):
    return [np.asarray(frame.image).mean() for frame in frames]


@pytest.mark.parametrize("suffix", ["mp4", "ts"])
def test_every_frame_of_a_file_has_its_time(tmp_path, suffix):
    levels = range(0, 250, 10)
    path = encode(tmp_path / f"clip.{suffix}", grays(levels))
    source = open_source(str(path))
    frames = list(source.frames(side=32))
    assert [frame.index for frame in frames] == list(range(25))
    assert [frame.seconds for frame in frames] == pytest.approx([index / RATE for index in range(25)], abs=2e-3)
    assert levels_of(frames) == pytest.approx(list(levels), abs=3)
    assert frames[0].image.size == (32, 32)
    assert (source.is_live, source.rate) == (False, RATE)
    assert not source.problems


@pytest.mark.parametrize(
    ("matrix", "quarters"), [((1, 0, 0, 1), 0), ((-1, 0, 0, -1), 2), ((0, 1, -1, 0), -1), ((0, -1, 1, 0), 1)]
)
def test_rotated_frames_are_shown_upright(tmp_path, matrix, quarters):
    expected = np.rot90(CORNERS, quarters)  # counterclockwise
    path = encode(tmp_path / "turned.mp4", [CORNERS] * 3, matrix=matrix)
    whole = next(open_source(str(path)).frames()).image
    assert np.abs(np.asarray(whole).astype(int) - expected).mean() < 5
    resized = np.asarray(next(open_source(str(path)).frames(side=32)).image)
    quadrants = [level for row in (4, 27) for level in resized[row, [4, 27], 0]]
    height, width, _ = expected.shape
    assert quadrants == pytest.approx([expected[y, x, 0] for y in (0, height - 1) for x in (0, width - 1)], abs=5)


@pytest.mark.parametrize(
    ("rate", "fps", "indices"),
    [(30, 10, [0, 3, 6, 9]), (30, None, list(range(10))), (25, 10, [0, 3, 5, 8]), (10, 30, list(range(10)))],
)
def test_fps_selects_the_first_frame_of_each_interval(tmp_path, rate, fps, indices):
    for index in range(10):
        Image.new("RGB", (20, 10)).save(tmp_path / f"{index}.png")
    frames = list(open_source(str(tmp_path), frame_rate=rate).frames(fps))
    assert [frame.index for frame in frames] == indices
    assert [frame.seconds for frame in frames] == pytest.approx([index / rate for index in indices])


def test_images_of_a_folder_are_ordered_by_number_and_broken_ones_are_skipped(tmp_path, capsys):
    for level in (10, 9, 2, 100):
        Image.new("RGB", (20, 10), (level,) * 3).save(tmp_path / f"frame{level}.png")
    (tmp_path / "frame11.png").write_text("not an image")
    (tmp_path / "notes.txt").write_text("not an image")
    source = open_source(str(tmp_path))
    frames = list(source.frames())
    assert levels_of(frames) == pytest.approx([2, 9, 10, 100], abs=1)
    assert [frame.index for frame in frames] == [0, 1, 2, 4]
    assert capsys.readouterr().err == "files left out: 1 .txt\n"
    assert source.broken == 1 and "frame11.png cannot be read as an image" in source.problems[0]


def test_all_frames_of_a_gif_are_read(tmp_path):
    first, *others = [Image.new("RGB", (48, 32), (level,) * 3) for level in (20, 100, 200)]
    first.save(tmp_path / "moving.gif", save_all=True, append_images=others, duration=[40, 400, 100])  # milliseconds
    frames = list(open_source(str(tmp_path / "moving.gif")).frames())
    assert [frame.seconds for frame in frames] == pytest.approx([0, 0.04, 0.44])
    assert levels_of(frames) == pytest.approx([20, 100, 200], abs=2)


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
        ("cut.mp4", "cut.mp4: cannot be read as a video"),
        ("nothing", "nothing: has no images"),
        ("97", "no such camera or stream"),
        ("tcp://127.0.0.1:9/stream", "no such camera or stream"),
    ],
)
def test_an_unusable_source_is_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    whole = encode(tmp_path / "whole.mp4", grays(range(0, 200, 10))).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])  # its index is at the end
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError) as caught:
        open_source(name)
    assert message in str(caught.value)


def test_a_frame_whose_time_steps_back_follows_the_last_one(tmp_path, monkeypatch):
    stamps = [0, 40, 80, 200, 120, 160, None, 280]  # ms
    source = open_source(str(encode(tmp_path / "clip.mkv", grays([90] * 2), rate=25)))
    frames = [SimpleNamespace(pts=ms and round(ms / 1000 / source.stream.time_base)) for ms in stamps]
    monkeypatch.setattr(source, "decode", lambda: iter(frames))
    times = [seconds for seconds, _ in source.read()]
    assert times == pytest.approx([0, 0.04, 0.08, 0.2, 0.24, 0.28, 0.32, 0.36])


def test_without_time_stamps_the_frame_rate_counts(tmp_path):
    path = encode(tmp_path / "raw.h264", grays(range(0, 200, 10)))
    frames = list(open_source(str(path), frame_rate=5).frames())
    assert [frame.seconds for frame in frames] == pytest.approx([index / 5 for index in range(20)])


@pytest.mark.parametrize(
    ("hang_up", "problem"), [(True, "the camera or stream ended after"), (False, "no data for 1.5 s")]
)
def test_frames_of_a_lost_stream_are_kept(tmp_path, hang_up, problem):
    data = encode(tmp_path / "clip.ts", grays([200] * 60)).read_bytes()
    with TCPServer([data[: len(data) * 2 // 3]], hang_up) as address:
        source = VideoSource(address, timeout=1.5)
        frames = list(source.frames())
    assert source.is_live and 20 <= len(frames) <= 50
    assert any(problem in text for text in source.problems)


def test_packets_that_are_marked_corrupt_are_counted(tmp_path):
    path = encode(tmp_path / "clip.ts", noise(30))
    data = path.read_bytes()
    middle = len(data) // 2 // 188 * 188
    path.write_bytes(data[:middle] + data[middle + 188 :])  # a packet of the transport stream is lost
    source = open_source(str(path))
    assert len(list(source.frames())) > 20
    assert source.broken == 1 and source.problems[0].endswith("the first error: a packet is damaged")


def test_jpeg_files_over_http_have_the_times_of_the_clock(tmp_path):
    stream = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(stream, "jpeg")
    header = b"HTTP/1.1 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=b\r\n\r\n"
    part = b"--b\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%s\r\n"
    parts = [header, *[part % (len(stream.getvalue()), stream.getvalue())] * 9]
    with TCPServer(parts, hang_up=False) as address:
        source = VideoSource(address.replace("tcp", "http"))
        source.clock = count(100, 7).__next__
        assert source.is_live and [frame.seconds for frame in islice(source.frames(), 4)] == [0, 7, 14, 21]
