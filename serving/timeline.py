"""Files about the answers over time: flushed CSV, Parquet, and a picture."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from ..files import atomic_write
from .events import Event


COLUMNS = {
    "frame": pa.int64(),
    "time": pa.float64(),
    "question": pa.string(),
    "answer": pa.string(),
    "score": pa.float32(),
    "p_yes": pa.float32(),  # null for answers in words
}
NOT_SURE = {"not_sure": pa.bool_()}  # follows with --thresholds
BLOCK_BYTES = 1 << 24  # of CSV that become one row group
MAX_POINTS = 1200  # of a curve in the picture
LINE, RANGE, THRESHOLD = "#2166ac", "#a9c9e4", "#8a8a8a"
COLORS = {"yes": "#f4a03c", "red": "#e8483c", "yellow": "#f2d13c", "green": "#3fb862"}  # of events
OTHER_COLORS = ("#b07cd0", "#3fb8b0", "#d98cb3", "#a58a6a", "#5b9bd5", "#9aa5b1")
MAX_TITLE = 115  # letters of a question
MIN_LABEL = 0.012  # fraction of the picture's width for each letter of an answer


class CsvLog:
    """A CSV file that is flushed after every call of `add`, so that a killed program loses no finished line."""

    def __init__(self, path: Path, columns: Iterable[str]):
        self.path = path
        self.file = path.open("w", newline="", encoding="utf-8")
        self.writer = csv.writer(self.file)
        self.add([list(columns)])

    def add(self, rows: Iterable[Iterable]) -> None:
        self.writer.writerows(rows)
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def convert_to_parquet(source: Path, path: Path) -> None:
    """Convert a timeline in CSV to Parquet, block by block."""
    reader = pyarrow.csv.open_csv(
        source,
        read_options=pyarrow.csv.ReadOptions(block_size=BLOCK_BYTES),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=COLUMNS | NOT_SURE, null_values=[""], strings_can_be_null=True
        ),
    )
    with atomic_write(path) as temporary, reader, pyarrow.parquet.ParquetWriter(temporary, reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)


def cut(text: str, length: int) -> str:
    """One line of at most `length` letters, with an ellipsis if there are more."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def clock_time(seconds: float) -> str:
    """Format seconds: 1:02:03.4 for 3723.4."""
    tenths = round(seconds * 10)
    minutes, rest = divmod(tenths, 600)
    hours, minutes = divmod(minutes, 60)
    start = f"{hours}:{minutes:02d}" if hours else f"{minutes}"
    return f"{start}:{rest // 10:02d}.{rest % 10}"


class AnswerColors(dict[str, str]):
    """A color for each answer: its own, or the next one of the others."""

    def __missing__(self, answer: str) -> str:
        others = len(self.keys() - COLORS.keys())
        self[answer] = COLORS.get(answer) or OTHER_COLORS[others % len(OTHER_COLORS)]
        return self[answer]


def summarize(path: Path, num_questions: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Reduce a timeline of T frames to at most MAX_POINTS points P.

    Returns:
        seconds [P]; lowest, mean and highest P(yes), or score of words, [P, num_questions].
    """
    # A frame has one row for each question, in their order.
    table = pyarrow.parquet.read_table(path, columns=["time", "score", "p_yes"])
    seconds = table["time"].to_numpy().reshape(-1, num_questions)[:, 0]  # [T]
    values = pc.coalesce(table["p_yes"], table["score"], 0.0).to_numpy().reshape(-1, num_questions)  # [T,Q]
    starts = np.arange(0, len(seconds), -(-len(seconds) // MAX_POINTS))
    counts = np.diff([*starts, len(seconds)])[:, None]
    mean = np.add.reduceat(values, starts, dtype=np.float64) / counts
    return seconds[starts], np.minimum.reduceat(values, starts), mean, np.maximum.reduceat(values, starts)


def draw_timeline(
    timeline: Path,
    questions: Sequence[str],
    events: Sequence[tuple[str, Event]],
    thresholds: Sequence[Sequence[float]],
    colors: AnswerColors,
    path: Path,
) -> None:
    """Draw a PNG with one row per question: its P(yes) or score, thresholds and events.

    Args:
        timeline: Parquet file of `convert_to_parquet`.
        events: (question, event) for every event, each with an end.
        thresholds: of each question on P(yes); none for a question answered in words.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    seconds, low, mean, high = summarize(timeline, len(questions))
    figure = Figure(figsize=(11, 1.0 + 0.8 * len(questions)))
    height = figure.get_figheight()
    figure.subplots_adjust(left=0.03, right=0.97, bottom=0.6 / height, top=1 - 0.35 / height, hspace=0.5)
    rows = figure.subplots(len(questions), 1, sharex=True, squeeze=False)[:, 0]
    end = max(seconds[-1], *(event.end or 0 for _, event in events), 1e-3)
    for index, (axes, question) in enumerate(zip(rows, questions)):
        found = [event for of_question, event in events if of_question == question]
        for event in found:
            axes.axvspan(event.start, event.end, color=colors[event.answer], alpha=0.55, linewidth=0)
            length = (event.end or 0) - event.start
            if not thresholds[index] and length > MIN_LABEL * len(event.answer) * end:
                axes.text(event.start + length / 2, 0.5, event.answer, fontsize=9, ha="center", va="center")
        for threshold in thresholds[index]:
            axes.axhline(threshold, color=THRESHOLD, linewidth=0.7, linestyle=":")
        axes.fill_between(seconds, low[:, index], high[:, index], color=RANGE, linewidth=0)
        axes.plot(seconds, mean[:, index], color=LINE, linewidth=1.2)
        axes.set(ylim=(0, 1), yticks=(0, 1))
        axes.spines[["top", "right"]].set_visible(False)
        total = sum(event.end - event.start for event in found if event.end is not None)
        axes.set_title(cut(question, MAX_TITLE), loc="left", fontsize=9, pad=3)
        axes.set_title(f"{len(found)} event(s), {total:.1f} s", loc="right", fontsize=9, pad=3)
    rows[-1].xaxis.set_major_locator(MaxNLocator(10, steps=[1, 1.5, 2, 3, 6, 10]))
    rows[-1].xaxis.set_major_formatter(FuncFormatter(lambda second, _: clock_time(max(0, second)).removesuffix(".0")))
    rows[-1].set_xlim(0, end)
    rows[-1].set_xlabel(
        "time. Line and pale area: P(yes) or the score of the words, mean and range. In color: events. "
        "Dotted: thresholds."
    )
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110, facecolor="white")
