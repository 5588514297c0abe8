"""Sources of frames: files, folders and streams, their times, sizes and colours, and what is wrong with them."""

import itertools
import time
import wave

import numpy as np
import pytest
import torch
from PIL import Image

from clips import RATE, TCPServer, encode, grays, quiet
from tiny import ROOT
from traffic_vlm.serving import video
from traffic_vlm.serving.annotation import video_size
from traffic_vlm.serving.video import Clock, is_wanted, open_source, read_frames
from traffic_vlm.utils import DataError


av = pytest.importorskip("av", reason="the video watcher needs PyAV")


# Times


def test_times_begin_at_nought_and_never_go_back():
    clock = Clock(0.1)
    assert [clock(stamp) for stamp in (5.0, 5.1, 5.05, 5.3)] == pytest.approx([0, 0.1, 0.1, 0.3])
    assert clock(0.0) == pytest.approx(0.4) and clock(0.1) == pytest.approx(0.5)  # another recording begins
    assert clock(None) == pytest.approx(0.6) and clock(0.3) == pytest.approx(0.7)
    without = Clock(0.04)
    assert [without(None) for _ in range(3)] == pytest.approx([0, 0.04, 0.08])
    assert without.missing == 3


@pytest.mark.parametrize(
    ("rate", "fps", "numbers"),
    [(30, 10, [0, 3, 6, 9]), (30, None, list(range(10))), (25, 10, [0, 3, 5, 8]), (10, 30, list(range(10)))],
)
def test_fps_takes_the_first_frame_of_each_span(rate, fps, numbers):
    taken, last = [], -1
    for number in range(10):
        wanted, last = is_wanted(number / rate, fps, last)
        taken += [number] * wanted
    assert taken == numbers


# Sources


@pytest.mark.parametrize("kind", ["mp4", "mkv", "avi", "ts", "mov"])
def test_every_frame_of_a_file_comes_with_its_time(tmp_path, kind):
    levels = range(0, 250, 10)
    path = encode(tmp_path / f"clip.{kind}", grays(levels), codec="mpeg4" if kind == "avi" else "libx264")
    notes = quiet()
    source = open_source(str(path), notes)
    frames = list(read_frames(source, size=32))
    assert [frame.number for frame in frames] == list(range(25))
    assert [frame.time for frame in frames] == pytest.approx([number / RATE for number in range(25)], abs=2e-3)
    assert [frame.pixels.mean() for frame in frames] == pytest.approx(list(levels), abs=3)
    assert frames[0].pixels.shape == (32, 32, 3) and frames[0].picture is None
    assert (source.is_live, source.rate, source.duration) == (False, RATE, pytest.approx(2.5))
    assert notes == quiet() or not (notes.notes or notes.problems)


def test_pixels_are_those_that_the_processor_makes(tmp_path, processor):
    example = np.asarray(Image.open(ROOT / "docs/example.jpg").convert("RGB").resize((640, 360)))
    path = encode(tmp_path / "clip.mp4", [example] * 2)
    [frame, _] = read_frames(open_source(str(path)), picture_size=lambda width, height: (width, height))
    assert frame.picture.shape == (360, 640, 3)
    pixels = processor(images=[Image.fromarray(frame.picture)], return_tensors="pt")["pixel_values"]
    ours = torch.from_numpy(frame.pixels.copy()).permute(2, 0, 1) / 127.5 - 1
    assert (ours - pixels[0]).abs().mean() < 0.5 / 127.5  # less than half of one of 255 levels


def test_colours_of_hd_video_are_those_of_its_own_colour_space(tmp_path):
    picture = np.zeros((720, 1280, 3), dtype=np.uint8)
    picture[:] = (200, 40, 90)
    frame = av.VideoFrame.from_ndarray(picture).reformat(format="yuv420p", dst_colorspace="ITU709")
    with av.open(str(tmp_path / "hd.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        frame.colorspace = video.UNSPECIFIED
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    [seen] = read_frames(open_source(str(tmp_path / "hd.mp4")))
    assert np.abs(seen.pixels.reshape(-1, 3).mean(0) - (200, 40, 90)).max() < 4


def test_a_video_recorded_lying_is_turned_upright(tmp_path):
    picture = np.zeros((48, 64, 3), dtype=np.uint8)
    picture[:, 32:] = 255  # the right half; turned to the left by a quarter it is above
    path = encode(tmp_path / "turned.mp4", [picture] * 3, turned=90)
    frame = next(read_frames(open_source(str(path)), picture_size=lambda width, height: (width, height)))
    assert frame.picture.shape == (64, 48, 3)
    assert frame.pixels[:100].mean() > 250 and frame.pixels[-100:].mean() < 5


def test_images_of_a_folder_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 9, 2, 100):
        Image.new("RGB", (20, 10), (number, 0, 0)).save(tmp_path / f"frame{number}.png")
    (tmp_path / "notes.txt").write_text("no image")
    source = open_source(str(tmp_path), quiet(), frame_rate=4)
    frames = list(read_frames(source, fps=2))
    assert [frame.pixels[0, 0, 0] for frame in frames] == [2, 10]
    assert [(frame.number, frame.time) for frame in frames] == [(0, 0.0), (2, 0.5)]
    single = list(read_frames(open_source(str(tmp_path / "frame9.png"), quiet())))
    assert [frame.pixels[0, 0, 0] for frame in single] == [9]


def test_without_frame_rate_a_folder_says_what_is_assumed(tmp_path):
    for number in range(2):
        Image.new("RGB", (20, 10)).save(tmp_path / f"{number}.png")
    notes = quiet()
    assert open_source(str(tmp_path), notes).rate == 25
    assert "25 per second are assumed (--frame_rate)" in notes.notes[0]


# Bad sources


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.mp4", "missing.mp4: no such file, folder, camera or stream"),
        ("text.mp4", "text.mp4: cannot be read as a video"),
        ("empty.mp4", "empty.mp4: cannot be read as a video"),
        ("cut.mp4", "one whose end, with its index, is missing"),
        ("sound.wav", "sound.wav: has no video stream, only audio"),
        ("words.srt", "has no video stream, only subtitle"),
        ("nothing", "nothing: has no images"),
        ("large.y4m", "15000 x 10000 pixels are more than 67,108,864, the limit"),
        ("larger.y4m", "larger than 67,108,864 pixels, the limit"),
        ("/dev/video97", "no such camera or stream"),
        ("97", "no such camera or stream"),
        ("tcp://127.0.0.1:9/stream", "no such camera or stream"),
    ],
)
def test_a_source_that_cannot_be_watched_is_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.mp4").write_text("This is no video.\n" * 50)
    (tmp_path / "empty.mp4").touch()
    whole = encode(tmp_path / "whole.mp4", grays(range(0, 200, 10))).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    with wave.open("sound.wav", "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(8000))
    (tmp_path / "words.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nHello\n\n")
    (tmp_path / "nothing").mkdir()
    for file, size in (("large.y4m", "W15000 H10000"), ("larger.y4m", "W20000 H20000")):
        (tmp_path / file).write_bytes(f"YUV4MPEG2 {size} F25:1 Ip A1:1 C420jpeg\nFRAME\n".encode() + bytes(1000))
    with pytest.raises(DataError) as caught:
        open_source(name, quiet())
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["mp4", "mkv"])
def test_of_a_truncated_video_what_can_be_decoded_is_kept(tmp_path, kind):
    levels = np.random.default_rng(0).integers(0, 255, (60, 48, 64, 3), dtype=np.uint8)
    options = {"movflags": "faststart"} if kind == "mp4" else None
    whole = encode(tmp_path / f"whole.{kind}", levels, options=options).read_bytes()
    path = tmp_path / f"cut.{kind}"
    path.write_bytes(whole[: len(whole) // 2])
    notes = quiet()
    frames = list(read_frames(open_source(str(path), notes), size=8))
    assert 25 <= len(frames) <= 32
    assert "declares 6.0 s, only" in notes.problems[-1] and "its end is missing" in notes.problems[-1]


def test_damage_in_the_middle_costs_only_the_damaged_frames(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (40, 48, 64, 3), dtype=np.uint8)
    path = encode(tmp_path / "clip.ts", noise)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 4000] = bytes(4000)
    path.write_bytes(data)
    frames = list(read_frames(open_source(str(path), quiet()), size=8))
    assert 30 <= len(frames) <= 40
    assert all(after.time >= before.time for before, after in itertools.pairwise(frames))


def test_a_video_may_change_its_size_and_begin_anew(tmp_path):
    parts = [encode(tmp_path / f"{size}.ts", grays([90] * 10, (size, 64))) for size in (48, 32)]
    path = tmp_path / "both.ts"
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    notes = quiet()
    frames = list(read_frames(open_source(str(path), notes), picture_size=video_size))
    assert len(frames) == 20
    assert frames[-1].time == pytest.approx(1.9, abs=0.15)
    assert {frame.pixels.shape for frame in frames} == {(224, 224, 3)}
    assert len({frame.picture.shape for frame in frames}) == 1
    assert "change from 64 x 48 to 64 x 32 at frame 10" in notes.notes[0]


def test_without_time_stamps_the_frame_rate_counts(tmp_path):
    path = encode(tmp_path / "raw.h264", grays(range(0, 200, 10)))
    notes = quiet()
    frames = list(read_frames(open_source(str(path), notes, frame_rate=5)))
    assert [frame.time for frame in frames] == pytest.approx([number / 5 for number in range(20)])
    assert len(notes.notes) == 1 and "no time stamps; 5 frames per second count" in notes.notes[0]


def test_an_image_that_cannot_be_read_is_left_out_by_name(tmp_path):
    for number in range(4):
        Image.new("RGB", (20, 10)).save(tmp_path / f"{number}.png")
    (tmp_path / "1.png").write_text("no image")
    Image.new("1", (20000, 20000)).save(tmp_path / "2.png")
    notes = quiet()
    frames = list(read_frames(open_source(str(tmp_path), notes, frame_rate=1)))
    assert [(frame.number, frame.time) for frame in frames] == [(0, 0.0), (3, 3.0)]
    assert "1.png cannot be read as an image" in notes.problems[0]
    assert "2.png is larger than 67,108,864 pixels, the limit" in notes.problems[1]


def test_notes_do_not_grow_without_end():
    notes = quiet()
    for number in range(500):
        notes.problem(str(number))
    assert len(notes.problems) == video.MAX_NOTES + 1


# Streams and cameras


def test_a_camera_that_vanishes_leaves_what_it_sent(tmp_path):
    data = encode(tmp_path / "clip.ts", grays([200] * 30)).read_bytes()
    notes = quiet()
    with TCPServer([data[: len(data) * 2 // 3]]) as address:
        source = open_source(address, notes)
        assert source.is_live
        frames = list(read_frames(source))
    assert 10 <= len(frames) <= 25
    assert "ended after" in notes.problems[-1] and "what was seen is kept" in notes.problems[-1]


def test_a_live_stream_in_heaps_is_taken_at_its_own_pace():
    pacer, start = video.Pacer(), time.monotonic()
    for number in range(5):
        pacer.wait(number * 0.05)
    assert time.monotonic() - start >= 0.19
    time.sleep(0.3)  # the stream stalls: what comes late puts off the rest, and nothing is hurried
    pacer.wait(0.25)
    start = time.monotonic()
    pacer.wait(0.35)
    assert time.monotonic() - start >= 0.09
