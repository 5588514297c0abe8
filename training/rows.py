"""The rows of a training run: datasets are opened, checked, and split into those to train on and to evaluate on."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets
from torch.utils.data import ConcatDataset
from transformers import TrainingArguments

from ..common.files import DataError
from ..data.datasets import (
    Mixture,
    SyntheticRows,
    add_questions,
    load_rows,
    select_evenly,
    source_names,
    synthetic_rows,
)
from ..data.near_duplicates import count_repeated, split_rows
from ..data.scene import SYNTHETIC
from .drawing import BatchSizes, Drawing
from .options import TrainOptions


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


def own_questions(datasets: Sequence[Any], processor: Any) -> list[tuple[str, str]]:
    """The user's own (question as it will be asked, answer) in datasets, without repeats.

    Raises:
        ValueError: a question or answer has unknown words, is empty or too long.
    """
    pairs: dict[tuple[str, str], None] = {}
    for rows in datasets:
        if not isinstance(rows, SyntheticRows) and "scene" not in rows.column_names:
            for row in rows.select_columns(["questions", "answers"]):
                pairs |= dict.fromkeys(zip(map(processor.rules.as_asked, row["questions"]), row["answers"]))
    if pairs:
        questions, answers = map(list, zip(*pairs))
        if unknown := processor.unknown_words(questions + answers):
            raise ValueError(
                f"{len(unknown)} words of the questions and answers are not among the 500 of the vocabulary: "
                f"{', '.join(unknown[:20])}. --add_words {' '.join(unknown[:20])} teaches them"
            )
        processor(text=questions, suffix=answers)  # an error now, rather than in the middle of an epoch
    return list(pairs)


def mix_rows(
    rows: list[Any], held: list[Any], arguments: TrainingArguments, options: TrainOptions
) -> tuple[Any, Any, str]:
    """(train, eval, warning) of a training with questions; see `split_for_evaluation`. `eval` may be None."""
    eval_rows, note = None, ""
    if arguments.eval_strategy != "no":
        rows, eval_rows, note = split_for_evaluation(rows, held, options.max_eval_images)
    return Mixture(rows, options.train_weights, options.images_per_epoch, arguments.seed), eval_rows, note


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
        note = repeated_note(rows, held)
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


def repeated_note(rows: list[Any], held: list[Any]) -> str:
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


def draw_rows(
    rows: list[Any], held: list[Any], arguments: TrainingArguments, options: TrainOptions, image_size: int
) -> tuple[Any, Any, str]:
    """(train, eval, warning) of a tower alone; the warning names groups on both sides. `eval` may be None.

    The run is one epoch, whose `max_steps` are set here.

    Args:
        image_size: side of the images of most steps, in pixels.

    Raises:
        DataError: rows have no scenes or groups.
    """
    check_scenes([*options.train_dataset, *options.eval_dataset], [*rows, *held])
    batches = arguments.world_size * arguments.gradient_accumulation_steps  # of a step
    if arguments.max_steps <= 0:
        images = arguments.num_train_epochs * options.images_per_epoch
        arguments.max_steps = math.ceil(images / (batches * arguments.per_device_train_batch_size))
    sizes = BatchSizes(
        options.sizes or [image_size],
        options.size_weights or [1.0] * max(1, len(options.sizes)),
        image_size,
        arguments.per_device_train_batch_size,
        arguments.max_steps * batches,
        options.vary_aspect,
    )
    eval_rows = concatenate_datasets(held) if held else None
    note = shared_groups_note(rows, eval_rows) if held else ""
    return Drawing(rows, options.train_weights, sizes, arguments.seed), eval_rows, note


def check_scenes(folders: Sequence[str], rows: Sequence[Any]) -> None:
    """Raise a DataError if rows of folders have no scenes or groups, which a tower alone needs."""
    for folder, dataset in zip(folders, rows):
        if not {"scene", "group"} <= set(getattr(dataset, "column_names", ())):
            raise DataError(f"{folder} has no scenes or no groups; make the dataset with make_dataset.py")


def shared_groups_note(rows: Sequence[Any], held: Any) -> str:
    """A sentence on the groups, such as cameras, that are both in `rows` and in `held`; empty if there are none."""

    def names(some: Any) -> set[str]:
        return {f"{source}: {group}" for source, group in zip(some["source"][:], some["group"][:])}

    shared = sorted(set().union(*map(names, rows)) & names(held))
    if not shared:
        return ""
    return f"{len(shared)} groups of pictures are also in --eval_dataset, whose figures are too high: {shared[:5]}"
