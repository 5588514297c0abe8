"""Frames of a video file, a folder of images, a camera or a stream, small as the model wants them.

    open_source(name) → Source.pictures(): number, seconds, picture → read_frames(): the wanted ones as [224,224,3]

What is special here:
- decoding, colour conversion and resizing are FFmpeg's (PyAV), in one call for a frame; Python touches no pixels;
- times begin at 0 and never go back; where a video has no time stamps, its frame rate takes their place;
- what breaks in the middle ends the frames, not the program: `Notes` keeps what there is to say.
"""

import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..data.formats import IMAGE_ERRORS, IMAGE_SUFFIXES
from ..images_traffic_vlm import to_rgb
from ..utils import DataError


MAX_PIXELS = 8192 * 8192  # of a frame: twice an 8K video
DEFAULT_RATE = 25.0  # frames per second of images, and of a video that says nothing about it
PATIENCE = 10.0  # seconds without a frame after which a camera or a stream is gone
RESTART = 0.5  # seconds by which time stamps go back where another recording begins
SHORTFALL = 0.5  # seconds that a file may lack of what it declares
MAX_NOTES = 50
UNSPECIFIED = 2  # FFmpeg's number of a colour space that nobody named
HD = 720  # lines from which such a one is that of HDTV
CAMERAS = {"linux": ("v4l2", "/dev/video{}"), "darwin": ("avfoundation", "{}")}
# They send whether or not anybody reads; over HTTP frames come as fast as one asks for them.
PUSHED = ("rtsp", "rtsps", "rtmp", "rtmps", "rtp", "srt", "tcp", "udp")


def import_av() -> Any:
    """PyAV.

    Raises:
        DataError: it is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise DataError('watching videos needs PyAV: pip install ".[video]" in the repository') from error
    return av


@dataclass
class Notes:
    """What the user should know of a run, said at once and kept for the summary.

    Attributes:
        notes: what is worth knowing. problems: what kept frames from being seen.
        say: how it is said.
    """

    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        self._keep(self.notes, text)

    def problem(self, text: str) -> None:
        self._keep(self.problems, text)

    def _keep(self, kept: list[str], text: str) -> None:
        if len(kept) < MAX_NOTES:
            kept.append(text)
            self.say(text)
        elif len(kept) == MAX_NOTES:
            kept.append("... and more")


class Clock:
    """Time stamps to seconds that begin at 0 and never go back.

    A missing one is `step` seconds after the last; where they begin anew (two recordings in one file), they go on.
    """

    def __init__(self, step: float):
        self.step = step
        self.missing = 0
        self._last: float | None = None
        self._shift: float | None = None

    def __call__(self, stamp: float | None) -> float:
        following = 0.0 if self._last is None else self._last + self.step
        if stamp is None:
            self.missing += 1
            seconds = following
        else:
            if self._shift is None:
                self._shift = stamp - following
            seconds = stamp - self._shift
            if self._last is not None and seconds < self._last - RESTART:
                self._shift = stamp - following
                seconds = following
        self._last = seconds = max(seconds, self._last or 0.0)
        return seconds


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One frame to answer questions about.

    Attributes:
        number: of the source's frames, from 0; those that `fps` leaves out count.
        time: seconds from the first frame.
        pixels: uint8 [size,size,3], RGB.
        picture: uint8 [H,W,3], RGB, for the annotated video; None if there is to be none.
    """

    number: int
    time: float
    pixels: np.ndarray
    picture: np.ndarray | None = None


class Source:
    """Where frames come from.

    Attributes:
        name: what the user typed.
        is_live: its frames come when they come, and are lost if nobody takes them.
        rate: frames per second, as declared or assumed.
        duration: seconds, None if unknown.
    """

    name: str
    notes: Notes
    is_live = False
    rate: float = DEFAULT_RATE
    duration: float | None = None

    def pictures(self) -> Iterator[tuple[int, float, Any]]:
        """Number, seconds and picture of every frame that can be read."""
        raise NotImplementedError

    def shape(self, picture: Any) -> tuple[int, int]:
        """Width and height of a picture as a person sees it."""
        raise NotImplementedError

    def pixels(self, picture: Any, width: int, height: int) -> np.ndarray:
        """A picture as uint8 [height,width,3], RGB, squeezed."""
        raise NotImplementedError


def open_source(name: str, notes: Notes | None = None, frame_rate: float | None = None) -> Source:
    """Open a video file, a folder of images, an image, a camera or a stream.

    Args:
        name: a path, a URL, a camera's device (`/dev/video0`, `video=NAME` on Windows) or its number.
        notes: where to say what is to be said.
        frame_rate: frames per second of images, and of videos without time stamps.

    Raises:
        DataError: there is no such thing, it cannot be read, has no frames, or they are too large.
    """
    notes = notes or Notes()
    path = Path(name)
    if path.is_dir():
        return FolderSource(name, list_images(path), notes, frame_rate)
    if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES:
        return FolderSource(name, [path], notes, frame_rate)
    if not path.exists() and not looks_live(name):
        raise DataError(f"{name}: no such file, folder, camera or stream")
    return StreamSource(name, notes, frame_rate)


def looks_live(name: str) -> bool:
    """Whether a name is that of a camera or a stream, not of a file."""
    if "://" in name or name.startswith(("/dev/", "video=")):
        return True
    return name.isdigit() and not Path(name).exists()


def list_images(folder: Path) -> list[Path]:
    """The images of a folder in the order of their names, numbers in them by value: 9.jpg comes before 10.jpg.

    Raises:
        DataError: there is none.
    """
    found = [path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()]
    if not found:
        raise DataError(f"{folder}: has no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    parts = {path: re.split(r"(\d+)", path.name) for path in found}
    return sorted(found, key=lambda path: [(int(p), p) if i % 2 else (0, p) for i, p in enumerate(parts[path])])


class FolderSource(Source):
    """Image files as frames, `frame_rate` of them a second."""

    def __init__(self, name: str, paths: list[Path], notes: Notes, frame_rate: float | None = None):
        self.name, self.paths, self.notes = name, paths, notes
        self.rate = frame_rate or DEFAULT_RATE
        self.duration = len(paths) / self.rate
        if frame_rate is None and len(paths) > 1:
            notes.note(f"{name}: images have no times; {self.rate:g} per second are assumed (--frame_rate)")

    def pictures(self) -> Iterator[tuple[int, float, Image.Image]]:
        for number, path in enumerate(self.paths):
            try:
                picture = self._open(path)
            except (DataError, *IMAGE_ERRORS) as error:
                self.notes.problem(f"frame {number} is left out: {error}")
                continue
            yield number, number / self.rate, picture

    def _open(self, path: Path) -> Image.Image:
        try:
            image = Image.open(path)  # reads no more than its header
        except Image.DecompressionBombError as error:
            raise DataError(f"{path} is larger than {MAX_PIXELS:,} pixels, the limit") from error
        except IMAGE_ERRORS as error:
            raise DataError(f"{path} cannot be read as an image") from error
        with image:
            check_size(str(path), *image.size)
            return to_rgb(image)

    def shape(self, picture: Image.Image) -> tuple[int, int]:
        return picture.size

    def pixels(self, picture: Image.Image, width: int, height: int) -> np.ndarray:
        return np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC))


def check_size(name: str, width: int, height: int) -> None:
    """Raises DataError for a frame of more than MAX_PIXELS."""
    if width * height > MAX_PIXELS:
        raise DataError(f"{name}: {width} x {height} pixels are more than {MAX_PIXELS:,}, the limit")


def reason(error: Exception) -> str:
    """What FFmpeg says of an error, without the numbers around it."""
    if type(error).__name__ == "ExitError":  # "Immediate exit requested"
        return f"nothing came for {PATIENCE:g} s"
    log = getattr(error, "log", None)  # level, part of FFmpeg, text
    what = str(getattr(error, "strerror", None) or error)
    return f"{what} ({log[2].strip()})" if log else what


class StreamSource(Source):
    """What FFmpeg can open: video files, cameras and streams."""

    def __init__(self, name: str, notes: Notes, frame_rate: float | None = None):
        av = import_av()
        self.name, self.notes, self.av = name, notes, av
        self.container = self._open()
        try:
            self.stream = self._choose_stream()
            width, height = self.stream.codec_context.width, self.stream.codec_context.height
            check_size(name, width, height)
        except DataError:
            self.container.close()
            raise
        # Frames larger than this are refused by the decoder too, should the size change on the way.
        self.stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}
        declared = self.stream.guessed_rate or self.stream.average_rate
        has_rate = declared is not None and 0 < declared <= 1000
        self.rate = frame_rate or (float(declared) if has_rate else DEFAULT_RATE)
        self.assumption = "" if frame_rate or has_rate else ", which is a guess (--frame_rate)"
        self.is_pushed = self.is_camera or name.partition("://")[0].lower() in PUSHED
        whole = self.container.duration
        self.is_live = self.is_pushed or ("://" in name and not whole)
        if not self.is_live:
            self.stream.thread_type = "AUTO"  # by frames as well, which for a live one would mean a delay
            self.duration = whole / av.time_base if whole else None
        self.seen_size: tuple[int, int] | None = None
        self.reformatters: dict[tuple[int, int], Any] = {}  # for each size one, which keeps its tables

    def _open(self) -> Any:
        name, options, form = self.name, {"max_pixels": str(MAX_PIXELS)}, None
        self.is_camera = looks_live(name) and "://" not in name
        if self.is_camera:
            form, name = camera(name)
        elif name.startswith("rtsp"):
            options["rtsp_transport"] = "tcp"  # over UDP lost packets become smeared frames
        timeout = PATIENCE if looks_live(self.name) else None
        logging = self.av.logging
        level = logging.get_level()
        try:
            logging.set_level(logging.PANIC)  # prints nothing yet, but lets errors say what FFmpeg said of them
            return self.av.open(name, format=form, options=options, timeout=timeout)
        except self.av.error.FFmpegError as error:
            raise DataError(self._why_not(error)) from error
        except (OSError, ValueError) as error:
            raise DataError(f"{self.name}: cannot be opened: {error}") from error
        finally:
            logging.set_level(level)

    def _why_not(self, error: Exception) -> str:
        why = reason(error)
        if "Picture size" in why:
            return f"{self.name}: its frames are larger than {MAX_PIXELS:,} pixels, the limit ({why})"
        if self.is_camera or "://" in self.name:
            return f"{self.name}: no such camera or stream, or it does not answer within {PATIENCE:g} s ({why})"
        if "moov" in why:
            why += ": not a video, or one whose end, with its index, is missing"
        return f"{self.name}: cannot be read as a video: {why}"

    def _choose_stream(self) -> Any:
        cover = self.av.stream.Disposition.attached_pic  # the picture of a piece of music
        for stream in self.container.streams.video:
            if not stream.disposition & cover:
                if stream.codec_context is None:
                    raise DataError(f"{self.name}: no decoder for its video is at hand")
                return stream
        kinds = ", ".join(sorted({stream.type for stream in self.container.streams})) or "nothing"
        raise DataError(f"{self.name}: has no video stream, only {kinds}")

    def pictures(self) -> Iterator[tuple[int, float, Any]]:
        clock, pacer, number, broken = Clock(1 / self.rate), Pacer(), 0, 0
        seconds = -1 / self.rate
        base = float(self.stream.time_base)  # the last frames come without it, after an error
        try:
            for packet in self._packets():
                try:
                    decoded = self.stream.decode(packet)
                except self.av.error.FFmpegError as error:
                    broken += 1
                    if broken == 1 and not self.is_live:  # one joins a stream in the middle of something
                        self.notes.problem(f"{self.name}: part of it cannot be decoded: {reason(error)}")
                    continue
                for picture in decoded:
                    seconds = clock(None if picture.pts is None else picture.pts * base)
                    self._watch_size(number, picture)
                    if picture.pts is None and clock.missing == 1:
                        text = f"{self.name}: no time stamps; {self.rate:g} frames per second count{self.assumption}"
                        self.notes.note(text)
                    if self.is_live and not self.is_pushed:
                        pacer.wait(seconds)
                    yield number, seconds, picture
                    number += 1
        finally:
            self.container.close()
        self._check_end(number, seconds + 1 / self.rate, broken)

    def _packets(self) -> Iterator[Any]:
        """Packets up to the end or to an error, and None at last, upon which the decoder gives what it holds."""
        while True:
            try:
                yield from self.container.demux(self.stream)
                return
            except self.av.error.BlockingIOError:  # some cameras say so where they should wait
                time.sleep(0.005)
            except self.av.error.EOFError:
                break
            except self.av.error.FFmpegError as error:
                self.notes.problem(f"{self.name}: reading stopped: {reason(error)}; what was seen is kept")
                break
        yield None

    def _watch_size(self, number: int, picture: Any) -> None:
        size = (picture.width, picture.height)
        if self.seen_size not in (None, size):
            old = "{} x {}".format(*self.seen_size)
            self.notes.note(f"{self.name}: frames change from {old} to {size[0]} x {size[1]} at frame {number}")
        self.seen_size = size

    def _check_end(self, frames: int, seconds: float, broken: int) -> None:
        if broken > 1 and not self.is_live:
            self.notes.problem(f"{self.name}: {broken} parts of it cannot be decoded")
        if self.is_live:
            self.notes.problem(f"{self.name}: the camera or stream ended after {seconds:.1f} s; what was seen is kept")
        elif not frames:
            self.notes.problem(f"{self.name}: no frame of it can be decoded")
        elif self.duration is not None:
            own = self.stream.duration and float(self.stream.duration * self.stream.time_base)
            # The duration of a whole file may be that of its sound, which may be a little longer.
            whole = own or self.duration - 3 * SHORTFALL
            if seconds < whole - SHORTFALL:
                text = f"{self.name}: declares {self.duration:.1f} s, only {seconds:.1f} s ({frames} frames) are there"
                self.notes.problem(f"{text}: its end is missing; what was seen is kept")

    def shape(self, picture: Any) -> tuple[int, int]:
        turned = picture.rotation % 180 == 90
        return (picture.height, picture.width) if turned else (picture.width, picture.height)

    def pixels(self, picture: Any, width: int, height: int) -> np.ndarray:
        quarters = round(picture.rotation / 90)  # telephones record lying, and say how to turn it
        if quarters % 2:
            width, height = height, width
        kinds = self.av.video.reformatter
        # As the processor resizes: bicubic, and averaging where it makes smaller.
        good = kinds.Interpolation.BICUBIC | kinds.Interpolation.ACCURATE_RND
        good |= kinds.Interpolation.FULL_CHR_H_INT | kinds.Interpolation.FULL_CHR_H_INP
        unnamed_hd = picture.colorspace == UNSPECIFIED and picture.height >= HD and not picture.format.is_rgb
        space = kinds.Colorspace.ITU709 if unnamed_hd else None
        scaler = self.reformatters.setdefault((width, height), kinds.VideoReformatter())
        image = scaler.reformat(picture, width, height, "rgb24", src_colorspace=space, interpolation=good, threads=1)
        return np.rot90(image.to_ndarray(), quarters)


def camera(name: str) -> tuple[str, str]:
    """FFmpeg's name of the kind of camera, and of the camera, for a device or a number.

    Raises:
        DataError: cameras have no numbers on this system.
    """
    if name.startswith("video="):
        return "dshow", name
    if not name.isdigit():
        return "v4l2", name
    if sys.platform not in CAMERAS:
        raise DataError(f'camera {name}: cameras have no numbers here; on Windows write "video=NAME OF THE CAMERA"')
    form, device = CAMERAS[sys.platform]
    return form, device.format(name)


class Pacer:
    """Holds frames back that a live stream delivers in heaps (HLS), so that none is late for want of time to look."""

    def __init__(self) -> None:
        self._start: float | None = None

    def wait(self, seconds: float) -> None:
        """Sleep until a frame of that time is due; one that comes late puts off those after it."""
        now = time.monotonic()
        if self._start is None or now - self._start > seconds:
            self._start = now - seconds
        time.sleep(min(self._start + seconds - now, PATIENCE / 2))


def is_wanted(seconds: float, fps: float | None, last: int) -> tuple[bool, int]:
    """Whether a frame is the first at or after a multiple of 1/fps seconds, and the number of that multiple."""
    if fps is None:
        return True, last
    tick = math.floor(seconds * fps + 1e-6)  # thirty times a third is a little less than ten
    return tick > last, max(tick, last)


def read_frames(
    source: Source, size: int = 224, fps: float | None = None, picture_size: Callable | None = None
) -> Iterator[Frame]:
    """The frames of a source as the model wants them.

    Args:
        size: width and height of the pixels.
        fps: at most so many frames a second; by default all.
        picture_size: width and height of `Frame.picture` from those of the first picture; by default there is none.
    """
    last, shape = -1, None
    pictures = source.pictures()
    try:
        for number, seconds, picture in pictures:
            wanted, last = is_wanted(seconds, fps, last)
            if not wanted:
                continue
            if picture_size is not None and shape is None:
                shape = picture_size(*source.shape(picture))
            large = None if shape is None else source.pixels(picture, *shape)
            yield Frame(number, seconds, source.pixels(picture, size, size), large)
    finally:
        pictures.close()  # type: ignore[attr-defined]
