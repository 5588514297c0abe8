"""Open dataset folders as rows with images, questions and answers.

A folder holds either `data/SPLIT-*.parquet`, as `scripts/make_dataset.py` writes it, or images beside a
`metadata.jsonl` (or `metadata.csv`) with a file_name, questions and answers in each line. The latter is read here, as
`datasets` would take files with "test", "train", "dev" or "eval" in their names as splits, and leave out the others.
"""

import csv
import glob
import io
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from datasets import Dataset, Image, concatenate_datasets, load_dataset

from ..common.files import DataError
from ..common.image_files import open_image, select_files
from .formats.names import decode_text, find_by_name, index_files
from .formats.reading import reading, split_lines
from .formats.source import list_files


LISTS = ("questions", "answers", "question_types", "categories", "question_ids")  # one entry for each question
COLUMNS = ("image", *LISTS, "source", "image_id")
MADE = ("group", "scene")  # columns of datasets that make_dataset.py wrote
REQUIRED = ("image", "questions", "answers")  # the other columns have defaults
ANSWER_ENDS = " .!"  # removed from the end of own answers: "Yes." would be an answer in words
SPLITS = ("train", "val", "valid", "validation", "dev", "test")  # names of folders that each hold a split


def load_rows(
    folders: Sequence[Path],
    split: str | None = None,
    max_images: int | None = None,
    prefer: str | None = None,
    sources: Sequence[str] | None = None,
) -> Dataset:
    """Load the rows of dataset folders, one folder after the other.

    Args:
        folders: dataset folders in either format.
        split: split to load; by default the only one of each folder.
        max_images: draw at most this many rows from all folders, the same in every run.
        prefer: split to load from a folder with several splits, if `split` is None.
        sources: source names for the rows of each folder that have none; by default `source_names(folders)`.

    Returns:
        a dataset with COLUMNS, and with those of MADE that all folders have.

    Raises:
        DataError: a folder is missing, empty or unreadable; a split or a required column does not exist.
    """
    folders = [Path(folder) for folder in folders]
    names = source_names(folders) if sources is None else sources
    parts = [_load_folder(folder, name, split, prefer) for folder, name in zip(folders, names)]
    columns = [*COLUMNS, *(name for name in MADE if all(name in part.column_names for part in parts))]
    rows = concatenate_datasets([part.select_columns(columns) for part in parts])
    if max_images is not None and max_images < len(rows):
        rows = rows.shuffle(seed=0).select(range(max_images))
    return rows


def source_names(folders: Sequence[Path]) -> list[str]:
    """Name each folder by as few trailing path components as no other folder shares: "drive1/val", "drive2/val".

    Raises:
        DataError: a folder is given twice, which would count its images twice.
    """
    paths = list(map(os.path.realpath, folders))
    if twice := [str(folder) for folder, path in zip(folders, paths) if paths.count(path) > 1]:
        raise DataError(f"{' and '.join(twice)}: a folder is given twice")
    names = []
    for parts in (folder.parts for folder in folders):
        others = [folder.parts for folder in folders if folder.parts != parts]
        sizes = (size for size in range(1, len(parts)) if all(other[-size:] != parts[-size:] for other in others))
        names.append("/".join(parts[-next(sizes, len(parts)) :]))
    return names


def select_evenly(rows: Any, count: int) -> Any:
    """Select at most `count` rows at equal distances."""
    if count >= len(rows):
        return rows
    indices = [i * len(rows) // count for i in range(count)]
    return rows.select(indices) if hasattr(rows, "select") else [rows[i] for i in indices]


def _load_folder(folder: Path, source: str, split: str | None, prefer: str | None) -> Dataset:
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such dataset folder")
    files: dict[str, list[str]] = {}
    for path in sorted((folder / "data").glob("*-*.parquet")):
        # "train-00000.parquet", or "train-00000-of-00002.parquet" as `push_to_hub` writes it
        files.setdefault(re.sub(r"-\d+(-of-\d+)?$", "", path.stem), []).append(glob.escape(str(path)))
    if files:
        name = _choose_split(folder, files, split, prefer)
        with reading(folder, "the dataset cannot be read"):
            # By file names: the cache of `datasets` may hold another folder of the same name.
            rows = load_dataset("parquet", data_files=files[name], split="train")
    else:
        rows = _read_own(folder, split, prefer)
    if not len(rows):
        raise DataError(f"{folder}: the dataset has no rows")
    if missing := [column for column in REQUIRED if column not in rows.column_names]:
        raise DataError(f"{folder}: has no column {', '.join(missing)}; required are {', '.join(REQUIRED)}")
    if files and "scene" not in rows.column_names:  # others are made by scripts/make_dataset.py
        for i, row in enumerate(rows.select_columns(["questions", "answers"]), start=1):
            _check_questions(f"{folder}: row {i}", row)
    return _add_defaults(rows, source)


def _read_own(folder: Path, split: str | None, prefer: str | None) -> Dataset:
    """Rows of all `metadata.jsonl` and `metadata.csv` of a folder; of one split, if each lies in a folder of a split.

    Raises:
        DataError: there are none, a line is wrong, or an image is missing or damaged.
    """
    paths = sorted([*folder.rglob("metadata.jsonl"), *folder.rglob("metadata.csv")])
    if not paths:
        raise DataError(
            f"{folder}: has neither data/SPLIT-00000.parquet, as scripts/make_dataset.py writes, nor images beside a "
            "metadata.jsonl of file_name, questions and answers"
        )
    parts = [path.relative_to(folder).parts[0] for path in paths]
    if not all(part.lower() in SPLITS for part in parts):
        parts = ["train"] * len(paths)
    name = _choose_split(folder, dict.fromkeys(parts), split, prefer)
    paths = [path for path, part in zip(paths, parts) if part == name]
    rows, missing = [], []
    seen, used = set[Path](), set[Path]()
    for path in paths:
        images = index_files(select_files(list_files(path.parent))[0])
        seen.update(path.parent / name for names in images.values() for name in names)
        for where, row in _read_metadata(path):
            if "file_name" not in row:
                raise DataError(f"{where}: has no file_name, only {', '.join(map(str, row)) or 'nothing'}")
            written = str(row["file_name"])
            found = find_by_name(images, written)
            used.update(path.parent / name for name in found)
            if len(found) == 1:
                _check_questions(f"{where} ({written})", row)
                image = path.parent / found[0]
                # A CSV file has a line for each question: lines about one image have one id.
                row = {"image_id": image.relative_to(folder).as_posix(), **row, "image": str(image)}
                row["answers"] = [text.rstrip(ANSWER_ENDS) for text in row["answers"]]
                rows.append(row)
            else:
                reason = f"may be {' or '.join(found)}" if found else "is missing"
                missing.append(f"{where}: image {written!r} {reason}")
    if missing:
        raise DataError(f"{folder}: cannot find {len(missing)} of its images: {'; '.join(missing[:3])}")
    with ThreadPoolExecutor() as pool:  # now: training would stop at a damaged image after hours
        damaged = list(filter(None, pool.map(_image_problem, [row["image"] for row in rows])))
    if damaged:
        raise DataError(f"{folder}: cannot read {len(damaged)} of its images: {'; '.join(damaged[:3])}")
    if os.environ.get("RANK", "0") == "0":  # of several processes, one
        note = f"; without a line, and left out: {len(seen - used)}" if seen - used else ""
        files = ", ".join(path.relative_to(folder).as_posix() for path in paths)
        print(f"{folder}: images with questions by {files}: {len(rows)}{note}", file=sys.stderr)
    columns = [column for column in (*COLUMNS, "scene") if rows and all(column in row for row in rows)]
    table = Dataset.from_dict({column: [row[column] for row in rows] for column in columns})
    return table.cast_column("image", Image()) if rows else table


def _image_problem(path: str) -> str:
    """Why an image cannot be read; empty if it can."""
    try:
        open_image(path)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _read_metadata(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, row) of each line. A cell of a CSV file is one text, or a JSON list."""
    with reading(path):
        text = decode_text(path.read_bytes())
        if path.suffix == ".csv":
            reader = csv.DictReader(io.StringIO(text))
            for cells in reader:
                where = f"{path}:{reader.line_num}"
                lists = {key: [cells.get(key)] for key in ("questions", "answers")}
                for key, [cell] in lists.items():
                    if str(cell).startswith("["):
                        lists[key] = _parse(where, str(cell))
                yield where, cells | lists
            return
    for i, line in split_lines(text):
        row = _parse(f"{path}:{i}", line)
        if not isinstance(row, dict):
            raise DataError(f"{path}:{i}: is not a JSON object")
        yield f"{path}:{i}", row


def _parse(where: str, text: str) -> Any:
    with reading(where, "is not valid JSON"):
        return json.loads(text)


def _check_questions(where: str, row: dict[str, Any]) -> None:
    """Raise a `DataError` if the questions and answers of a row do not belong together."""
    for column in ("questions", "answers"):
        texts = row.get(column)
        if not isinstance(texts, list) or not all(isinstance(one, str) and one.rstrip(ANSWER_ENDS) for one in texts):
            raise DataError(f"{where}: {column} must be a list of texts that are not empty, got {texts!r}")
    if len(row["questions"]) != len(row["answers"]):
        raise DataError(f"{where}: {len(row['questions'])} questions have {len(row['answers'])} answers")


def _choose_split(folder: Path, splits: Collection[str], split: str | None, prefer: str | None) -> str:
    if split is None and len(splits) > 1 and prefer not in splits:
        names = ", ".join(splits)
        raise DataError(f"{folder}: has the splits {names}; --split of evaluate.py names one, train.py takes train")
    name = split or (prefer if prefer and prefer in splits else next(iter(splits)))
    if name not in splits:
        raise DataError(f"{folder}: has no split {name!r}, only {', '.join(splits)}")
    return name


def _add_defaults(rows: Dataset, source: str) -> Dataset:
    """Add the columns that hand-written questions lack. Each text is its own question id."""
    missing = [column for column in COLUMNS if column not in rows.column_names]
    questions = list(rows["questions"]) if missing else []
    own = [["own"] * len(texts) for texts in questions]
    defaults = {
        "question_types": own,
        "categories": own,
        "question_ids": questions,
        "source": [source] * len(own),
        "image_id": [str(index) for index in range(len(own))],
    }
    for column in missing:
        rows = rows.add_column(column, defaults[column])
    return rows
