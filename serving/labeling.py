"""Ask the same questions about very many images, and write the answers as Parquet files.

    files ──→ Ray Data: a block for 200 images, a tar or a Parquet file ──→ actors, each with a pipeline
    labels of a block ──→ this process ──→ part-<digest of its files>.parquet, which appears complete or not at all

Each label file notes in its schema which files it labels and with which options. So the next run leaves out what has
labels, and continues a run that was stopped. Actors that outlive it write nothing.
"""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow.fs import FileSelector, FileSystem, LocalFileSystem
from tqdm import tqdm

from ..common.files import DataError
from ..common.image_files import IMAGE_SUFFIXES, open_image, select_files
from ..common.options import option
from ..fast_traffic_vlm import fingerprint
from ..pipeline_traffic_vlm import THREADS, answer_batches
from .cluster import running_ray, share_machines
from .options import ModelOptions, examine, read_questions


# Options that all labels of a folder share.
SHARED = ("answer_untaught", "bf16", "column", "describe", "image_size", "key_column", "locate", "min_score", "region")
KINDS = {"image": tuple(IMAGE_SUFFIXES), "tar": (".tar", ".tar.gz", ".tgz"), "parquet": (".parquet",)}
OBJECT = {
    "label": pa.string(),
    "score": pa.float32(),
    "box": pa.list_(pa.float32()),
    "point": pa.list_(pa.float32()),
}
SCHEMA = pa.schema(
    {
        "key": pa.string(),
        "question": pa.string(),
        "answer": pa.string(),
        "score": pa.float32(),
        "p_yes": pa.float32(),
        "problem": pa.string(),  # of the image or of the answer
        # Null without --thresholds, --locate and --describe, and if the image has a problem.
        "not_sure": pa.bool_(),
        "objects": pa.list_(pa.struct(OBJECT)),
        "caption": pa.string(),
        "file": pa.string(),  # of a block; not written
    }
)


@dataclass(kw_only=True)
class LabelOptions(ModelOptions):
    """Options of `label`."""

    threads: int = option(2, "CPU cores of an actor")
    ask: list[str] = field(metadata={"help": "a question; repeat the option for more", "action": "extend"})
    locate: list[str] | None = option(None, "classes of objects to locate in each image, or all")
    describe: bool = option(False, "add a caption of each image, of what is sure")
    output_dir: str = field(metadata={"help": "folder to write to: a path, or a URL such as s3://bucket/labels"})
    column: str = option("image", "column of Parquet files with the images: bytes, or a struct with bytes")
    key_column: str | None = option(None, "column of Parquet files to use as key; without it, file and row number")
    images_per_part: int = option(200, "single images in one file of labels, on average")
    batch_size: int = option(32, "images in one pass of the model")
    address: str | None = option(None, "Ray cluster of this machine: auto, or host:6379; without it, a new one")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def open_url(name: str) -> tuple[FileSystem, str]:
    """(file system, path on it) of a path or a URL. Raises a ValueError for an unknown kind of URL."""
    return FileSystem.from_uri(name) if "://" in name else (LocalFileSystem(), os.path.abspath(name))


def list_files(source: str) -> tuple[str, list[str], str]:
    """(kind of the input: "image", "tar" or "parquet"; its files as paths without "s3://"; note on other files).

    Args:
        source: a path or a URL of a folder or a file, or a local list.txt with the path of an image in each line.

    Raises:
        DataError: no such files, files of several kinds, or an empty list.
    """
    fs, path = open_url(source)
    if path.endswith(".txt") and os.path.isfile(path):
        lines = Path(path).read_text("utf-8-sig").splitlines()
        names = [os.path.join(os.path.dirname(path), line.strip()) for line in lines if line.strip()]
        if not names:
            raise DataError(f"{source} lists no image")
        return "image", list(dict.fromkeys(names)), ""
    [info] = fs.get_file_info([path])
    infos = [info] if info.is_file else fs.get_file_info(FileSelector(path, allow_not_found=True, recursive=True))
    root = os.path.dirname(path) if info.is_file else path
    suffixes = [suffix for suffixes in KINDS.values() for suffix in suffixes]
    files, left_out = select_files(sorted(info.path for info in infos if info.is_file), suffixes, root)
    kinds = {kind for name in files for kind, suffixes in KINDS.items() if name.lower().endswith(suffixes)}
    if len(kinds) != 1:
        found = " and ".join(sorted(kinds)) or "none"
        message = f"{source}: must hold images, Parquet files or tars, one of these kinds; found {found}. {left_out}"
        raise DataError(message.rstrip(" ."))
    return kinds.pop(), files, left_out


class LabelFolder:
    """A folder of label files, on this machine or at a URL.

    Args:
        options: what all labels of the folder share.

    Attributes:
        labeled: the files that have labels.

    Raises:
        ValueError: there is no such file system; or labels have other options.
    """

    def __init__(self, url: str, options: dict[str, Any]):
        self.fs, self.path = open_url(url)
        self.options, self.labeled = options, set[str]()
        for info in self.fs.get_file_info(FileSelector(self.path, allow_not_found=True)):
            if not info.base_name.startswith("part-"):
                continue
            try:
                metadata = pq.read_schema(info.path, filesystem=self.fs).metadata
                before, files = (json.loads(metadata[key]) for key in (b"options", b"files"))
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(f"{info.path} is no file of labels, or damaged; choose another folder") from error
            if others := [name for name, new in options.items() if before.get(name) != new]:
                listed = "; ".join(f"{name} {before.get(name)!r}, now {options[name]!r}" for name in others)
                raise DataError(f"{self.path} has labels of another run ({listed}): choose another --output_dir")
            self.labeled.update(files)

    def write(self, labels: pa.Table) -> None:
        """Write the labels of a block, from a `Labeler`, as a file that appears complete or not at all."""
        files = sorted(set(labels["file"].to_pylist()))
        name = f"part-{digest(chr(0).join(files))}.parquet"
        metadata = {"options": json.dumps(self.options), "files": json.dumps(files)}
        table = labels.drop_columns("file").replace_schema_metadata(metadata)
        temporary = f"{self.path}/.{name}.tmp"
        self.fs.create_dir(self.path)
        pq.write_table(table, temporary, filesystem=self.fs, compression="zstd")
        self.fs.move(temporary, f"{self.path}/{name}")


class Labeler:
    """Labels blocks. Ray Data makes one in each actor and calls it; it holds a model.

    Args:
        kind: of the input, see `list_files`.
    """

    def __init__(self, options: LabelOptions, kind: str):
        self.options, self.kind, self.pipe = options, kind, options.load()

    def __call__(self, block: pa.Table) -> pa.Table:
        """The labels of a block: a row for each image and question, with the image's file."""
        rows = answer_batches(self.open, self.label, self.options.batch_size, THREADS, self.images(block))
        return pa.Table.from_pylist(list(rows), SCHEMA)

    def images(self, block: pa.Table) -> Iterator[tuple[str, str, Any]]:
        """Yield (key, file, bytes) of the images of a block, which Ray Data has read."""
        column, key_column = self.options.column, self.options.key_column
        for number, row in enumerate(block.to_pylist()):
            file = row["path"]
            if self.kind == "image":
                yield file, file, row["bytes"]
            elif self.kind == "tar":  # a sample: its files by their suffixes
                names = {f"{row['__key__']}.{end}": value for end, value in row.items() if isinstance(value, bytes)}
                yield from ((f"{file}#{name}", file, names[name]) for name in select_files(names)[0])
            else:
                image = row[column]
                content = image.get("bytes") if isinstance(image, dict) else image
                yield str(row[key_column]) if key_column else f"{file}#{number}", file, content

    def open(self, key: str, file: str, content: Any) -> tuple[dict[str, Any], Any, Any]:
        """(key, file and problem of an image; pixels [1,3,H,W], None with a problem; size). Runs in threads."""
        row = {"key": key, "file": file}
        try:
            if not isinstance(content, bytes):
                raise DataError("this row has no image")
            image = open_image(content, os.path.basename(key))
            return row, self.pipe.processor.pixels([image], self.options.part_of_image), image.size
        except (OSError, ValueError) as error:
            return row | {"problem": str(error)}, None, None

    def label(self, batch: Sequence[tuple[dict[str, Any], Any, Any]]) -> Iterator[dict[str, Any]]:
        """Yield a row for each image, from `open`, and question."""
        asked, encoded, answers = self.options.ask, [], []
        if good := [pixels for _, pixels, _ in batch if pixels is not None]:
            with self.pipe.fast:
                images = self.pipe.model.encode_images(torch.cat(good).to(self.pipe.device))
            encoded = [images[i] for i in range(len(images))]
            answers = self.pipe(encoded, asked, batch_size=len(encoded))
        answered = zip(encoded, answers)
        for row, pixels, size in batch:
            if pixels is None:
                yield from (row | {"question": question} for question in asked)
            else:
                image, items = next(answered)
                row |= examine(self.pipe, image, size, self.options.locate, self.options.describe)
                yield from (row | item for item in items)


def read_blocks(kind: str, files: list[str], blocks: int, fs: FileSystem, options: LabelOptions) -> Any:
    """A dataset of Ray that has this number of blocks, each with whole files. Raises a `DataError`: no such column."""
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # the errors that it logs are raised, too
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = None  # otherwise large blocks would be split
    context.use_datasource_v2 = False  # its blocks are not whole files, and its listing waits for a core
    shared: dict[str, Any] = {"filesystem": fs, "include_paths": True, "override_num_blocks": blocks}
    # Actors may take all cores, so reading must not wait for one; without a limit, each block would get a process.
    shared |= {"num_cpus": 0, "concurrency": min(blocks, 4)}
    if kind == "image":
        return ray.data.read_binary_files(files, **shared)
    if kind == "tar":
        return ray.data.read_webdataset(files, decoder=None, **shared)
    names = pq.read_schema(files[0], filesystem=fs).names
    columns = [name for name in (options.column, options.key_column) if name]
    if "path" in columns:  # Ray puts the file's path there
        raise DataError("a column 'path' cannot be read: rename it")
    if missing := [name for name in columns if name not in names]:
        raise DataError(f"{files[0]}: has no column {missing[0]!r}; its columns are {', '.join(names)}")
    return ray.data.read_parquet(files, columns=[*columns, "path"], **shared)


def prepare(options: LabelOptions) -> dict[str, Any]:
    """Put questions and classes into the options as the pipeline reads them; return what all labels of a folder share.

    What cannot be answered is refused here, before hours are spent on it.

    Raises:
        OSError: there is no such model.
        ValueError: a question cannot be answered, or has a word that the model does not know; or a class cannot be
            located.
    """
    pipe = replace(options, device="cpu").load()
    if options.locate:
        options.locate = sorted(pipe.read_labels(options.locate))
    questions = read_questions(pipe, options.ask)
    for question in questions:
        if question.unknown_words and not options.answer_untaught:
            words = ", ".join(question.unknown_words)
            raise DataError(f"{question.text!r}: the model does not know {words}. Correct or rephrase the question")
    options.ask = [question.text for question in questions]
    return {
        "questions": sorted(options.ask),
        "weights": fingerprint(pipe.model)[1],
        "temperature": pipe.model.config.yes_no_temperature,
        "thresholds": digest(Path(options.thresholds).read_text()) if options.thresholds else None,
        **{name: getattr(options, name) for name in SHARED},
    }


def label(source: str, options: LabelOptions) -> None:
    """Label what has no labels yet, with the machines of Ray, and print the progress to standard error.

    Args:
        source: see `list_files`.

    Raises:
        ValueError: the input, the folder, a question or the device cannot be used.
        OSError: Ray or the model does not start, or a file cannot be read or written. Complete files of labels stay.
    """
    if f"{open_url(options.output_dir)[1]}/".startswith(f"{open_url(source)[1]}/"):
        raise DataError(f"--output_dir {options.output_dir}: is inside the input, so the next run would read it")
    shared = prepare(options)
    kind, files, left_out = list_files(source)
    if left_out:
        print(left_out, file=sys.stderr)
    folder = LabelFolder(options.output_dir, shared)
    files = [file for file in files if file not in folder.labeled]
    if not files:
        print(f"all of {source} is labeled", file=sys.stderr)
        return
    blocks = -(-len(files) // options.images_per_part) if kind == "image" else len(files)
    with running_ray(options.address) as ray:
        resources, room = share_machines(ray.cluster_resources(), options.device, options.threads)
        labels = read_blocks(kind, files, blocks, open_url(source)[0], options).map_batches(
            Labeler,
            fn_constructor_args=[options, kind],
            batch_size=None,  # a block
            batch_format="pyarrow",
            concurrency=max(1, min(room, blocks)),
            **resources,
        )
        bad = 0
        with tqdm(total=len(files) if kind == "image" else None, unit=" images") as bar:
            for block in labels.iter_batches(batch_size=None, batch_format="pyarrow"):
                folder.write(block)
                problems = block["problem"].is_valid().to_numpy().reshape(-1, len(options.ask))
                bad += int(problems.any(axis=1).sum())
                bar.set_postfix_str(f"{bad:,} with a problem", refresh=False)
                bar.update(len(problems))
