"""A video file for each event, cut from one encoded stream: frames are encoded once, whatever events overlap.

    pictures → Encoder → packets of the last seconds → a file per event, from a key frame before it

Packets are small, so the seconds before an event can wait in memory until the event is known.
"""

import io
import re
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
from PIL import Image

from ..files import DataError, atomic_write
from .annotation import Encoder
from .events import Event


SECONDS_AROUND = 1.0  # before and after an event
SLUG_LENGTH = 60
# Of complete clips, and of those that a killed run left.
NAME = re.compile(r"\.?\d{6,}\.\d{3}s_q\d+_[a-z0-9_-]*\.mp4(\.[0-9a-f]{32}\.tmp)?")


def clip_name(number: int, question: str, event: Event) -> str:
    """Name of the clip of an event of question `number`: "000012.400s_q1_is-there-a-bus_yes.mp4"."""
    slug = re.sub(r"[^a-z0-9]+", "-", question.lower()).strip("-")[:SLUG_LENGTH]
    answer = re.sub(r"[^a-z0-9]+", "-", event.answer.lower()).strip("-")[:SLUG_LENGTH]
    return f"{event.start:010.3f}s_q{number}_{slug}_{answer}.mp4"


def find_clips(folder: Path) -> list[Path]:
    """Files that this module wrote, by their names."""
    return [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []


@dataclass(eq=False)
class Clip:
    """An open file.

    Attributes:
        container, stream: FFmpeg's.
        first: time stamp of its first packet, which becomes 0.
        until: seconds of the source, where it ends.
        closing: closes the container, then renames the file.
    """

    container: Any
    stream: Any
    first: int
    until: float = float("inf")
    closing: ExitStack = field(default_factory=ExitStack)


class ClipWriter:
    """Writes clips of events as H.264 in MP4, each under a temporary name until it is complete.

    Args:
        rate: frames per second, a hint to players.
        delay: seconds after its start at which an event is known.

    Raises:
        DataError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, rate: float, delay: float):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"--clips {folder}: cannot be written to: {error}") from error
        self.folder, self.seconds_kept = folder, delay + SECONDS_AROUND
        self.encoder = Encoder(av.open(io.BytesIO(), "w", format="mp4"), rate)  # nothing is written to this container
        self.packets: deque[av.Packet] = deque()  # the first one is a key frame
        self.clips: dict[int, Clip] = {}  # of current events, by question
        self.ending: list[Clip] = []

    def add(self, seconds: float, picture: Image.Image) -> None:
        """Add an RGB frame, before the events that it begins or ends."""
        self._pass_on(self.encoder.encode(seconds, picture))
        keys = [index for index, packet in enumerate(self.packets) if packet.is_keyframe]
        old = [index for index in keys if _seconds(self.packets[index]) <= seconds - self.seconds_kept]
        for _ in range(old[-1] if old else 0):
            self.packets.popleft()

    def begin(self, number: int, question: str, event: Event) -> None:
        """Open the clip of an event of question `number`, with the frames before it."""
        closing = ExitStack()
        path = closing.enter_context(atomic_write(self.folder / clip_name(number, question, event)))
        container: Any = av.open(str(path), "w", format="mp4")
        closing.callback(container.close)
        template = self.encoder.stream
        stream = container.add_stream_from_template(template)
        stream.codec_context.extradata = template.codec_context.extradata  # the template leaves it out
        start = event.start - SECONDS_AROUND
        keys = [i for i, packet in enumerate(self.packets) if packet.is_keyframe and _seconds(packet) <= start]
        packets = list(self.packets)[keys[-1] if keys else 0 :]
        first = (packets[0].pts or 0) if packets else 0
        self.clips[number] = Clip(container, stream, first, closing=closing)
        for packet in packets:
            _write(self.clips[number], packet)

    def end(self, number: int, event: Event) -> None:
        """Let the clip of an event end soon after it."""
        clip = self.clips.pop(number)
        clip.until = (event.end or 0.0) + SECONDS_AROUND
        self.ending.append(clip)

    def close(self) -> None:
        """Complete all clips."""
        with ExitStack() as steps:
            steps.callback(self.encoder.container.close)
            for clip in (*self.clips.values(), *self.ending):
                steps.push(clip.closing)
            self._pass_on(self.encoder.flush())

    def _pass_on(self, packets: list[av.Packet]) -> None:
        for packet in packets:
            self.packets.append(packet)
            for clip in (*self.clips.values(), *self.ending):
                if _seconds(packet) < clip.until:
                    _write(clip, packet)
            for clip in [clip for clip in self.ending if _seconds(packet) >= clip.until]:
                self.ending.remove(clip)
                clip.closing.close()


def _seconds(packet: av.Packet) -> float:
    return float((packet.pts or 0) * packet.time_base)


def _write(clip: Clip, packet: av.Packet) -> None:
    copy = av.Packet(bytes(packet))  # a container takes what it writes
    copy.pts = copy.dts = (packet.pts or 0) - clip.first
    copy.time_base, copy.is_keyframe, copy.stream = packet.time_base, packet.is_keyframe, clip.stream
    clip.container.mux(copy)
