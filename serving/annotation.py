"""A video with the questions and their answers drawn over every frame."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from PIL import Image, ImageDraw, ImageFont

from ..utils import DataError
from .timeline import clock_time


SUFFIXES = (".mp4", ".mov", ".mkv")
MAX_SIDE, MIN_SIDE = 1280, 320  # pixels: limits of the longer and of the shorter side
TIME_BASE = Fraction(1, 90_000)
PLAIN, EVENT = (235, 235, 235), (255, 170, 60)


def video_size(width: int, height: int) -> tuple[int, int]:
    """Width and height of the annotated video for frames of a size: same shape, both even."""
    largest = MAX_SIDE / max(width, height)
    scale = min(max(min(1.0, largest), MIN_SIDE / min(width, height)), largest)
    return max(2, 2 * round(width * scale / 2)), max(2, 2 * round(height * scale / 2))


def check_path(path: Path) -> None:
    """Raise a DataError for a file type other than .mp4, .mov and .mkv."""
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"--video {path}: must end in {', '.join(SUFFIXES)}")


class AnnotatedVideo:
    """Writes an H.264 video in fragments: after a kill, all but the last seconds can be played.

    Args:
        path: a .mp4, .mov or .mkv file.
        questions: Q questions; as many as fit are shown.
        rate: frames per second, a hint to players. Every frame keeps its own time.

    Raises:
        DataError: another file type, or a file that cannot be written.
    """

    def __init__(self, path: Path, questions: Sequence[str], rate: float):
        check_path(path)
        self.path, self.questions = path, list(questions)
        self.rate = Fraction(rate).limit_denominator(1001)
        options = {"flush_packets": "1"}
        if path.suffix.lower() != ".mkv":
            options["movflags"] = "hybrid_fragmented"  # becomes an ordinary file when closed
        try:
            path.open("wb").close()  # FFmpeg would report this only after the first frame
        except OSError as error:
            raise DataError(f"--video {path}: cannot be written: {error.strerror}") from error
        self.container = av.open(str(path), "w", options=options)
        self.stream: Any = None
        self.last = -1

    def _start(self, width: int, height: int) -> None:
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        options = {"preset": "veryfast", "crf": "23"} if codec == "libx264" else {}
        self.stream = self.container.add_stream(codec, rate=self.rate, options=options)
        self.stream.width, self.stream.height, self.stream.pix_fmt = width, height, "yuv420p"
        self.stream.time_base = self.stream.codec_context.time_base = TIME_BASE
        self.stream.codec_context.gop_size = max(1, round(2 * self.rate))

    def add(
        self, seconds: float, picture: Image.Image, probabilities: Sequence[float], is_event: Sequence[bool]
    ) -> None:
        """Write an RGB frame with Q answers; `is_event` marks those within an event."""
        if self.stream is None:
            self._start(*picture.size)
        frame = av.VideoFrame.from_image(
            annotate(picture, self.questions, probabilities, is_event, clock_time(seconds))
        )
        frame.pts = self.last = max(round(seconds / TIME_BASE), self.last + 1)
        frame.time_base = TIME_BASE
        self.container.mux(self.stream.encode(frame))

    def close(self) -> None:
        """Finish the file; without any frame, remove it."""
        if self.stream is not None:
            self.container.mux(self.stream.encode())
        self.container.close()
        if self.stream is None:
            self.path.unlink(missing_ok=True)


def annotate(
    picture: Image.Image,
    questions: Sequence[str],
    probabilities: Sequence[float],
    is_event: Sequence[bool],
    corner: str,
) -> Image.Image:
    """Draw P(yes) of every question that fits, in orange within an event, below a first line of text."""
    image = picture.copy()
    size = max(10, min(20, image.height // 26))
    font, height = ImageFont.load_default(size), round(1.4 * size)
    lines = [(corner, PLAIN)]
    for question, probability, is_on in zip(questions, probabilities, is_event):
        lines.append((f"{probability:.2f}  {question}", EVENT if is_on else PLAIN))
    draw = ImageDraw.Draw(image)
    for row, (text, color) in enumerate(lines[: image.height // height]):
        draw.text((size // 2, height * row), text, color, font, stroke_width=2, stroke_fill="black")
    return image
