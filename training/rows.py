"""The rows of a training run: datasets are opened, checked, and split into those to train on and to evaluate on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset
from transformers import TrainingArguments

from ..data.dataset import Mixture, SyntheticRows, synthetic_rows
from ..data.folders import load_rows, select_evenly, source_names
from ..data.near_duplicates import split_rows
from ..data.scene import SYNTHETIC
from ..tokenization_traffic_vlm import ANSWER_TOKENS
from .options import DataOptions


EVAL_FRACTION = 0.1  # of the training images, held back if no other images are given for evaluation


def open_rows(options: DataOptions, arguments: TrainingArguments) -> tuple[list[Any], list[Any]]:
    """The datasets to train on, and those to evaluate on."""
    rows = open_datasets(options.train_dataset, prefer="train")
    return rows, open_datasets(options.eval_dataset) if arguments.eval_strategy != "no" else []


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


def prepare_rows(
    processor: Any, rows: list[Any], held: list[Any], options: DataOptions, arguments: TrainingArguments
) -> tuple[Mixture, Any]:
    """The rows to train on, and those to evaluate on (None without evaluation), from the datasets of `open_rows`."""
    for dataset in (*rows, *held):
        check_rows(dataset, processor)
    processor.own_questions |= any(has_answers_in_words(dataset, processor) for dataset in rows)
    eval_rows = None
    if arguments.eval_strategy != "no":
        if not held:
            rows, held = hold_back(rows)
            if held and arguments.should_log:
                print(
                    f"{sum(map(len, held))} images, 10 %, are held back for evaluation, with all their "
                    "near-duplicates. Frames of one drive are similar still: for a realistic evaluation pass images "
                    "of other drives with --eval_dataset"
                )
        held = held or [synthetic_rows(first_seed=1 << 40, num_images=min(options.max_eval_images, 64))]
        eval_rows = choose_rows(held, options.max_eval_images)
    return Mixture(rows, options.train_weights, options.images_per_epoch, arguments.seed), eval_rows


def hold_back(datasets: list[Any]) -> tuple[list[Any], list[Any]]:
    """Split the same 10 % off each dataset for evaluation, so that neither part has near-duplicates of the other.

    Synthetic sources are endless and stay whole.
    """
    kept, held = [], []
    for dataset in datasets:
        if not isinstance(dataset, SyntheticRows):
            dataset, test = split_rows(dataset, EVAL_FRACTION)
            held.append(test)
        kept.append(dataset)
    return kept, held


def choose_rows(datasets: list[Any], max_rows: int) -> Any:
    """At most `max_rows` rows, the same number from each dataset, evenly spread. Images are read on access."""
    chosen: list[Any] = [select_evenly(dataset, max(1, max_rows // len(datasets))) for dataset in datasets]
    return ConcatDataset(chosen)


def check_rows(rows: Any, processor: Any) -> None:
    """Raise a ValueError if a dataset's own questions have unknown words, or are empty or too long."""
    pairs = own_questions(rows)
    texts = sorted({text for pair in pairs for text in pair})
    if texts and (unknown := processor.unknown_words(texts)):
        raise ValueError(
            f"{len(unknown)} words of the questions and answers are not among the 500 of the vocabulary: "
            f"{', '.join(unknown[:20])}. --add_words {' '.join(unknown[:20])} teaches them in place of others"
        )
    if pairs:  # the processor rejects empty and long questions: now, rather than in the middle of an epoch
        questions, answers = zip(*pairs)
        processor(text=list(questions), suffix=list(answers))


def own_questions(rows: Any) -> list[tuple[str, str]]:
    """The different questions of a dataset with their answers; [] if they come from our templates."""
    if "scene" in getattr(rows, "column_names", ("scene",)):
        return []
    texts = rows.select_columns(["questions", "answers"])
    return list({pair: None for row in texts for pair in zip(row["questions"], row["answers"])})


def has_answers_in_words(rows: Any, processor: Any) -> bool:
    """Whether a dataset has questions of its own that are answered in words, neither yes nor no."""
    answers = {answer for _, answer in own_questions(rows)}
    return any(processor.tokenizer.tokenize(answer)[0] not in ANSWER_TOKENS for answer in answers)
