"""A video with the standing questions and their answers over each frame."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..utils import DataError
from .timeline import clock_time
from .video import import_av


SUFFIXES = (".mp4", ".mov", ".mkv")
LONGEST, LEAST = 1280, 320  # pixels: the longest side at most, the shorter one at least
TICKS = 90_000  # a second
PLAIN, EVENT, PANEL = (225, 225, 225), (255, 170, 60), (0, 0, 0, 150)


def video_size(width: int, height: int) -> tuple[int, int]:
    """Width and height of the annotated video of frames of that size: of the same shape, both even."""
    scale = min(1.0, LONGEST / max(width, height))
    scale = min(max(scale, LEAST / min(width, height)), LONGEST / max(width, height))
    return tuple(max(2, 2 * round(side * scale / 2)) for side in (width, height))  # type: ignore[return-value]


class AnnotatedVideo:
    """Writes an H.264 video that can be played up to its last second, even if the program is killed.

    Args:
        path: of the file, whose end says its kind: .mp4, .mov or .mkv.
        questions: Q questions; as many as fit are shown.
        rate: frames per second, as a hint to players; each frame keeps its own time.

    Raises:
        DataError: another kind of file, or one that cannot be written.
    """

    def __init__(self, path: Path, questions: Sequence[str], rate: float):
        self.av = import_av()
        check_path(path)
        self.path, self.questions = path, list(questions)
        self.rate = Fraction(rate).limit_denominator(1001)
        # Written in fragments, which become an ordinary file at the end.
        options = {"flush_packets": "1"}
        if path.suffix.lower() != ".mkv":
            options["movflags"] = "hybrid_fragmented"
        try:
            path.open("wb").close()  # FFmpeg would say so after the first frame only
        except OSError as error:
            raise DataError(f"--video {path}: cannot be written: {error.strerror}") from error
        self.container = self.av.open(str(path), "w", options=options)
        self.stream: Any = None
        self.last = -1

    def _start(self, width: int, height: int) -> None:
        codec = "libx264" if "libx264" in self.av.codecs_available else "mpeg4"
        options = {"preset": "veryfast", "crf": "23"} if codec == "libx264" else {}
        self.stream = self.container.add_stream(codec, rate=self.rate, options=options)
        self.stream.width, self.stream.height, self.stream.pix_fmt = width, height, "yuv420p"
        self.stream.time_base = self.stream.codec_context.time_base = Fraction(1, TICKS)
        self.stream.codec_context.gop_size = max(1, round(2 * self.rate))

    def add(self, seconds: float, picture: np.ndarray, probabilities: np.ndarray, is_event: Sequence[bool]) -> None:
        """A frame uint8 [H,W,3] with the answers [Q] to it, and which of them are within an event."""
        if self.stream is None:
            self._start(picture.shape[1], picture.shape[0])
        image = annotate(picture, self.questions, probabilities, is_event, clock_time(seconds))
        frame = self.av.VideoFrame.from_ndarray(np.asarray(image))
        frame.pts = self.last = max(round(seconds * TICKS), self.last + 1)
        frame.time_base = Fraction(1, TICKS)
        self.container.mux(self.stream.encode(frame))

    def close(self) -> None:
        if self.stream is not None:
            self.container.mux(self.stream.encode())
        self.container.close()
        if self.stream is None:
            self.path.unlink(missing_ok=True)


def check_path(path: Path) -> None:
    """Raises DataError for a kind of video that is not written here."""
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"--video {path}: must end in {', '.join(SUFFIXES)}")


def annotate(
    picture: np.ndarray, questions: Sequence[str], probabilities: np.ndarray, is_event: Sequence[bool], corner: str
) -> Image.Image:
    """A picture uint8 [H,W,3] with a line for each question: P(yes) as a bar and a number, orange within an event."""
    image = Image.fromarray(np.ascontiguousarray(picture))
    size = max(10, min(20, image.height // 26))
    line, bar = round(size * 1.4), 4 * size
    room = max(1, (image.height - 2 * line) // line)
    shown = len(questions) if len(questions) <= room else room - 1
    font = ImageFont.load_default(size)
    texts = [f"{probability:.2f}  {question}" for question, probability in zip(questions[:shown], probabilities)]
    texts += [f"... and {len(questions) - shown} more questions"] * (shown < len(questions))
    draw = ImageDraw.Draw(image, "RGBA")
    wide = bar + size + max(draw.textlength(text, font) for text in (*texts, corner))
    draw.rectangle((0, 0, wide + size, line * (len(texts) + 1)), fill=PANEL)
    draw.text((size // 2, line // 6), corner, PLAIN, font)
    for number, text in enumerate(texts):
        top = line * (number + 1)
        color = EVENT if number < shown and is_event[number] else PLAIN
        if number < shown:
            middle = top + line // 2
            draw.rectangle((size // 2, middle - 2, size // 2 + bar, middle + 2), fill=(120, 120, 120))
            full = round(bar * float(probabilities[number]))
            draw.rectangle((size // 2, middle - 2, size // 2 + full, middle + 2), fill=color)
        draw.text((bar + size, top + line // 6), text, color, font)
    return image
