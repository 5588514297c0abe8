"""The answers over time: CSV files that survive a kill, and a picture of the curves and events."""

import csv
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..common.files import atomic_write


LINE, THRESHOLD = "#2166ac", "#8a8a8a"
COLORS = {"yes": "#f4a03c", "red": "#e8483c", "yellow": "#f2d13c", "green": "#3fb862"}  # of events
OTHER_COLOR = "#b07cd0"
MAX_TITLE = 80  # letters of a question
MIN_LABEL = 0.015  # fraction of the width, per letter: a narrower event is drawn without its answer
CHUNK = 10_000  # points of a curve that are drawn at once: more can be too many for Agg


def csv_log(path: Path, columns: Sequence[str]) -> csv.DictWriter:
    """A writer of rows to a new CSV file, each at once, so that a killed program loses no finished line.

    Keys of a row that are not columns are left out.
    """
    file = path.open("w", buffering=1, newline="", encoding="utf-8")
    writer = csv.DictWriter(file, columns, extrasaction="ignore")
    writer.writeheader()
    return writer


def clock_time(seconds: float) -> str:
    """Seconds as a time: 1:02:03.4 for 3723.4."""
    minutes, tenths = divmod(round(seconds * 10), 600)
    hours, minutes = divmod(minutes, 60)
    start = f"{hours}:{minutes:02d}" if hours else f"{minutes}"
    return f"{start}:{tenths // 10:02d}.{tenths % 10}"


def draw_timeline(
    path: Path,
    seconds: Sequence[float],
    questions: Sequence[str],
    curves: np.ndarray,
    thresholds: Sequence[Sequence[float]],
    events: Sequence[Mapping[str, Any]],
) -> None:
    """Draw a PNG with one row per question: its P(yes) or score, thresholds and events.

    Args:
        seconds: times [T] of the frames.
        curves: P(yes), or score of words, [T, number of questions].
        thresholds: on P(yes), for each question; empty for a question answered in words.
        events: rows of events.csv.
    """
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
        axes.step(seconds, curves[:, index], where="post", color=LINE, linewidth=1.2)  # until the next frame
        axes.set(ylim=(0, 1.03), yticks=(0, 1), xlim=(0, end))
        axes.spines[["top", "right"]].set_visible(False)
        title = textwrap.shorten(question, MAX_TITLE, placeholder="…")
        axes.set_title(title, loc="left", fontsize=10, pad=3, parse_math=False)  # "$" stands for itself
    rows[-1].xaxis.set_major_locator(MaxNLocator(8, steps=[1, 1.5, 2, 3, 6, 10]))
    rows[-1].xaxis.set_major_formatter(FuncFormatter(lambda second, _: clock_time(max(0, second)).removesuffix(".0")))
    rows[-1].set_xlabel("line: P(yes), or score of the words · color: events · dots: thresholds")
    with atomic_write(path) as temporary, rc_context({"agg.path.chunksize": CHUNK}):
        figure.savefig(temporary, format="png", dpi=150, facecolor="white")
