"""Frames of a video file, a folder of images, a camera or a stream.

    open_source(name) → source.frames(): Frame(index, seconds, image), resized for the model

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

from ..files import DataError
from ..image_files import list_images, open_image
from ..images_traffic_vlm import Region


MAX_PIXELS = 8192 * 8192  # per frame: twice an 8K video
DEFAULT_RATE = 25.0  # frames per second of images, and of videos that declare no rate
TIMEOUT = 10.0  # seconds without data after which a stream counts as lost
# What a complete video may lack: frames of the duration that it declares for its pictures, or seconds of any other
# duration, which can be that of the longer sound, or estimated.
TOLERANCE_FRAMES = 1.5
TOLERANCE = 1.5
CAMERA_FORMATS = {"linux": "v4l2", "darwin": "avfoundation", "win32": "dshow"}
# These send at their own pace, whether frames are read or not. HTTP sends as fast as it is read.
LIVE_PROTOCOLS = ("rtsp", "rtsps", "rtmp", "rtmps", "rtp", "srt", "tcp", "udp")
# Bicubic, with colors at full resolution: within half a level of the image processor.
RESIZE = (
    Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP
)


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One frame to answer questions about.

    Attributes:
        index: of the frame in the source, from 0. Frames that `fps` skips count too.
        seconds: from the first frame.
        image: RGB, size × size, squeezed.
        picture: RGB, for the annotated video and clips; None without them.
    """

    index: int
    seconds: float
    image: Image.Image
    picture: Image.Image | None = None


class Source:
    """Base of folders of images and of videos.

    Attributes:
        name: as the user gave it.
        rate: frames per second, declared or assumed.
        duration: seconds, None if unknown.
        is_live: frames arrive at their own pace and are lost if nothing takes them.
        notes: assumptions that the user should know.
        problems: why frames are missing; complete when `frames` has ended.
        broken: number of images, or packets of a video, that could not be decoded.
    """

    def __init__(self, name: str, rate: float | None = None):
        self.name = name
        self.rate = rate or DEFAULT_RATE
        self.duration: float | None = None
        self.is_live = False
        self.notes: list[str] = []
        self.problems: list[str] = []
        self.broken = 0

    def _decode(self) -> Iterator[tuple[int, float, av.VideoFrame]]:
        """Yield index, seconds and image of every frame that can be read."""
        raise NotImplementedError

    def frames(
        self,
        size: int,
        fps: float | None = None,
        picture_size: Callable | None = None,
        region: Region | None = None,
    ) -> Iterator[Frame]:
        """Read the frames.

        Args:
            size: width and height of `Frame.image`.
            fps: take only the first frame in every 1/fps seconds; by default all frames.
            picture_size: maps (width, height) of the first frame to the size of `Frame.picture`.
            region: the part of each frame that is `Frame.image`; `Frame.picture` is whole.
        """
        resizers = VideoReformatter(), VideoReformatter()  # kept, as each keeps FFmpeg's tables for its size
        last, shape = -1, None
        for index, seconds, picture in self._decode():
            tick = index if fps is None else math.floor(seconds * fps + 1e-6)  # 30 times 1/30 s may be below 1 s
            if tick <= last:
                continue
            last = tick
            is_turned = picture.rotation % 180 == 90
            sides = (picture.height, picture.width) if is_turned else (picture.width, picture.height)
            if picture_size is not None and shape is None:
                shape = picture_size(*sides)
            image = resize(resizers[0], picture, *((size, size) if region is None else sides))
            if region is not None:
                image = region.crop(image).resize((size, size), Image.Resampling.BICUBIC)
            yield Frame(index, seconds, image, None if shape is None else resize(resizers[1], picture, *shape))

    def skip(self, error: Exception | str) -> None:
        """Count a broken frame, and describe the first one."""
        self.broken += 1
        if self.broken == 1:
            self.problems.append(f"{self.name}: frames that cannot be read are skipped; the first error: {error}")


def resize(resizer: VideoReformatter, picture: av.VideoFrame, width: int, height: int) -> Image.Image:
    """Convert a frame to an upright RGB image: phones record sideways, and store how to turn the frames."""
    if picture.rotation % 180 == 90:
        width, height = height, width
    image = resizer.reformat(picture, width, height, "rgb24", interpolation=RESIZE).to_image()
    return image.rotate(picture.rotation, expand=True) if picture.rotation else image


def open_source(name: str, frame_rate: float | None = None) -> Source:
    """Open a video file, a folder of images, a camera or a stream.

    Args:
        name: a path, a URL, a camera's device (`/dev/video0`, `video=NAME` on Windows) or its number.
        frame_rate: frames per second of images, and of videos without time stamps.

    Raises:
        DataError: it does not exist, cannot be read, has no video or no images, or its frames are too large.
    """
    path = Path(name)
    if path.is_dir():
        paths, note = list_images(path)
        source = ImageSource(name, paths, frame_rate)
        source.notes += [note] if note else []
        return source
    if not path.exists() and not is_camera(name) and "://" not in name:
        raise DataError(f"{name}: no such file, folder, camera or stream")
    return VideoSource(name, frame_rate)


def is_camera(name: str) -> bool:
    """Whether the name is that of a camera."""
    return name.startswith(("/dev/", "video=")) or (name.isdecimal() and not Path(name).exists())


class ImageSource(Source):
    """Image files as frames."""

    def __init__(self, name: str, paths: list[Path], frame_rate: float | None = None):
        super().__init__(name, frame_rate)
        self.paths = paths
        self.duration = len(paths) / self.rate
        if frame_rate is None:
            self.notes.append(f"{name}: images have no times; {self.rate:g} per second are assumed (--frame_rate)")

    def _decode(self) -> Iterator[tuple[int, float, av.VideoFrame]]:
        for index, path in enumerate(self.paths):
            try:
                picture = open_image(path, max_pixels=MAX_PIXELS)
            except ValueError as error:
                self.skip(error)
                continue
            yield index, index / self.rate, av.VideoFrame.from_image(picture)


class VideoSource(Source):
    """Video files, cameras and streams: all that FFmpeg can open."""

    def __init__(self, name: str, frame_rate: float | None = None):
        super().__init__(name, frame_rate)
        self.is_live = is_camera(name) or name.partition("://")[0].lower() in LIVE_PROTOCOLS
        self.container = self._open()
        try:
            self.stream = self._choose_stream()
        except DataError:
            self.container.close()
            raise
        declared = self.stream.guessed_rate or self.stream.average_rate
        if frame_rate is None and declared and 0 < declared <= 1000:
            self.rate = float(declared)
        if not self.is_live:
            self.duration = self.container.duration / av.time_base if self.container.duration else None
            self.stream.thread_type = "AUTO"  # threads over frames; they would delay a live source

    def _open(self) -> Any:
        name, options, camera_format = self.name, {}, None
        is_stream = "://" in name
        if is_camera(name):
            camera_format = CAMERA_FORMATS.get(sys.platform, "v4l2")
            if name.isdecimal() and camera_format == "v4l2":
                name = f"/dev/video{name}"
        elif name.lower().startswith("rtsp"):
            options["rtsp_transport"] = "tcp"  # with UDP, lost packets become smeared frames
        try:
            return av.open(name, format=camera_format, options=options, timeout=TIMEOUT if is_stream else None)
        except (av.error.FFmpegError, OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            problem = "cannot be read as a video"
            if camera_format or is_stream:
                problem = f"no such camera or stream, or no answer within {TIMEOUT:g} s"
            raise DataError(f"{self.name}: {problem}: {reason}") from error

    def _choose_stream(self) -> Any:
        streams = [stream for stream in self.container.streams.video if stream.codec_context is not None]
        if not streams:
            found = ", ".join(sorted({stream.type for stream in self.container.streams})) or "nothing"
            raise DataError(f"{self.name}: has no video stream that can be decoded, only {found}")
        decoder = streams[0].codec_context
        if decoder.width * decoder.height > MAX_PIXELS:
            size = f"{decoder.width} x {decoder.height}"
            raise DataError(f"{self.name}: {size} pixels are more than {MAX_PIXELS:,}, the limit")
        decoder.options = {"max_pixels": str(MAX_PIXELS)}  # the size may change later
        return streams[0]

    def _decode(self) -> Iterator[tuple[int, float, av.VideoFrame]]:
        index, seconds, end = -1, 0.0, 0.0
        last: float | None = None
        start = self.stream.start_time or 0
        base = float(self.stream.time_base)  # after an error, the last frames come without it
        with self.container:
            for index, picture in enumerate(self._decode_packets()):
                stamp = None if picture.pts is None else picture.pts * base
                if stamp is not None and last is not None and stamp >= last:
                    seconds += stamp - last
                elif index:  # also where a second recording starts within the file, and its time stamps at 0
                    seconds += 1 / self.rate
                last = stamp
                if picture.pts is not None:  # the last picture of a recorded screen can stand for seconds
                    end = max(end, (picture.pts - start + (picture.duration or 0)) * base)
                yield index, seconds, picture
            # Before the container is closed, which frees what the stream says of itself.
            self._check_end(index + 1, max(end, seconds + 1 / self.rate))

    def _decode_packets(self) -> Iterator[av.VideoFrame]:
        for packet in self._read_packets():
            try:
                yield from self.stream.decode(packet)
            except av.error.FFmpegError as error:
                self.skip(error.strerror or error)

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

    def _check_end(self, frames: int, seconds: float) -> None:
        if self.is_live:
            self.problems.append(f"{self.name}: the camera or stream ended after {seconds:.1f} s")
        elif not frames:
            self.problems.append(f"{self.name}: no frame can be decoded")
        elif self.duration is not None:
            own = self.stream.duration and float(self.stream.duration * self.stream.time_base)
            declared = self._declared_seconds()
            tolerance = TOLERANCE if declared is None else TOLERANCE_FRAMES / self.rate
            declared = declared or own or self.duration
            if seconds < declared - tolerance:
                self.problems.append(
                    f"{self.name}: the end is missing: {seconds:.1f} s of {declared:.1f} s ({frames} frames) were read"
                )

    def _declared_seconds(self) -> float | None:
        """The duration of the pictures as the file declares it, whatever is left of the file; None if it does not.

        FFmpeg estimates the duration of other files by their last time stamps.
        """
        stream, name = self.stream, self.container.format.name
        if "matroska" in name:
            match = re.fullmatch(r"(\d+):(\d+):([\d.]+)", stream.metadata.get("DURATION", ""))  # to the end
            end = match and 3600 * int(match[1]) + 60 * int(match[2]) + float(match[3])
            return end and end - float((stream.start_time or 0) * stream.time_base)
        ticks = {"avi": stream.frames, "mov,mp4,m4a,3gp,3g2,mj2": stream.duration}.get(name)
        return float(ticks * stream.time_base) if ticks else None
