"""Questions about every frame of a video: events, what is written, the command, signals.

Tiny random weights cannot see. Where times matter, a scorer measures the brightness of the frames.
"""

import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from clips import RATE, TCPServer, encode, grays, noise
from tiny import ROOT, save_folder, tiny_model
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from traffic_vlm.serving.answerer import Answerer
from traffic_vlm.serving.events import Event, EventDetector


pytest.importorskip("av", reason="videos need PyAV")
parquet = pytest.importorskip("pyarrow.parquet", reason="the timeline needs pyarrow")

from traffic_vlm.serving import watcher  # noqa: E402
from traffic_vlm.serving.annotation import AnnotatedVideo, video_size  # noqa: E402
from traffic_vlm.serving.timeline import CsvLog, clock_time, convert_to_parquet, summarize  # noqa: E402
from traffic_vlm.serving.video import Frame, open_source  # noqa: E402


QUESTIONS = ["Is there a pedestrian?", "Is there a bus?"]


def make_frames(levels):
    return (Frame(index, index / RATE, Image.new("RGB", (4, 4), (level,) * 3)) for index, level in enumerate(levels))


def brightness(frames):
    """P(yes) [B,2]: the brightness of a frame, and its complement."""
    bright = np.array([np.asarray(frame.image).mean() / 255 for frame in frames])
    return np.stack([bright, 1 - bright], 1).astype(np.float32)


def make_recorder(folder):
    return watcher.Recorder(QUESTIONS, watcher.WatchOptions(output_dir=folder), RATE)


def count_frames(path):
    return len(list(open_source(str(path)).frames(size=8)))


# Events


def events_of(probabilities, rate=RATE, **options):
    detector = EventDetector(**options)
    changes = [detector.update(index / rate, p) for index, p in enumerate(probabilities)]
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
        ([0.1] * 10 + [0.7] * 10 + [0.5] * 10 + [0.1] * 10, [Event(1.0, 3.0, 0.7)]),  # 0.5 continues the "yes"
        ([0.1] * 10 + [0.9] * 5 + [0.1] * 10, [Event(1.0, 1.5, 0.9)]),  # the shortest event
        ([0.1] * 10 + [0.9] * 4 + [0.1] * 10, []),  # shorter
        ([0.9, 0.1] * 25, []),  # flicker
        ([0.9] * 10 + [0.1] * 4 + [0.9] * 6 + [0.1] * 10, [Event(0.0, 2.0, 0.9)]),  # a gap that is flicker
        ([0.9] * 10 + [0.1] * 5 + [0.8] * 5 + [0.1] * 10, [Event(0.0, 1.0, 0.9), Event(1.5, 2.0, 0.8)]),
        ([0.9] * 10 + [0.1, 0.5, 0.5] + [0.1] * 10, [Event(0.0, 1.0, 0.9)]),  # 0.5 continues the "no"
        ([0.1] * 10 + [0.7, 0.9] + [0.6] * 8, [Event(1.0, 2.0, 0.9, is_cut=True)]),
        ([0.1] * 16 + [0.9] * 4, []),  # too short before the video ends
        ([0.9] * 10 + [0.1] * 3, [Event(0.0, 1.0, 0.9)]),  # over, although the video ends soon after
        ([0.6] * 5 + [0.4] * 5 + [0.39] * 5, [Event(0.0, 1.0, 0.6)]),  # the thresholds themselves
    ],
)
def test_events_in_closed_form(probabilities, expected):
    assert events_of(probabilities) == expected


def test_a_frame_lasts_until_the_next_one():
    assert events_of([0.1, 0.9, 0.1, 0.9], shortest=0) == [Event(0.1, 0.2, 0.9), Event(0.3, 0.4, 0.9, is_cut=True)]
    assert events_of([0.1, 0.9, 0.1], rate=1) == [Event(1.0, 2.0, 0.9)]
    assert events_of([0.1, 0.9, 0.1], rate=1, shortest=1.5) == []


def test_an_event_is_reported_once_it_is_long_enough():
    detector = EventDetector()
    changes = [(index / RATE, detector.update(index / RATE, 0.9)) for index in range(10)]
    assert [(seconds, events) for seconds, events in changes if events] == [(0.5, [Event(0.0, None, 0.9)])]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1), max_size=60), st.sampled_from([0.0, 0.25, 0.5]))
def test_events_and_gaps_are_long_enough(probabilities, shortest):
    events = events_of(probabilities, shortest=shortest)
    for event in events:
        assert event.end - event.start >= shortest - 1e-6 and event.peak >= 0.6
    for before, after in itertools.pairwise(events):
        assert after.start - before.end >= shortest - 1e-6


# Live sources


def test_late_frames_of_a_live_source_are_dropped_and_counted():
    def frames():
        for frame in make_frames([100] * 60):
            time.sleep(0.01)
            yield frame

    reader, indices = watcher.LiveReader(frames()), []
    for [frame] in reader.batches(lambda: False):
        time.sleep(0.05)
        indices.append(frame.index)
    assert len(indices) + reader.dropped == 60 and reader.dropped > 20
    assert indices == sorted(set(indices)) and indices[-1] == 59  # the newest frame is never dropped


def test_an_error_while_reading_is_raised_after_the_frames_before_it():
    def frames():
        yield from make_frames([200] * 3)
        raise RuntimeError("the reader broke")

    seen = []
    with pytest.raises(RuntimeError, match="the reader broke"):
        seen.extend(watcher.LiveReader(frames()).batches(lambda: False))
    assert len(seen) == 3


# What is written


def test_a_run_is_recorded(tmp_path):
    """Two bright seconds of six are one event; the files can be read before and after the end."""
    frames = list(make_frames([20] * 20 + [250] * 20 + [20] * 20))
    recorder = make_recorder(tmp_path)
    recorder.add(frames, brightness(frames))
    lines = (tmp_path / "timeline.csv").read_text().splitlines()  # as a killed run leaves it
    assert len(lines) == 1 + 120 and lines[0] == "frame,time,question,probability"
    assert (tmp_path / "events.csv").read_text().count("\n") == 3
    recorder.close()
    table = parquet.read_table(tmp_path / "timeline.parquet")
    assert table.column_names == ["frame", "time", "question", "probability"]
    assert [str(column.type) for column in table.columns] == ["int64", "double", "string", "float"]
    assert table["frame"].to_pylist() == [index for index in range(60) for _ in QUESTIONS]
    assert table["probability"].to_numpy().reshape(-1, 2).tolist() == brightness(frames).tolist()
    assert recorder.events == [
        ("Is there a bus?", Event(0.0, 2.0, 0.9216)),
        ("Is there a pedestrian?", Event(2.0, 4.0, 0.9804)),
        ("Is there a bus?", Event(4.0, 6.0, 0.9216, is_cut=True)),
    ]
    assert (tmp_path / "events.csv").read_text().splitlines()[:3] == [
        "question,start,end,peak,is_cut",
        "Is there a bus?,0.0,2.0,0.9216,False",
        "Is there a pedestrian?,2.0,4.0,0.9804,False",
    ]
    assert Image.open(tmp_path / "timeline.png").width > 600
    assert not (tmp_path / "timeline.csv").exists()


def test_thresholds_take_the_place_of_on_and_off(tmp_path):
    """Brightness 0.55 is a yes from 0.5 for a pedestrian, but not sure; for a bus (0.45) it is a sure no."""
    path = tmp_path / "thresholds.json"
    presence, place = {"threshold": 0.5, "band": [0.5, 0.7]}, {"threshold": 0.9}
    path.write_text(json.dumps({"default": place, "question_types": {"presence": presence}}))
    options = watcher.WatchOptions(output_dir=tmp_path, thresholds=path)
    recorder = watcher.Recorder(["Is there a pedestrian?", "Is there a bus on the left?"], options, RATE)
    frames = list(make_frames([20] * 20 + [140] * 20 + [250] * 20))
    recorder.add(frames[:40], brightness(frames[:40]))
    recorder.close()
    rows = parquet.read_table(tmp_path / "timeline.parquet").to_pylist()
    assert [*rows[0]] == ["frame", "time", "question", "probability", "answer", "not_sure"]
    decided = [(row["answer"], row["not_sure"]) for row in rows]
    assert decided[::2] == [("no", False)] * 20 + [("yes", True)] * 20
    assert decided[1::2] == [("yes", False)] * 20 + [("no", False)] * 20
    assert (tmp_path / "events.csv").read_text().splitlines() == [
        "question,start,end,peak,is_cut,not_sure",
        "Is there a bus on the left?,0.0,2.0,0.9216,False,False",
        "Is there a pedestrian?,2.0,4.0,0.549,True,True",
    ]


def test_a_probability_that_is_not_a_number_is_an_error(tmp_path):
    recorder = make_recorder(tmp_path)
    with pytest.raises(ValueError, match="frame 0: the model returned"):
        recorder.add(list(make_frames([0])), np.array([[0.5, np.nan]]))
    recorder.close()
    assert "nan" not in (tmp_path / "timeline.csv").read_text()


def test_a_timeline_is_reduced_to_ranges(tmp_path, monkeypatch):
    monkeypatch.setattr("traffic_vlm.serving.timeline.MAX_POINTS", 10)
    log = CsvLog(tmp_path / "timeline.csv", ["frame", "time", "question", "probability"])
    for index in range(100):
        log.add([(index, index / 10, question, p) for question, p in (('a "b",\n', index / 100), ("NA", 0.5))])
    log.close()
    convert_to_parquet(tmp_path / "timeline.csv", tmp_path / "timeline.parquet")
    assert parquet.read_table(tmp_path / "timeline.parquet")["question"].to_pylist()[:2] == ['a "b",\n', "NA"]
    seconds, low, mean, high = summarize(tmp_path / "timeline.parquet", 2)
    assert seconds == pytest.approx(np.arange(10))
    assert low[:, 0] == pytest.approx(np.arange(10) / 10)
    assert mean[:, 0] == pytest.approx(np.arange(10) / 10 + 0.045)
    assert high[:, 0] == pytest.approx(np.arange(10) / 10 + 0.09)
    assert mean[:, 1] == pytest.approx(np.full(10, 0.5))


def test_clock_time():
    assert [clock_time(seconds) for seconds in (0, 59.96, 3723.4)] == ["0:00.0", "1:00.0", "1:02:03.4"]


def test_an_annotated_video_keeps_times_and_shows_answers(tmp_path):
    annotated = AnnotatedVideo(tmp_path / "out.mp4", QUESTIONS * 50, 10)
    times = [0.0, 0.1, 0.2, 0.2, 0.7]
    for seconds in times:
        annotated.add(seconds, Image.new("RGB", (640, 360), (90, 90, 90)), [0.9, 0.1] * 50, [True, False] * 50)
    annotated.close()
    frames = list(open_source(str(tmp_path / "out.mp4")).frames())
    assert [frame.seconds for frame in frames] == pytest.approx(times, abs=1e-3)
    pixels = np.asarray(frames[0].image).astype(int)
    assert np.abs(pixels[:, -50:] - 90).max() < 8  # no text there
    assert pixels[:, :100].std() > 20


def test_an_annotated_video_can_be_played_after_a_kill(tmp_path):
    annotated = AnnotatedVideo(tmp_path / "open.mp4", QUESTIONS, 10)
    picture = Image.fromarray(noise(1, (160, 160))[0])
    for index in range(150):
        annotated.add(index / 10, picture, [0.5, 0.5], [False, False])
    shutil.copy(tmp_path / "open.mp4", tmp_path / "killed.mp4")
    annotated.close()
    assert 50 <= count_frames(tmp_path / "killed.mp4") < count_frames(tmp_path / "open.mp4") == 150


@pytest.mark.parametrize(
    ("size", "expected"),
    [((640, 360), (640, 360)), ((3840, 2160), (1280, 720)), ((64, 48), (426, 320)), ((101, 1000), (128, 1280))],
)
def test_size_of_the_annotated_video(size, expected):
    assert video_size(*size) == pytest.approx(expected, abs=2)
    assert all(side % 2 == 0 for side in video_size(*size))


# The model and the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_folder(tiny_model(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    picture = np.asarray(Image.open(ROOT / "docs/example.jpg").convert("RGB").resize((320, 240)))
    pictures = [picture, np.ascontiguousarray(picture[:, ::-1])]
    return encode(tmp_path_factory.mktemp("clip") / "clip.mp4", pictures * 10)


def test_scores_are_those_of_the_model_in_one_pass(folder):
    answerer = Answerer(folder, device="cpu")
    questions = [*QUESTIONS, "Is there a zebra?"]
    scorer = watcher.QuestionScorer(answerer, questions)
    images = [Image.fromarray(pixels) for pixels in noise(3, (224, 224))]
    batches, passes = [], []
    answerer.model.model.vision_tower.register_forward_hook(lambda module, args, output: batches.append(len(args[0])))
    answerer.model.model.text_model.register_forward_hook(lambda module, args, output: passes.append(1))
    scores = scorer(images)
    assert batches == [3] and len(passes) == 1
    for image, row in zip(images, scores):
        for question, score in zip(questions, row):
            inputs = answerer.processor(images=image, text=question, on_unknown="ignore", return_tensors="pt")
            assert score == pytest.approx(float(answerer.model.score_yes_no(**inputs)[0]), abs=1e-5)
    assert any("zebra" in note for note in scorer.notes)


@pytest.fixture
def command(folder, tmp_path, monkeypatch, capsys):
    """Runs scripts/watch.py in this process; returns its status and standard error."""
    spec = importlib.util.spec_from_file_location("watch_script", ROOT / "scripts/watch.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def run(*arguments):
        fixed = ["--output_dir", tmp_path / "out", "--model", folder, "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["watch.py", *map(str, [*fixed, *arguments])])
        try:
            status = script.main()
        except SystemExit as leave:
            status = leave.code
        errors = capsys.readouterr().err
        assert "Traceback" not in errors
        return status, errors

    handlers = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    yield run
    for name, handler in handlers.items():
        signal.signal(name, handler)


def asking(*questions):
    return [word for question in questions for word in ("--ask", question)]


def test_the_command_writes_everything(command, clip, tmp_path):
    out = tmp_path / "out"
    status, errors = command(clip, *asking(*QUESTIONS), "--video", tmp_path / "seen.mkv", "--on", 0.01, "--off", 0.005)
    assert status == 0, errors
    assert "20 frames" in errors and "x real time" in errors
    assert parquet.read_table(out / "timeline.parquet")["question"].to_pylist() == QUESTIONS * 20
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["frames"], summary["dropped"], summary["broken"], summary["problems"]) == (20, 0, 0, [])
    assert summary["ended_by"] == "end of the source" and summary["frames_per_second"] > 0
    assert all(event["is_cut"] and event["end"] == pytest.approx(2.0) for event in summary["events"])
    assert (out / "timeline.png").exists() and (out / "events.csv").exists()
    assert count_frames(tmp_path / "seen.mkv") == 20

    status, errors = command(clip, *asking("Is it raining?"))
    assert status == 2 and "has timeline.parquet of an earlier run" in errors
    status, errors = command(
        clip, *asking("Is there a 🦄 zebra?"), "--fps", 5, "--bf16", "--batch_size", 3, "--overwrite"
    )
    assert status == 0, errors
    assert "does not know: " in errors and "zebra" in errors
    assert parquet.read_table(out / "timeline.parquet")["frame"].to_pylist() == list(range(0, 20, 2))


CAR = asking("Is there a car?")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (asking(*(f"Is there a car {index}?" for index in range(200))), "200 questions: at least 1 and at most 128"),
        (asking("Is there a car?", " "), "question 2 is empty"),
        (asking("?!"), "question 1 is empty"),
        (asking("🦄🦄"), "no word of the question '🦄🦄'"),
        (asking("car " * 200), "at most 128"),
        ([*CAR, "--on", "0.2"], "on=0.2 and off=0.4"),
        ([*CAR, "--shortest", "-1"], "0 seconds or more, got -1.0"),
        ([*CAR, "--fps", "0"], "--fps must be above 0"),
        ([*CAR, "--thresholds", "file"], "file: is no JSON"),
        ([*CAR, "--thresholds", "zero.json"], "got on=0 and off=0"),
        ([*CAR, "--thresholds", "zero.json", "--on", "0.7"], "--thresholds takes the place of --on and --off"),
        ([*CAR, "--frame_rate", "nan"], "--frame_rate must be above 0"),
        ([*CAR, "--batch_size", "none"], "invalid int value"),
        ([*CAR, "--device", "tpu9"], "tpu9"),
        ([*CAR, "--model", "nowhere"], "nowhere"),
        ([*CAR, "--video", "seen.gif"], "must end in .mp4"),
        ([*CAR, "--video", "nowhere/seen.mp4"], "cannot be written"),
        ([*CAR, "--output_dir", "file"], "file: cannot be written to"),
        ([*CAR, "--output", "elsewhere"], "--output is now --output_dir"),
        ([], "--ask"),
        (["missing.mp4", *CAR], "missing.mp4: no such file"),
        (["/dev/video97", *CAR], "/dev/video97: no such camera or stream"),
        (["own.mp4", *CAR, "--video", "own.mp4"], "is the video to watch"),
    ],
)
def test_bad_input_is_an_error_that_keeps_earlier_files(command, clip, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "zero.json").write_text('{"default": {"threshold": 0}}')
    shutil.copy(clip, tmp_path / "own.mp4")
    (tmp_path / "out").mkdir()
    for name in watcher.FILES:
        (tmp_path / "out" / name).write_text("hours")
    has_source = bool(arguments) and not arguments[0].startswith("--")
    status, errors = command(*([] if has_source else [clip]), *arguments, "--overwrite")
    assert status == 2 and message in errors
    assert {(tmp_path / "out" / name).read_text() for name in watcher.FILES} == {"hours"}
    assert (tmp_path / "own.mp4").read_bytes() == clip.read_bytes()


def test_a_run_that_fails_keeps_its_frames_and_names_the_error(command, clip, tmp_path, monkeypatch):
    scores = watcher.QuestionScorer.__call__
    calls = []

    def fail(scorer, images):
        calls.append(1)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return scores(scorer, images)

    monkeypatch.setattr(watcher.QuestionScorer, "__call__", fail)
    status, errors = command(clip, *CAR, "--batch_size", 5)
    assert status == 2 and "No space left" in errors
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert (summary["ended_by"], summary["frames"]) == ("an error", 5)
    assert parquet.read_table(tmp_path / "out/timeline.parquet").num_rows == 5


def test_damaged_weights_end_the_run_and_write_no_nan(command, clip, tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[4:6] = float("nan")  # [YES] and [NO]
    status, errors = command(clip, *CAR, "--model", save_folder(model, tmp_path / "damaged"))
    assert status == 2 and "nan" in errors.lower()
    assert not list((tmp_path / "out").iterdir())  # refused before the first frame


def test_a_run_whose_answers_become_nan_ends_and_writes_no_nan(command, clip, tmp_path, monkeypatch):
    original, passes = TrafficVLMForConditionalGeneration.question_logits, []

    def damage(model, *args, **inputs):
        passes.append(1)
        logits = original(model, *args, **inputs)
        return logits if len(passes) <= 3 else [one * float("nan") for one in logits]  # the first pass is a check

    monkeypatch.setattr(TrafficVLMForConditionalGeneration, "question_logits", damage)
    status, errors = command(clip, *CAR, "--batch_size", 5)
    assert status == 2 and "frame 10: the model returned [nan]; its weights may be damaged" in errors
    table = parquet.read_table(tmp_path / "out/timeline.parquet")
    assert table["frame"].to_pylist() == list(range(10)) and np.isfinite(table["probability"].to_numpy()).all()
    texts = [path.read_text().lower() for path in (tmp_path / "out").glob("*.[cj]s*")]
    assert len(texts) == 2 and not any("nan" in text for text in texts)


def test_a_broken_file_keeps_its_beginning_and_exits_with_1(command, tmp_path):
    whole = encode(tmp_path / "whole.mkv", noise(40)).read_bytes()
    (tmp_path / "cut.mkv").write_bytes(whole[: len(whole) * 9 // 10])  # 0.4 s are missing
    status, errors = command(tmp_path / "cut.mkv", *CAR)
    assert status == 1 and "the end is missing" in errors
    assert 30 <= parquet.read_table(tmp_path / "out/timeline.parquet").num_rows <= 38
    assert json.loads((tmp_path / "out/summary.json").read_text())["problems"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGKILL", -9)])
def test_finished_frames_survive_signals(folder, tmp_path, name, status):
    """On an endless live stream; the signal comes after the first lines of the timeline."""
    data = encode(tmp_path / "clip.ts", grays([200] * 50)).read_bytes()

    def endless():
        while True:
            yield data
            time.sleep(0.2)

    out, csv = tmp_path / "out", tmp_path / "out/timeline.csv"
    command = [sys.executable, ROOT / "scripts/watch.py", *asking(*QUESTIONS), "--output_dir", out, "--model", folder]
    command += ["--device", "cpu", "--threads", "1", "--video", tmp_path / "seen.mp4"]
    with TCPServer(endless()) as address:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen([*map(str, command), address], env=environment, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            if csv.exists() and csv.read_text().count("\n") > 20:
                break
            time.sleep(0.05)
        process.send_signal(getattr(signal, name))
        _, errors = process.communicate(timeout=200)
    assert process.returncode == status, errors
    if name == "SIGKILL":
        assert csv.read_text().count("\n") > 20
        return
    assert "stopping: completing the files" in errors and "Traceback" not in errors
    frames = parquet.read_table(out / "timeline.parquet")["frame"].to_pylist()
    assert frames[::2] == frames[1::2] == sorted(set(frames))
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["ended_by"], summary["frames"] * 2) == (name, len(frames))
    assert count_frames(tmp_path / "seen.mp4") == summary["frames"]
