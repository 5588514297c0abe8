"""Videos: frames of a file, an image, a folder of images, a camera or a stream; and an annotated video to write.

    open_source(name) → source.frames(): Frame(index, seconds, image), upright

- FFmpeg (PyAV) decodes videos and animated GIFs, Pillow other images.
- Times start at 0 and never decrease. A frame without a time stamp, or with one that steps back, follows the last one
  by 1 / frame rate.
- Frames that cannot be read are counted and skipped; `FrameSource.problems` describes the first one.
"""

import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from PIL import Image

from ..common.files import DataError
from ..common.image_files import IMAGE_SUFFIXES, list_images, open_image
from .overlay import with_text


DEFAULT_RATE = 25.0  # frames per second of images, and of videos that declare no rate
TIMEOUT = 10.0  # seconds without data after which a stream counts as lost
CAMERA_FORMATS = {"linux": "v4l2", "darwin": "avfoundation", "win32": "dshow"}
# These send at their own pace, whether frames are read or not. HTTP sends as fast as it is read.
LIVE_PROTOCOLS = ("rtsp", "rtsps", "rtmp", "rtmps", "rtp", "srt", "tcp", "udp")
MAX_SIDE, MIN_WIDTH = 1280, 400  # pixels of an annotated video
TIME_BASE = Fraction(1, 90_000)


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One frame to answer questions about.

    Attributes:
        index: of the frame in the source, from 0, with the frames that `fps` skips counted.
        seconds: since the first frame.
        image: RGB, upright.
    """

    index: int
    seconds: float
    image: Image.Image


class FrameSource:
    """Base class of image files and of videos.

    Attributes:
        name: as the user gave it, without a password.
        rate: frames per second, declared or assumed.
        is_live: frames arrive at their own pace and are lost if nothing takes them.
        problems: why frames are missing; complete when `frames` has ended.
        broken: number of images, or packets of a video, that are damaged.
        dropped: number of frames of a live source that were replaced by newer ones before they were used.
    """

    def __init__(self, name: str, rate: float | None = None):
        self.name, self.rate, self.is_live = hide_password(name), rate or DEFAULT_RATE, False
        self.broken = self.dropped = 0
        self.problems: list[str] = []

    def read(self) -> Iterator[tuple[float, Any]]:
        """Yield (seconds, content) of every frame."""
        raise NotImplementedError

    def to_image(self, content: Any, side: int | None) -> Image.Image:
        """RGB image of a frame's content, upright. Raises OSError or ValueError if it cannot be read."""
        raise NotImplementedError

    def frames(self, fps: float | None = None, side: int | None = None) -> Iterator[Frame]:
        """Yield the frames.

        Args:
            fps: take only the first frame in every 1/fps seconds; by default all frames.
            side: resize frames of videos to side × side, which FFmpeg does several times as fast as the pipeline.
        """
        last_tick = -1
        for index, (seconds, content) in enumerate(self.read()):
            tick = index if fps is None else math.floor(seconds * fps + 1e-6)  # 30 times 1/30 s may be below 1 s
            if tick <= last_tick:
                continue
            try:
                image = self.to_image(content, side)
            except (OSError, ValueError) as error:
                self.skip(error)
                continue
            last_tick = tick
            yield Frame(index, seconds, image)

    def skip(self, error: Exception | str) -> None:
        """Count a broken frame, and describe the first one."""
        self.broken += 1
        if self.broken == 1:
            self.problems.append(f"{self.name}: frames are missing or damaged; the first error: {error}")


def open_source(name: str, frame_rate: float | None = None) -> FrameSource:
    """A video file, an image, a folder of images, a camera or a stream, ready to be read.

    Args:
        name: a path, a URL, a camera's device (`/dev/video0`, `video=NAME` on Windows) or its number.
        frame_rate: frames per second of images, and of videos without time stamps.

    Raises:
        ValueError: it does not exist, cannot be read, has no video or no images.
    """
    path = Path(name)
    if path.is_dir() or (path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES - {".gif"}):
        return ImageSource(name, frame_rate)
    if not path.exists() and not is_camera(name) and "://" not in name:
        raise DataError(f"{name}: no such file, folder, camera or stream")
    return VideoSource(name, frame_rate)


def is_camera(name: str) -> bool:
    """Whether the name is that of a camera."""
    return name.startswith(("/dev/", "video=")) or (name.isdecimal() and not Path(name).exists())


def hide_password(name: str) -> str:
    """The name with *** for user and password: http://***@camera/stream.

    The last @ ends them, since passwords may hold @ and / that should have been escaped.
    """
    return re.sub(r"://.*@", "://***@", name)


class ImageSource(FrameSource):
    """The images of a folder, or one image, as frames of 1 / frame rate each."""

    def __init__(self, name: str, frame_rate: float | None = None):
        super().__init__(name, frame_rate)
        self.paths, left_out = list_images(Path(name))
        if left_out:
            print(left_out, file=sys.stderr)

    def read(self) -> Iterator[tuple[float, Path]]:
        yield from ((index / self.rate, path) for index, path in enumerate(self.paths))

    def to_image(self, content: Path, side: int | None) -> Image.Image:
        return open_image(content)


class VideoSource(FrameSource):
    """Video files, cameras and streams: all that FFmpeg can open.

    Args:
        timeout: seconds without data after which a stream counts as lost.

    Attributes:
        clock: returns seconds: the times of JPEG frames over HTTP, which have none; None for other sources.
    """

    def __init__(self, name: str, frame_rate: float | None = None, timeout: float = TIMEOUT):
        super().__init__(name, frame_rate)
        self.timeout = timeout
        self.container = self._open(name)
        self.clock = time.monotonic if self.container.format.name == "mpjpeg" and "://" in name else None
        self.is_live = bool(self.clock or is_camera(name) or name.partition("://")[0].lower() in LIVE_PROTOCOLS)
        self.stream = self.container.streams.best("video")
        if self.stream is None or self.stream.codec_context is None:
            raise DataError(f"{self.name}: has no video stream that can be decoded")
        self.rate = frame_rate or float(self.stream.guessed_rate or DEFAULT_RATE)
        if not self.is_live:
            self.stream.thread_type = "AUTO"  # several frames at a time, which would delay a live source

    def _open(self, name: str) -> Any:
        options, camera_format, timeout = {}, None, None
        problem = f"no such camera or stream, or no answer within {self.timeout:g} s"
        if is_camera(name):
            camera_format = CAMERA_FORMATS.get(sys.platform, "v4l2")
            if name.isdecimal() and camera_format == "v4l2":
                name = f"/dev/video{name}"
        elif "://" in name:
            timeout = self.timeout
            if name.lower().startswith("rtsp"):
                options["rtsp_transport"] = "tcp"  # with UDP, lost packets become smeared frames
        else:
            name, problem = f"file:{name}", "cannot be read as a video"  # otherwise "12:30.mp4" has the protocol 12
        try:
            return av.open(name, format=camera_format, options=options, timeout=timeout)
        except (av.error.FFmpegError, OSError, ValueError) as error:
            # Not the whole error, which would repeat the address with its password.
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise DataError(f"{self.name}: {problem}: {reason}") from None

    def to_image(self, content: av.VideoFrame, side: int | None) -> Image.Image:
        image = content.to_image(width=side, height=side, interpolation="BICUBIC")
        return image.rotate(content.rotation, expand=True)  # phones record sideways and note it

    def read(self) -> Iterator[tuple[float, av.VideoFrame]]:
        seconds = -1 / self.rate  # the first frame follows, at 0
        last: float | None = None  # time stamp
        base = float(self.stream.time_base)  # read now: the frames that follow an error do not have it
        with self.container:
            for frame in self.decode():
                stamp = self.clock() if self.clock else None if frame.pts is None else frame.pts * base
                if stamp is None or last is None or stamp < last:
                    seconds += 1 / self.rate
                else:
                    seconds += stamp - last
                last = stamp
                yield seconds, frame
        if seconds < 0:
            self.problems.append(f"{self.name}: no frame can be decoded")
        elif self.is_live:
            self.problems.append(f"{self.name}: the camera or stream ended after {seconds + 1 / self.rate:.1f} s")

    def decode(self) -> Iterator[av.VideoFrame]:
        """Yield the frames of all packets that can be decoded."""
        while True:
            try:
                for packet in self.container.demux(self.stream):
                    if packet.is_corrupt:
                        self.skip("a packet is damaged")
                    try:
                        yield from self.stream.decode(packet)
                    except av.error.FFmpegError as error:
                        self.skip(error.strerror or type(error).__name__)
                return
            except BlockingIOError:  # some cameras raise it instead of waiting
                time.sleep(0.005)
            except av.error.FFmpegError as error:
                reason = f"no data for {self.timeout:g} s" if isinstance(error, av.error.ExitError) else error.strerror
                self.problems.append(f"{self.name}: reading stopped: {reason}")
                return


class AnnotatedVideo:
    """Writes an H.264 video with the time, and lines of text, below every frame.

    Args:
        path: a file of a type that holds H.264, such as .mp4 or .mkv.

    Raises:
        DataError: the file cannot be written, or its type does not hold H.264. `add` and `close` raise an OSError.
    """

    def __init__(self, path: Path):
        options = {"preset": "veryfast", "crf": "23"}
        try:
            self.container = av.open(f"file:{path}", "w")
            self.stream = self.container.add_stream("libx264", rate=25, options=options)  # a hint: frames have times
            path.open("wb").close()  # FFmpeg would report a missing folder only after the first frame
        except (OSError, ValueError) as error:
            raise DataError(f"--video {path}: {error}") from error
        self.size: tuple[int, int] | None = None  # of the first frame, and so of all
        self.last = -1  # time stamp of the last frame; negative before the first one

    def add(self, seconds: float, picture: Image.Image, lines: Sequence[str]) -> None:
        """Write an RGB frame, with lines of text below it."""
        if self.size is None:
            scale = min(1.0, MAX_SIDE / max(picture.size))
            self.size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
        image = with_text(picture.resize(self.size), lines, MIN_WIDTH)
        if self.last < 0:
            self.stream.width, self.stream.height, self.stream.pix_fmt = *image.size, "yuv420p"
            self.stream.time_base = self.stream.codec_context.time_base = TIME_BASE
            self.stream.codec_context.max_b_frames = 0  # with them, an MP4 does not start at 0
        frame = av.VideoFrame.from_image(image)
        frame.pts = self.last = max(round(seconds / TIME_BASE), self.last + 1)
        frame.time_base = TIME_BASE
        self.container.mux(self.stream.encode(frame))

    def close(self) -> None:
        """Finish the file, which is empty without any frame."""
        if self.last >= 0:
            self.container.mux(self.stream.encode(None))  # the frames that the encoder still holds
        self.container.close()
