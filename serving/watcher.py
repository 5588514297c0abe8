"""Standing questions about every frame of a video: read ahead, score, keep.

    source → FrameReader (a thread: decode, resize) → QuestionScorer (the model) → Recorder (timeline, events, video)

The questions become tensors once; of a frame only its pixels are new. A live source never waits: when the model is
late, the oldest waiting frame is dropped and counted. A file waits, and loses none.
"""

import json
import os
import shutil
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from PIL import Image

from ..utils import DataError
from .annotation import AnnotatedVideo
from .events import EventDetector
from .timeline import EventLog, TimelineWriter, clock_time, draw_timeline, read_events
from .video import PATIENCE, Frame, Notes


MAX_QUESTIONS = 128
LIVE_WAITING = 4  # frames of a live source that may wait for the model; more of them would only be older
FILES = ("timeline.parquet", "timeline", "events.csv", "timeline.png", "summary.json")
Scorer = Callable[[np.ndarray], np.ndarray]  # pixels uint8 [B,224,224,3] → P(yes) [B,Q]


class QuestionScorer:
    """P(yes) of the standing questions, all in one packed row for each frame.

    Args:
        answerer: the loaded model.
        questions: as `check_questions` gives them.
        notes: where unknown words, and questions that want words for an answer, are named.

    Raises:
        ValueError: a question without a known word, or one that is too long.
    """

    def __init__(self, answerer: Any, questions: Sequence[str], notes: Notes):
        self.model, self.device = answerer.model, answerer.device
        processor = answerer.processor
        images = processor.image_processor
        self.size = images.size["height"]
        # As the processor does it: (pixel · rescale - mean) / std, for each colour.
        statistics = torch.tensor([images.image_mean, images.image_std], device=self.device)
        mean, std = statistics[..., None, None]  # each [3,1,1]
        self.scale, self.shift = images.rescale_factor / std, -mean / std
        # A first look at nothing: it finds what is wrong with the questions, and warms the model up.
        gray = Image.new("RGB", (self.size, self.size), "gray")
        for answer in answerer([gray], [list(questions)])[0]:
            if answer.unknown_words:
                words = ", ".join(answer.unknown_words)
                notes.note(f"{answer.question!r} has words that the model does not know: {words}")
            if answer.yes_probability is None:
                notes.note(f"{answer.question!r} is answered with words; its P(yes) beside P(no) may mean little")
        text = processor(text=[list(questions)], packed=True, on_unknown="ignore", return_tensors="pt")
        self.text = {name: tensor.to(self.device) for name, tensor in text.items()}  # each [1,L] or [1,Q]

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """P(yes), float32 [B,Q], of frames uint8 [B,size,size,3]."""
        images = torch.from_numpy(pixels).to(self.device).permute(0, 3, 1, 2)  # as the tower wants them in memory
        images = images.float() * self.scale + self.shift
        text = {name: tensor.expand(len(images), -1) for name, tensor in self.text.items()}
        return torch.stack(self.model.score_yes_no(pixel_values=images, **text)).cpu().numpy()


def check_folder(folder: Path, overwrite: bool = False) -> None:
    """Make a folder to write to; files of an earlier run in it are left alone, see `clear_folder`.

    Raises:
        DataError: there are some, and they are not to be overwritten; or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder / name for name in FILES):
            if path.exists() and not overwrite:
                raise DataError(f"{folder}: has {path.name} of an earlier run; choose another folder, or --overwrite")
    except OSError as error:
        raise DataError(f"{folder}: cannot be written to: {error}") from error


def clear_folder(folder: Path) -> None:
    """Remove the files of an earlier run; call it when nothing can keep the new one from starting.

    Raises:
        DataError: they cannot be removed.
    """
    try:
        for path in (folder / name for name in FILES):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written to: {error}") from error


def check_questions(questions: Sequence[str]) -> list[str]:
    """The questions without spaces around them, each once.

    Raises:
        DataError: none, too many, or an empty one.
    """
    cleaned = [question.strip() for question in questions]
    for number, question in enumerate(cleaned, 1):
        if not any(unicodedata.category(character)[0] in "LNS" for character in question):
            raise DataError(f"question {number} is empty: {questions[number - 1]!r}")
    cleaned = list(dict.fromkeys(cleaned))
    if not 0 < len(cleaned) <= MAX_QUESTIONS:
        raise DataError(f"{len(cleaned)} questions: at least 1 and at most {MAX_QUESTIONS} can be asked of each frame")
    return cleaned


class FrameReader:
    """A thread that reads frames ahead of the model.

    Args:
        frames: read in the thread.
        capacity: frames that may wait.
        drops_late: drop the oldest waiting frame, and count it, where there is no room for a new one; else wait.
    """

    def __init__(self, frames: Iterable[Frame], capacity: int, drops_late: bool = False):
        self.frames, self.capacity, self.drops_late = frames, capacity, drops_late
        self.dropped = 0
        self._ended = False
        self._waiting: deque[Frame] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="frames", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for frame in self.frames:
                if not self._put(frame):
                    break
        except BaseException as error:
            self._error = error
        finally:
            close = getattr(self.frames, "close", None)
            if close is not None:
                close()  # here, not in the other thread: a decoder at work must not be closed
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, frame: Frame) -> bool:
        with self._changed:
            if self.drops_late and len(self._waiting) >= self.capacity:
                self._waiting.popleft()
                self.dropped += 1
            self._changed.wait_for(lambda: self._stopped or len(self._waiting) < self.capacity)
            self._waiting.append(frame)
            self._changed.notify_all()
            return not self._stopped

    def take(self, count: int, timeout: float) -> list[Frame]:
        """Up to `count` frames, in order, as soon as there is one; none after `timeout` seconds, or at the end.

        Raises:
            whatever reading raised, once the frames before it are taken.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended, timeout)
            frames = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
            self._changed.notify_all()
            if not frames and self._error is not None:
                raise self._error
            return frames

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to take, not even an error."""
        with self._changed:
            return self._ended and not self._waiting and self._error is None

    def stop(self) -> None:
        """End the thread; one that waits for a camera is left to itself."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(timeout=2)


class Progress:
    """Frames per second and speed against real time, on one line of a terminal or now and then in a log.

    Args:
        duration: seconds of the video, None if unknown.
        stream: where to write; nowhere by default.
    """

    def __init__(self, duration: float | None = None, stream: TextIO | None = None):
        self.duration, self.stream = duration, stream
        self.is_terminal = stream is not None and stream.isatty()
        self.frames, self.seconds, self.dropped = 0, 0.0, 0
        self.started = datetime.now().astimezone()
        self.start = self.shown = time.monotonic()
        self.end: float | None = None

    def update(self, frames: int, seconds: float, dropped: int) -> None:
        self.frames += frames
        self.seconds, self.dropped = seconds, dropped
        if time.monotonic() - self.shown > (0.5 if self.is_terminal else 5.0):
            self.show()

    def elapsed(self) -> float:
        return max((self.end or time.monotonic()) - self.start, 1e-9)

    def show(self, is_last: bool = False) -> None:
        self.shown = time.monotonic()
        if self.stream is None:
            return
        whole = f" of {clock_time(self.duration)}" if self.duration else ""
        speed = f"{self.frames / self.elapsed():.1f} frames/s, {self.seconds / self.elapsed():.2f} x real time"
        late = f", {self.dropped:,} dropped" if self.dropped else ""
        line = f"{clock_time(self.seconds)}{whole}: {self.frames:,} frames, {speed}{late}"
        before, after = ("\r\x1b[K", "\n" if is_last else "") if self.is_terminal else ("", "\n")
        self.stream.write(before + line + after)
        self.stream.flush()

    def tell(self, line: str, stream: TextIO | None = None) -> None:
        """Write a line to a stream, by default standard output, above the progress."""
        if self.is_terminal and self.stream is not None:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
        print(line, file=stream, flush=True)
        if self.is_terminal:
            self.show()

    def finish(self) -> None:
        self.end = time.monotonic()
        self.show(is_last=True)


@dataclass
class Options:
    """What makes an event, and how frames are taken."""

    on: float = 0.6
    off: float = 0.4
    shortest: float = 0.5
    batch_size: int = 8
    patience: float = PATIENCE


@dataclass
class Recorder:
    """Everything that is written of a run, kept readable at any moment.

    Args:
        folder: it must be there, without files of an earlier run.
        rate: of the asked frames, per second.
        video: annotated video to write.
        tell: is given a line for each event that begins or ends.
    """

    folder: Path
    questions: Sequence[str]
    options: Options
    rate: float
    video: AnnotatedVideo | None = None
    tell: Callable[[str], None] = lambda line: print(line, flush=True)
    frames: int = 0
    events: int = 0
    last: float = 0.0

    def __post_init__(self) -> None:
        options = self.options
        self.detectors = [EventDetector(options.on, options.off, options.shortest) for _ in self.questions]
        self.timeline = TimelineWriter(self.folder, self.questions)
        self.log = EventLog(self.folder / "events.csv")

    def add(self, frames: Sequence[Frame], probabilities: np.ndarray) -> None:
        """Frames in order, and the answers [B,Q] to the questions about them."""
        for frame, row in zip(frames, probabilities):
            self.frames, self.last = self.frames + 1, frame.time
            self.timeline.add(frame.number, frame.time, row)
            for question, detector, probability in zip(self.questions, self.detectors, row.tolist()):
                self._keep(question, detector.update(frame.time, probability))
            if self.video is not None and frame.picture is not None:
                self.video.add(frame.time, frame.picture, row, [detector.is_event for detector in self.detectors])

    def _keep(self, question: str, events: Sequence[Any]) -> None:
        for event in events:
            if event.end is None:
                self.tell(f"{clock_time(event.start):>9}  yes  {question}")
                continue
            self.log.add(question, event)
            self.events += 1
            how = "video ends" if event.is_cut else "over"
            self.tell(f"{clock_time(event.end):>9}  {how}  {question} (peak {event.peak:.2f})")

    def close(self) -> None:
        """End events that go on, and complete all files; each is tried, whatever becomes of the others."""
        steps = [self._end_events, self.log.close, self.timeline.close, self._draw]
        if self.video is not None:
            steps.insert(0, self.video.close)
        errors = []
        for step in steps:
            try:
                step()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _end_events(self) -> None:
        end = self.last + 1 / self.rate  # the last frame lasts as long as the others
        for question, detector in zip(self.questions, self.detectors):
            self._keep(question, detector.close(end))

    def _draw(self) -> None:
        if self.frames:
            thresholds = (self.options.on, self.options.off)
            picture = self.folder / "timeline.png"
            draw_timeline(self.timeline.path, self.folder / "events.csv", self.questions, thresholds, picture)

    def write_summary(self, **more: Any) -> None:
        """summary.json: counts, events and whatever else there is to say."""
        events = [
            {"question": question, "start": event.start, "end": event.end, "peak": event.peak, "is_cut": event.is_cut}
            for question, event in read_events(self.folder / "events.csv")
        ]
        asked = {"questions": list(self.questions), **vars(self.options)}
        text = json.dumps({**more, "options": asked, "frames": self.frames, "events": events}, indent=1)
        temporary = self.folder / ".summary.json.tmp"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.folder / "summary.json")


def watch(
    reader: FrameReader,
    score: Scorer,
    recorder: Recorder,
    progress: Progress,
    notes: Notes,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Ask about frames until they end, a live source is silent for `patience` seconds, or `should_stop` says so."""
    options, heard = recorder.options, time.monotonic()
    batch_size = 1 if reader.drops_late else options.batch_size
    try:
        while not should_stop():
            frames = reader.take(batch_size, timeout=0.2)
            if frames:
                recorder.add(frames, score(np.stack([frame.pixels for frame in frames])))
                progress.update(len(frames), recorder.last, reader.dropped)
                heard = time.monotonic()
                continue
            if reader.is_over:
                break
            recorder.timeline.flush_if_due()
            if reader.drops_late and time.monotonic() - heard > options.patience:
                notes.problem(
                    f"no frame for {options.patience:g} s: the camera or stream is gone; what was seen is kept"
                )
                break
    finally:
        reader.stop()
        progress.finish()
