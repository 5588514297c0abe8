"""Questions about every frame of a video: events, what is written and drawn, clips, the command, signals.

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
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline
from traffic_vlm.question_form_traffic_vlm import question_form
from traffic_vlm.question_traffic_vlm import yes_or_no
from traffic_vlm.serving.events import Event, EventDetector


pytest.importorskip("av", reason="videos need PyAV")
parquet = pytest.importorskip("pyarrow.parquet", reason="the timeline needs pyarrow")

import av  # noqa: E402

from traffic_vlm.serving import watcher  # noqa: E402
from traffic_vlm.serving.annotation import (  # noqa: E402
    CURSOR,
    MIN_COLUMN,
    NO_EVENT,
    TRACK,
    AnnotatedVideo,
    Panel,
    Row,
    shorten,
    video_size,
)
from traffic_vlm.serving.clips import ClipWriter  # noqa: E402
from traffic_vlm.serving.timeline import AnswerColors, CsvLog, clock_time, convert_to_parquet, summarize  # noqa: E402
from traffic_vlm.serving.video import Frame, open_source  # noqa: E402


QUESTIONS = ["Is there a pedestrian?", "Is there a bus?"]


def make_frames(levels):
    return (Frame(index, index / RATE, Image.new("RGB", (4, 4), (level,) * 3)) for index, level in enumerate(levels))


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
            rows[-1].append({"question": question} | yes_or_no(question_form(question), p_yes, threshold))
    return rows


def make_recorder(folder, questions=QUESTIONS, **outputs):
    return watcher.Recorder(questions, watcher.WatchOptions(output_dir=folder), RATE, **outputs)


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


LIGHTS = ["red", "yellow", "green", "none"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["none"] * 9, []),
        (
            ["red"] * 10 + ["green"] * 10 + ["none"] * 10,
            [Event(0.0, 1.0, 0.9, answer="red"), Event(1.0, 2.0, 0.9, answer="green")],
        ),
        (["red"] * 10 + ["none"] * 4 + ["red"] * 6, [Event(0.0, 2.0, 0.9, True, "red")]),  # flicker
        (
            ["red"] * 10 + ["yellow"] * 2 + ["green"] * 8,  # "red" ended where it was last seen
            [Event(0.0, 1.0, 0.9, answer="red"), Event(1.2, 2.0, 0.9, True, "green")],
        ),
        (["red"] * 10 + ["yellow", "green"] * 10, [Event(0.0, 1.0, 0.9, answer="red")]),
    ],
)
def test_answers_in_words_are_events(words, expected):
    detector = EventDetector()
    changes = [detector.update(index / RATE, 0.9, text) for index, text in enumerate(words)]
    changes.append(detector.close(len(words) / RATE))
    assert [event for event in itertools.chain(*changes) if event.end is not None] == expected


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from(LIGHTS), min_size=1, max_size=60), st.sampled_from([0.0, 0.25, 0.5]))
def test_the_event_at_a_time_is_known_soon(words, shortest):
    """`shortest` seconds later, it is the one that the list of all events has."""
    detector, known, over = EventDetector(shortest=shortest), {}, []
    for index, text in enumerate(words):
        over += detector.update(index / RATE, 0.9, text)
        for earlier in range(index + 1):
            if earlier not in known and (index - earlier) / RATE >= shortest - 1e-6:
                known[earlier] = detector.event_at(earlier / RATE)
    over = [event for event in over + detector.close(len(words) / RATE) if event.end is not None]
    for index in range(len(words)):
        [expected] = [event.answer for event in over if event.start <= index / RATE < event.end] or [None]
        found = known[index] if index in known else detector.event_at(index / RATE)
        assert (found and found.answer) == expected


# Live sources


def test_a_camera_that_falls_silent_counts_as_lost(monkeypatch):
    """Its driver may never return: the run ends, and says so."""
    monkeypatch.setattr(watcher, "SILENCE", 0.3)

    def frames():
        yield from make_frames([100] * 3)
        time.sleep(60)

    reader = watcher.LiveReader(frames())
    assert sum(len(batch) for batch in reader.batches(lambda: False)) == 3
    assert reader.is_silent


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
    assert len(lines) == 1 + 120 and lines[0] == "frame,time,question,answer,score,p_yes"
    assert lines[1:3] == [
        "0,0.0,Is there a pedestrian?,no,0.921568625,0.0784313753",
        "0,0.0,Is there a bus?,yes,0.921568632,0.921568632",
    ]
    assert (tmp_path / "events.csv").read_text().count("\n") == 3
    recorder.close()
    table = parquet.read_table(tmp_path / "timeline.parquet")
    assert table.column_names == ["frame", "time", "question", "answer", "score", "p_yes"]
    assert [str(one.type) for one in table.columns] == ["int64", "double", "string", "string", "float", "float"]
    assert table["frame"].to_pylist() == [index for index in range(60) for _ in QUESTIONS]
    assert table["p_yes"].to_pylist() == [item["p_yes"] for row in brightness(frames) for item in row]
    assert recorder.events == [
        ("Is there a bus?", Event(0.0, 2.0, 0.9216)),
        ("Is there a pedestrian?", Event(2.0, 4.0, 0.9804)),
        ("Is there a bus?", Event(4.0, 6.0, 0.9216, is_cut=True)),
    ]
    assert (tmp_path / "events.csv").read_text().splitlines()[:3] == [
        "question,answer,start,end,peak,is_cut",
        "Is there a bus?,yes,0.0,2.0,0.9216,False",
        "Is there a pedestrian?,yes,2.0,4.0,0.9804,False",
    ]
    assert Image.open(tmp_path / "timeline.png").width > 600
    assert not (tmp_path / "timeline.csv").exists()


def test_thresholds_take_the_place_of_on_and_off(tmp_path):
    """Brightness 0.55 is a yes from 0.5 for a pedestrian, but not sure; for a bus (0.45) it is a sure no."""
    path = tmp_path / "thresholds.json"
    presence, place = {"threshold": 0.5, "band": [0.5, 0.7]}, {"threshold": 0.9}
    path.write_text(json.dumps({"default": place, "question_types": {"presence": presence}}))
    options = watcher.WatchOptions(output_dir=tmp_path, thresholds=path)
    questions = ["Is there a pedestrian?", "Is there a bus on the left?"]
    recorder = watcher.Recorder(questions, options, RATE)
    frames = list(make_frames([20] * 20 + [140] * 20))
    recorder.add(frames, brightness(frames, questions, options.loaded_thresholds))
    recorder.close()
    rows = parquet.read_table(tmp_path / "timeline.parquet").to_pylist()
    assert [*rows[0]] == ["frame", "time", "question", "answer", "score", "p_yes", "not_sure"]
    decided = [(row["answer"], row["not_sure"]) for row in rows]
    assert decided[::2] == [("no", False)] * 20 + [("yes", True)] * 20
    assert decided[1::2] == [("yes", False)] * 20 + [("no", False)] * 20
    assert (tmp_path / "events.csv").read_text().splitlines() == [
        "question,answer,start,end,peak,is_cut,not_sure",
        "Is there a bus on the left?,yes,0.0,2.0,0.9216,False,False",
        "Is there a pedestrian?,yes,2.0,4.0,0.549,True,True",
    ]


COLOR = "What color is the traffic light?"


def test_words_over_time_are_recorded(tmp_path, capsys):
    recorder = make_recorder(tmp_path, [COLOR])
    states = ["none"] * 10 + ["red"] * 20 + ["none"] * 10
    recorder.add(list(make_frames([20] * 40)), [[an_item(COLOR, state, 0.9)] for state in states])
    recorder.close()
    rows = parquet.read_table(tmp_path / "timeline.parquet").to_pylist()
    assert [row["answer"] for row in rows] == ["none"] * 10 + ["red"] * 20 + ["none"] * 10
    assert all(row["score"] == np.float32(0.9) and row["p_yes"] is None for row in rows)
    assert (tmp_path / "events.csv").read_text().splitlines()[1:] == [f"{COLOR},red,1.0,3.0,0.9,False"]
    assert "0:01.0  begins  What color is the traffic light? red" in capsys.readouterr().out
    picture = np.asarray(Image.open(tmp_path / "timeline.png").convert("RGB")).astype(int)
    is_red = (picture[..., 0] - picture[..., 1] > 60).mean(0) > 0.2
    assert 0.4 < is_red.mean() < 0.55  # the middle half of the time axis is a red segment


def test_a_frame_without_an_answer_belongs_to_no_event(tmp_path):
    recorder = make_recorder(tmp_path, [COLOR], video=RowsOnly())
    items = [an_item(COLOR, "red", 0.9)] * 10 + [an_item(COLOR, None, None) | {"problem": "not a color"}] * 10
    for frame, item in zip(with_pictures([20] * 20), items):
        recorder.add([frame], [[item]])
    recorder.close()
    assert recorder.events == [(COLOR, Event(0.0, 1.0, 0.9, answer="red"))]
    assert parquet.read_table(tmp_path / "timeline.parquet")["answer"].to_pylist() == ["red"] * 10 + [None] * 10
    assert recorder.video.frames[-1][1] == [Row("not a color", 0.0)]


def test_a_threshold_of_a_negated_question_is_turned_around(tmp_path):
    """P(yes) of "Is there no bus?" is 1 - that of "Is there any bus?", to which thresholds belong."""
    path = tmp_path / "thresholds.json"
    path.write_text('{"default": {"threshold": 0.75, "band": [0.7, 0.8]}}')
    options = watcher.WatchOptions(output_dir=tmp_path, thresholds=path)
    assert watcher.event_limits("Is there a bus?", options) == (0.75, 0.75)
    assert watcher.event_limits("Is there no bus?", options) == (0.25, 0.25)


def test_a_timeline_is_reduced_to_ranges(tmp_path, monkeypatch):
    monkeypatch.setattr("traffic_vlm.serving.timeline.MAX_POINTS", 10)
    log = CsvLog(tmp_path / "timeline.csv", ["frame", "time", "question", "score", "p_yes"])
    for index in range(100):
        log.add([(index, index / 10, 'a "b",\n', 0.9, index / 100), (index, index / 10, "NA", 0.5, None)])
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


ORANGE = AnswerColors()["yes"]
ROWS = [Row("yes, 0.90", 0.9, ORANGE), Row("no, 0.90", 0.1)]


@pytest.mark.parametrize("suffix", ["mp4", "mov", "mkv"])
def test_an_annotated_video_starts_at_0_and_hides_nothing(tmp_path, suffix):
    """A hundred questions stand below the road, which keeps its gray."""
    path = tmp_path / f"out.{suffix}"
    annotated = AnnotatedVideo(path, QUESTIONS * 50, 10, 1.0)
    times = [0.0, 0.1, 0.2, 0.2, 0.7]
    for seconds in times:
        annotated.add(seconds, Image.new("RGB", (640, 360), (90, 90, 90)), ROWS * 50)
    annotated.close()
    with av.open(str(path)) as container:
        frames = list(container.decode(container.streams.video[0]))
        assert frames[0].pts == 0 and container.streams.video[0].start_time in (0, None)  # None: Matroska has none
    assert [frame.time for frame in frames] == pytest.approx(times, abs=2e-3)
    pixels = frames[-1].to_ndarray(format="rgb24").astype(int)
    assert np.abs(pixels[:356] - 90).max() < 8
    assert pixels.shape[1] == 640 and pixels[364:, :100].std() > 20


def is_color(image, color):
    """Which pixels [H,W] have a color."""
    return (np.asarray(image) == np.asarray(Image.new("RGB", (1, 1), color))).all(-1)


def test_strips_fill_behind_the_cursor():
    """An event from 1 to 2 s of 4 s: half of the strip is drawn at 2 s, the second quarter in the event's color."""
    panel = Panel(["Is there a bus?"], 420, 4.0)
    for tenth in range(21):
        image = panel.draw(tenth / 10, [Row("yes, 0.90", 1.0, ORANGE) if 10 <= tenth < 20 else Row("no, 0.50", 0.5)])
    strip = image.crop((10, image.height - 12, 410, image.height - 11))  # at the foot of the strip
    columns = [np.flatnonzero(is_color(strip, color)[0]) for color in (NO_EVENT, ORANGE, CURSOR, TRACK)]
    extents = [(found.min(), found.max()) for found in columns]
    for found, expected in zip(extents, [(0, 99), (100, 198), (199, 201), (202, 399)]):
        assert found == pytest.approx(expected, abs=1)


def test_strips_of_an_unknown_duration_are_squeezed():
    panel = Panel(["Is there a bus?"], 420)
    for second in range(91):  # an event during the first 30 s of what becomes 120 s
        image = panel.draw(second, [Row("yes, 0.90", 1.0, ORANGE) if second < 30 else Row("no, 1.00", 0.0)])
    strip = image.crop((10, image.height - 12, 410, image.height - 11))
    assert np.flatnonzero(is_color(strip, ORANGE)[0]).tolist() == pytest.approx(list(range(100)), abs=1)
    assert np.flatnonzero(is_color(strip, CURSOR)[0]).mean() == pytest.approx(300, abs=1)


@pytest.mark.parametrize("width", [MIN_COLUMN, 640, 1280])
@pytest.mark.parametrize("count", [1, 5, 9, 128])
def test_every_question_has_a_row_and_long_text_is_shortened(width, count):
    """Nothing is drawn outside of the columns, and question and answer do not meet."""
    long = "Is there a very " + "very " * 100 + "long truck?"
    panel = Panel([long] * count, width)
    image = panel.draw(0.0, [Row("a word " * 50, 0.0, "#ff0000")] * count)
    assert len(set(panel.corners)) == count and image.width == width
    for left, top in panel.corners:
        assert left >= 0 and left + panel.inner <= width and top + panel.line + 14 <= image.height
        row = np.asarray(image.crop((left, top, left + panel.inner, top + panel.line - 2))).astype(int)
        red = np.flatnonzero((row[..., 0] > row[..., 1] + 40).any(0))
        white = np.flatnonzero((row[..., 1] > 150).any(0))
        assert white.max() + 4 < red.min()
    assert shorten(long, panel.font, 200).endswith("…") and panel.font.getlength(shorten(long, panel.font, 200)) <= 200
    assert shorten("Is there\na bus?", panel.font, 300) == "Is there a bus?"


class RowsOnly:
    """In place of an annotated video."""

    def __init__(self):
        self.frames = []

    def add(self, seconds, picture, rows):
        self.frames.append((seconds, rows))

    def close(self):
        pass


def with_pictures(levels):
    return [
        Frame(frame.index, frame.seconds, frame.image, frame.image.resize((160, 120))) for frame in make_frames(levels)
    ]


def test_the_video_shows_events_from_their_start(tmp_path):
    """The frames in color are those of events.csv, although an event is known only 0.5 s after its start."""
    recorder = make_recorder(tmp_path, video=RowsOnly())
    frames = with_pictures([20] * 20 + [250] * 20 + [20, 250, 20, 250] * 5)
    for frame in frames:
        recorder.add([frame], brightness([frame]))
    recorder.close()
    assert [seconds for seconds, _ in recorder.video.frames] == [frame.seconds for frame in frames]
    for index, question in enumerate(QUESTIONS):
        events = [event for of_question, event in recorder.events if of_question == question]
        assert events
        for seconds, rows in recorder.video.frames:
            assert (rows[index].color is not None) == any(event.start <= seconds < event.end for event in events)
    assert [row.answer for row in recorder.video.frames[0][1]] == ["no, 0.92", "yes, 0.92"]


def clip_times(path):
    with av.open(str(path)) as container:
        return [frame.time for frame in container.decode(container.streams.video[0])]


def test_a_clip_for_each_event(tmp_path):
    """A bright second from 3.0 s has a clip of 1 s more on both sides; until it is complete, its name is temporary."""
    folder = tmp_path / "clips"
    recorder = make_recorder(tmp_path, QUESTIONS[:1], clips=ClipWriter(folder, RATE, 0.5))
    frames = with_pictures([20] * 30 + [250] * 10 + [20] * 60 + [250] * 10)
    names = []
    for frame in frames:
        recorder.add([frame], brightness([frame], QUESTIONS[:1]))
        names.append(sorted(path.name for path in folder.iterdir()))
    first, last = "000003.000s_q1_is-there-a-pedestrian_yes.mp4", "000010.000s_q1_is-there-a-pedestrian_yes.mp4"
    assert not names[34] and names[35][0].startswith(f".{first}.") and len(names[35]) == 1
    assert names[99] == [first]  # as a killed run leaves it
    recorder.close()
    assert sorted(path.name for path in folder.iterdir()) == [first, last]
    times = clip_times(folder / first)
    assert times == pytest.approx([index / RATE for index in range(len(times))], abs=1e-3)
    assert 30 <= len(times) <= 40  # it begins with a key frame, of which there is one each second
    pictures = [frame.image for frame in open_source(str(folder / first)).frames(size=8)]
    bright = [np.asarray(picture).mean() > 128 for picture in pictures]
    assert sum(bright) == 10 and bright[-10:] == [False] * 10
    assert 20 <= len(clip_times(folder / last)) <= 30


def test_clips_of_overlapping_events_share_no_file(tmp_path):
    clips = ClipWriter(tmp_path / "clips", RATE, 0.0)
    questions = ["Is there a bus?", "Is there a bus ?"]
    recorder = make_recorder(tmp_path, questions, clips=clips)
    recorder.add(with_pictures([250] * 40), [[an_item(question, "yes", 0.9, 0.9) for question in questions]] * 40)
    recorder.close()
    assert [len(clip_times(path)) for path in (tmp_path / "clips").iterdir()] == [40, 40]


def test_an_annotated_video_can_be_played_after_a_kill(tmp_path):
    annotated = AnnotatedVideo(tmp_path / "open.mp4", QUESTIONS, 10)
    picture = Image.fromarray(noise(1, (160, 160))[0])
    for index in range(150):
        annotated.add(index / 10, picture, ROWS)
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


def test_frames_have_the_size_that_the_processor_resizes_to(command, clip, processor, monkeypatch):
    add, sizes = watcher.Recorder.add, set()

    def record(recorder, batch, answers):
        sizes.update(frame.image.size for frame in batch)
        add(recorder, batch, answers)

    monkeypatch.setattr(watcher.Recorder, "add", record)
    assert command(clip, *asking("Is there a bus?"))[0] == 0
    size = processor.image_processor.size
    assert sizes == {(size["width"], size["height"])}


def test_the_command_writes_everything(command, clip, tmp_path):
    out = tmp_path / "out"
    files = ["--video", tmp_path / "seen.mkv", "--clips", tmp_path / "clips"]
    status, errors = command(clip, *asking(*QUESTIONS), *files, "--on", 0.01, "--off", 0.005)
    assert status == 0, errors
    assert "20 frames" in errors and "x real time" in errors
    assert parquet.read_table(out / "timeline.parquet")["question"].to_pylist() == QUESTIONS * 20
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["frames"], summary["dropped"], summary["broken"], summary["problems"]) == (20, 0, 0, [])
    assert summary["ended_by"] == "end of the source" and summary["frames_per_second"] > 0
    assert all(event["is_cut"] and event["end"] == pytest.approx(2.0) for event in summary["events"])
    assert (out / "timeline.png").exists() and (out / "events.csv").exists()
    assert count_frames(tmp_path / "seen.mkv") == 20
    clips = {path.name: count_frames(path) for path in (tmp_path / "clips").iterdir()}
    assert clips == {f"000000.000s_q{n}_is-there-a-{of}_yes.mp4": 20 for n, of in ((1, "pedestrian"), (2, "bus"))}

    status, errors = command(clip, *asking("Is it raining?"))
    assert status == 2 and "has timeline.parquet of an earlier run" in errors
    status, errors = command(clip, *asking("Is it raining?"), "--output_dir", tmp_path / "new", *files[2:])
    assert status == 2 and "clips: has clips of an earlier run" in errors
    (tmp_path / "clips/mine.mp4").touch()
    options = ["--fps", 5, "--bf16", "--batch_size", 3, "--overwrite", *files[2:], "--on", 1.0]
    status, errors = command(clip, *asking("Is there a 🦄 zebra?"), *options)
    assert status == 0, errors
    assert [path.name for path in (tmp_path / "clips").iterdir()] == ["mine.mp4"]  # only clips are replaced
    assert "unknown, so ignored: " in errors and "zebra" in errors
    assert parquet.read_table(out / "timeline.parquet")["frame"].to_pylist() == list(range(0, 20, 2))


CAR = asking("Is there a car?")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (asking("Is there a car?", " "), "the question '' has no word"),
        (asking("?!"), "the question '?!' has no word"),
        (asking("🦄🦄"), "no word of the question '🦄🦄'"),
        (asking("Is there a car? Is it wet?"), "contains 2 questions"),
        (asking("What is the meaning of life?"), "'What is the meaning of life?': the model was not taught"),
        (asking("car " * 200), "at most 128"),
        ([*CAR, "--on", "0.2"], "on=0.2 and off=0.4"),
        ([*CAR, "--shortest", "-1"], "--shortest must be 0 or more, got -1.0"),
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
        ([*CAR, "--clips", "file"], "--clips file: cannot be written to"),
        (["text.mp4", *CAR], "text.mp4: cannot be read as a video"),
        ([], "--ask"),
        (["missing.mp4", *CAR], "missing.mp4: no such file"),
        (["/dev/video97", *CAR], "/dev/video97: no such camera or stream"),
        (["own.mp4", *CAR, "--video", "own.mp4"], "is the video to watch"),
    ],
)
def test_bad_input_is_an_error_that_keeps_earlier_files(command, clip, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "text.mp4").write_text("This is no video.")
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
    forward, calls = TrafficVLMPipeline.forward, []

    def fail(pipe, *args, **options):
        calls.append(1)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return forward(pipe, *args, **options)

    monkeypatch.setattr(TrafficVLMPipeline, "forward", fail)
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
        return logits if len(passes) <= 2 else [one * float("nan") for one in logits]

    monkeypatch.setattr(TrafficVLMForConditionalGeneration, "question_logits", damage)
    status, errors = command(clip, *CAR, "--batch_size", 5)
    assert status == 2 and "the model answers 'Is there a car?' with l_yes - l_no = nan" in errors
    table = parquet.read_table(tmp_path / "out/timeline.parquet")
    assert table["frame"].to_pylist() == list(range(10)) and np.isfinite(table["p_yes"].to_numpy()).all()
    texts = [path.read_text().lower() for path in (tmp_path / "out").glob("*.[cj]s*")]
    assert len(texts) == 2 and not any("nan" in text for text in texts)


def test_a_broken_file_keeps_its_beginning_and_exits_with_1(command, tmp_path):
    whole = encode(tmp_path / "whole.mkv", noise(40)).read_bytes()
    (tmp_path / "cut.mkv").write_bytes(whole[: len(whole) * 9 // 10])  # 0.4 s are missing
    status, errors = command(tmp_path / "cut.mkv", *CAR)
    assert status == 1 and "the end is missing" in errors
    assert 30 <= parquet.read_table(tmp_path / "out/timeline.parquet").num_rows <= 38
    assert json.loads((tmp_path / "out/summary.json").read_text())["problems"]


def test_frames_that_cannot_be_read_cost_only_themselves(command, tmp_path):
    """One is no image, one too large to be read; one of 60 megapixels is answered."""
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames/1.jpg").write_text("no image")
    for name, side in (("2.png", 20_000), ("3.png", 7_746), ("4.png", 60)):
        Image.new("1", (side, side)).save(tmp_path / "frames" / name)
    status, errors = command(tmp_path / "frames", *CAR, "--frame_rate", 1, "--video", tmp_path / "seen.mp4")
    assert (
        status == 1
        and "frames that cannot be read are skipped; the first error: 1.jpg cannot be read as an image" in errors
    )
    assert parquet.read_table(tmp_path / "out/timeline.parquet")["frame"].to_pylist() == [2, 3]
    assert json.loads((tmp_path / "out/summary.json").read_text())["broken"] == 2


def test_a_text_named_as_an_image_is_a_sentence(command, tmp_path):
    (tmp_path / "text.jpg").write_text("no image")
    status, errors = command(tmp_path / "text.jpg", *CAR)
    assert status == 1 and "the first error: Invalid data found" in errors and "no frame can be decoded" in errors
    assert "Errno" not in errors


def test_a_lost_camera_ends_the_run_with_1(command, tmp_path, monkeypatch):
    """A stream that sends some frames and falls silent: its frames are recorded, and the reason is named."""
    monkeypatch.setattr("traffic_vlm.serving.watcher.SILENCE", 2.0)
    data = encode(tmp_path / "clip.ts", grays([200] * 60)).read_bytes()
    with TCPServer([data[: len(data) * 2 // 3]], hang_up=False) as address:
        status, errors = command(address, *CAR)
    assert status == 1 and "no frame for 2 s: the camera or stream is lost" in errors
    assert parquet.read_table(tmp_path / "out/timeline.parquet").num_rows >= 4


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
