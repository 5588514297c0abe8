"""Questions about every frame of a video: what is written and drawn, the command, signals.

Tiny random weights cannot see. Where times matter, the brightness of a frame is its P(yes).
"""

import csv
import json
import os
import shutil
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from clips import RATE, TCPServer, encode, grays
from tiny import ROOT
from traffic_vlm.evaluation.thresholds import load_thresholds
from traffic_vlm.question_traffic_vlm import Rules


av = pytest.importorskip("av", reason="videos need PyAV")

from traffic_vlm.serving import watcher  # noqa: E402
from traffic_vlm.serving.video import AnnotatedVideo, Frame, open_source  # noqa: E402


QUESTIONS = ["Is there a pedestrian?", "Is there a bus?"]
COLOR = "What color is the traffic light?"
LINES = ["yes, 0.90 · Is there a pedestrian?", "no, 0.90 · Is there a bus?"]


def make_frames(levels):
    for index, level in enumerate(levels):
        image = Image.new("RGB", (4, 4), (level,) * 3)
        yield Frame(index, index / RATE, image)


def an_item(question, answer, score, p_yes=None):
    return {"question": question, "answer": answer, "score": score, "p_yes": p_yes}


def brightness(frames, questions=QUESTIONS, thresholds=None):
    """Items of two questions about each frame: P(yes) is its brightness, and 1 - that."""
    rows = []
    for frame in frames:
        bright = np.float32(np.asarray(frame.image).mean() / 255)
        rows.append([])
        for question, p_yes in zip(questions, (float(bright), float(1 - bright))):
            threshold = 0.5 if thresholds is None else thresholds.for_question(question)
            rows[-1].append({"question": question} | Rules().form(question).yes_or_no(p_yes, threshold))
    return rows


def a_source():
    return SimpleNamespace(name="clip.mp4", rate=RATE, broken=0, dropped=0, problems=[])


def make_recorder(folder, questions=QUESTIONS, **options):
    questions, options = [Rules().form(text) for text in questions], {"min_score": 0} | options
    return watcher.Recorder(questions, watcher.WatchOptions(output_dir=folder, **options), a_source())


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def count_frames(path):
    return len(list(open_source(str(path)).frames()))


# Live sources


def test_the_frames_before_silence_are_kept():
    """The driver of a camera that falls silent may never return: the run ends all the same."""

    def frames():
        yield from make_frames([100] * 3)
        threading.Event().wait()

    source = a_source()
    assert len(list(watcher.newest_frames(source, frames(), silence=0.3))) == 3
    assert source.problems == ["clip.mp4: no frame for 0.3 s: the camera or stream is lost"]


def test_late_frames_of_a_live_source_are_dropped_and_counted():
    all_sent, source = threading.Event(), a_source()

    def frames():
        yield from make_frames([100] * 20)
        all_sent.set()

    newest = watcher.newest_frames(source, frames())
    first = next(newest)
    assert all_sent.wait(timeout=60)  # the model is busy until then
    indices = [frame.index for frame in (first, *newest)]
    assert indices[-4:] == [16, 17, 18, 19]  # the newest frames are never dropped
    assert source.dropped == 20 - len(indices) >= 15


# What is written


def test_a_run_is_recorded(tmp_path):
    """Two bright seconds of six are one event; the files can be read before and after the end."""
    frames = list(make_frames([20] * 20 + [250] * 20 + [20] * 20))
    recorder = make_recorder(tmp_path)
    recorder.add(frames, brightness(frames))
    lines = (tmp_path / "timeline.csv").read_text().splitlines()  # as a killed run leaves it
    assert len(lines) == 1 + 120 and lines[0] == "frame,time,question,answer,score,p_yes"
    assert lines[1:3] == [
        "0,0.0,Is there a pedestrian?,no,0.9215686246752739,0.0784313753247261",
        "0,0.0,Is there a bus?,yes,0.9215686321258545,0.9215686321258545",
    ]
    assert (tmp_path / "events.csv").read_text().count("\n") == 3
    recorder.close()
    assert (tmp_path / "timeline.csv").read_text().splitlines() == lines
    assert (tmp_path / "events.csv").read_text().splitlines() == [
        "question,answer,start,end,peak,is_cut",
        "Is there a bus?,yes,0.0,2.0,0.9216,False",
        "Is there a pedestrian?,yes,2.0,4.0,0.9804,False",
        "Is there a bus?,yes,4.0,6.0,0.9216,True",
    ]
    assert Image.open(tmp_path / "timeline.png").width > 600


def test_thresholds_take_the_place_of_on_and_off(tmp_path):
    """Brightness 0.55 is a yes from 0.5 for a pedestrian, but not sure; for a bus (0.45) it is a sure no."""
    path = tmp_path / "thresholds.json"
    presence, place = {"threshold": 0.5, "band": [0.5, 0.7]}, {"threshold": 0.9}
    path.write_text(json.dumps({"default": place, "question_types": {"presence": presence}}))
    questions = ["Is there a pedestrian?", "Is there a bus on the left?"]
    recorder = make_recorder(tmp_path, questions, thresholds=path)
    frames = list(make_frames([20] * 20 + [140] * 20))
    recorder.add(frames, brightness(frames, questions, load_thresholds(path)))
    recorder.close()
    rows = read_csv(tmp_path / "timeline.csv")
    assert [*rows[0]] == ["frame", "time", "question", "answer", "score", "p_yes", "not_sure"]
    decided = [(row["answer"], row["not_sure"]) for row in rows]
    assert decided[::2] == [("no", "False")] * 20 + [("yes", "True")] * 20
    assert decided[1::2] == [("yes", "False")] * 20 + [("no", "False")] * 20
    assert (tmp_path / "events.csv").read_text().splitlines() == [
        "question,answer,start,end,peak,is_cut",
        "Is there a bus on the left?,yes,0.0,2.0,0.9216,False",
        "Is there a pedestrian?,yes,2.0,4.0,0.549,True",
    ]


def test_words_over_time_are_recorded(tmp_path, capsys):
    recorder = make_recorder(tmp_path, [COLOR])
    states = ["none"] * 10 + ["red"] * 20 + ["none"] * 10
    recorder.add(list(make_frames([20] * 40)), [[an_item(COLOR, state, 0.9)] for state in states])
    recorder.close()
    rows = read_csv(tmp_path / "timeline.csv")
    assert [row["answer"] for row in rows] == ["none"] * 10 + ["red"] * 20 + ["none"] * 10
    assert {(row["score"], row["p_yes"]) for row in rows} == {("0.9", "")}
    assert (tmp_path / "events.csv").read_text().splitlines()[1:] == [f"{COLOR},red,1.0,3.0,0.9,False"]
    assert "0:01.0  begins  What color is the traffic light? red" in capsys.readouterr().out
    picture = np.asarray(Image.open(tmp_path / "timeline.png").convert("RGB")).astype(int)
    is_red = (picture[..., 0] - picture[..., 1] > 60).mean(0) > 0.2
    assert 0.4 < is_red.mean() < 0.55  # the middle half of the time axis is a red segment


def test_a_frame_without_an_answer_belongs_to_no_event_and_shows_its_problem(tmp_path):
    shown = []
    video = SimpleNamespace(add=lambda *frame: shown.append(frame), close=lambda: None)
    recorder = make_recorder(tmp_path, [COLOR])
    recorder.video = video
    items = [an_item(COLOR, "red", 0.9)] * 10 + [an_item(COLOR, None, None) | {"problem": "not a color"}] * 10
    recorder.add(list(make_frames([20] * 20)), [[item] for item in items])
    recorder.close()
    [event] = recorder.events
    assert (event["answer"], event["start"], event["end"]) == ("red", 0.0, 1.0)
    assert [row["answer"] for row in read_csv(tmp_path / "timeline.csv")] == ["red"] * 10 + [""] * 10
    assert (shown[-1][0], shown[-1][2]) == (1.9, ["0:01.9", f"not a color · {COLOR}"])


def test_a_threshold_of_a_negated_question_is_turned_around(tmp_path):
    """P(yes) of "Is there no bus?" is 1 - that of "Is there any bus?", to which thresholds belong."""
    path = tmp_path / "thresholds.json"
    path.write_text('{"default": {"threshold": 0.75}}')
    options = watcher.WatchOptions(output_dir=tmp_path, thresholds=path)
    assert options.event_limits(Rules().form("Is there a bus?")) == (0.75, 0.75)
    assert options.event_limits(Rules().form("Is there no bus?")) == (0.25, 0.25)


# What is drawn


def test_an_annotated_video_starts_at_0_and_hides_nothing(tmp_path):
    """A hundred questions stand below the road, which keeps its gray; all frames have the size of the first."""
    path = tmp_path / "out.mp4"
    annotated = AnnotatedVideo(path)
    times = [0.0, 0.1, 0.2, 0.2, 0.7]
    for seconds, scale in zip(times, (2, 2, 2, 2, 1)):
        annotated.add(seconds, Image.new("RGB", (320 * scale, 180 * scale), (90, 90, 90)), LINES * 50)
    annotated.close()
    with av.open(str(path)) as container:
        frames = list(container.decode(container.streams.video[0]))
        assert frames[0].pts == container.streams.video[0].start_time == 0
    assert [frame.time for frame in frames] == pytest.approx(times, abs=2e-3)
    pixels = frames[-1].to_ndarray(format="rgb24").astype(int)
    assert np.abs(pixels[:356] - 90).max() < 8
    assert pixels.shape[1] == 640 and pixels[364:, :100].std() > 20


# The model and the command


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    picture = np.asarray(Image.open(ROOT / "docs/example.jpg").convert("RGB").resize((320, 240)))
    pictures = [picture, np.ascontiguousarray(picture[:, ::-1])]
    return encode(tmp_path_factory.mktemp("clip") / "clip.mp4", pictures * 10)


@pytest.fixture
def command(saved_model, tmp_path, run_script, capsys):
    """Runs scripts/watch.py in this process; returns its status and standard error."""

    def run(*arguments):
        fixed, status = ["--output_dir", tmp_path / "out", "--model", saved_model, "--device", "cpu"], 0
        try:
            run_script("watch.py", *fixed, *arguments)
        except SystemExit as leave:
            status = leave.code
        return status, capsys.readouterr().err

    return run


def asking(*questions):
    return [word for question in questions for word in ("--ask", question)]


def test_the_command_writes_everything(command, clip, tmp_path):
    out = tmp_path / "out"
    files = ["--video", tmp_path / "seen.mkv"]
    options = ["--fps", 5, "--batch_size", 3, "--on", 0.01, "--off", 0.005]
    status, errors = command(clip, *asking(*QUESTIONS, "Is there a car near a 🦄 zebra?"), *files, *options)
    assert status == 0, errors
    assert "10 frames" in errors
    assert "unknown, so ignored: " in errors and "zebra" in errors
    rows = read_csv(out / "timeline.csv")
    assert [int(row["frame"]) for row in rows[::3]] == list(range(0, 20, 2))
    assert [row["question"] for row in rows[:2]] == QUESTIONS
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["frames"], summary["dropped"], summary["broken"], summary["problems"]) == (10, 0, 0, [])
    assert summary["frames_per_second"] > 0
    assert all(event["is_cut"] and event["end"] == pytest.approx(2.0) for event in summary["events"])
    assert {path.name for path in out.iterdir()} == set(watcher.FILES)
    assert count_frames(tmp_path / "seen.mkv") == 10


CAR = asking("Is there a car?")


def test_an_earlier_run_is_replaced_only_with_overwrite(command, clip, tmp_path):
    files = ["--video", tmp_path / "seen.mp4"]
    assert command(clip, *CAR, *files)[0] == 0
    status, errors = command(clip, *asking("Is it raining?"))
    assert status == 2 and "timeline.csv is of an earlier run" in errors
    status, errors = command(clip, *CAR, *files, "--output_dir", tmp_path / "new")
    assert status == 2 and "seen.mp4 is of an earlier run" in errors
    assert command(ROOT / "docs/example.jpg", *asking("Is it raining?"), *files, "--overwrite")[0] == 0
    assert [row["question"] for row in read_csv(tmp_path / "out/timeline.csv")] == ["Is it raining?"]
    assert count_frames(tmp_path / "seen.mp4") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (asking("What is the meaning of life?"), "'What is the meaning of life?': the model was not taught"),
        ([*CAR, "--thresholds", "file"], "file has no valid thresholds"),
        ([*CAR, "--thresholds", "zero.json"], "got on=0 and off=0"),
        ([*CAR, "--video", "nowhere/seen.mp4"], "No such file or directory: 'nowhere/seen.mp4'"),
        ([*CAR, "--video", "seen.webm"], "--video seen.webm: 'webm' format does not support 'libx264'"),
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
    has_source = not arguments[0].startswith("--")
    status, errors = command(*([] if has_source else [clip]), *arguments, "--overwrite")
    assert status == 2 and message in errors
    assert {(tmp_path / "out" / name).read_text() for name in watcher.FILES} == {"hours"}
    assert (tmp_path / "own.mp4").read_bytes() == clip.read_bytes()


def test_frames_that_cannot_be_read_cost_only_themselves(command, tmp_path):
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames/1.jpg").write_text("not an image")
    Image.new("1", (60, 60)).save(tmp_path / "frames/2.png")
    status, errors = command(tmp_path / "frames", *CAR, "--frame_rate", 1)
    assert status == 1
    assert "frames are missing or damaged; the first error: 1.jpg cannot be read as an image" in errors
    assert [row["frame"] for row in read_csv(tmp_path / "out/timeline.csv")] == ["1"]
    assert json.loads((tmp_path / "out/summary.json").read_text())["broken"] == 1


def test_finished_frames_survive_ctrl_c(command, tmp_path):
    """On an endless live stream; the signal comes after the first lines of the timeline.

    The run ignores the signal when it starts, as a shell's background job does.
    """
    data = encode(tmp_path / "clip.ts", grays([200] * 50)).read_bytes()
    out, timeline, is_over = tmp_path / "out", tmp_path / "out/timeline.csv", threading.Event()

    def endless():
        while not is_over.wait(0.1):
            yield data
            if timeline.exists() and timeline.read_text().count("\n") > 20:
                os.kill(os.getpid(), signal.SIGINT)
                break
        while not is_over.wait(0.1):
            yield data

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with TCPServer(endless()) as address:
        ended, errors = command(address, *asking(*QUESTIONS), "--video", tmp_path / "seen.mp4")
        is_over.set()
    assert ended == 130 and "Traceback" not in errors
    frames = [int(row["frame"]) for row in read_csv(timeline)]
    assert frames[::2] == frames[1::2] == sorted(set(frames))
    summary = json.loads((out / "summary.json").read_text())
    assert summary["frames"] * 2 == len(frames)
    assert count_frames(tmp_path / "seen.mp4") == summary["frames"]
