"""A video with the time, the questions and their answers as text below every frame."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from PIL import Image

from ..common.files import DataError
from .overlay import with_text
from .timeline import clock_time


SUFFIXES = (".mp4", ".mov", ".mkv")
MAX_SIDE, MIN_WIDTH = 1280, 400  # pixels
TIME_BASE = Fraction(1, 90_000)


class AnnotatedVideo:
    """Writes an H.264 video.

    Args:
        path: a .mp4, .mov or .mkv file.
        rate: frames per second, a hint to players. Every frame has its own time stamp.

    Raises:
        DataError: the file cannot be written. `add` and `close` raise it, too.
    """

    def __init__(self, path: Path, rate: float):
        self.path, self.rate = path, Fraction(rate).limit_denominator(1001)
        self.size: tuple[int, int] | None = None  # of the first frame, and so of all
        self.stream: Any = None  # opened with the first frame, whose size it needs
        self.last, self.is_broken = -1, False  # time stamp of the last frame; whether writing failed
        try:
            path.open("wb").close()  # FFmpeg would report this only after the first frame
        except OSError as error:
            raise DataError(f"--video {path}: cannot be written: {error.strerror}") from error
        self.container = av.open(f"file:{path}", "w")

    def add(self, seconds: float, picture: Image.Image, lines: Sequence[str]) -> None:
        """Write an RGB frame, with lines of text below it."""
        if self.size is None:
            scale = min(1.0, MAX_SIDE / max(picture.size))
            self.size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
        image = with_text(picture.resize(self.size), [clock_time(seconds), *lines], MIN_WIDTH)
        if self.stream is None:
            self._start(*image.size)
        frame = av.VideoFrame.from_image(image)
        frame.pts = self.last = max(round(seconds / TIME_BASE), self.last + 1)
        frame.time_base = TIME_BASE
        self._encode(frame)

    def close(self) -> None:
        """Finish the file; without any frame, remove it."""
        if self.stream is None:
            self.container.close()
            self.path.unlink(missing_ok=True)
        elif not self.is_broken:
            self._encode(None)  # the frames that the encoder still holds
            self.container.close()

    def _start(self, width: int, height: int) -> None:
        options = {"preset": "veryfast", "crf": "23"}
        self.stream = self.container.add_stream("libx264", rate=self.rate, options=options)
        self.stream.width, self.stream.height, self.stream.pix_fmt = width, height, "yuv420p"
        context = self.stream.codec_context
        self.stream.time_base = context.time_base = TIME_BASE
        context.max_b_frames = 0  # with them, an MP4 does not start at 0

    def _encode(self, frame: av.VideoFrame | None) -> None:
        try:
            self.container.mux(self.stream.encode(frame))
        except OSError as error:  # for example, the disk is full
            self.is_broken = True  # FFmpeg crashes if it writes again after an error
            raise DataError(f"--video {self.path}: cannot be written: {error.strerror}") from error
