"""The rows of a training run: datasets are opened, checked, and split into those to train on and to evaluate on."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets
from torch.utils.data import ConcatDataset

from ..common.files import DataError
from ..data.datasets import LIKE, SyntheticRows, add_questions, load_rows, select_evenly, source_names, synthetic_rows
from ..data.near_duplicates import count_repeated, split_rows
from ..data.scene import SYNTHETIC
from ..tokenization_traffic_vlm import ANSWER_TOKENS


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
        ValueError: a question or answer has unknown words, is empty or too long; or the pipeline does not ask it.
    """
    pairs: dict[tuple[str, str], None] = {}
    for rows in photographs(datasets):
        if not rows["scene"][0]:
            for row in rows.select_columns(["questions", "answers"]):
                pairs |= dict.fromkeys(processor.rules.all_as_asked(row["questions"], row["answers"]))
    for text, _ in pairs:
        if problem := processor.rules.form(text).problem:
            raise ValueError(f"one of your questions has no answer later: {problem}")
    if pairs:
        questions, answers = map(list, zip(*pairs))
        if unknown := processor.unknown_words(questions + answers):
            words = " ".join(unknown[:20])
            raise ValueError(f"{len(unknown)} words of your questions are not known: --add_words {words} teaches them")
        processor(text=questions, suffix=answers)  # an error now, rather than in the middle of an epoch
    return list(pairs)


def are_of_own_kind(pairs: Sequence[tuple[str, str]], processor: Any) -> bool:
    """Whether own questions have answers in words, or ask for decisions: the pipeline refuses both if not taught."""
    tokenizer = processor.tokenizer
    return any(
        tokenizer.tokenize(answer)[0] not in ANSWER_TOKENS
        or processor.rules.read(question, processor.prompt, tokenizer.model_max_length).problem
        for question, answer in pairs
    )


def split_for_evaluation(rows: list[Any], held: list[Any], max_images: int) -> tuple[list[Any], Any, str]:
    """(train, eval, note): the note says what is held back, or which groups are on both sides; "" if there are none.

    Without `held`, datasets to evaluate on, 10 % of each of `rows` are held back, always the same ones, with their
    near-duplicates; of rendered scenes, which are endless, others are rendered. `max_images` are evenly spread over
    the datasets.
    """
    note, seen = shared_note(rows, held), photographs(rows)
    if seen and not held:
        stay, held, alike = split_rows(seen, EVAL_FRACTION)
        parts = iter(stay)
        rows = [one if isinstance(one, SyntheticRows) else next(parts) for one in rows]
        note = f"{sum(map(len, held))} of {sum(map(len, seen))} images are held back for evaluation."
        if alike:
            note += f" {alike} of them look like all others of their folder: their figures are too high."
    held = held or [SyntheticRows()]
    most = max(1, max_images // len(held))
    asked: list[Any] = [
        synthetic_rows(first_seed=1 << 40, num_images=min(most, 64))
        if isinstance(one, SyntheticRows)
        else add_questions(select_evenly(one, most))
        for one in held
    ]
    return rows, ConcatDataset(asked), note


def rows_for_tower(rows: Sequence[Any], held: Sequence[Any], folders: Sequence[str]) -> tuple[Dataset | None, str]:
    """(eval, note): all of `held`, on which a tower is evaluated; the note names groups that are in `rows`, too.

    Raises:
        DataError: one of the folders of `rows` and `held` has no scenes.
    """
    for folder, one in zip(folders, [*rows, *held]):
        if isinstance(one, SyntheticRows) or not one["scene"][0]:
            raise DataError(f"{folder} has no scenes; make the dataset with make_dataset.py")
    return concatenate_datasets(held) if held else None, shared_note(rows, held)


def shared_note(rows: Sequence[Any], held: Sequence[Any]) -> str:
    """Sentences on the cameras or drives that are both in `rows` and in `held`, and on images of `held` that are
    near-duplicates of images in `rows`; "" without any."""
    seen, asked = photographs(rows), photographs(held)
    if not seen or not asked:
        return ""

    def cameras(datasets: Sequence[Dataset]) -> set[str]:
        pairs = {pair for one in datasets for pair in zip(one["source"], one["group"])}
        return {f"{source}: {group}" for source, group in pairs if group and not group.startswith(LIKE)}

    shared, notes = sorted(cameras(seen) & cameras(asked)), list[str]()
    if shared:
        notes.append(f"{len(shared)} groups are also in --eval_dataset: its figures are too high. {shared[:5]}")
    if count := sum(count_repeated(concatenate_datasets(asked), concatenate_datasets(seen)).values()):
        notes.append(f"{count} images of --eval_dataset look like training images: its figures are too high.")
    return " ".join(notes)
