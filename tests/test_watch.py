"""The video watcher: events, frames lost and kept, what is written, the command, Ctrl-C and memory.

Tiny random weights cannot see, so where times matter a scorer reads a sign out of the pixels that the test put there.
"""

import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from clips import RATE, TCPServer, encode, grays, quiet
from tiny import ROOT, save_folder, tiny_model
from traffic_vlm.serving import timeline, video, watcher
from traffic_vlm.serving.annotation import AnnotatedVideo, annotate, video_size
from traffic_vlm.serving.answerer import Answerer
from traffic_vlm.serving.events import Event, EventDetector
from traffic_vlm.serving.timeline import TimelineWriter, bin_timeline, clock_time, read_events
from traffic_vlm.serving.video import Frame, open_source, read_frames


av = pytest.importorskip("av", reason="the video watcher needs PyAV")
parquet = pytest.importorskip("pyarrow.parquet", reason="the video watcher needs pyarrow")

QUESTIONS = ["Is there a pedestrian?", "Is there a bus?"]


def brightness(pixels):
    """A scorer [B,2]: P(yes) is the brightness of a frame, and the second question's the opposite."""
    bright = pixels.reshape(len(pixels), -1).mean(1) / 255
    return np.stack([bright, 1 - bright], 1).astype(np.float32)


def watch_frames(frames, folder, score=brightness, drops_late=False, capacity=4, rate=RATE, notes=None, **options):
    """Watch an iterable of frames; the recorder and the reader, closed."""
    folder.mkdir(exist_ok=True)
    recorder = watcher.Recorder(folder, QUESTIONS, watcher.Options(**options), rate, tell=lambda line: None)
    reader = watcher.FrameReader(frames, capacity, drops_late)
    watcher.watch(reader, score, recorder, watcher.Progress(), notes or quiet())
    recorder.close()
    return recorder, reader


def frames_of(levels, rate=RATE):
    return (
        Frame(number, number / rate, np.full((4, 4, 3), level, dtype=np.uint8)) for number, level in enumerate(levels)
    )


# Events


def events_of(probabilities, rate=RATE, **options):
    detector = EventDetector(**options)
    changes = [detector.update(number / rate, p) for number, p in enumerate(probabilities)]
    changes.append(detector.close(len(probabilities) / rate))
    flat = list(itertools.chain(*changes))
    begun = [event for event in flat if event.end is None]
    over = [event for event in flat if event.end is not None]
    assert [event.start for event in begun] == [event.start for event in over]
    return over


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [
        ([0.1] * 50, []),
        ([0.1] * 10 + [0.9] * 20 + [0.1] * 10, [Event(1.0, 3.0, 0.9)]),
        ([0.1] * 10 + [0.5] * 20 + [0.1] * 10, []),  # never reaches `on`
        ([0.1] * 10 + [0.7] * 10 + [0.5] * 10 + [0.1] * 10, [Event(1.0, 3.0, 0.7)]),  # 0.5 goes on with what was
        ([0.1] * 10 + [0.9] * 5 + [0.1] * 10, [Event(1.0, 1.5, 0.9)]),  # as short as an event may be
        ([0.1] * 10 + [0.9] * 4 + [0.1] * 10, []),  # shorter
        ([0.9, 0.1] * 25, []),  # flicker
        ([0.9] * 10 + [0.1] * 4 + [0.9] * 6 + [0.1] * 10, [Event(0.0, 2.0, 0.9)]),  # a gap that is flicker
        ([0.9] * 10 + [0.1] * 5 + [0.8] * 5 + [0.1] * 10, [Event(0.0, 1.0, 0.9), Event(1.5, 2.0, 0.8)]),
        ([0.9] * 10 + [0.1, 0.5, 0.5] + [0.1] * 10, [Event(0.0, 1.0, 0.9)]),  # 0.5 goes on with what was, the "no"
        ([0.1] * 10 + [0.7, 0.9] + [0.6] * 8, [Event(1.0, 2.0, 0.9, is_cut=True)]),
        ([0.1] * 16 + [0.9] * 4, []),  # too short before the video ends
        ([0.9] * 10 + [0.1] * 3, [Event(0.0, 1.0, 0.9)]),  # over, although the video ends soon after
        ([0.6] * 5 + [0.4] * 5 + [0.39] * 5, [Event(0.0, 1.0, 0.6)]),  # the thresholds themselves
    ],
)
def test_events_in_closed_form(probabilities, expected):
    assert events_of(probabilities) == expected


def test_without_a_shortest_duration_each_frame_counts():
    assert events_of([0.1, 0.9, 0.1, 0.9], shortest=0) == [Event(0.1, 0.2, 0.9), Event(0.3, 0.4, 0.9, is_cut=True)]


def test_at_one_frame_a_second_a_frame_stands_for_a_second():
    assert events_of([0.1, 0.9, 0.1], rate=1) == [Event(1.0, 2.0, 0.9)]
    assert events_of([0.1, 0.9, 0.1], rate=1, shortest=1.5) == []


def test_an_event_is_told_as_soon_as_it_is_sure():
    detector = EventDetector()
    told = [(number / RATE, detector.update(number / RATE, 0.9)) for number in range(10)]
    assert [(when, events) for when, events in told if events] == [(0.5, [Event(0.0, None, 0.9)])]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1), max_size=60), st.sampled_from([0.0, 0.25, 0.5]))
def test_events_are_apart_and_long_enough(probabilities, shortest):
    events = events_of(probabilities, shortest=shortest)
    for event in events:
        assert event.end - event.start >= shortest - 1e-6 and event.peak >= 0.6
    for before, after in itertools.pairwise(events):
        assert after.start - before.end >= shortest - 1e-6


@pytest.mark.parametrize("options", [{"on": 0.3, "off": 0.4}, {"off": 0.0}, {"on": 1.1}, {"shortest": -1}])
def test_thresholds_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match="must be 0"):
        EventDetector(**options)


# What is late, silent or broken


def test_a_camera_that_falls_silent_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "PATIENCE", 1.5)
    data = encode(tmp_path / "clip.ts", grays([200] * 60)).read_bytes()
    notes = quiet()
    with TCPServer([data], hang_up=False) as address:
        frames = read_frames(open_source(address, notes))
        recorder, _ = watch_frames(frames, tmp_path / "out", drops_late=True, capacity=99, notes=notes)
    assert recorder.frames >= 40
    assert any("nothing came for 1.5 s" in problem for problem in notes.problems)


def test_frames_that_stay_away_end_the_watching(tmp_path):
    over = threading.Event()

    def frames():
        yield from frames_of([200] * 3)
        over.wait(20)

    notes = quiet()
    recorder, reader = watch_frames(frames(), tmp_path / "out", drops_late=True, notes=notes, patience=0.3)
    over.set()
    assert recorder.frames + reader.dropped == 3
    assert notes.problems == ["no frame for 0.3 s: the camera or stream is gone; what was seen is kept"]


def test_late_frames_of_a_live_source_are_dropped_and_counted(tmp_path):
    batches = []

    def slow(pixels):
        batches.append(len(pixels))
        time.sleep(0.1)
        return brightness(pixels)

    def frames():
        for frame in frames_of([100] * 100, rate=100):
            time.sleep(0.01)
            yield frame

    recorder, reader = watch_frames(frames(), tmp_path / "out", slow, drops_late=True)
    assert set(batches) == {1}
    assert recorder.frames + reader.dropped == 100 and reader.dropped > 50
    numbers = parquet.read_table(tmp_path / "out" / "timeline.parquet")["frame"].to_pylist()[::2]
    assert numbers == sorted(set(numbers)) and numbers[-1] == 99  # the newest is never the one dropped


def test_no_frame_of_a_file_is_lost_however_slow_the_model(tmp_path):
    def slow(pixels):
        time.sleep(0.02)
        return brightness(pixels)

    levels = [number % 250 for number in range(120)]
    recorder, reader = watch_frames(frames_of(levels), tmp_path / "out", slow, batch_size=3)
    table = parquet.read_table(tmp_path / "out" / "timeline.parquet")
    assert (recorder.frames, reader.dropped, table.num_rows) == (120, 0, 240)
    assert table["frame"].to_pylist()[::2] == list(range(120))
    assert table["probability"].to_pylist()[::2] == pytest.approx([level / 255 for level in levels], abs=1e-6)


def test_reading_is_over_when_the_last_frame_is_taken():
    reader = watcher.FrameReader(frames_of([100] * 3), 9)
    reader._thread.join(timeout=10)
    assert not reader.is_over
    assert [frame.number for frame in reader.take(9, timeout=1)] == [0, 1, 2]
    assert reader.is_over and reader.take(9, timeout=1) == []


def test_what_breaks_while_reading_is_raised_and_the_rest_is_kept(tmp_path):
    def frames():
        yield from frames_of([200] * 5)
        raise RuntimeError("the reader broke")

    (tmp_path / "out").mkdir()
    recorder = watcher.Recorder(tmp_path / "out", QUESTIONS, watcher.Options(), RATE, tell=lambda line: None)
    with pytest.raises(RuntimeError, match="the reader broke"):
        reader = watcher.FrameReader(frames(), 9)
        watcher.watch(reader, brightness, recorder, watcher.Progress(), quiet())
    recorder.close()
    assert recorder.frames == 5
    assert parquet.read_table(tmp_path / "out" / "timeline.parquet").num_rows == 10


# What is written


def test_clock_time():
    assert [clock_time(seconds) for seconds in (0, 59.96, 61.25, 3723.4)] == [
        "0:00.0",
        "1:00.0",
        "1:01.2",
        "1:02:03.4",
    ]


def test_a_long_timeline_is_drawn_from_a_few_spans_of_time(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "GROUP_ROWS", 50)
    writer = TimelineWriter(tmp_path, QUESTIONS)
    for number in range(100):
        writer.add(number, number / 10, np.array([number / 100, 0.5]))
        if number % 30 == 0:
            writer.flush()
    writer.close()
    assert parquet.ParquetFile(tmp_path / "timeline.parquet").num_row_groups == 4
    assert not (tmp_path / "timeline").exists()
    binned = bin_timeline(tmp_path / "timeline.parquet", QUESTIONS, columns=10)
    assert binned["low"][:, 0] == pytest.approx(np.arange(10) / 10, abs=0.011)
    assert binned["high"][:, 0] == pytest.approx(np.arange(10) / 10 + 0.09, abs=0.011)
    assert binned["mean"][:, 1] == pytest.approx(np.full(10, 0.5))
    assert binned["time"] == pytest.approx((np.arange(10) + 0.5) * 0.99)


def test_an_annotated_video_keeps_times_and_shows_answers(tmp_path):
    path = tmp_path / "out.mp4"
    annotated = AnnotatedVideo(path, QUESTIONS, 10)
    times = [0.0, 0.1, 0.2, 0.2, 0.7]
    for seconds in times:
        annotated.add(seconds, grays([90], (360, 640))[0], np.array([0.9, 0.1]), [True, False])
    annotated.close()
    frames = list(read_frames(open_source(str(path), quiet())))
    assert [frame.time for frame in frames] == pytest.approx(times, abs=1e-3)
    assert np.abs(frames[0].pixels[-50:].astype(int) - 90).max() < 8  # below the panel the frame is as it was
    assert frames[0].pixels[:30].std() > 20


def test_an_annotated_video_can_be_played_before_it_is_closed(tmp_path):
    annotated = AnnotatedVideo(tmp_path / "open.mp4", QUESTIONS, 10)
    noise = np.random.default_rng(0).integers(0, 255, (160, 160, 3), dtype=np.uint8)
    for number in range(150):
        annotated.add(number / 10, noise, np.array([0.5, 0.5]), [False, False])
    shutil.copy(tmp_path / "open.mp4", tmp_path / "killed.mp4")  # what there would be, were the program killed now
    annotated.close()
    frames = [
        len(list(read_frames(open_source(str(tmp_path / name), quiet()), size=8)))
        for name in ("killed.mp4", "open.mp4")
    ]
    assert 50 <= frames[0] < frames[1] == 150


def test_more_questions_than_fit_are_counted():
    picture = grays([128], (360, 640))[0]
    many = [f"Question {number}?" for number in range(100)]
    image = annotate(picture, many, np.linspace(0, 1, 100), [False] * 100, "0:01.0")
    assert image.size == (640, 360)
    assert np.asarray(image)[-15:, 600:].mean() == 128  # the panel ends before the picture does


@pytest.mark.parametrize(
    ("size", "expected"),
    [((640, 360), (640, 360)), ((3840, 2160), (1280, 720)), ((64, 48), (426, 320)), ((101, 1000), (128, 1280))],
)
def test_size_of_the_annotated_video(size, expected):
    assert video_size(*size) == pytest.approx(expected, abs=2)
    assert all(side % 2 == 0 for side in video_size(*size))


def walk(seconds: float):
    """A street across which a pedestrian walks: the picture, and whether the truth has a pedestrian in it."""
    from traffic_vlm.data.synthetic import draw, make_plan

    plan = make_plan(115)
    place = (-2.0 + 2.2 * seconds, 0.0, 7.0)
    things = [replace(thing, place=place) if thing.label == "pedestrian" else thing for thing in plan.things]
    image, scene = draw(replace(plan, things=things), 224)
    return np.asarray(image), any(item.label == "pedestrian" and item.size > 60 for item in scene.objects)


def test_a_pedestrian_who_enters_and_leaves_is_an_event_at_that_time(tmp_path):
    pictures, truth = zip(*(walk(number / RATE) for number in range(80)))
    begin, end = truth.index(True) / RATE, (len(truth) - truth[::-1].index(True)) / RATE
    assert 1 < begin < end - 1 < 6
    empty = pictures[0].astype(int)

    def difference(pixels):  # from the empty street
        share = (np.abs(pixels - empty).max(-1) > 40).mean((1, 2))
        return np.stack([np.minimum(1.0, share / 0.004), np.zeros(len(pixels))], 1).astype(np.float32)

    source = open_source(str(encode(tmp_path / "walk.mp4", pictures)), quiet())
    annotated = AnnotatedVideo(tmp_path / "seen.mp4", QUESTIONS, RATE)
    recorder = watcher.Recorder(tmp_path, QUESTIONS, watcher.Options(), RATE, annotated, tell=lambda line: None)
    reader = watcher.FrameReader(read_frames(source, picture_size=video_size), 8)
    watcher.watch(reader, difference, recorder, watcher.Progress(), quiet())
    recorder.close()
    [(question, event)] = read_events(tmp_path / "events.csv")
    assert question == "Is there a pedestrian?" and not event.is_cut
    assert event.start == pytest.approx(begin, abs=0.5) and event.end == pytest.approx(end, abs=0.5)
    picture = np.asarray(Image.open(tmp_path / "timeline.png").convert("RGB")).astype(int)
    orange = (np.abs(picture - (249, 208, 187)).max(-1) < 12).any(0).nonzero()[0] / picture.shape[1]
    assert orange[0] == pytest.approx(begin / 8, abs=0.06) and orange[-1] == pytest.approx(end / 8, abs=0.06)
    assert len(list(read_frames(open_source(str(tmp_path / "seen.mp4"), quiet()), size=8))) == 80


# The model and the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_folder(tiny_model(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    picture = np.asarray(Image.open(ROOT / "docs/example.jpg").convert("RGB").resize((320, 240)))
    pictures = [picture, np.ascontiguousarray(picture[:, ::-1])]
    return encode(tmp_path_factory.mktemp("clip") / "clip.mp4", pictures * 10)


def test_scores_are_those_of_the_model_for_each_frame(folder):
    answerer = Answerer(folder, device="cpu")
    notes = quiet()
    questions = [*QUESTIONS, "Is there a zebra?"]
    scorer = watcher.QuestionScorer(answerer, questions, notes)
    pixels = np.random.default_rng(0).integers(0, 255, (3, 224, 224, 3), dtype=np.uint8)
    with torch.no_grad():
        inputs = answerer.processor(
            images=list(pixels), text=[questions] * 3, packed=True, on_unknown="ignore", return_tensors="pt"
        )
        expected = torch.stack(answerer.model.score_yes_no(**inputs)).numpy()
    assert scorer(pixels) == pytest.approx(expected, abs=1e-5)
    assert scorer(pixels[1:2]) == pytest.approx(expected[1:2], abs=1e-5)
    assert any("zebra" in note for note in notes.notes)


def test_each_batch_of_frames_is_one_pass(folder, monkeypatch):
    answerer = Answerer(folder, device="cpu")
    scorer = watcher.QuestionScorer(answerer, QUESTIONS, quiet())
    looks, passes = [], []
    answerer.model.model.vision_tower.register_forward_hook(lambda module, args, output: looks.append(len(args[0])))
    answerer.model.model.text_model.register_forward_hook(lambda module, args, output: passes.append(1))
    monkeypatch.setattr(answerer, "processor", None)  # the questions are not made into tensors again
    scorer(np.zeros((3, 224, 224, 3), dtype=np.uint8))
    scorer(np.zeros((1, 224, 224, 3), dtype=np.uint8))
    assert looks == [3, 1] and len(passes) == 2


def load_script():
    spec = importlib.util.spec_from_file_location("watch_script", ROOT / "scripts/watch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def command(folder, tmp_path, monkeypatch, capsys):
    """Runs scripts/watch.py in this process; status, standard output and standard error."""

    def run(*arguments):
        output = ["--output", tmp_path / "out", "--model", folder, "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["watch.py", *map(str, [*output, *arguments])])
        try:
            status = load_script().main()
        except SystemExit as leave:
            status = leave.code
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def asking(*questions):
    return [word for question in questions for word in ("--ask", question)]


def test_a_run_that_fails_says_so_in_its_summary(command, clip, tmp_path, monkeypatch):
    def fill_the_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("traffic_vlm.serving.watcher.watch", fill_the_disk)
    status, _, said = command(clip, *asking(*QUESTIONS))
    assert status == 2 and "No space left" in said
    assert json.loads((tmp_path / "out/summary.json").read_text())["ended_by"] == "an error"


def test_the_command_writes_everything(command, clip, tmp_path):
    out = tmp_path / "out"
    status, _, said = command(
        clip, *asking(*QUESTIONS), "--video", tmp_path / "seen.mkv", "--on", 0.01, "--off", 0.005
    )
    assert status == 0, said
    table = parquet.read_table(out / "timeline.parquet")
    assert table.column_names == ["frame", "time", "question", "probability"]
    assert table["frame"].to_pylist() == [number for number in range(20) for _ in QUESTIONS]
    assert table["question"].to_pylist() == QUESTIONS * 20
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["frames"], summary["dropped"], summary["problems"]) == (20, 0, [])
    assert summary["ended_by"] == "end of the source" and summary["frames_per_second"] > 0
    assert all(event["is_cut"] and event["end"] == pytest.approx(2.0) for event in summary["events"])
    assert Image.open(out / "timeline.png").width > 600
    assert len(list(read_frames(open_source(str(tmp_path / "seen.mkv"), quiet()), size=8))) == 20
    assert "frames/s" in said and "x real time" in said

    status, _, said = command(clip, *asking("Is it raining?"))
    assert status == 2 and "has timeline.parquet of an earlier run" in said
    status, _, said = command(clip, *asking("Is it raining?"), "--fps", 5, "--bf16", "--batch_size", 3, "--overwrite")
    assert status == 0, said
    assert parquet.read_table(out / "timeline.parquet")["frame"].to_pylist() == list(range(0, 20, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [*asking(*(f"Is there a car {number}?" for number in range(200)))],
            "200 questions: at least 1 and at most 128",
        ),
        ([*asking("Is there a car?", " ")], "question 2 is empty"),
        ([*asking("?!")], "question 1 is empty"),
        ([*asking("🦄🦄")], "no word of the question '🦄🦄'"),
        ([*asking("car " * 200)], "at most 128"),
        ([*asking("Is there a car?"), "--on", "0.2"], "on=0.2 and off=0.4"),
        ([*asking("Is there a car?"), "--shortest", "-1"], "0 seconds or more, got -1.0"),
        ([*asking("Is there a car?"), "--fps", "0"], "float above 0"),
        ([*asking("Is there a car?"), "--batch_size", "none"], "int above 0"),
        ([*asking("Is there a car?"), "--device", "tpu9"], "tpu9"),
        ([*asking("Is there a car?"), "--video", "seen.gif"], "must end in .mp4"),
        ([*asking("Is there a car?"), "--video", "nowhere/seen.mp4"], "cannot be written"),
        ([*asking("Is there a car?"), "--output", "file"], "file: cannot be written to"),
        ([], "--ask"),
    ],
)
def test_what_cannot_be_asked_is_said(command, clip, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    status, _, said = command(clip, *arguments)
    assert status == 2 and message in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.mp4", *asking("Is there a car?")], "no.mp4: no such file"),
        (["/dev/video97", *asking("Is there a car?")], "/dev/video97: no such camera or stream"),
        ([*asking("Is there a car?"), "--model", "nowhere"], "nowhere"),
        ([*asking("🦄")], "no word of the question"),
        ([*asking("Is there a car?"), "--video", "nowhere/seen.mp4"], "cannot be written"),
    ],
)
def test_a_run_that_cannot_start_removes_nothing(command, clip, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    earlier = ["timeline.parquet", "timeline/part-000000.parquet", "events.csv", "timeline.png", "summary.json"]
    (tmp_path / "out/timeline").mkdir(parents=True)
    for name in earlier:
        (tmp_path / "out" / name).write_text("hours")
    source = [clip] if arguments[0] == "--ask" else []
    status, _, said = command(*source, *arguments, "--overwrite")
    assert status == 2 and message in said and "Traceback" not in said, said
    assert {(tmp_path / "out" / name).read_text() for name in earlier} == {"hours"}


def test_the_video_to_watch_is_not_overwritten(command, clip):
    before = clip.read_bytes()
    status, _, said = command(clip, *asking("Is there a car?"), "--video", clip, "--overwrite")
    assert status == 2 and "is the video to watch" in said and clip.read_bytes() == before


def test_unknown_words_and_emoji_are_named_and_the_rest_is_watched(command, clip, tmp_path):
    status, _, said = command(clip, *asking("Is there a zebra?", "Is there a 🦄 car?"), "--fps", 1)
    assert status == 0 and "does not know: zebra" in said and "does not know: 🦄" in said
    assert len(json.loads((tmp_path / "out" / "summary.json").read_text())["notes"]) >= 2


def test_a_broken_file_keeps_its_beginning_and_says_so_by_its_status(command, tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (40, 48, 64, 3), dtype=np.uint8)
    whole = encode(tmp_path / "whole.mkv", noise).read_bytes()
    (tmp_path / "cut.mkv").write_bytes(whole[: len(whole) // 2])
    status, _, said = command(tmp_path / "cut.mkv", *asking(*QUESTIONS))
    assert status == 1 and "its end is missing" in said
    rows = parquet.read_table(tmp_path / "out" / "timeline.parquet").num_rows
    assert 30 <= rows <= 50
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["problems"]


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGKILL", -9)])
def test_what_was_seen_survives_ctrl_c_and_worse(folder, tmp_path, name, status):
    """On a live stream without an end; the signal comes when the first part of the timeline is there."""
    data = encode(tmp_path / "clip.ts", grays([200] * 50)).read_bytes()

    def endless():
        while True:
            yield data
            time.sleep(0.2)

    out = tmp_path / "out"
    command = [sys.executable, ROOT / "scripts/watch.py", *asking(*QUESTIONS), "--output", out, "--model", folder]
    command += ["--device", "cpu", "--threads", "1", "--video", tmp_path / "seen.mp4"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with TCPServer(endless()) as address:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen([*map(str, command), address], env=environment, **pipes)
        deadline = time.monotonic() + 300
        while not list(out.glob("timeline/part-*")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(getattr(signal, name))
        _, said = process.communicate(timeout=200)
    assert process.returncode == status, said
    finished = name != "SIGKILL"
    table = parquet.read_table(out / ("timeline.parquet" if finished else "timeline"))
    frames = table["frame"].to_pylist()
    assert len(frames) >= 4 and frames == sorted(frames) and len(frames) % 2 == 0
    if finished:
        summary = json.loads((out / "summary.json").read_text())
        assert (summary["ended_by"], summary["frames"] * 2) == (name, len(frames))
        assert Image.open(out / "timeline.png").width > 600
        assert len(list(read_frames(open_source(str(tmp_path / "seen.mp4"), quiet()), size=8))) == summary["frames"]
        assert "stopping: writing what was seen" in said and "Traceback" not in said


def test_sigterm_stops_like_ctrl_c_and_a_second_signal_at_once(capsys):
    before = signal.getsignal(signal.SIGTERM)
    with load_script().Stop() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGTERM)
        assert stop() and stop.number == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
    assert "stopping: writing what was seen" in capsys.readouterr().err


def resident() -> float:
    """Memory of this process in MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads memory from /proc")
def test_memory_stays_flat(tmp_path):
    path = encode(tmp_path / "long.mp4", grays([number % 250 for number in range(1400)]), rate=30)
    seen = []

    def score(pixels):
        seen.append(resident())
        return brightness(pixels)

    frames = read_frames(open_source(str(path), quiet()), size=224)
    recorder, _ = watch_frames(frames, tmp_path / "out", score, batch_size=1)
    assert recorder.frames == 1400
    assert np.median(seen[-50:]) - np.median(seen[350:400]) < 8
