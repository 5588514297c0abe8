"""The rows of a training run: datasets are opened, checked, and split into those to train on and to evaluate on."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets
from torch.utils.data import ConcatDataset

from ..common.files import DataError
from ..data.datasets import SyntheticRows, add_questions, load_rows, select_evenly, source_names, synthetic_rows
from ..data.near_duplicates import count_repeated, split_rows
from ..data.scene import SYNTHETIC


EVAL_FRACTION = 0.1  # of the training images, held back if no other images are given for evaluation


def open_datasets(folders: Sequence[str], prefer: str | None = None) -> list[Any]:
    """Open dataset folders; "synthetic" gives rows of scenes that are rendered on access."""
    sources = source_names([Path(folder) for folder in folders])
    return [
        SyntheticRows() if folder == SYNTHETIC else load_rows([Path(folder)], prefer=prefer, sources=[source])
        for folder, source in zip(folders, sources)
    ]


def photographs(datasets: Sequence[Any]) -> list[Dataset]:
    """The datasets that are not rendered."""
    return [rows for rows in datasets if not isinstance(rows, SyntheticRows)]


def sources_of(datasets: Sequence[Any]) -> list[str]:
    """The names of all sources of datasets, sorted."""
    named = ([SYNTHETIC] if isinstance(rows, SyntheticRows) else rows.unique("source") for rows in datasets)
    return sorted(set(chain.from_iterable(named)))


def own_questions(datasets: Sequence[Any], processor: Any) -> list[tuple[str, str]]:
    """The user's own (question as it will be asked, answer) in datasets, without repeats.

    Raises:
        ValueError: a question or answer has unknown words, is empty or too long.
    """
    pairs: dict[tuple[str, str], None] = {}
    for rows in photographs(datasets):
        if "scene" not in rows.column_names:
            for row in rows.select_columns(["questions", "answers"]):
                pairs |= dict.fromkeys(zip(map(processor.rules.as_asked, row["questions"]), row["answers"]))
    if pairs:
        questions, answers = map(list, zip(*pairs))
        if unknown := processor.unknown_words(questions + answers):
            words = " ".join(unknown[:20])
            raise ValueError(f"{len(unknown)} words of your questions are not known: --add_words {words} teaches them")
        processor(text=questions, suffix=answers)  # an error now, rather than in the middle of an epoch
    return list(pairs)


def split_for_evaluation(rows: list[Any], held: list[Any], max_images: int) -> tuple[list[Any], Any, str]:
    """(train, eval, note): the note counts images that are held back, and near-duplicates across the split.

    Without `held`, datasets to evaluate on, 10 % of each of `rows` are held back, always the same ones; of rendered
    scenes, which are endless, others are rendered. `max_images` are evenly spread over the datasets.
    """
    note, repeated, seen = "", {}, photographs(rows)
    if held and seen and photographs(held):
        train, test = ([one.select_columns(["image", "source"]) for one in some] for some in (seen, photographs(held)))
        repeated = count_repeated(concatenate_datasets(test), concatenate_datasets(train))
    elif seen and not held:
        stay, held, alike = split_rows(seen, EVAL_FRACTION)
        repeated = {"folders in which all images look alike": alike} if alike else {}
        parts = iter(stay)
        rows = [one if isinstance(one, SyntheticRows) else next(parts) for one in rows]
        note = f"{sum(map(len, held))} of {sum(map(len, seen))} images are held back for evaluation. "
    if repeated:
        named = ", ".join(f"{name} {count}" for name, count in repeated.items())
        note += f"{sum(repeated.values())} of {sum(map(len, photographs(held)))} evaluation images are "
        note += f"near-duplicates of training images ({named}): their figures are too high."
    held = held or [SyntheticRows()]
    most, asked = max(1, max_images // len(held)), list[Any]()
    for one in held:
        if isinstance(one, SyntheticRows):
            asked.append(select_evenly(synthetic_rows(first_seed=1 << 40, num_images=min(max_images, 64)), most))
        else:
            asked.append(add_questions(select_evenly(one, most)))
    return rows, ConcatDataset(asked), note.strip()


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
    return f"{len(shared)} groups are also in --eval_dataset: its figures are too high. {shared[:5]}" if shared else ""
