"""Open dataset folders as rows with images, questions and answers.

A folder holds either `data/SPLIT-*.parquet`, as `scripts/make_dataset.py` writes it, or images beside a
`metadata.jsonl` with a file_name, questions and answers in each line.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Image, concatenate_datasets, load_dataset

from ..files import DataError


LISTS = ("questions", "answers", "question_types", "categories", "question_ids")  # one entry for each question
COLUMNS = ("image", *LISTS, "source", "image_id")
REQUIRED = ("image", "questions", "answers")  # the other columns have defaults


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
        a dataset with COLUMNS, and with "scene" if all folders have it.

    Raises:
        DataError: a folder is missing, empty or unreadable; a split or a required column does not exist.
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
    """Name each folder by as few trailing path components as no other folder shares: "drive1/val", "drive2/val"."""
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
        files.setdefault(path.name.rsplit("-", 1)[0], []).append(str(path))
    if not files and not any(folder.glob("**/metadata.jsonl")) and not any(folder.glob("**/metadata.csv")):
        raise DataError(
            f"{folder}: has neither data/SPLIT-00000.parquet, as scripts/make_dataset.py writes, nor images beside a "
            "metadata.jsonl of file_name, questions and answers"
        )
    try:
        if files:
            # By file names: the cache of `datasets` may hold another folder of the same name.
            name = _choose_split(folder, files, split, prefer)
            rows = load_dataset("parquet", data_files=files[name], split="train")
        else:
            found = load_dataset("imagefolder", data_dir=str(folder))
            rows = found[_choose_split(folder, found, split, prefer)]
    except DataError:
        raise
    except Exception as error:  # each format raises its own errors
        message = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{folder}: the dataset cannot be read: {message}") from error
    if not len(rows):
        raise DataError(f"{folder}: the dataset has no rows")
    if missing := [column for column in REQUIRED if column not in rows.column_names]:
        raise DataError(f"{folder}: has no column {', '.join(missing)}; required are {', '.join(REQUIRED)}")
    if "scene" not in rows.column_names:  # others are made by scripts/make_dataset.py
        _check_own_questions(folder, rows)
    return _add_defaults(rows, source)


def _check_own_questions(folder: Path, rows: Dataset) -> None:
    """Raise a `DataError` that names the first row whose questions and answers do not belong together."""
    for i, row in enumerate(rows.select_columns(["questions", "answers"])):
        problem = ""
        for column, texts in row.items():
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                problem = problem or f"{column} must be a list of texts, got {texts!r}"
        if not problem and len(row["questions"]) != len(row["answers"]):
            problem = f"{len(row['questions'])} questions have {len(row['answers'])} answers"
        if problem:
            image = rows.cast_column("image", Image(decode=False))[i]["image"]["path"]
            raise DataError(f"{folder}: row {i + 1} ({Path(image).name if image else 'no path'}): {problem}")


def _choose_split(folder: Path, splits: Collection[str], split: str | None, prefer: str | None) -> str:
    if split is None and len(splits) > 1 and prefer not in splits:
        names = ", ".join(splits)
        raise DataError(f"{folder}: has the splits {names}; --split of evaluate.py names one, train.py takes train")
    name = split or (prefer if prefer and prefer in splits else next(iter(splits)))
    if name not in splits:
        raise DataError(f"{folder}: has no split {name!r}, only {', '.join(splits)}")
    return name


def _add_defaults(rows: Dataset, source: str) -> Dataset:
    """Add the columns that hand-written questions lack. Each text is a question id of its own."""
    missing = [column for column in COLUMNS if column not in rows.column_names]
    questions = rows["questions"] if missing else []
    own = [["own"] * len(texts) for texts in questions]
    defaults = {
        "question_types": own,
        "categories": own,
        "question_ids": list(questions),
        "source": [source] * len(own),
        "image_id": [str(index) for index in range(len(own))],
    }
    for column in missing:
        rows = rows.add_column(column, defaults[column])
    return rows
