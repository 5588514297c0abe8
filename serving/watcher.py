"""Ask the same questions about every frame of a video, and record the answers.

    source → frames → pipeline → Recorder: timeline, events, annotated video; at the end a picture and a summary

A file waits for the model, and no frame is lost. A live source does not wait: `LiveReader` takes its frames in a
thread, and when the model is late, the oldest waiting frame is dropped and counted.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from queue import Empty, Queue
from typing import Any

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
JUMP, JUMP_STEPS = 60.0, 20  # a step over so many seconds, and so many times the usual step, ends events
SILENCE = 20.0  # seconds without a frame after which a live source counts as lost; FFmpeg may notice earlier
FILES = ("timeline.csv", "events.csv", "timeline.png", "summary.json")
COLUMNS = ("frame", "time", "question", "answer", "score", "p_yes")
EVENT_COLUMNS = ("question", "answer", "start", "end", "peak", "is_cut")
Item = Mapping[str, Any]  # of the pipeline


@dataclass(kw_only=True)
class WatchOptions(ModelOptions):
    """Options of `watch`."""

    output_dir: Path = field(metadata={"help": "folder to write to"})
    overwrite: bool = option(False, "replace the files of an earlier run")
    video: Path | None = option(None, "annotated video to write, such as seen.mp4")
    fps: float | None = option(None, "frames to ask about per second; all by default")
    frame_rate: float | None = option(None, "frames per second of images, and of videos without time stamps")
    on: float = option(0.6, "P(yes) from which an event begins")
    off: float = option(0.4, "P(yes) below which it ends")
    shortest: float = option(0.5, "seconds; a shorter yes or no is flicker")
    thresholds: str | None = option(None, "thresholds.json of scripts/evaluate.py, in place of --on and --off")
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

    def detector(self, question: Question) -> EventDetector:
        """A detector of the events of a question. Raises a ValueError for a threshold of 0."""
        return EventDetector(*self.event_limits(question), self.shortest)


class LiveReader:
    """Takes every frame of a live source in a thread, and keeps the newest ones.

    Attributes:
        dropped: number of frames that were replaced by newer ones before they were used.
        is_silent: no frame came for so many seconds that the source counts as lost.
    """

    def __init__(self, frames: Iterator[Frame], silence: float = SILENCE):
        self.silence, self.dropped, self.is_silent = silence, 0, False
        self._waiting: Queue[Frame | None] = Queue(LIVE_CAPACITY)
        threading.Thread(target=self._read, args=(frames,), daemon=True).start()

    def _read(self, frames: Iterator[Frame]) -> None:
        for frame in frames:
            with suppress(Empty):  # the model may take a frame in between
                if self._waiting.full():
                    self._waiting.get_nowait()
                    self.dropped += 1
            self._waiting.put(frame)
        self._waiting.put(None)

    def batches(self) -> Iterator[list[Frame]]:
        """Yield lists of one frame until frames end or the source is lost."""
        try:
            while (frame := self._waiting.get(timeout=self.silence)) is not None:
                yield [frame]
        except Empty:
            self.is_silent = True


class Recorder:
    """Writes timeline, events and annotated video as they come; picture and summary at the end.

    Args:
        options: `output_dir` is an existing folder.
        source: of the frames; it gets the notes on their times.

    Raises:
        ValueError: a threshold of 0. Files of an earlier run are then still there.
        OSError: a file cannot be written.
    """

    def __init__(self, questions: Sequence[Question], options: WatchOptions, source: FrameSource):
        self.questions, self.options, self.source = list(questions), options, source
        self.detectors = [options.detector(question) for question in questions]
        self.folder, self.texts = options.output_dir, [question.text for question in questions]
        self.step = 1 / min(source.rate, options.fps or source.rate)  # seconds between frames, as a rule
        self.num_frames, self.dropped, self.seconds, self.start = 0, 0, 0.0, time.monotonic()
        self.events: list[dict[str, Any]] = []  # rows of those that have ended
        self.video = AnnotatedVideo(options.video) if options.video else None
        for file in FILES:
            (self.folder / file).unlink(missing_ok=True)
        not_sure = () if options.loaded_thresholds is None else ("not_sure",)
        self.timeline = csv_log(self.folder / "timeline.csv", COLUMNS + not_sure)
        self.log = csv_log(self.folder / "events.csv", EVENT_COLUMNS)

    def add(self, frames: Sequence[Frame], items: Sequence[Sequence[Item]]) -> None:
        """Record frames in their order, each with the items of all questions."""
        for frame, row in zip(frames, items):
            if self.num_frames and frame.seconds - self.seconds > max(JUMP, JUMP_STEPS * self.step):
                self._end_events()
                times = f"{clock_time(self.seconds)} to {clock_time(frame.seconds)}"
                self.source.notes.append(f"the time jumps from {times}: events end there")
            self.num_frames, self.seconds = self.num_frames + 1, frame.seconds
            self.timeline.writerows(timeline_row(frame, item) for item in row)
            for question, item, detector in zip(self.questions, row, self.detectors):
                is_in_words = item["p_yes"] is None
                level = item["score"] or 0.0 if is_in_words else item["p_yes"]
                changes = detector.update(frame.seconds, level, item["answer"] or NONE if is_in_words else None)
                self._record(question, changes)
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
            row = {"question": question.text, **asdict(event), "peak": round(event.peak, 4)}
            self.events.append(row | {"start": round(event.start, 3), "end": round(event.end, 3)})
            self.log.writerow(self.events[-1])

    def _end_events(self) -> None:
        """End the current events: no frame follows the last one, which lasts a usual step."""
        for question, detector in zip(self.questions, self.detectors):
            self._record(question, detector.close(self.seconds + self.step))
        self.detectors = [self.options.detector(question) for question in self.questions]

    def close(self) -> None:
        """End the current events, complete all files, and print the main figures to standard error."""
        speed = round(self.num_frames / (time.monotonic() - self.start), 2)
        self._end_events()
        limits = [self.options.event_limits(question) for question in self.questions]
        summary = {
            "source": self.source.name,
            "seconds": self.seconds,
            "frames": self.num_frames,
            "frames_per_second": speed,
            "dropped": self.dropped,
            "broken": self.source.broken,
            "notes": self.source.notes,
            "problems": self.source.problems,
            "questions": [{"question": text, "on": on, "off": off} for text, (on, off) in zip(self.texts, limits)],
            "events": self.events,
        }
        atomic_write_text(self.folder / "summary.json", json.dumps(summary, indent=1))
        print(
            f"{self.num_frames:,} frames, {speed} frames/s, {len(self.events):,} events; wrote {self.folder}",
            file=sys.stderr,
        )
        if self.video is not None:
            self.video.close()
        if self.num_frames:
            drawn = [limit if question.is_yes_no else () for question, limit in zip(self.questions, limits)]
            files = self.folder / "timeline.csv", self.folder / "timeline.png"
            draw_timeline(files[0], self.texts, self.events, drawn, files[1])


def timeline_row(frame: Frame, item: Item) -> dict[str, Any]:
    """A row of timeline.csv; 9 digits keep every float32."""
    numbers = {name: None if item[name] is None else f"{item[name]:.9g}" for name in ("score", "p_yes")}
    return {"frame": frame.index, "time": round(frame.seconds, 6), **item, **numbers}


def watch(
    name: str, questions: Sequence[str], options: WatchOptions, should_stop: Callable[[], Any] = lambda: False
) -> list[str]:
    """Ask questions about every frame of a source, and write the answers to `options.output_dir`.

    Args:
        name: see `open_source`.
        should_stop: asked before each pass of the model; the run ends once it returns something true.

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
    source.notes += [f"{question.text!r}: {note}" for question in read for note in answer_notes(question.item())]
    recorder = Recorder(read, options, source)
    try:
        ask_about_frames(pipe, recorder, should_stop)
    finally:
        recorder.close()
        for text in source.notes + source.problems:
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


def ask_about_frames(pipe: TrafficVLMPipeline, recorder: Recorder, should_stop: Callable[[], Any]) -> None:
    """Ask about and record the frames of a source until they end or `should_stop()` is true."""
    options, source, size = recorder.options, recorder.source, pipe.processor.image_processor.size
    side = max(size["height"], size["width"])
    frames = source.frames(options.fps, None if options.video or options.region else side)
    live = LiveReader(frames) if source.is_live else None
    batches = live.batches() if live else iter(lambda: list(islice(frames, options.batch_size)), [])
    with tqdm(unit=" frames", disable=None) as progress:  # only on a terminal
        for batch in batches:
            if should_stop():
                break
            images = [frame.image for frame in batch]
            recorder.add(batch, pipe(images, recorder.texts, batch_size=len(batch)))
            recorder.dropped = live.dropped if live else 0
            progress.set_postfix_str(f"{clock_time(recorder.seconds)}, {recorder.dropped:,} dropped", refresh=False)
            progress.update(len(batch))
    if live is not None and live.is_silent:
        source.problems.append(f"{source.name}: no frame for {live.silence:g} s: the camera or stream is lost")
