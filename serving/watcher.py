"""Ask the same questions about every frame of a video, and record the answers.

    source → frames → pipeline → Recorder (timeline, events, video, clips)

A file waits for the model, and no frame is lost. A live source does not wait: `LiveReader` takes its frames in a
thread, and when the model is late, the oldest waiting frame is dropped and counted.
"""

import json
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from tqdm import tqdm

from ..answer_kind_traffic_vlm import NONE
from ..files import DataError, atomic_write_text
from ..options import option
from ..pipeline_traffic_vlm import TrafficVLMPipeline
from ..question_form_traffic_vlm import question_form
from ..question_traffic_vlm import answer_notes, answer_text
from .annotation import AnnotatedVideo, Row, check_path, video_size
from .clips import ClipWriter, find_clips
from .events import TOLERANCE, Event, EventDetector
from .options import ModelOptions, read_questions
from .timeline import COLUMNS, NOT_SURE, AnswerColors, CsvLog, clock_time, convert_to_parquet, draw_timeline
from .video import Frame, Source, open_source


LIVE_CAPACITY = 4  # frames of a live source that wait for the model; more would only be older
SILENCE = 20.0  # seconds without a frame after which a live source counts as lost; FFmpeg may notice earlier
MAX_UNDRAWN = 64  # frames that wait until it is known whether they belong to an event
FILES = ("timeline.csv", "timeline.parquet", "events.csv", "timeline.png", "summary.json")
EVENT_COLUMNS = ("question", "answer", "start", "end", "peak", "is_cut")


@dataclass(kw_only=True)
class WatchOptions(ModelOptions):
    """Options of `watch`."""

    may_be_zero: ClassVar[tuple[str, ...]] = ("shortest",)
    output_dir: Path = field(metadata={"help": "folder to write to"})
    overwrite: bool = option(False, "replace the files of an earlier run")
    video: Path | None = option(None, "annotated video to write: .mp4, .mov or .mkv")
    clips: Path | None = option(None, "folder for a clip (.mp4) of each event")
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
        if self.thresholds and (self.on, self.off) != (WatchOptions.on, WatchOptions.off):
            raise DataError("--thresholds takes the place of --on and --off: give either")
        if self.video is not None:
            check_path(self.video)
            if self.video.exists() and not self.overwrite:
                raise DataError(f"--video {self.video}: exists; choose another name, or --overwrite")


def event_limits(question: str, options: WatchOptions) -> tuple[float, float]:
    """P(yes) from which an event of a question begins, and below which it ends."""
    if options.loaded_thresholds is None:
        return options.on, options.off
    form = question_form(question)
    threshold = options.loaded_thresholds.for_question(form.text).threshold
    threshold = 1 - threshold if form.is_negated else threshold
    return threshold, threshold


def batch_frames(frames: Iterator[Frame], size: int, should_stop: Callable[[], Any]) -> Iterator[list[Frame]]:
    """Yield lists of up to `size` frames until they end or `should_stop()` is true."""
    while not should_stop() and (batch := list(islice(frames, size))):
        yield batch


class LiveReader:
    """Takes every frame of a live source in a thread, and keeps the newest ones.

    Attributes:
        dropped: number of frames that were replaced by newer ones before they were used.
        is_silent: no frame came for SILENCE seconds, and `batches` ended.
    """

    def __init__(self, frames: Iterator[Frame]):
        self.dropped, self.is_silent = 0, False
        # Frames; at the end None, or the exception that reading raised.
        self._queue: queue.Queue[Frame | Exception | None] = queue.Queue()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, args=(frames,), daemon=True).start()

    def _run(self, frames: Any) -> None:
        end = None
        try:
            with closing(frames):
                for frame in frames:
                    if self._stopped.is_set():
                        return
                    if self._queue.qsize() >= LIVE_CAPACITY:
                        with suppress(queue.Empty):
                            self._queue.get_nowait()
                            self.dropped += 1
                    self._queue.put(frame)
        except Exception as error:
            end = error
        self._queue.put(end)

    def batches(self, should_stop: Callable[[], Any]) -> Iterator[list[Frame]]:
        """Yield frames one by one until they end, none comes for SILENCE seconds, or `should_stop()` is true.

        Raises:
            Exception: whatever reading raised, after the frames before it.
        """
        last = time.monotonic()
        try:
            while not should_stop() and not self.is_silent:
                try:
                    item = self._queue.get(timeout=0.2)
                except queue.Empty:
                    self.is_silent = time.monotonic() - last > SILENCE
                    continue
                if item is None:
                    return
                if isinstance(item, Exception):
                    raise item
                yield [item]
                last = time.monotonic()  # while the model was busy, none was waited for
        finally:
            self._stopped.set()


Item = Mapping[str, Any]  # of the pipeline


def _level(item: Item) -> float:
    """P(yes), or the score of an answer in words; 0 without an answer."""
    return item["score"] or 0.0 if item["p_yes"] is None else item["p_yes"]


def _timeline_columns(item: Item) -> tuple[str | None, ...]:
    """Question, answer, score and P(yes) in CSV; 9 digits keep every float32."""
    numbers = (None if item[name] is None else f"{item[name]:.9g}" for name in ("score", "p_yes"))
    return item["question"], item["answer"], *numbers


class Recorder:
    """Writes timeline, events, annotated video and clips; the files can be read at any moment.

    Frames wait until it is known whether they belong to an event, so the video shows events from their start.

    Args:
        options: `output_dir` is an existing folder without files of an earlier run.
        rate: of the recorded frames, per second.
    """

    def __init__(
        self,
        questions: Sequence[str],
        options: WatchOptions,
        rate: float,
        video: AnnotatedVideo | None = None,
        clips: ClipWriter | None = None,
    ):
        self.questions, self.options, self.rate = list(questions), options, rate
        self.video, self.clips = video, clips
        self.folder = options.output_dir
        self.frames, self.dropped, self.seconds, self.elapsed = 0, 0, 0.0, 0.0
        self.started, self.start = datetime.now().astimezone(), time.monotonic()
        self.ended_by = "an error"
        self.events: list[tuple[str, Event]] = []  # those that have ended
        self.limits = [event_limits(question, options) for question in self.questions]
        self.detectors = [EventDetector(on, off, options.shortest) for on, off in self.limits]
        self.colors = AnswerColors()
        self.undrawn: deque[tuple[Frame, Sequence[Item]]] = deque()
        not_sure = () if options.loaded_thresholds is None else tuple(NOT_SURE)
        self.timeline = CsvLog(self.folder / "timeline.csv", (*COLUMNS, *not_sure))
        self.log = CsvLog(self.folder / "events.csv", (*EVENT_COLUMNS, *not_sure))

    def add(self, frames: Sequence[Frame], items: Sequence[Sequence[Item]]) -> None:
        """Record frames in their order, each with the items of all questions."""
        for frame, row in zip(frames, items):
            self.frames, self.seconds = self.frames + 1, frame.seconds
            self.timeline.add(
                (frame.index, frame.seconds, *_timeline_columns(item), *self._sure(item.get("not_sure")))
                for item in row
            )
            if self.clips is not None and frame.picture is not None:
                self.clips.add(frame.seconds, frame.picture)
            for index, item in enumerate(row):
                words = item["answer"] or NONE if item["p_yes"] is None else None
                self._keep(index, self.detectors[index].update(frame.seconds, _level(item), words))
            if self.video is not None:
                self.undrawn.append((frame, row))
                self._draw_until(frame.seconds - self.options.shortest)

    def _sure(self, not_sure: bool | None) -> tuple[bool | None, ...]:
        """The column that follows with --thresholds."""
        return () if self.options.loaded_thresholds is None else (not_sure,)

    def _draw_until(self, seconds: float) -> None:
        """Draw the frames up to a time, whose events are known, and those that are too many to wait."""
        while self.undrawn and (self.undrawn[0][0].seconds <= seconds + TOLERANCE or len(self.undrawn) > MAX_UNDRAWN):
            frame, items = self.undrawn.popleft()
            if self.video is None or frame.picture is None:
                continue
            rows = []
            for item, detector in zip(items, self.detectors):
                event = detector.event_at(frame.seconds)
                level = _level(item) if event or item["p_yes"] is not None else 0.0
                rows.append(Row(answer_text(item), level, self.colors[event.answer] if event else None))
            self.video.add(frame.seconds, frame.picture, rows)

    def _describe(self, question: str, event: Event) -> dict[str, Any]:
        """An event as a row of events.csv. It is not sure if even its peak is not."""
        row, thresholds = {"question": question, **asdict(event)}, self.options.loaded_thresholds
        not_sure, form = None, question_form(question)
        if thresholds is not None and form.is_yes_no:
            peak = 1 - event.peak if form.is_negated else event.peak
            not_sure = thresholds.for_question(form.text).is_unsure(peak)
        return {name: row[name] for name in EVENT_COLUMNS} | dict(zip(NOT_SURE, self._sure(not_sure)))

    def _keep(self, index: int, changes: Sequence[Event]) -> None:
        question = self.questions[index]
        for event in changes:
            answer = "" if question_form(question).is_yes_no else f" {event.answer}"
            if event.end is None:
                tqdm.write(f"{clock_time(event.start):>9}  begins  {question}{answer}")
                if self.clips is not None:
                    self.clips.begin(index + 1, question, event)
                continue
            if self.clips is not None:
                self.clips.end(index + 1, event)
            end = round(event.end, 3)
            event = replace(event, start=round(event.start, 3), end=end, peak=round(event.peak, 4))
            self.events.append((question, event))
            self.log.add([self._describe(question, event).values()])
            tqdm.write(f"{clock_time(end):>9}  ends    {question}{answer} (peak {event.peak:.2f})")

    def close(self) -> None:
        """End the current events and complete all files. Each step runs even if another fails."""
        self.elapsed = time.monotonic() - self.start
        with ExitStack() as steps:  # runs the last one first
            if self.frames:
                steps.callback(self._complete_timeline)
            steps.callback(self.timeline.close)
            steps.callback(self.log.close)
            if self.video is not None:
                steps.callback(self.video.close)
            if self.clips is not None:
                steps.callback(self.clips.close)
            steps.callback(self._draw_until, float("inf"))
            steps.callback(self._end_events)

    def _end_events(self) -> None:
        end = self.seconds + 1 / self.rate  # the last frame lasts as long as the others
        for index, detector in enumerate(self.detectors):
            self._keep(index, detector.close(end))

    def _complete_timeline(self) -> None:
        path = self.folder / "timeline.parquet"
        convert_to_parquet(self.timeline.path, path)
        self.timeline.path.unlink()
        limits = [pair if question_form(text).is_yes_no else () for text, pair in zip(self.questions, self.limits)]
        draw_timeline(path, self.questions, self.events, limits, self.colors, self.folder / "timeline.png")

    def write_summary(self, source: Source) -> None:
        """Write summary.json, and its main figures to standard error; call `close` first."""
        names = ("on", "off", "shortest", "batch_size")
        used = {"questions": self.questions, **{name: getattr(self.options, name) for name in names}}
        if self.options.loaded_thresholds is not None:
            used |= {"on": None, "off": None, "thresholds": [on for on, _ in self.limits]}
        summary = {
            "source": source.name,
            "model": self.options.model,
            "started": self.started.isoformat(timespec="seconds"),
            "ended_by": self.ended_by,
            "seconds": self.seconds,
            "elapsed": round(self.elapsed, 3),
            "frames_per_second": round(self.frames / self.elapsed, 2),
            "real_time": round(self.seconds / self.elapsed, 3),
            "dropped": self.dropped,
            "broken": source.broken,
            "notes": source.notes,
            "problems": source.problems,
            "options": used,
            "frames": self.frames,
            "events": [self._describe(question, event) for question, event in self.events],
        }
        atomic_write_text(self.folder / "summary.json", json.dumps(summary, indent=1, allow_nan=False))
        print(
            f"{self.frames:,} frames, {summary['frames_per_second']} frames/s, {summary['real_time']} x real time, "
            f"{len(self.events):,} events; wrote {self.folder}",
            file=sys.stderr,
        )


def watch(
    name: str, questions: Sequence[str], options: WatchOptions, stop_signal: Callable[[], int] = lambda: 0
) -> list[str]:
    """Ask questions about every frame of a source, and write the answers to `options.output_dir`.

    Args:
        name: see `open_source`.
        stop_signal: polled; a number other than 0 is the signal that ends the run.

    Returns:
        why frames are missing; empty if none are.

    Raises:
        ValueError, OSError, RuntimeError: bad questions, source, model, device or output. Files of an earlier run are
            then still there.
    """
    check_output(options, name)
    for question in questions:
        EventDetector(*event_limits(question, options), options.shortest)  # refuses a threshold of 0
    pipe = replace(options, region=None).load()  # frames are cut to the region when they are resized
    read = read_questions(pipe, questions)
    questions = [question.text for question in read]
    notes = [f"{question.text!r}: {note}" for question in read for note in answer_notes(question.answer())]
    # Opened last: the buffer of a camera would overflow while the model is loaded.
    source = open_source(name, options.frame_rate)
    rate = min(source.rate, options.fps or source.rate)
    video = AnnotatedVideo(options.video, questions, rate, source.duration) if options.video else None
    clips = ClipWriter(options.clips, rate, options.shortest) if options.clips else None
    earlier = [options.output_dir / file for file in FILES] + (find_clips(options.clips) if options.clips else [])
    for path in earlier:  # only now, when the new run can start
        path.unlink(missing_ok=True)
    recorder = Recorder(questions, options, rate, video, clips)
    source.notes += notes
    for note in source.notes:
        print(note, file=sys.stderr)
    try:
        ask_about_frames(source, pipe, recorder, stop_signal)
        stop = stop_signal()
        recorder.ended_by = signal.Signals(stop).name if stop else "end of the source"
    finally:
        recorder.close()
        recorder.write_summary(source)
    for problem in source.problems:
        print(problem, file=sys.stderr)
    return source.problems


def ask_about_frames(
    source: Source, pipe: TrafficVLMPipeline, recorder: Recorder, should_stop: Callable[[], Any]
) -> None:
    """Ask about and record the frames of a source until they end or `should_stop()` is true."""
    has_pictures = recorder.video is not None or recorder.clips is not None
    options, size = recorder.options, pipe.processor.image_processor.size["height"]
    frames = source.frames(size, options.fps, video_size if has_pictures else None, options.part_of_image)
    live = LiveReader(frames) if source.is_live else None
    batches = live.batches(should_stop) if live else batch_frames(frames, options.batch_size, should_stop)
    whole = f" of {clock_time(source.duration)}" if source.duration else ""
    with tqdm(unit=" frames", disable=None) as progress:  # only on a terminal
        for batch in batches:
            images = [frame.image for frame in batch]
            recorder.add(batch, pipe(images, recorder.questions, batch_size=len(batch)))
            recorder.dropped = live.dropped if live else 0
            late = f", {recorder.dropped:,} dropped" if recorder.dropped else ""
            progress.set_postfix_str(f"{clock_time(recorder.seconds)}{whole}{late}", refresh=False)
            progress.update(len(batch))
    if live is not None and live.is_silent:
        source.problems.append(f"{source.name}: no frame for {SILENCE:g} s: the camera or stream is lost")


def check_output(options: WatchOptions, source: str) -> None:
    """Create the output folder.

    Raises:
        DataError: it has files of an earlier run and `overwrite` is off, it cannot be created, or the annotated video
            is the source. The folder of clips has clips of an earlier run.
    """
    video, folder = options.video, options.output_dir
    if video is not None and video.exists() and Path(source).exists() and video.samefile(source):
        raise DataError(f"--video {video}: is the video to watch")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written to: {error}") from error
    for file in FILES:
        if (folder / file).exists() and not options.overwrite:
            raise DataError(f"{folder}: has {file} of an earlier run; choose another folder, or --overwrite")
    if options.clips is not None and find_clips(options.clips) and not options.overwrite:
        raise DataError(f"--clips {options.clips}: has clips of an earlier run; choose another folder, or --overwrite")
