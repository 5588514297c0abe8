"""A video with questions and answers below every frame, and for each question a strip that fills with time."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from PIL import Image, ImageDraw, ImageFont

from ..files import DataError
from .timeline import clock_time


SUFFIXES = (".mp4", ".mov", ".mkv")
MAX_SIDE, MIN_SIDE = 1280, 320  # pixels: limits of the longer and of the shorter side of a frame
TIME_BASE = Fraction(1, 90_000)
FIRST_SPAN = 60.0  # seconds that the strips hold at first if the duration is unknown
# Pixels, and rows: most questions fit into MIN_COLUMN, and up to COLUMN_ROWS questions stay in one column.
MIN_COLUMN, COLUMN_ROWS, MARGIN, STRIP_HEIGHT = 400, 8, 10, 14
PLAIN, DIM, BACKGROUND, TRACK, CURSOR = "#ebebeb", "#a0a0a0", "#181818", "#363636", "#ffffff"
NO_EVENT = "#8a94a0"


def video_size(width: int, height: int) -> tuple[int, int]:
    """Width and height within the limits, in the proportion of a frame, and even, as H.264 needs."""
    largest = MAX_SIDE / max(width, height)
    scale = min(max(min(1.0, largest), MIN_SIDE / min(width, height)), largest)
    return max(2, 2 * round(width * scale / 2)), max(2, 2 * round(height * scale / 2))


def check_path(path: Path) -> None:
    """Raise a DataError for a file type other than .mp4, .mov and .mkv."""
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"--video {path}: must end in {', '.join(SUFFIXES)}")


@dataclass(frozen=True, slots=True)
class Row:
    """What a frame shows of one question.

    Attributes:
        answer: as text.
        level: 0..1, how high the strip is filled.
        color: of the event that the frame belongs to; None outside of events.
    """

    answer: str
    level: float
    color: str | None = None


class AnnotatedVideo:
    """Writes an H.264 video, or MPEG-4 without libx264. After a kill, all but the last seconds can be played.

    Args:
        path: a .mp4, .mov or .mkv file.
        questions: Q questions; all are shown.
        rate: frames per second, a hint to players. Every frame has its own time stamp.
        duration: seconds; None if unknown.

    Raises:
        DataError: the file has another type, or cannot be written. `add` and `close` raise it, too.
    """

    def __init__(self, path: Path, questions: Sequence[str], rate: float, duration: float | None = None):
        check_path(path)
        self.path, self.questions, self.duration = path, list(questions), duration
        self.rate = Fraction(rate).limit_denominator(1001)
        self.stream: Any = None  # opened with the first frame, whose size it needs
        self.panel: Panel | None = None
        self.last, self.is_broken = -1, False  # time stamp of the last frame; whether writing failed
        options = {"flush_packets": "1"}
        if path.suffix.lower() != ".mkv":
            options["movflags"] = "hybrid_fragmented"  # becomes an ordinary file when closed
        try:
            path.open("wb").close()  # FFmpeg would report this only after the first frame
        except OSError as error:
            raise DataError(f"--video {path}: cannot be written: {error.strerror}") from error
        self.container = av.open(f"file:{path}", "w", options=options)

    def add(self, seconds: float, picture: Image.Image, rows: Sequence[Row]) -> None:
        """Write an RGB frame, with Q rows below it."""
        if self.panel is None:
            self.panel = Panel(self.questions, max(picture.width, MIN_COLUMN), self.duration)
        panel = self.panel.draw(seconds, rows)
        image = Image.new("RGB", (panel.width, picture.height + panel.height), BACKGROUND)
        image.paste(picture, ((panel.width - picture.width) // 2, 0))
        image.paste(panel, (0, picture.height))
        if self.stream is None:
            self._start(*image.size)
        frame = av.VideoFrame.from_image(image)
        frame.pts = self.last = max(round(seconds / TIME_BASE), self.last + 1)
        frame.time_base = TIME_BASE
        self._encode(frame)

    def close(self) -> None:
        """Finish the file; without any frame, remove it."""
        if self.stream is not None:
            self._encode(None)  # the frames that the encoder still holds
        if not self.is_broken:
            self.container.close()
        if self.stream is None:
            self.path.unlink(missing_ok=True)

    def _start(self, width: int, height: int) -> None:
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        options = {"preset": "veryfast", "crf": "23"} if codec == "libx264" else {}
        self.stream = self.container.add_stream(codec, rate=self.rate, options=options)
        self.stream.width, self.stream.height, self.stream.pix_fmt = width, height, "yuv420p"
        context = self.stream.codec_context
        self.stream.time_base = context.time_base = TIME_BASE
        # A key frame every second. No B-frames: with them, an MP4 does not start at 0.
        context.gop_size, context.max_b_frames = max(1, round(self.rate)), 0

    def _encode(self, frame: av.VideoFrame | None) -> None:
        if self.is_broken:  # FFmpeg crashes if it writes again after an error
            return
        try:
            self.container.mux(self.stream.encode(frame))
        except OSError as error:  # for example, the disk is full
            self.is_broken = True
            raise DataError(f"--video {self.path}: cannot be written: {error.strerror}") from error


class Panel:
    """Draws the time, and for each question its answer and a strip: the answers so far, from 0 to the duration.

    If the duration is unknown, strips are squeezed to half their width whenever they are full.

    Args:
        width: even, in pixels.
        duration: seconds; None if unknown.
    """

    def __init__(self, questions: Sequence[str], width: int, duration: float | None = None):
        self.duration, self.span = duration, duration or FIRST_SPAN
        columns = max(1, min(width // MIN_COLUMN, -(-len(questions) // COLUMN_ROWS)))
        column = width // columns
        size = 14 if column < 1.5 * MIN_COLUMN else 17
        self.font, self.line = ImageFont.load_default(size), round(1.4 * size)
        self.inner = column - 2 * MARGIN  # the width of a strip
        rows, row_height, top = -(-len(questions) // columns), self.line + STRIP_HEIGHT + 6, self.line + 6
        # Top left corners of the rows.
        self.corners = [
            (index // rows * column + MARGIN, top + index % rows * row_height) for index in range(len(questions))
        ]
        height = top + rows * row_height + 4
        self.base = Image.new("RGB", (width, height + height % 2), BACKGROUND)
        draw = ImageDraw.Draw(self.base)
        legend = shorten("strips: probability; in color: events", self.font, width - 2 * MARGIN - 11 * size)
        draw.text((width - MARGIN, 3), legend, DIM, self.font, anchor="ra")
        for corner, question in zip(self.corners, questions):
            draw.text(corner, shorten(question, self.font, 0.66 * self.inner), PLAIN, self.font)
        self.strips = [Image.new("RGB", (self.inner, STRIP_HEIGHT), TRACK) for _ in questions]
        self.last: tuple[int, Sequence[Row]] = (0, [])  # x and rows of the last frame

    def draw(self, seconds: float, rows: Sequence[Row]) -> Image.Image:
        """The panel, RGB, at a time in seconds, which must not decrease."""
        while seconds > self.span:
            self._squeeze()
        cursor = min(self.inner - 1, int(seconds / self.span * self.inner))
        start, last_rows = self.last
        for strip, row in zip(self.strips, last_rows):  # an answer holds until the next frame
            top = round((1 - row.level) * STRIP_HEIGHT)
            if cursor > start and top < STRIP_HEIGHT:
                strip.paste(row.color or NO_EVENT, (start, top, cursor, STRIP_HEIGHT))
        self.last = cursor, rows
        image = self.base.copy()
        draw = ImageDraw.Draw(image)
        whole = f" of {clock_time(self.span)}" if self.duration else ""
        draw.text((MARGIN, 3), clock_time(seconds) + whole, PLAIN, self.font)
        for (left, top), strip, row in zip(self.corners, self.strips, rows):
            answer = shorten(row.answer, self.font, 0.32 * self.inner)
            draw.text((left + self.inner, top), answer, row.color or PLAIN, self.font, anchor="ra")
            top += self.line
            image.paste(strip, (left, top))
            draw.rectangle((left + cursor - 1, top - 2, left + cursor + 1, top + STRIP_HEIGHT + 1), CURSOR)
        return image

    def _squeeze(self) -> None:
        self.span *= 2
        for index, strip in enumerate(self.strips):
            half = strip.resize((self.inner // 2, STRIP_HEIGHT), Image.Resampling.BOX)
            self.strips[index] = Image.new("RGB", strip.size, TRACK)
            self.strips[index].paste(half, (0, 0))
        self.last = self.last[0] // 2, self.last[1]


def shorten(text: str, font: Any, width: float) -> str:
    """One line of text that is at most `width` pixels wide, with an ellipsis if it had to be cut."""
    line = " ".join(text.split())
    if font.getlength(line) <= width:
        return line
    length = bisect_left(range(len(line)), True, key=lambda end: font.getlength(line[: end + 1] + "…") > width)
    return line[:length].rstrip() + "…"
