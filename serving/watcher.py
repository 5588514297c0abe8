"""Ask the same questions about every frame of a video, and record the answers.

    source → frames → pipeline → Recorder: timeline, events, annotated video; at the end a picture and a summary

A file waits for the model, and no frame is lost. A live source does not wait: `newest_frames` takes its frames in a
thread, and when the model is late, the oldest waiting frame is dropped and counted.
"""

import json
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
from tqdm import tqdm

from ..common.answers import answer_notes, answer_text
from ..common.files import DataError, atomic_write_text
from ..common.options import option
from ..pipeline_traffic_vlm import TrafficVLMPipeline
from ..question_traffic_vlm import NONE, Question
from .events import Event, EventDetector
from .options import ModelOptions, read_questions
from .timeline import clock_time, csv_log, draw_timeline
from .video import AnnotatedVideo, Frame, FrameSource, open_source


LIVE_CAPACITY = 4  # frames of a live source that wait for the model; more would only be older
SILENCE = 20.0  # seconds without a frame after which a live source counts as lost; FFmpeg may notice earlier
FILES = ("timeline.csv", "events.csv", "timeline.png", "summary.json")
COLUMNS = ("frame", "time", "question", "answer", "score", "p_yes")
EVENT_COLUMNS = ("question", "answer", "start", "end", "peak", "is_cut")


@dataclass(kw_only=True)
class WatchOptions(ModelOptions):
    """Options of `watch`."""

    output_dir: Path = field(metadata={"help": "folder to write to"})
    overwrite: bool = option(False, "replace the files of an earlier run")
    video: Path | None = option(None, "annotated video to write, such as seen.mp4")
    fps: float | None = option(None, "frames to ask about per second; all by default")
    frame_rate: float | None = option(None, "frames per second of images, and of videos without times; default: 25")
    on: float = option(0.6, "P(yes) from which an event begins")
    off: float = option(0.4, "P(yes) below which it ends")
    shortest: float = option(0.5, "seconds; a shorter yes or no is flicker")
    batch_size: int = option(8, "frames in one pass of the model; 1 for live sources")

    def __post_init__(self) -> None:
        super().__post_init__()
        EventDetector(self.on, self.off, self.shortest)  # checks the three values

    def event_limits(self, question: Question) -> tuple[float, float]:
        """P(yes) from which an event of a question begins, and below which it ends."""
        if self.loaded_thresholds is None:
            return self.on, self.off
        threshold = self.loaded_thresholds.for_question(question.asked).threshold
        threshold = 1 - threshold if question.is_negated else threshold
        return threshold, threshold


def newest_frames(source: FrameSource, frames: Iterator[Frame], silence: float = SILENCE) -> Iterator[Frame]:
    """Yield the newest frames of a live source, which a thread reads, until they end or the source is silent."""
    waiting: Queue[Frame | None] = Queue(LIVE_CAPACITY)

    def read() -> None:
        for frame in frames:
            with suppress(Empty):  # the model may take a frame in between
                if waiting.full():
                    waiting.get_nowait()
                    source.dropped += 1
            waiting.put(frame)
        waiting.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        while (frame := waiting.get(timeout=silence)) is not None:
            yield frame
    except Empty:
        source.problems.append(f"{source.name}: no frame for {silence:g} s: the camera or stream is lost")


class Recorder:
    """Writes timeline, events and annotated video as they come; picture and summary at the end.

    Args:
        options: `output_dir` is an existing folder.

    Raises:
        ValueError: a threshold of 0. Files of an earlier run are then still there.
        OSError: a file cannot be written.
    """

    def __init__(self, questions: Sequence[Question], options: WatchOptions, source: FrameSource):
        self.questions, self.texts = list(questions), [question.text for question in questions]
        self.options, self.source, self.folder = options, source, options.output_dir
        self.limits = [options.event_limits(question) for question in questions]
        self.detectors = [EventDetector(on, off, options.shortest) for on, off in self.limits]
        self.step = 1 / min(source.rate, options.fps or source.rate)  # seconds between frames, as a rule
        self.times, self.levels = array("d"), array("d")  # of the frames [T]; of the questions of each frame [T·Q]
        self.events: list[dict[str, Any]] = []  # rows of those that have ended
        self.start = time.monotonic()
        self.video = AnnotatedVideo(options.video) if options.video else None
        for file in FILES:
            (self.folder / file).unlink(missing_ok=True)
        not_sure = () if options.loaded_thresholds is None else ("not_sure",)
        self.timeline = csv_log(self.folder / "timeline.csv", COLUMNS + not_sure)
        self.log = csv_log(self.folder / "events.csv", EVENT_COLUMNS)

    def add(self, frames: Sequence[Frame], items: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Record frames in their order, each with the items of all questions."""
        for frame, row in zip(frames, items):
            self.times.append(frame.seconds)
            self.timeline.writerows({"frame": frame.index, "time": round(frame.seconds, 6), **item} for item in row)
            for question, item, detector in zip(self.questions, row, self.detectors):
                is_in_words = item["p_yes"] is None
                self.levels.append(item["score"] or 0.0 if is_in_words else item["p_yes"])
                answer = item["answer"] or NONE if is_in_words else None
                self._record(question, detector.update(frame.seconds, self.levels[-1], answer))
            if self.video is not None:
                # The answer comes first: a long question is cut off.
                lines = [f"{answer_text(item)} · {question.text}" for question, item in zip(self.questions, row)]
                self.video.add(frame.seconds, frame.image, [clock_time(frame.seconds), *lines])

    def _record(self, question: Question, changes: Sequence[Event]) -> None:
        """Print the events of a question that have begun or ended, and write those that have ended."""
        for event in changes:
            text = question.text if question.is_yes_no else f"{question.text} {event.answer}"
            if event.end is None:
                tqdm.write(f"{clock_time(event.start):>9}  begins  {text}")
                continue
            tqdm.write(f"{clock_time(event.end):>9}  ends    {text} (peak {event.peak:.2f})")
            numbers = {"start": round(event.start, 3), "end": round(event.end, 3), "peak": round(event.peak, 4)}
            self.events.append({"question": question.text, **asdict(event), **numbers})
            self.log.writerow(self.events[-1])

    def close(self) -> None:
        """End the current events, complete all files, and print the main figures to standard error."""
        seconds, count = self.times[-1] if self.times else 0.0, len(self.times)
        speed = round(count / (time.monotonic() - self.start), 2)
        for question, detector in zip(self.questions, self.detectors):
            self._record(question, detector.close(seconds + self.step))  # the last frame lasts a usual step
        summary = {
            "source": self.source.name,
            "seconds": seconds,
            "frames": count,
            "frames_per_second": speed,
            "dropped": self.source.dropped,
            "broken": self.source.broken,
            "problems": self.source.problems,
            "questions": [
                {"question": text, "on": on, "off": off} for text, (on, off) in zip(self.texts, self.limits)
            ],
            "events": self.events,
        }
        atomic_write_text(self.folder / "summary.json", json.dumps(summary, indent=1))
        figures = f"{count:,} frames, {speed} frames/s, {len(self.events):,} events"
        print(f"{figures}; wrote {self.folder}", file=sys.stderr)
        if self.video is not None:
            self.video.close()
        if count:
            curves = np.reshape(self.levels, (count, -1))
            limits = [limits if question.is_yes_no else () for question, limits in zip(self.questions, self.limits)]
            draw_timeline(self.folder / "timeline.png", self.times, self.texts, curves, limits, self.events)


def watch(name: str, questions: Sequence[str], options: WatchOptions, stop: threading.Event) -> list[str]:
    """Ask questions about every frame of a source, and write the answers to `options.output_dir`.

    Args:
        name: see `open_source`.
        stop: ends the run before the next pass of the model.

    Returns:
        why frames are missing; empty if none are.

    Raises:
        ValueError, OSError, RuntimeError: bad questions, source, model, device or output. Files of an earlier run are
            then still there.
    """
    check_output(options, name)
    pipe = options.load()
    read = read_questions(pipe, questions)
    # Opened last: the buffer of a camera would overflow while the model is loaded.
    source = open_source(name, options.frame_rate)
    recorder = Recorder(read, options, source)
    try:
        ask_about_frames(pipe, recorder, stop)
    finally:
        recorder.close()
        notes = [f"{question.text!r}: {note}" for question in read for note in answer_notes(question.item())]
        for text in notes + source.problems:
            print(text, file=sys.stderr)
    return source.problems


def check_output(options: WatchOptions, source: str) -> None:
    """Create the output folder.

    Raises:
        OSError: it cannot be created.
        DataError: there are files of an earlier run and `overwrite` is off, or the annotated video is the source.
    """
    video, folder = options.video, options.output_dir
    if video and video.exists() and Path(source).exists() and video.samefile(source):
        raise DataError(f"--video {video}: is the video to watch")
    folder.mkdir(parents=True, exist_ok=True)
    for path in [folder / file for file in FILES] + ([video] if video else []):
        if path.exists() and not options.overwrite:
            raise DataError(f"{path} is of an earlier run; choose another name, or --overwrite")


def ask_about_frames(pipe: TrafficVLMPipeline, recorder: Recorder, stop: threading.Event) -> None:
    """Ask about and record the frames of a source until they end or `stop` is set."""
    options, source, size = recorder.options, recorder.source, pipe.processor.image_processor.size
    side = max(size["height"], size["width"])
    frames = source.frames(options.fps, None if options.video or options.region else side)
    if source.is_live:
        frames = newest_frames(source, frames)
    batch_size = 1 if source.is_live else options.batch_size
    batches = iter(lambda: list(islice(frames, batch_size)), [])
    with tqdm(unit=" frames", disable=None) as progress:  # only on a terminal
        for batch in batches:
            if stop.is_set():
                break
            recorder.add(batch, pipe([frame.image for frame in batch], recorder.texts, batch_size=len(batch)))
            progress.set_postfix_str(f"{clock_time(batch[-1].seconds)}, {source.dropped:,} dropped", refresh=False)
            progress.update(len(batch))
