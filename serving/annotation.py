"""A video with the time, the questions and their answers as text below every frame."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from PIL import Image, ImageDraw, ImageFont

from ..common.files import DataError
from .timeline import clock_time


SUFFIXES = (".mp4", ".mov", ".mkv")
MAX_SIDE, MIN_WIDTH, MARGIN, FONT_SIZE, LINE = 1280, 400, 10, 14, 20  # pixels
TIME_BASE = Fraction(1, 90_000)
TEXT, BACKGROUND = "#ebebeb", "#181818"


def video_size(width: int, height: int) -> tuple[int, int]:
    """(width, height) in the proportion of a frame, at most MAX_SIDE, and even, as H.264 needs."""
    scale = min(1.0, MAX_SIDE / max(width, height))
    return max(2, 2 * round(width * scale / 2)), max(2, 2 * round(height * scale / 2))


class AnnotatedVideo:
    """Writes an H.264 video, or MPEG-4 without libx264. After a kill, all but the last seconds can be played.

    Args:
        path: a .mp4, .mov or .mkv file.
        rate: frames per second, a hint to players. Every frame has its own time stamp.

    Raises:
        DataError: the file cannot be written. `add` and `close` raise it, too.
    """

    def __init__(self, path: Path, rate: float):
        self.path = path
        self.size: tuple[int, int] | None = None  # of the first frame, and so of all
        self.rate = Fraction(rate).limit_denominator(1001)
        self.stream: Any = None  # opened with the first frame, whose size it needs
        self.last, self.is_broken = -1, False  # time stamp of the last frame; whether writing failed
        options = {"flush_packets": "1"}
        if path.suffix.lower() != ".mkv":
            options["movflags"] = "hybrid_fragmented"  # becomes an ordinary file when closed
        try:
            path.open("wb").close()  # FFmpeg would report this only after the first frame
        except OSError as error:
            raise DataError(f"--video {path}: cannot be written: {error.strerror}") from error
        self.container = av.open(f"file:{path}", "w", options=options)

    def add(self, seconds: float, picture: Image.Image, lines: Sequence[str]) -> None:
        """Write an RGB frame, with lines of text below it."""
        self.size = self.size or video_size(*picture.size)
        image = with_text(picture.resize(self.size), [clock_time(seconds), *lines])
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


def with_text(picture: Image.Image, lines: Sequence[str]) -> Image.Image:
    """RGB picture of even size with lines of text below it; text wider than the picture is cut off."""
    width, height = max(picture.width, MIN_WIDTH), picture.height + LINE * len(lines) + MARGIN
    image = Image.new("RGB", (width + width % 2, height + height % 2), BACKGROUND)
    image.paste(picture, ((width - picture.width) // 2, 0))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(FONT_SIZE)
    for number, line in enumerate(lines):
        draw.text((MARGIN, picture.height + 4 + LINE * number), " ".join(line.split()), TEXT, font)
    return image
