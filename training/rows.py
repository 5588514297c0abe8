"""The rows of a training run: datasets are opened, checked, and split into those to train on and to evaluate on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets
from torch.utils.data import ConcatDataset

from ..data.datasets import SyntheticRows, add_questions, load_rows, select_evenly, source_names, synthetic_rows
from ..data.near_duplicates import count_repeated, split_rows
from ..data.scene import SYNTHETIC
from ..question_traffic_vlm import is_content_word
from ..tokenization_traffic_vlm import ANSWER_TOKENS


EVAL_FRACTION = 0.1  # of the training images, held back if no other images are given for evaluation


def open_datasets(folders: Sequence[str], prefer: str | None = None) -> list[Any]:
    """Open dataset folders; "synthetic" gives rows of scenes that are rendered on access."""
    sources = source_names([Path(folder) for folder in folders])
    return [
        SyntheticRows() if folder == SYNTHETIC else load_rows([Path(folder)], prefer=prefer, sources=[source])
        for folder, source in zip(folders, sources)
    ]


def sources_of(datasets: Sequence[Any]) -> list[str]:
    """The names of all sources of datasets, sorted."""
    names = [[SYNTHETIC] if isinstance(rows, SyntheticRows) else rows.unique("source") for rows in datasets]
    return sorted({name for some in names for name in some})


def split_for_evaluation(rows: list[Any], held: list[Any], max_images: int) -> tuple[list[Any], Any, str]:
    """(train, eval, warning): the warning counts near-duplicates across the split; '' if there are none.

    Args:
        rows: datasets to train on.
        held: datasets to evaluate on. If there are none, 10 % of each of `rows` are held back, always the same
            ones; of rendered scenes, which are endless, others are rendered.
        max_images: to evaluate on, evenly spread over the datasets. Images are read on access.
    """
    note = ""
    if held:
        note = describe_repeated(rows, held)
    elif not all(isinstance(dataset, SyntheticRows) for dataset in rows):
        rows, held, note = hold_back(rows)
    held = [
        synthetic_rows(first_seed=1 << 40, num_images=min(max_images, 64)) if isinstance(one, SyntheticRows) else one
        for one in held or [SyntheticRows()]
    ]
    chosen = [select_evenly(dataset, max(1, max_images // len(held))) for dataset in held]
    asked: list[Any] = [add_questions(part) if isinstance(part, Dataset) else part for part in chosen]
    return rows, ConcatDataset(asked), note


def hold_back(rows: list[Any]) -> tuple[list[Any], list[Any], str]:
    """(train, held_out, note): 10 % of the photographs are held out; rendered scenes stay in train."""
    photographs = [dataset for dataset in rows if not isinstance(dataset, SyntheticRows)]
    if min(map(len, photographs)) < 2:
        raise ValueError("one image cannot be trained on and held back: pass others with --eval_dataset")
    stay, held, repeated = split_rows(photographs, EVAL_FRACTION)
    parts = iter(stay)
    rows = [dataset if isinstance(dataset, SyntheticRows) else next(parts) for dataset in rows]
    count, total = sum(map(len, held)), sum(map(len, photographs))
    note = f"{count} of {total} images are held back for evaluation, with all their near-duplicates"
    if repeated:
        note += f", but for {repeated} of folders in which all images look alike, whose figures are too high"
    note += ". Frames of one drive are similar still: for a realistic evaluation pass images of other drives with "
    return rows, held, note + "--eval_dataset"


def describe_repeated(rows: list[Any], held: list[Any]) -> str:
    """A sentence that says how many evaluation images are near-duplicates of training images; empty if none is."""
    photographs, tests = (
        [one.select_columns(columns) for one in some if not isinstance(one, SyntheticRows)]
        for some, columns in ((rows, ["image"]), (held, ["image", "source"]))
    )
    if not photographs or not tests:
        return ""
    test = concatenate_datasets(tests)
    repeated = count_repeated(test, concatenate_datasets(photographs))
    if not repeated:
        return ""
    named = ", ".join(f"{name} {count}" for name, count in repeated.items())
    return (
        f"{sum(repeated.values())} of {len(test)} evaluation images are near-duplicates of training images ({named}): "
        "their figures are too high"
    )


def check_rows(rows: Any, processor: Any) -> None:
    """Raise a ValueError if a dataset's own questions have unknown words, or are empty or too long."""
    pairs = own_questions(rows, processor)
    texts = sorted({text for pair in pairs for text in pair})
    if texts and (unknown := processor.unknown_words(texts)):
        raise ValueError(
            f"{len(unknown)} words of the questions and answers are not among the 500 of the vocabulary: "
            f"{', '.join(unknown[:20])}. --add_words {' '.join(unknown[:20])} teaches them"
        )
    if pairs:  # the processor rejects empty and long questions: now, rather than in the middle of an epoch
        questions, answers = zip(*pairs)
        processor(text=list(questions), suffix=list(answers))


def own_questions(rows: Any, processor: Any) -> list[tuple[str, str]]:
    """The different questions of a dataset, as they will be asked, with their answers; [] if they are of templates."""
    if "scene" in getattr(rows, "column_names", ("scene",)):
        return []
    texts = rows.select_columns(["questions", "answers"])
    pairs = dict.fromkeys(pair for row in texts for pair in zip(row["questions"], row["answers"]))
    return [(processor.rules.as_asked(text), answer) for text, answer in pairs]


def own_words(rows: Any, processor: Any) -> set[str]:
    """The content words of a dataset's own questions and answers."""
    texts = {text for pair in own_questions(rows, processor) for text in pair}
    return {word for text in texts for word in processor.tokenizer.tokenize(text) if is_content_word(word)}


def has_answers_in_words(rows: Any, processor: Any) -> bool:
    """Whether a dataset has questions of its own that are answered in words, neither yes nor no."""
    answers = {answer for _, answer in own_questions(rows, processor)}
    return any(processor.tokenizer.tokenize(answer)[0] not in ANSWER_TOKENS for answer in answers)
