"""The answers over time: CSV files that survive a kill, and a picture of the curves and events."""

import csv
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..common.files import atomic_write


MAX_POINTS = 1200  # of a curve in the picture
LINE, THRESHOLD = "#2166ac", "#8a8a8a"
COLORS = {"yes": "#f4a03c", "red": "#e8483c", "yellow": "#f2d13c", "green": "#3fb862"}  # of events
OTHER_COLOR = "#b07cd0"
MAX_TITLE = 80  # letters of a question
MIN_LABEL = 0.015  # fraction of the width, per letter: a narrower event is drawn without its answer


class CsvLog:
    """A CSV file that is flushed after every call of `add`, so that a killed program loses no finished line."""

    def __init__(self, path: Path, columns: Sequence[str]):
        self.file = path.open("w", newline="", encoding="utf-8")
        self.writer = csv.DictWriter(self.file, columns, extrasaction="ignore")
        self.writer.writeheader()
        self.file.flush()

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a line for each row; keys that are not columns are left out."""
        self.writer.writerows(rows)
        self.file.flush()


def clock_time(seconds: float) -> str:
    """Seconds as a time: 1:02:03.4 for 3723.4."""
    minutes, tenths = divmod(round(seconds * 10), 600)
    hours, minutes = divmod(minutes, 60)
    start = f"{hours}:{minutes:02d}" if hours else f"{minutes}"
    return f"{start}:{tenths // 10:02d}.{tenths % 10}"


def read_curves(timeline: Path, num_questions: int, max_points: int = MAX_POINTS) -> tuple[np.ndarray, ...]:
    """The curves of a timeline of T frames, reduced to P points, at most `max_points`.

    Returns:
        seconds [P]; lowest and highest P(yes), or score of words, [P, num_questions].
    """
    with timeline.open(newline="", encoding="utf-8") as file:
        rows = ((row["time"], row["p_yes"] or row["score"] or 0) for row in csv.DictReader(file))
        table = np.fromiter(rows, dtype=np.dtype((np.float64, 2)))
    table = table.reshape(-1, num_questions, 2)  # [T, Q, 2]: a frame has a row for each question, in their order
    starts = np.arange(0, len(table), -(-len(table) // max_points))
    seconds, values = table[starts, 0, 0], table[:, :, 1]
    return seconds, np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def draw_timeline(
    timeline: Path,
    questions: Sequence[str],
    events: Sequence[Mapping[str, Any]],
    thresholds: Sequence[Sequence[float]],
    path: Path,
) -> None:
    """Draw a PNG with one row per question: its P(yes) or score, thresholds and events.

    Args:
        events: rows of events.csv.
        thresholds: on P(yes), for each question; empty for a question answered in words.
    """
    seconds, low, high = read_curves(timeline, len(questions))
    figure = Figure(figsize=(8, 0.9 + 0.85 * len(questions)), layout="constrained")
    rows = figure.subplots(len(questions), 1, sharex=True, squeeze=False)[:, 0]
    end = max(seconds[-1], *(event["end"] for event in events), 1e-3)
    for index, (axes, question) in enumerate(zip(rows, questions)):
        for event in events:
            if event["question"] == question:
                start, stop, answer = event["start"], event["end"], event["answer"]
                axes.axvspan(start, stop, fc=COLORS.get(answer, OTHER_COLOR), ec="white", alpha=0.55)
                if not thresholds[index] and stop - start > MIN_LABEL * len(answer) * end:
                    axes.text((start + stop) / 2, 0.5, answer, fontsize=10, ha="center", va="center")
        for threshold in thresholds[index]:
            axes.axhline(threshold, color=THRESHOLD, linewidth=0.7, linestyle=":")
        # An answer holds until the next frame. A range without height is a line.
        axes.fill_between(seconds, low[:, index], high[:, index], step="post", color=LINE, linewidth=1.2)
        axes.set(ylim=(0, 1.03), yticks=(0, 1), xlim=(0, end))
        axes.spines[["top", "right"]].set_visible(False)
        title = textwrap.shorten(question, MAX_TITLE, placeholder="…")
        axes.set_title(title, loc="left", fontsize=10, pad=3, parse_math=False)  # "$" stands for itself
    rows[-1].xaxis.set_major_locator(MaxNLocator(8, steps=[1, 1.5, 2, 3, 6, 10]))
    rows[-1].xaxis.set_major_formatter(FuncFormatter(lambda second, _: clock_time(max(0, second)).removesuffix(".0")))
    rows[-1].set_xlabel("line: P(yes), or score of the words · color: events · dots: thresholds")
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150, facecolor="white")
