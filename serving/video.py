"""Frames of a video file, an image, a folder of images, a camera or a stream.

    open_source(name) → source.frames(size): Frame(index, seconds, image), upright and resized for the model

- FFmpeg (PyAV) decodes, converts colors and resizes.
- Times start at 0 and never decrease. A frame without a usable time stamp follows the last one by 1 / frame rate.
- Frames that cannot be read are counted and skipped; `Source.problems` describes them.
"""

import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
from av.video.reformatter import Interpolation, VideoReformatter
from PIL import Image
from PIL.Image import Transpose

from ..common.files import DataError
from ..common.image_files import HEIC_SUFFIXES, IMAGE_SUFFIXES, list_images, open_image
from ..images_traffic_vlm import Region


MAX_PIXELS = 8192 * 8192  # per frame: twice an 8K video
DEFAULT_RATE = 25.0  # frames per second of images, and of videos that declare no rate
TIMEOUT = 10.0  # seconds without data after which a stream counts as lost
CAMERA_FORMATS = {"linux": "v4l2", "darwin": "avfoundation", "win32": "dshow"}
# These send at their own pace, whether frames are read or not. HTTP sends as fast as it is read.
LIVE_PROTOCOLS = ("rtsp", "rtsps", "rtmp", "rtmps", "rtp", "srt", "tcp", "udp")
MOVING_SUFFIXES = (".gif", ".apng")  # Pillow and FFmpeg both read them; FFmpeg reads all of their frames
# Bicubic, with colors at full resolution: within half a level of the image processor.
RESIZE = (
    Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP
)
ROTATIONS = {90: Transpose.ROTATE_90, 180: Transpose.ROTATE_180, 270: Transpose.ROTATE_270}
SIDEWAYS = (Transpose.ROTATE_90, Transpose.ROTATE_270)


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One frame to answer questions about.

    Attributes:
        index: of the frame in the source, from 0, with the frames that `fps` skips counted.
        seconds: since the first frame.
        image: RGB, size × size, whatever the proportion of the frame.
        picture: RGB, for the annotated video; None without it.
    """

    index: int
    seconds: float
    image: Image.Image
    picture: Image.Image | None = None


class Source:
    """Base class of image files and of videos.

    Attributes:
        name: as the user gave it, without a password.
        rate: frames per second, declared or assumed.
        duration: seconds, None if unknown.
        is_live: frames arrive at their own pace and are lost if nothing takes them.
        notes: assumptions that the user should know.
        problems: why frames are missing; complete when `frames` has ended.
        broken: number of images, or packets of a video, that could not be decoded.
    """

    def __init__(self, name: str, rate: float | None = None):
        self.name = hide_password(name)
        self.rate = rate or DEFAULT_RATE
        self.duration: float | None = None
        self.is_live = False
        self.notes: list[str] = []
        self.problems: list[str] = []
        self.broken = 0

    def decode(self) -> Iterator[tuple[int, float, av.VideoFrame]]:
        """Yield index, seconds and pixels of every frame that can be read."""
        raise NotImplementedError

    def frames(
        self,
        size: int,
        fps: float | None = None,
        picture_size: Callable[[int, int], tuple[int, int]] | None = None,
        region: Region | None = None,
    ) -> Iterator[Frame]:
        """Yield the frames, upright.

        Args:
            size: width and height of `Frame.image`.
            fps: take only the first frame in every 1/fps seconds; by default all frames.
            picture_size: maps (width, height) of the first frame to the size of `Frame.picture`.
            region: the part of each frame that is `Frame.image`; `Frame.picture` is whole.
        """
        resizers = VideoReformatter(), VideoReformatter()  # one for each size, as each caches FFmpeg's tables
        last_tick, shape = -1, None
        for index, seconds, pixels in self.decode():
            tick = index if fps is None else math.floor(seconds * fps + 1e-6)  # 30 times 1/30 s may be below 1 s
            if tick <= last_tick:
                continue
            last_tick = tick
            turn = ROTATIONS.get(pixels.rotation % 360)  # as phones record sideways and note it
            sides = (pixels.height, pixels.width) if turn in SIDEWAYS else (pixels.width, pixels.height)
            if picture_size is not None and shape is None:
                shape = picture_size(*sides)
            image = resize(resizers[0], pixels, turn, *((size, size) if region is None else sides))
            if region is not None:
                image = region.crop(image).resize((size, size), Image.Resampling.BICUBIC)
            picture = None if shape is None else resize(resizers[1], pixels, turn, *shape)
            yield Frame(index, seconds, image, picture)

    def skip(self, error: Exception | str) -> None:
        """Count a broken frame, and describe the first one."""
        self.broken += 1
        if self.broken == 1:
            self.problems.append(f"{self.name}: frames that cannot be read are skipped; the first error: {error}")


def resize(
    resizer: VideoReformatter, pixels: av.VideoFrame, turn: Transpose | None, width: int, height: int
) -> Image.Image:
    """The frame as an upright RGB image, width × height."""
    if turn in SIDEWAYS:
        width, height = height, width
    image = resizer.reformat(pixels, width, height, "rgb24", interpolation=RESIZE).to_image()
    return image if turn is None else image.transpose(turn)


def open_source(name: str, frame_rate: float | None = None) -> Source:
    """A video file, an image, a folder of images, a camera or a stream, ready to be read.

    Args:
        name: a path, a URL, a camera's device (`/dev/video0`, `video=NAME` on Windows) or its number.
        frame_rate: frames per second of images, and of videos without time stamps.

    Raises:
        ValueError: it does not exist, cannot be read, has no video or no images, or its frames are too large.
    """
    path = Path(name)
    if path.is_dir():
        paths, note = list_images(path)
        source = ImageSource(name, paths, frame_rate)
        if note:
            source.notes.append(f"{name}: {note}")
        return source
    if not path.exists() and not is_camera(name) and "://" not in name:
        raise DataError(f"{name}: no such file, folder, camera or stream")
    suffix = path.suffix.lower()
    if path.is_file() and suffix not in MOVING_SUFFIXES and suffix in (*IMAGE_SUFFIXES, *HEIC_SUFFIXES):
        open_image(path, max_pixels=MAX_PIXELS)  # raises an error now, as the source has no other image
        return ImageSource(name, [path], frame_rate)
    return VideoSource(name, frame_rate)


def is_camera(name: str) -> bool:
    """Whether the name is that of a camera."""
    return name.startswith(("/dev/", "video=")) or (name.isdecimal() and not Path(name).exists())


def hide_password(name: str) -> str:
    """The name with *** for user and password: http://***@camera/stream.

    The last @ ends them, since passwords may hold @ and / that should have been escaped.
    """
    return re.sub(r"://.*@", "://***@", name)


class ImageSource(Source):
    """Image files as frames."""

    def __init__(self, name: str, paths: list[Path], frame_rate: float | None = None):
        super().__init__(name, frame_rate)
        self.paths = paths
        self.duration = len(paths) / self.rate
        if frame_rate is None and len(paths) > 1:
            self.notes.append(f"{name}: images have no times; {self.rate:g} per second are assumed (--frame_rate)")

    def decode(self) -> Iterator[tuple[int, float, av.VideoFrame]]:
        for index, path in enumerate(self.paths):
            try:
                image = open_image(path, max_pixels=MAX_PIXELS)
            except (OSError, ValueError) as error:
                self.skip(error)
                continue
            yield index, index / self.rate, av.VideoFrame.from_image(image)


class VideoSource(Source):
    """Video files, cameras and streams: all that FFmpeg can open."""

    def __init__(self, name: str, frame_rate: float | None = None):
        super().__init__(name, frame_rate)
        self.address = name
        self.is_live = is_camera(name) or name.partition("://")[0].lower() in LIVE_PROTOCOLS
        self.container = self._open()
        try:
            self.stream = self._find_stream()
        except DataError:
            self.container.close()
            raise
        declared = self.stream.guessed_rate or self.stream.average_rate
        if frame_rate is None and declared and 0 < declared <= 1000:
            self.rate = float(declared)
        if not self.is_live:
            self.duration = self.container.duration / av.time_base if self.container.duration else None
            self.stream.thread_type = "AUTO"  # several frames at a time, which would delay a live source

    def _open(self) -> Any:
        address, options, camera_format, timeout = self.address, {}, None, None
        problem = "cannot be read as a video"
        if is_camera(address) or "://" in address:
            problem = f"no such camera or stream, or no answer within {TIMEOUT:g} s"
        if is_camera(address):
            camera_format = CAMERA_FORMATS.get(sys.platform, "v4l2")
            if address.isdecimal() and camera_format == "v4l2":
                address = f"/dev/video{address}"
        elif "://" in address:
            timeout = TIMEOUT
            if address.lower().startswith("rtsp"):
                options["rtsp_transport"] = "tcp"  # with UDP, lost packets become smeared frames
        else:
            address = f"file:{address}"  # otherwise "12:30.mp4" has the unknown protocol 12
        try:
            return av.open(address, format=camera_format, options=options, timeout=timeout)
        except (av.error.FFmpegError, OSError, ValueError) as error:
            # Not the whole error, which would repeat the address with its password.
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise DataError(f"{self.name}: {problem}: {reason}") from None

    def _find_stream(self) -> Any:
        stream = self.container.streams.best("video")
        if stream is None or stream.codec_context is None:
            found = ", ".join(sorted({stream.type for stream in self.container.streams})) or "nothing"
            raise DataError(f"{self.name}: has no video stream that can be decoded, only {found}")
        decoder = stream.codec_context
        if decoder.width * decoder.height > MAX_PIXELS:
            size = f"{decoder.width} x {decoder.height}"
            raise DataError(f"{self.name}: {size} pixels are more than {MAX_PIXELS:,}, the limit")
        decoder.options = {"max_pixels": str(MAX_PIXELS)}  # for later frames, whose size may differ
        return stream

    def decode(self) -> Iterator[tuple[int, float, av.VideoFrame]]:
        index, seconds = -1, 0.0
        last: float | None = None
        base = float(self.stream.time_base)  # read now: the frames that follow an error do not have it
        with self.container:
            for index, pixels in enumerate(self._decode_packets()):
                stamp = None if pixels.pts is None else pixels.pts * base
                if stamp is not None and last is not None and stamp >= last:
                    seconds += stamp - last
                elif index:  # no time stamp, or a smaller one: a second recording in the file starts at 0 again
                    seconds += 1 / self.rate
                last = stamp
                yield index, seconds, pixels
        if self.is_live:
            self.problems.append(f"{self.name}: the camera or stream ended after {seconds + 1 / self.rate:.1f} s")
        elif index < 0:
            self.problems.append(f"{self.name}: no frame can be decoded")

    def _decode_packets(self) -> Iterator[av.VideoFrame]:
        for packet in self._read_packets():
            try:
                yield from self.stream.decode(packet)
            except av.error.FFmpegError as error:
                self.skip(error.strerror or type(error).__name__)

    def _read_packets(self) -> Iterator[Any]:
        while True:
            try:
                yield from self.container.demux(self.stream)
                return
            except BlockingIOError:  # some cameras raise it instead of waiting
                time.sleep(0.005)
            except av.error.FFmpegError as error:
                timed_out = isinstance(error, av.error.ExitError)
                reason = f"no data for {TIMEOUT:g} s" if timed_out else error.strerror
                self.problems.append(f"{self.name}: reading stopped: {reason}")
                yield None  # the decoder returns the frames that it holds
                return
