"""Frames of a video file, an image, a folder of images, a camera or a stream.

    open_source(name) → source.frames(): Frame(index, seconds, image), upright, in the colors and shape of a screen

- FFmpeg (PyAV) decodes and resizes videos, Pillow images, also animated ones. Both follow the rules of `to_rgb`:
  transparent pixels are white, and 16-bit pixels that use a part of their range are scaled from it, for a video once.
- Times start at 0 and never decrease. A frame without a usable time stamp follows the last one by 1 / frame rate.
- Frames that cannot be read are counted and skipped; `FrameSource.problems` describes them.
"""

import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.reformatter import ColorTrc, Interpolation, VideoReformatter
from PIL import Image
from PIL.Image import Transpose

from ..common.files import DataError
from ..common.image_files import IMAGE_SUFFIXES, READABLE, list_images, open_image
from ..images_traffic_vlm import ANIMATED, LOW_BITS, own_range, scale_pixels, to_rgb


DEFAULT_RATE = 25.0  # frames per second of images, and of videos that declare no rate, or one above MAX_RATE
MAX_RATE = 1000.0
TIMEOUT = 10.0  # seconds without data after which a stream counts as lost
DISORDER = 1.0  # seconds: time stamps that step back less are out of order
CAMERA_FORMATS = {"linux": "v4l2", "darwin": "avfoundation", "win32": "dshow"}
# These send at their own pace, whether frames are read or not. HTTP sends as fast as it is read.
LIVE_PROTOCOLS = ("rtsp", "rtsps", "rtmp", "rtmps", "rtp", "srt", "tcp", "udp")
PLAYLISTS = (".m3u", ".m3u8")
# With colors at full resolution: within half a level of the image processor.
EXACT = Interpolation.BICUBIC | Interpolation.ACCURATE_RND
EXACT |= Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP
DEEP = ("rgb48", "bgr48", "rgba64", "bgra64", "gbrp16", "gbrap16", "ya16")  # formats of 16 bits that are not YUV
WHOLE_RANGE = (0.0, 65535.0)
ROTATIONS = {90: Transpose.ROTATE_90, 180: Transpose.ROTATE_180, 270: Transpose.ROTATE_270}


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
        notes: assumptions that the user should know.
        problems: why frames are missing; complete when `frames` has ended.
        broken: number of images, or packets of a video, that could not be decoded.
    """

    def __init__(self, name: str, rate: float | None = None):
        self.name, self.rate, self.is_live, self.broken = hide_password(name), rate or DEFAULT_RATE, False, 0
        self.notes: list[str] = []
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
            self.problems.append(f"{self.name}: frames that cannot be read are skipped; the first error: {error}")


def open_source(name: str, frame_rate: float | None = None) -> FrameSource:
    """A video file, an image, a folder of images, a camera or a stream, ready to be read.

    Args:
        name: a path, a URL, a camera's device (`/dev/video0`, `video=NAME` on Windows) or its number.
        frame_rate: frames per second of images, and of videos without time stamps.

    Raises:
        ValueError: it does not exist, cannot be read, has no video or no images.
    """
    path = Path(name)
    if path.is_dir():
        return ImageSource(name, *list_images(path), frame_rate)
    if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES:
        with warnings.catch_warnings(action="ignore"):  # that one frame of several is read
            open_image(path)  # raises an error now, as the source has no other image
        with Image.open(path, formats=READABLE) as image:
            is_animated = image.format in ANIMATED and getattr(image, "is_animated", False)
        return AnimationSource(name, path, frame_rate) if is_animated else ImageSource(name, [path], "", frame_rate)
    if not path.exists() and not is_camera(name) and "://" not in name:
        raise DataError(f"{name}: no such file, folder, camera or stream")
    if path.is_file() and path.suffix.lower() in PLAYLISTS and b"://" in path.read_bytes():
        raise DataError(f"{name}: is a playlist with addresses of videos; give its URL in place of the file")
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
    """Image files as frames, 1 / frame rate each."""

    def __init__(self, name: str, paths: list[Path], left_out: str, frame_rate: float | None = None):
        super().__init__(name, frame_rate)
        self.paths = paths
        if frame_rate is None and len(paths) > 1:
            assumed = f"{self.rate:g} per second are assumed (--frame_rate)"
            self.notes.append(f"{self.name}: images have no times; {assumed}")
        if left_out:
            self.notes.append(f"{self.name}: {left_out}")

    def read(self) -> Iterator[tuple[float, Path]]:
        yield from ((index / self.rate, path) for index, path in enumerate(self.paths))

    def to_image(self, content: Path, side: int | None) -> Image.Image:
        return open_image(content)


class AnimationSource(FrameSource):
    """The frames of an animated image, each as long as the file says, or 1 / frame rate; the pages of a TIFF."""

    def __init__(self, name: str, path: Path, frame_rate: float | None = None):
        super().__init__(name, frame_rate)
        self.path = path

    def read(self) -> Iterator[tuple[float, Image.Image]]:
        seconds = 0.0
        with Image.open(self.path) as image:
            for index in range(image.n_frames):  # type: ignore[attr-defined]
                try:
                    image.seek(index)
                    image.load()
                except Exception as error:  # whatever the decoder of the format raises: the frames end here
                    return self.skip(error)
                yield seconds, image.copy()
                milliseconds = image.info.get("duration") or 1000 / self.rate  # 0: as fast as the program can
                seconds += milliseconds / 1000

    def to_image(self, content: Image.Image, side: int | None) -> Image.Image:
        return to_rgb(content)


# --- videos of high dynamic range ---


def _linear_hlg(signal: np.ndarray) -> np.ndarray:
    """Light of the scene, by BT.2100; a white surface, which has the signal 0.75, is 1."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    light = np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - c) / a) + b) / 12)
    return light / 0.265


def _linear_pq(signal: np.ndarray) -> np.ndarray:
    """Light of the screen, by BT.2100; a white surface, which has 203 cd/m² of 10,000 (BT.2408), is 1."""
    power = signal ** (32 / 2523)
    return (np.maximum(power - 107 / 128, 0) / (2413 / 128 - 2392 / 128 * power)) ** (16384 / 2610) / 0.0203


LEVELS = np.linspace(0, 1, 4096, dtype=np.float32)
LINEAR: dict[int, np.ndarray] = {ColorTrc.ARIB_STD_B67: _linear_hlg(LEVELS), ColorTrc.SMPTE2084: _linear_pq(LEVELS)}
SRGB = np.rint(255 * np.where(LEVELS < 0.0031308, 12.92 * LEVELS, 1.055 * LEVELS ** (1 / 2.4) - 0.055)).astype(
    np.uint8
)
BT709_FROM_BT2020 = np.array(
    [[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]], dtype=np.float32
)


def to_standard_range(pixels: np.ndarray, linear: np.ndarray) -> np.ndarray:
    """Pixels uint8 [H,W,3] of screens from uint16 of BT.2020, by a table [4096] of the light of their signals.

    Light above that of a white surface keeps its hue: red lamps stay red.
    """
    light = (linear[pixels >> 4] @ BT709_FROM_BT2020.T).clip(0)
    light /= light.max(-1, keepdims=True).clip(1)
    return SRGB[np.rint(light * 4095).astype(np.int16)]


# --- videos and streams ---


class VideoSource(FrameSource):
    """Video files, cameras and streams: all that FFmpeg can open.

    Args:
        timeout: seconds without data after which a stream counts as lost.
        clock: returns seconds: the times of JPEG frames over HTTP, which have none.
    """

    def __init__(
        self,
        name: str,
        frame_rate: float | None = None,
        timeout: float = TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(name, frame_rate)
        self.timeout, self.reformatter = timeout, VideoReformatter()  # which keeps FFmpeg's tables
        self.container, self.corrupt = self._open(name), 0  # number of packets that FFmpeg marks corrupt
        self.range: tuple[float, float] | None = None  # of 16-bit pixels, once measured
        self.clock = clock if self.container.format.name == "mpjpeg" and "://" in name else None
        self.is_live = bool(self.clock or is_camera(name) or name.partition("://")[0].lower() in LIVE_PROTOCOLS)
        if self.clock and frame_rate is not None:
            raise DataError(f"{self.name}: is a live stream, whose times are those of the clock: omit --frame_rate")
        self.stream = self.container.streams.best("video")
        if self.stream is None or self.stream.codec_context is None:
            raise DataError(f"{self.name}: has no video stream that can be decoded")
        declared = float(self.stream.guessed_rate or 0)
        self.rate = frame_rate or (declared if 0 < declared <= MAX_RATE else DEFAULT_RATE)
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
        aspect = self.stream.sample_aspect_ratio or 1  # the width of a pixel, as it is shown, divided by its height
        width = side or max(1, round(content.width * aspect))

        def pixels(layout: str) -> Any:
            return self.reformatter.reformat(content, width, side, layout, interpolation=EXACT)

        name, parts = content.format.name, content.format.components
        if content.color_trc in LINEAR:
            image = Image.fromarray(to_standard_range(pixels("rgb48le").to_ndarray(), LINEAR[content.color_trc]))
        elif parts[0].bits > 8 and name.startswith(("gray", *DEEP)):
            image = self._scale(pixels("gray16le" if name.startswith("gray") else "rgba64le").to_ndarray())
        elif any(part.is_alpha for part in parts):
            image = to_rgb(Image.fromarray(pixels("rgba").to_ndarray()))
        else:
            image = pixels("rgb24").to_image()
        turn = ROTATIONS.get(content.rotation % 360)  # phones record sideways and note it
        return image if turn is None else image.transpose(turn)

    def _scale(self, array: np.ndarray) -> Image.Image:
        """RGB image of 16-bit pixels, by the range of the first frame that has one, as `to_rgb` scales a picture."""
        colors = array if array.ndim == 2 else array[..., :3]
        if self.range is None and colors.min() < colors.max():
            is_scaled = array.ndim == 2 or colors.max() < LOW_BITS
            self.range = own_range(colors) if is_scaled else WHOLE_RANGE
        scaled = scale_pixels(array, *(self.range or WHOLE_RANGE))
        if array.ndim == 3:
            scaled[..., 3] = array[..., 3] >> 8
        return to_rgb(Image.fromarray(scaled))

    def read(self) -> Iterator[tuple[float, av.VideoFrame]]:
        seconds = -1 / self.rate  # the first frame follows, at 0
        last: float | None = None  # the highest time stamp
        base = float(self.stream.time_base)  # read now: the frames that follow an error do not have it
        with self.container:
            for pixels in self.decode():
                stamp = self.clock() if self.clock else None if pixels.pts is None else pixels.pts * base
                if stamp is None or last is None or stamp < last - DISORDER:  # no time, or a second recording begins
                    seconds, last = seconds + 1 / self.rate, stamp
                elif stamp > last:
                    seconds, last = seconds + stamp - last, stamp
                yield seconds, pixels
        if self.corrupt:
            damaged = f"{self.name}: damaged packets, whose frames may be wrong: {self.corrupt:,}"
            (self.notes if self.is_live else self.problems).append(damaged)
        if seconds < 0:
            self.problems.append(f"{self.name}: no frame can be decoded")
        elif self.is_live:
            self.problems.append(f"{self.name}: the camera or stream ended after {seconds + 1 / self.rate:.1f} s")

    def decode(self) -> Iterator[av.VideoFrame]:
        """Yield the frames of all packets that can be decoded."""
        while True:
            try:
                for packet in self.container.demux(self.stream):
                    self.corrupt += packet.is_corrupt
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
