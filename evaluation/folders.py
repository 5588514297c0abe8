"""Model and dataset folders: opened with checks, so that what is wrong is said in one line.

A folder that cannot be used is a `DataError`, the error of all input in this project.
"""

import os
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets, load_dataset

from ..configuration_traffic_vlm import TrafficVLMConfig
from ..modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from ..processing_traffic_vlm import TrafficVLMProcessor
from ..utils import DataError, load_weights
from .predict import COLUMNS


ASKED = ("image", "questions", "answers")  # what a dataset must have; the rest can be filled in


def load_rows(
    folders: Sequence[Path],
    split: str | None = None,
    max_images: int | None = None,
    prefer: str | None = None,
    sources: Sequence[str] | None = None,
) -> Dataset:
    """The rows of dataset folders, one after the other.

    Args:
        folders: as `scripts/make_dataset.py` writes them; or images beside a `metadata.jsonl` with a file_name,
            questions and answers in each line.
        split: name of the split; by default the only one that a folder has.
        max_images: take so many, drawn from all in an order that is always the same.
        prefer: the split of a folder that has several, if it is among them and `split` names none.
        sources: of the rows of each folder that name none; by default `source_names` of the folders.

    Raises:
        DataError: a folder that is missing, empty or no dataset; a split or a column that is not there.
    """
    folders = [Path(folder) for folder in folders]
    parts = [
        _load_folder(folder, source, split, prefer)
        for folder, source in zip(folders, source_names(folders) if sources is None else sources)
    ]
    columns = [*COLUMNS, "scene"] if all("scene" in part.column_names for part in parts) else list(COLUMNS)
    rows = concatenate_datasets([part.select_columns(columns) for part in parts])
    if max_images is not None and max_images < len(rows):
        rows = rows.shuffle(seed=0).select(range(max_images))
    return rows


def source_names(folders: Sequence[Path]) -> list[str]:
    """For each folder as many of its last parts as no other one ends in, so that "val" of two drives is told apart."""
    names = []
    for parts in (folder.parts for folder in folders):
        others = [folder.parts for folder in folders if folder.parts != parts]
        sizes = (size for size in range(1, len(parts)) if all(other[-size:] != parts[-size:] for other in others))
        names.append("/".join(parts[-next(sizes, len(parts)) :]))
    return names


def _load_folder(folder: Path, source: str, split: str | None, prefer: str | None) -> Dataset:
    """The rows of a folder; `source` is that of rows that name none."""
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such dataset folder")
    splits: dict[str, list[str]] = {}
    for path in sorted((folder / "data").glob("*-*.parquet")):
        splits.setdefault(path.name.rsplit("-", 1)[0], []).append(str(path))
    listed = sorted(folder.glob("**/metadata.jsonl")) + sorted(folder.glob("**/metadata.csv"))
    if not splits and not listed:
        raise DataError(
            f"{folder}: has neither data/SPLIT-00000.parquet, as scripts/make_dataset.py writes, nor images beside a "
            "metadata.jsonl of file_name, questions and answers"
        )
    try:
        if splits:
            # By its files, not by its name: the library's cache may hold another folder of the same name.
            name = _choose(folder, splits, split, prefer)
            rows = load_dataset("parquet", data_files=splits[name], split="train")
        else:
            found = load_dataset("imagefolder", data_dir=str(folder))
            rows = found[_choose(folder, found, split, prefer)]
    except DataError:
        raise
    except Exception as error:  # whatever the reader of the format happens to raise
        raise DataError(f"{folder}: the dataset cannot be read: {_first_line(error)}") from error
    if not len(rows):
        raise DataError(f"{folder}: the dataset has no rows")
    if missing := [column for column in ASKED if column not in rows.column_names]:
        raise DataError(f"{folder}: has no column {', '.join(missing)}; needed are {', '.join(ASKED)}")
    return _fill(rows, source)


def _choose(folder: Path, splits: Collection[str], split: str | None, prefer: str | None) -> str:
    if split is None and len(splits) > 1 and prefer not in splits:
        names = ", ".join(splits)
        raise DataError(f"{folder}: has the splits {names}; --split of evaluate.py names one, train.py takes train")
    name = split or (prefer if prefer and prefer in splits else next(iter(splits)))
    if name not in splits:
        raise DataError(f"{folder}: has no split {name!r}, only {', '.join(splits)}")
    return name


def _fill(rows: Dataset, source: str) -> Dataset:
    """Adds the columns that questions written by people lack: each wording is a fact of its own."""
    filled: dict[str, Callable[[int, list[str]], Any]] = {
        "kinds": lambda number, questions: ["own"] * len(questions),
        "labels": lambda number, questions: ["own"] * len(questions),
        "facts": lambda number, questions: list(questions),
        "source": lambda number, questions: source,
        "image_id": lambda number, questions: str(number),
    }
    asked = None
    for column, value in filled.items():
        if column not in rows.column_names:
            asked = asked if asked is not None else rows["questions"]
            rows = rows.add_column(column, [value(number, questions) for number, questions in enumerate(asked)])
    return rows


def load_model(folder: Path, device: str = "cpu") -> tuple[TrafficVLMForConditionalGeneration, TrafficVLMProcessor]:
    """A model in float32 and evaluation mode, and its processor.

    Raises:
        DataError: a folder that is missing, has no weights or not all of them, or does not load.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such model folder")
    if not (folder / "config.json").exists():
        raise DataError(f"{folder}: has no config.json, so it is no model folder")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise DataError(f"{folder}: has no weights (model.safetensors); train it first")
    try:
        model = load_weights(folder, dtype=torch.float32)
        processor = TrafficVLMProcessor.from_pretrained(folder)
    except Exception as error:  # of configuration, weights, tokenizer or image processor
        raise DataError(f"{folder}: the model cannot be loaded: {_first_line(error)}") from error
    return model.eval().to(device), processor


def write_temperature(folder: Path, temperature: float) -> None:
    """Set the temperature of P(yes) in a model folder: in config.json, and in decision.json for pipelines.

    Each file is replaced as a whole.
    """
    config = TrafficVLMConfig.from_pretrained(folder)
    config.yes_no_temperature = temperature
    with tempfile.TemporaryDirectory(dir=folder, prefix=".temperature") as temporary:
        config.save_pretrained(temporary)
        for name in ("decision.json", "config.json"):
            os.replace(Path(temporary) / name, folder / name)


def _first_line(error: Any) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
