"""Datasets of images, scenes and questions: written as Parquet files, loaded, or rendered while training.

    records or seeds → Dataset.from_generator → rows {image, ..., scene} → add_questions → Parquet

The rows follow from the options alone, with any number of processes. The files are written to a temporary folder,
which is renamed at the end: a run that is stopped leaves nothing, and is started again.

`load_rows` opens such a folder, or images beside a `metadata.jsonl` (or `metadata.csv`) with a file_name, questions
and answers in each line. The latter is read here, as `datasets` would take files with "test", "train", "dev" or "eval"
in their names as splits, and leave out the others.
"""

import csv
import glob
import io
import itertools
import json
import os
import random
import re
import sys
import tempfile
import uuid
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, Image, List, Value, concatenate_datasets, load_dataset
from PIL import Image as PILImage

from ..common.files import DataError, new_folder
from ..common.image_files import open_image, select_files
from ..common.options import option
from .formats import Problems, Record, read_source
from .formats.drafting import draft_mapping
from .formats.mapping import load_mapping
from .formats.reading import Folder, parse_text, reason_of, split_lines
from .formats.scene_labels import read_scene_labels, with_scene_labels
from .formats.split import find_by_name, index_files, plain_name, read_json_lines
from .formats.vehicle_colors import parse_vehicle_color, with_vehicle_color
from .near_duplicates import difference_hash, near_duplicate_groups
from .questions import Balancer, ask, has_question, rebalance
from .scene import SYNTHETIC, Scene, classes_of, parse_scene
from .synthetic import render
from .truth import GroundTruth


Item = Record | int  # an annotated image, or the seed of a synthetic one
# Columns with one entry for each question, and the attributes of a question in them
COLUMN_OF = {
    **{"questions": "text", "answers": "answer", "question_types": "question_type"},
    **{"categories": "category", "question_ids": "question_id"},
}
LISTS = tuple(COLUMN_OF)
# Of every dataset. Without annotations "scene" is empty, and so is "group", the camera, drive or near-duplicates.
FEATURES = Features(
    {
        "image": Image(),
        **{name: List(Value("string")) for name in LISTS},
        **{name: Value("string") for name in ("source", "image_id", "group", "scene")},
    }
)
MADE_FEATURES = Features({**FEATURES, "bits": List(Value("bool")), "problem": Value("string")})  # of `make_rows`
ANSWER_ENDS = " .!"  # removed from the end of own answers: "Yes." would be an answer in words
SPLITS = ("train", "val", "valid", "validation", "dev", "test")  # names of folders that each hold a split
SYNTHETIC_IMAGES = 1000  # by default
TRAIN = "train"  # the split without stored questions: training asks new ones each time
NOTHING = "nothing to ask"  # the problem of an image without a possible question
# What to do about images that are left out; a reason that begins so
ADVICE = {
    NOTHING: "list under 'exhaustive' of the mapping the categories of which every visible object is labeled, or use "
    "--scene_labels",
    "unknown class": "add the class under 'classes' of the mapping, with a category or null",
    "missing image": "correct 'images' of the split in the mapping",
    "image without annotation": "an image without objects needs an empty label file, or an entry in that of its split",
    "unlabeled image": "if these images have no objects, remove 'unlabeled' from the mapping",
    "bad box": "boxes of YOLO are center and size in fractions, boxes of COCO left, top, width and height in pixels",
}
LIKE = "like "  # and the id of the first of near-duplicates: a group that the source does not name
JPEG_QUALITY = 92  # of synthetic images: about 20 kB each, without visible artifacts
# The id differs for every dataset: `load_dataset` may load another folder of the same name from its cache otherwise.
CARD = """---
configs:
  - config_name: default
    description: made as {id}
    data_files:
      - split: {split}
        path: data/{split}-*.parquet
---

Images of traffic scenes with questions and true answers, made by `scripts/make_dataset.py` of Traffic VLM.
"""


@dataclass
class DatasetOptions:
    """Options of `make_dataset`."""

    output_dir: Path = field(metadata={"help": "folder to write to"})
    source: list[str] = option(
        [SYNTHETIC], "synthetic, MAPPING=FOLDER, or a FOLDER, for which a mapping is drafted next to output_dir"
    )
    scene_labels: Path | None = option(None, "folder of labels of whole images, by source")
    vehicle_colors: Path | None = option(None, "file of the colors of the largest vehicles")
    num_images: int | None = option(
        None, "maximum number of images of each source, evenly spread; default: all, 1000 synthetic ones"
    )
    split: str = option(TRAIN, "split of the sources, and of the dataset")
    questions_per_image: int = option(16, "maximum number of questions for each image")
    num_workers: int = option(2, "number of processes")

    def __post_init__(self) -> None:
        for name in ("questions_per_image", "num_workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if not re.fullmatch(r"\w+(\.\w+)*", self.split):
            raise ValueError(f"--split must be words with dots between, like train or val.night, got {self.split!r}")


def make_dataset(options: DatasetOptions) -> dict[str, Any]:
    """Write data/SPLIT-00000.parquet, README.md and report.json to a new folder.

    Returns:
        The report: numbers of images, and of questions by type; what was skipped because it is unusable;
        what was left out as intended; what to do about both.

    Raises:
        DataError: the folder exists, a source or its mapping is unusable, or no image has a possible question.
        OSError: for example, the disk is full. Nothing is left then.
    """
    problems = Problems()
    with new_folder(options.output_dir) as folder, tempfile.TemporaryDirectory(dir=folder.parent) as cache:
        items = read_items(options, problems)
        every = [item for part in items.values() for item in part]
        rows = Dataset.from_generator(
            make_rows,
            features=MADE_FEATURES,
            cache_dir=cache,
            gen_kwargs={"items": every},
            num_proc=min(options.num_workers, len(every)),
            fingerprint=uuid.uuid4().hex,  # by default a hash of all scenes
        )
        notes = Counter(rows["problem"])
        rows = rows.select([i for i, note in enumerate(rows["problem"]) if not note]).remove_columns("problem")
        rows = add_groups(rows)
        if options.split != TRAIN:
            rows = add_questions(rows, options.questions_per_image)
            asked = [i for i, questions in enumerate(rows["questions"]) if questions]
            notes += Counter({NOTHING: len(rows) - len(asked)})  # the others would not be balanced
            rows = rows.select(asked)
        report = _summarize(rows, notes, problems) | {"advice": _advise(items, problems)}
        if not len(rows):
            reasons = report["advice"] + report["messages"][:3]
            raise DataError(f"no image has a possible question: {'; '.join(reasons)}")
        (folder / "data").mkdir()
        rows.to_parquet(folder / "data" / f"{options.split}-00000.parquet")
        (folder / "README.md").write_text(CARD.format(split=options.split, id=uuid.uuid4().hex), encoding="utf-8")
        (folder / "report.json").write_text(json.dumps(report, indent=1, sort_keys=True), encoding="utf-8")
    return report


def read_items(options: DatasetOptions, problems: Problems) -> dict[str, list[Item]]:
    """All images by value of --source, in a fixed order. Each split has other synthetic scenes.

    Raises:
        DataError: a source is unknown or given twice, no source has a usable image, or a file of labels is missing.
    """
    if len(set(options.source)) < len(options.source):
        raise DataError(f"a source is given twice: {' '.join(options.source)}")
    items, names = dict[str, list[Item]](), set[str]()
    for source in options.source:
        if source == SYNTHETIC:
            count = SYNTHETIC_IMAGES if options.num_images is None else options.num_images
            offset = 0 if options.split == TRAIN else (1 + zlib.crc32(options.split.encode())) << 32
            items[source] = [offset + i for i in range(count)]
            continue
        name, _, root = source.partition("=")
        if Path(source).is_dir():
            folder = Folder(Path(source))
            path = options.output_dir.parent / f"{options.output_dir.name}_{folder.root.resolve().name}.json"
            mapping, text = draft_mapping(folder, path)
            print(text)
        elif root:
            folder, mapping = Folder(Path(root)), load_mapping(name)
        else:
            raise DataError(f"source {source!r} is not a folder, and a mapping needs one: --source {source}=FOLDER")
        if mapping.name in names:
            raise DataError(f'two sources are named {mapping.name!r}: rename a folder, or "name" of a mapping file')
        names.add(mapping.name)
        records = read_source(folder, mapping, options.split, problems)
        if Path(source).is_dir() and mapping.format == "yolo":
            records = without_unused(records)
        if options.vehicle_colors is not None:
            records = add_vehicle_colors(records, folder.root, options.vehicle_colors, problems)
        if options.scene_labels is not None:
            records = add_scene_labels(records, folder.root, options.scene_labels, problems)
        if options.num_images is not None:
            records = select_evenly(records, options.num_images)
        items[source] = list(records)
    if not any(items.values()):
        found = "; ".join(problems.messages[:3]) or f"--num_images is {options.num_images}"
        raise DataError(f"the sources {options.source} have no usable image: {found}")
    return items


def without_unused(records: Sequence[Record]) -> list[Record]:
    """Records of a drafted mapping, whose classes without any box are not exhaustive: a data.yaml often names the 80
    classes of COCO, of which somebody labeled two."""
    used = {name for record in records for item in record.scene.objects for name in classes_of(item.category)}
    unused = sorted({name for record in records for name in record.scene.exhaustive} - used)
    if unused:
        print(f"  no image has a box of {', '.join(unused)}: nothing is taken to be absent of these")
    scenes = (replace(one.scene, exhaustive=one.scene.exhaustive & used) for one in records)
    return [replace(record, scene=scene) for record, scene in zip(records, scenes)]


def add_scene_labels(records: Sequence[Record], folder: Path, scene_labels: Path, problems: Problems) -> list[Record]:
    """Add the scene labels of the folder's own file to its records; what has no counterpart is a problem."""
    path = scene_labels / f"{folder.resolve().name}.jsonl"
    labels, found = dict(read_scene_labels(path, problems)), []
    for record in records:
        name = _name_with_folder(record, folder)
        if entry := labels.pop(name, None):
            record = replace(record, scene=with_scene_labels(record.scene, entry))
        else:
            problems.add("image without scene labels", record.image, f"{path} has no line for {name}")
        found.append(record)
    if labels:
        message = f"has {len(labels)} images that this split has not, such as {next(iter(labels))}"
        problems.add("scene labels without image", path, message, expected=True, count=len(labels))
    return found


def add_vehicle_colors(records: Sequence[Record], folder: Path, path: Path, problems: Problems) -> list[Record]:
    """Add the colors of vehicles to the records of a source; labels without an image or a box are problems."""
    found = {_name_with_folder(record, folder): record for record in records}
    for where, label in read_json_lines(path, parse_vehicle_color, problems, "bad vehicle color"):
        if record := found.get(label.image):
            try:
                found[label.image] = replace(record, scene=with_vehicle_color(record.scene, label))
            except ValueError as error:
                problems.add("vehicle color without box", where, str(error))
        elif label.image.startswith(f"{folder.resolve().name}/"):
            problems.add("vehicle color without image", where, f"{label.image} is not of this split", expected=True)
    return list(found.values())


def _name_with_folder(record: Record, folder: Path) -> str:
    """The path of an image from the parent of its source's folder on, as labels of whole images name it."""
    return plain_name(f"{folder.resolve().name}/{record.image.relative_to(folder).as_posix()}")


def make_rows(items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    """Yield rows of MADE_FEATURES, without questions. Their "problem" says why a row is left out, or is empty."""
    for item in items:
        try:
            content, scene, bits = load_item(item)
        except DataError as error:
            yield dict.fromkeys(MADE_FEATURES) | {"problem": str(error)}
            continue
        yield {
            "image": {"bytes": content, "path": None},
            **{name: [] for name in LISTS},
            "source": scene.source,
            "image_id": scene.image_id,
            "group": item.group if isinstance(item, Record) else "",
            "scene": scene.to_json(),
            "bits": bits,
            "problem": "" if has_question(GroundTruth(scene)) else NOTHING,
        }


def add_groups(rows: Dataset) -> Dataset:
    """Rows of `make_rows`, each photograph with a group. Where a source names none, near-duplicates are a group."""
    groups, ids, sources, bits = (rows[name][:] for name in ("group", "image_id", "source", "bits"))
    for source in sorted({*sources} - {SYNTHETIC}):
        unnamed = [i for i, name in enumerate(sources) if name == source and not groups[i]]
        numbers = near_duplicate_groups(np.array([bits[i] for i in unnamed]).reshape(-1, 64)).tolist()
        first: dict[int, str] = {}
        for i, number in zip(unnamed, numbers):
            groups[i] = first.setdefault(number, f"{LIKE}{ids[i]}")
    return rows.remove_columns(["group", "bits"]).add_column("group", groups)


def _summarize(rows: Dataset, notes: Counter[str], problems: Problems) -> dict[str, Any]:
    """The report on rows and problems, to which the notes of `make_rows` are added."""
    for note, count in notes.items():
        if note == NOTHING:
            problems.add(NOTHING, "--source", f"{count} images have no possible question", expected=True, count=count)
        elif note:
            where, _, message = note.partition(": ")
            problems.add("unreadable image", where, message, count=count)
    return {
        "images": len(rows),
        "left_out": Counter({kind: count for kind, count in problems.counts.items() if kind in problems.expected}),
        "messages": problems.messages,
        "questions": Counter(name for names in rows["question_types"] for name in names),
        "skipped": Counter({kind: count for kind, count in problems.counts.items() if kind not in problems.expected}),
        "sources": Counter(rows["source"]),
    }


def _advise(items: dict[str, list[Item]], problems: Problems) -> list[str]:
    """Sentences about what to do: for each source in which nothing is known to be absent, and each kind of problem."""

    def can_be_no(item: Item) -> bool:
        return isinstance(item, int) or bool(item.scene.exhaustive) or False in item.scene.presence.values()

    found = [
        f"{source}: no class is exhaustive, so nothing can be answered no: {ADVICE[NOTHING]}"
        for source, part in items.items()
        if part and not any(map(can_be_no, part))
    ]
    kinds = {kind: text for kind in problems.counts for start, text in ADVICE.items() if kind.startswith(start)}
    return found + [f"{kind} ({problems.counts[kind]}): {text}" for kind, text in kinds.items()]


def add_questions(rows: Dataset, questions_per_image: int = 16) -> Dataset:
    """Rows with questions: rows of training splits, which store none, get new ones about their scenes.

    Yes and no are balanced within each source. Rows without scenes are returned unchanged.
    """
    if all(rows["questions"]):
        return rows
    lists = rows.select_columns([*LISTS, "source", "scene"]).to_list()
    for source in sorted({row["source"] for row in lists}):
        rng, balancer = random.Random(f"0/{source}"), Balancer()
        empty = [row for row in lists if row["source"] == source and row["scene"] and not row["questions"]]
        truths = (GroundTruth(parse_scene(row["scene"])) for row in empty)
        asked = [ask(truth, rng, questions_per_image, balancer) for truth in truths]
        for row, questions in zip(empty, rebalance(asked)):
            for column, name in COLUMN_OF.items():
                row[column] = [getattr(question, name) for question in questions]
    for column in LISTS:
        rows = rows.remove_columns(column).add_column(column, [row[column] for row in lists], feature=FEATURES[column])
    return rows


def load_item(item: Item) -> tuple[bytes, Scene, np.ndarray]:
    """The bytes of an image file, its scene, from annotations or a synthetic seed, and its `difference_hash`.

    Raises:
        DataError: the image cannot be read.
    """
    if isinstance(item, int):
        image, scene = render(item)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=0)
        return buffer.getvalue(), scene, difference_hash(image)
    try:
        content = item.image.read_bytes()
        with PILImage.open(io.BytesIO(content)) as opened:
            bits = difference_hash(opened)  # it loads the image: a truncated file opens, but does not load
    except Exception as error:  # Pillow raises almost any error on damaged bytes
        raise DataError(f"{item.image}: the image cannot be read: {error}") from error
    return content, item.scene, bits


def synthetic_rows(first_seed: int, num_images: int, questions_per_image: int = 16) -> Dataset:
    """Rows of rendered scenes with questions, as `load_rows` gives them."""
    made = list(make_rows(range(first_seed, first_seed + num_images)))
    return add_questions(
        Dataset.from_list(made, MADE_FEATURES).remove_columns(["bits", "problem"]), questions_per_image
    )


class SyntheticRows(torch.utils.data.Dataset):
    """Rows {image (PIL), scene (a `Scene`), source, image_id}, rendered from one seed each, from `first_seed` on."""

    column_names = ("image", "scene", "source", "image_id")

    def __init__(self, first_seed: int = 0, num_images: int = 1 << 20):
        self.first_seed, self.num_images = first_seed, num_images

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, scene = render(self.first_seed + index)
        return {"image": image, "scene": scene, "source": scene.source, "image_id": scene.image_id}


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
        max_images: at most this many rows of all folders, evenly spread.
        prefer: split to load from a folder with several splits, if `split` is None.
        sources: source names for the rows of each folder that have none; by default `source_names(folders)`.

    Returns:
        a dataset with the columns of FEATURES.

    Raises:
        DataError: a folder is missing, empty or unreadable; a split or a required column does not exist.
    """
    folders = [Path(folder) for folder in folders]
    names = source_names(folders) if sources is None else sources
    rows = concatenate_datasets([_load_folder(*pair, split, prefer) for pair in zip(folders, names)])
    return rows if max_images is None else select_evenly(rows, max_images)


def source_names(folders: Sequence[Path]) -> list[str]:
    """Name the folders by as few trailing path components as make all names differ: "drive1/val", "drive2/val".

    Raises:
        DataError: a folder is given twice, which would count its images twice.
    """
    paths = list(map(os.path.realpath, folders))
    if twice := [str(folder) for folder, path in zip(folders, paths) if paths.count(path) > 1]:
        raise DataError(f"{' and '.join(twice)}: a folder is given twice")
    tries = (["/".join(folder.parts[-size:]) for folder in folders] for size in itertools.count(1))
    return next(names for names in tries if len(set(names)) == len(names))


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
        chosen = files[_choose_split(folder, files, split, prefer)]
        try:
            # By file names: the cache of `datasets` may hold another folder of the same name.
            rows = load_dataset("parquet", data_files=chosen, split="train")
        except Exception as error:  # of pyarrow, on broken files
            raise DataError(f"{folder}: the dataset cannot be read: {reason_of(error)}") from error
    else:
        rows = _read_own(folder, source, split, prefer)
    if not len(rows):
        raise DataError(f"{folder}: the dataset has no rows")
    if missing := [column for column in FEATURES if column not in rows.column_names]:
        raise DataError(f"{folder}: has no column {', '.join(missing)}; make the dataset with make_dataset.py")
    return rows.select_columns([*FEATURES])


def _read_own(folder: Path, source: str, split: str | None, prefer: str | None) -> Dataset:
    """Rows of all `metadata.jsonl` and `metadata.csv` of a folder; of one split, if each lies in a folder of a split.

    Each text is its own question id.

    Raises:
        DataError: there are none, a line is wrong, or an image is missing or damaged.
    """
    files = Folder(folder)
    names = [name for name in files.files(folder) if Path(name).name in ("metadata.jsonl", "metadata.csv")]
    if not names:
        raise DataError(f"{folder}: has neither data/SPLIT-00000.parquet nor a metadata.jsonl: see docs/data.md")
    parts = [Path(name).parts[0].lower() for name in names]
    if not all(part in SPLITS for part in parts):
        parts = ["train"] * len(names)
    chosen = _choose_split(folder, dict.fromkeys(parts), split, prefer)
    names = [name for name, part in zip(names, parts) if part == chosen]
    made, seen = dict[Path, dict[str, Any]](), set[Path]()  # one row for each image
    for path in (folder / name for name in names):
        images = index_files(select_files(files.files(path.parent))[0])
        seen.update(path.parent / name for names_of in images.values() for name in names_of)
        for where, row in _read_metadata(path, files.read(path, parse_text)):
            if not isinstance(row, dict) or "file_name" not in row:
                raise DataError(f"{where}: has no file_name: {row!r:.80}")
            written = str(row["file_name"])
            _check_questions(f"{where} ({written})", row)
            found = [path.parent / name for name in find_by_name(images, written)]
            if len(found) != 1:
                reason = f"may be {' or '.join(path.name for path in found)}" if found else "is missing"
                raise DataError(f"{where}: image {written!r} {reason}")
            own, questions = ["own"] * len(row["questions"]), row["questions"]
            lists = {"questions": questions, "answers": [text.rstrip(ANSWER_ENDS) for text in row["answers"]]}
            lists |= {"question_types": own, "categories": own, "question_ids": questions}
            about = {"source": source, "image_id": found[0].relative_to(folder).as_posix(), "group": "", "scene": ""}
            # A CSV file has a line for each question: lines about one image are one row.
            one = made.setdefault(found[0], {"image": str(found[0]), **about, **{name: [] for name in LISTS}})
            for name, values in lists.items():
                one[name] += values
    rows = [*made.values()]
    try:  # now: training would stop at a damaged image after hours
        with ThreadPoolExecutor() as pool:
            for _ in pool.map(lambda row: open_image(row["image"]).size, rows):
                pass
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: {error}") from error
    note = f"; without a line, and left out: {len(seen - made.keys())}" if seen - made.keys() else ""
    print(f"{folder}: images with questions by {', '.join(names)}: {len(rows)}{note}", file=sys.stderr)
    return Dataset.from_dict({name: [row[name] for row in rows] for name in FEATURES}, FEATURES)


def _read_metadata(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, row) of each line of a file. A line of a CSV file has one question."""
    if path.suffix == ".csv":
        reader = csv.DictReader(io.StringIO(text))
        for cells in reader:
            if None in cells:
                raise DataError(f"{path}:{reader.line_num}: more cells than columns: put a text with commas in quotes")
            yield f"{path}:{reader.line_num}", cells | {key: [cells.get(key)] for key in ("questions", "answers")}
        return
    for i, line in split_lines(text):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{i}: is not valid JSON: {error}") from error
        yield f"{path}:{i}", row


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
