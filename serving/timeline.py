"""What a watcher writes of the answers: a Parquet timeline, a table of events, and a picture of both.

Rows go to small Parquet files that are complete when they get their name, and become one file at the end: a run that
is killed leaves all but the last seconds in `timeline/`, which any reader of Parquet takes as one table.
"""

import csv
import math
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..utils import DataError
from .events import Event


PART_SECONDS = 5.0  # the most that a killed run loses
GROUP_ROWS = 65_536  # of a row group; as many waiting rows are written at once
EVENT_COLUMNS = ("question", "start", "end", "peak", "is_cut")
COLUMNS = 1200  # of the picture: so many spans of time at most, each with its lowest, mean and highest probability
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400)  # seconds between ticks
LINE, AREA, YES, ALARM, QUIET = "#2166ac", "#a9c9e4", "#f4a582", "#b2182b", "#8a8a8a"


def import_parquet() -> Any:
    """Raises DataError if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError('a timeline needs pyarrow: pip install ".[video]" in the repository') from error
    return pyarrow


class TimelineWriter:
    """Rows (frame, time, question, probability) to `timeline.parquet` in a folder, in order of time.

    Args:
        folder: where to write; it must be there.
        questions: the standing questions, Q of them.
    """

    def __init__(self, folder: Path, questions: Sequence[str]):
        self.pa = import_parquet()
        self.path, self.parts = folder / "timeline.parquet", folder / "timeline"
        self.questions = list(questions)
        self.parts.mkdir()
        self.count = 0  # of parts
        self._clear()

    def _clear(self) -> None:
        self.frames: list[int] = []
        self.times: list[float] = []
        self.rows: list[np.ndarray] = []
        self.since = time.monotonic()

    def add(self, number: int, seconds: float, probabilities: np.ndarray) -> None:
        """The answers [Q] to all questions about a frame."""
        self.frames.append(number)
        self.times.append(seconds)
        self.rows.append(probabilities)
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Write what has waited long enough."""
        if len(self.frames) * len(self.questions) >= GROUP_ROWS or time.monotonic() - self.since > PART_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write a part, if there is anything for it."""
        if not self.frames:
            self.since = time.monotonic()
            return
        asked = len(self.questions)
        table = self.pa.table(
            {
                "frame": np.repeat(np.array(self.frames, dtype=np.int64), asked),
                "time": np.repeat(np.array(self.times, dtype=np.float64), asked),
                "question": self.pa.array(self.questions * len(self.frames)),
                "probability": np.concatenate(self.rows).astype(np.float32),
            }
        )
        path = self.parts / f"part-{self.count:06d}.parquet"
        temporary = path.with_name(f".{path.name}.tmp")  # readers of a folder pass over names that begin with a dot
        self.pa.parquet.write_table(table, temporary)
        os.replace(temporary, path)
        self.count += 1
        self._clear()

    def close(self) -> None:
        """Write the rest, and put the parts together."""
        self.flush()
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        paths = sorted(self.parts.glob("part-*.parquet"))
        if paths:
            with self.pa.parquet.ParquetWriter(temporary, self.pa.parquet.read_schema(paths[0])) as writer:
                waiting: list[Any] = []  # for a row group
                for path in paths:
                    waiting.append(self.pa.parquet.read_table(path))
                    if path == paths[-1] or sum(table.num_rows for table in waiting) >= GROUP_ROWS:
                        writer.write_table(self.pa.concat_tables(waiting))
                        waiting = []
            os.replace(temporary, self.path)
        shutil.rmtree(self.parts)


class EventLog:
    """Events as lines of a CSV file, each written when the event is over."""

    def __init__(self, path: Path):
        self.file = path.open("w", newline="", encoding="utf-8")
        self.writer = csv.writer(self.file)
        self.writer.writerow(EVENT_COLUMNS)
        self.file.flush()

    def add(self, question: str, event: Event) -> None:
        self.writer.writerow([question, f"{event.start:.3f}", f"{event.end:.3f}", f"{event.peak:.4f}", event.is_cut])
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def read_events(path: Path) -> list[tuple[str, Event]]:
    """(question, event) of each line that an `EventLog` wrote, in order of their ends."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [
        (row["question"], Event(float(row["start"]), float(row["end"]), float(row["peak"]), row["is_cut"] == "True"))
        for row in rows
    ]


def clock_time(seconds: float) -> str:
    """1:02:03.4 of 3723.4 seconds."""
    tenths = round(seconds * 10)
    minutes, rest = divmod(tenths, 600)
    hours, minutes = divmod(minutes, 60)
    start = f"{hours}:{minutes:02d}" if hours else f"{minutes}"
    return f"{start}:{rest // 10:02d}.{rest % 10}"


def bin_timeline(path: Path, questions: Sequence[str], columns: int = COLUMNS) -> dict[str, np.ndarray]:
    """A timeline of any length in a few spans of time, read row group by row group.

    Returns:
        `time` [T], the middle of each span that has frames, and `low`, `mean`, `high` [T,Q] of the probability there.
    """
    file = import_parquet().parquet.ParquetFile(path)
    asked, groups = len(questions), range(file.num_row_groups)
    last = max(float(file.read_row_group(group, ["time"])["time"].to_numpy().max()) for group in groups)
    columns = max(1, min(columns, file.metadata.num_rows // asked))
    width = last / columns or 1.0
    low, high = np.full((columns, asked), np.inf), np.full((columns, asked), -np.inf)
    total, count = np.zeros((columns, asked)), np.zeros(columns, dtype=np.int64)
    for group in groups:
        table = file.read_row_group(group, ["time", "probability"])
        # Rows stand frame by frame, and in each in the order of the questions.
        times = table["time"].to_numpy().reshape(-1, asked)[:, 0]
        values = table["probability"].to_numpy().reshape(-1, asked).astype(np.float64)
        place = np.minimum((times / width).astype(np.int64), columns - 1)
        np.minimum.at(low, place, values)
        np.maximum.at(high, place, values)
        np.add.at(total, place, values)
        np.add.at(count, place, 1)
    seen = count > 0
    mean = total[seen] / count[seen][:, None]
    return {"time": (np.flatnonzero(seen) + 0.5) * width, "low": low[seen], "mean": mean, "high": high[seen]}


def draw_timeline(
    timeline: Path, events: Path, questions: Sequence[str], thresholds: tuple[float, float], path: Path
) -> None:
    """A PNG: for each question a band with P(yes) over time, its events in orange, their starts marked.

    Args:
        timeline, events: files of a `TimelineWriter` and an `EventLog`.
        thresholds: (on, off), drawn as lines.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MultipleLocator
    except ImportError as error:
        raise DataError('a picture of the timeline needs matplotlib: pip install ".[video]"') from error
    binned = bin_timeline(timeline, questions)
    found: dict[str, list[Event]] = {question: [] for question in questions}
    for question, event in read_events(events):
        found[question].append(event)
    figure = Figure(figsize=(11, 1.0 + 0.75 * len(questions)), layout="constrained")
    axes = figure.subplots()
    for number, question in enumerate(questions):
        bottom = len(questions) - 1 - number  # a band is 0.7 high, its question stands above it
        for event in found[question]:
            end = event.start if event.end is None else event.end
            axes.fill_between([event.start, end], bottom, bottom + 0.7, color=YES, alpha=0.55, linewidth=0)
            axes.plot(event.start, bottom + 0.7, marker="v", color=ALARM, markersize=5, clip_on=False)
        for level, style in ((0.0, "-"), *((threshold, ":") for threshold in thresholds)):
            axes.axhline(bottom + 0.7 * level, color=QUIET, linewidth=0.7, linestyle=style)
        low, mean, high = (bottom + 0.7 * binned[name][:, number] for name in ("low", "mean", "high"))
        axes.fill_between(binned["time"], low, high, color=AREA, linewidth=0)
        axes.plot(binned["time"], mean, color=LINE, linewidth=1.2)
        spent = sum(event.end - event.start for event in found[question] if event.end is not None)
        count = len(found[question])
        told = f"{count} event{'s' * (count > 1)}, {spent:.1f} s" if count else "no event"
        where: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "bottom", "fontsize": 9}
        axes.text(0.0, bottom + 0.74, question[:100], ha="left", **where)
        axes.text(1.0, bottom + 0.74, told, ha="right", color=ALARM if count else QUIET, **where)
    axes.set_yticks(
        [place + share for place in range(len(questions)) for share in (0, 0.7)], ["0", "1"] * len(questions)
    )
    axes.tick_params(axis="y", length=0, labelsize=7)
    axes.spines[["top", "right", "left"]].set_visible(False)
    last = max([binned["time"][-1], *(event.end or 0.0 for one in found.values() for event in one)])
    step = next((step for step in STEPS if last <= 10 * step), 10 ** math.ceil(math.log10(last / 10)))
    axes.xaxis.set_major_locator(MultipleLocator(step))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: clock_time(seconds)[: None if step < 1 else -2]))
    axes.set(xlim=(0, last), ylim=(-0.05, len(questions)))
    axes.set_xlabel("time. Line and pale area: P(yes), mean and range; orange: events; dotted: the two thresholds")
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=110, facecolor="white")
    os.replace(temporary, path)
