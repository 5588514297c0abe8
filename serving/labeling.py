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
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from pyarrow.fs import FileSelector, FileSystem, LocalFileSystem
from tqdm import tqdm

from ..common.answers import answer_notes
from ..common.files import DataError, decode_text
from ..common.image_files import IMAGE_SUFFIXES, image_warnings, open_image, select_files
from ..common.options import option
from ..fast_traffic_vlm import checksum
from ..pipeline_traffic_vlm import Asked, TrafficVLMPipeline
from .cluster import running_ray, share_machines
from .options import ModelOptions, read_questions


KINDS = {"image": tuple(IMAGE_SUFFIXES), "tar": (".tar", ".tar.gz", ".tgz"), "parquet": (".parquet",)}
SCHEMA = pa.schema(
    {
        "key": pa.string(),
        "question": pa.string(),
        "answer": pa.string(),
        "score": pa.float32(),
        "p_yes": pa.float32(),
        "problem": pa.string(),  # of the image or of the answer
    }
)
NOT_SURE = pa.field("not_sure", pa.bool_())  # one more column with --thresholds
OBJECT = pa.struct({"label": pa.string(), "score": pa.float32(), "box": pa.list_(pa.float32())})
OBJECTS = pa.field("objects", pa.list_(OBJECT))  # one more column with --locate; null if the image has a problem
CAPTION = pa.field("caption", pa.string())  # one more column with --describe; null if the image has a problem


@dataclass(kw_only=True)
class LabelOptions(ModelOptions):
    """Options of `label`."""

    device: Literal["cpu", "cuda"] | None = option(None, "by default GPUs if the machines have any")
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
    actors: int | None = option(None, "processes with a model each; without it, as many as have room")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address and self.address.startswith("ray://"):
            raise DataError(f"--address {self.address}: run the command on a machine of the cluster, with auto")
        if os.path.isdir(self.model):
            self.model = os.path.abspath(self.model)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def open_url(name: str) -> tuple[FileSystem, str]:
    """(file system, path on it) of a path or a URL. Raises a `DataError` for an unknown kind of URL."""
    try:
        return FileSystem.from_uri(name) if "://" in name else (LocalFileSystem(), os.path.abspath(name))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name}: there is no such file system: {error}") from error


def list_files(source: str) -> tuple[str, list[str], str]:
    """(kind of the input: "image", "tar" or "parquet"; its files as paths without "s3://"; note on other files).

    Args:
        source: a path or a URL of a folder or a file, or a local list.txt with the path of an image in each line.

    Raises:
        DataError: no such files, or files of several kinds.
    """
    fs, path = open_url(source)
    if path.endswith(".txt") and os.path.isfile(path):
        lines = decode_text(Path(path).read_bytes()).splitlines()
        names = [os.path.join(os.path.dirname(path), line.strip()) for line in lines if line.strip()]
        return "image", list(dict.fromkeys(names)), ""
    [info] = fs.get_file_info([path])
    found = [info] if info.is_file else fs.get_file_info(FileSelector(path, allow_not_found=True, recursive=True))
    root = os.path.dirname(path) if info.is_file else path
    suffixes = [suffix for suffixes in KINDS.values() for suffix in suffixes]
    files, left_out = select_files(sorted(info.path for info in found if info.is_file), suffixes, root)
    kinds = Counter(kind for name in files for kind, suffixes in KINDS.items() if name.lower().endswith(suffixes))
    if len(kinds) != 1:
        listed = ", ".join(f"{count:,} of kind {kind}" for kind, count in sorted(kinds.items())) or "none"
        message = f"{source}: must hold images, Parquet files or tars, one of these kinds; found {listed}. {left_out}"
        raise DataError(message.rstrip(" ."))
    return next(iter(kinds)), files, left_out


class LabelFolder:
    """A folder of label files, on this machine or at a URL.

    Args:
        options: what all labels of the folder share.

    Attributes:
        labeled: the files that have labels.

    Raises:
        DataError: there is no such file system; or a label file is damaged, none of ours, or has other options.
    """

    def __init__(self, url: str, options: dict[str, Any]):
        self.fs, self.path = open_url(url)
        self.options, self.labeled = options, set[str]()
        for info in self.fs.get_file_info(FileSelector(self.path, allow_not_found=True)):
            if not info.base_name.endswith(".parquet"):
                continue
            try:
                metadata = pq.read_schema(info.path, filesystem=self.fs).metadata or {}
                before, files = (json.loads(metadata[key]) for key in (b"options", b"files"))
            except (pa.ArrowException, KeyError) as error:
                raise DataError(f"{info.path} is damaged, or holds no labels: remove it ({error})") from error
            pairs = [(name, before.get(name), new) for name, new in options.items()]
            others = [f"{name} {old!r}, now {new!r}" for name, old, new in pairs if old != new]
            if others:
                what = "; ".join(others)
                raise DataError(f"{self.path} has labels of another run ({what}): choose another --output_dir")
            self.labeled.update(files)

    def write(self, labels: pa.Table) -> None:
        """Write the labels of a block, from a `Labeler`, as a file that appears complete or not at all."""
        files = sorted(set(labels["file"].to_pylist()))
        name = f"part-{digest(chr(0).join(files))}.parquet"
        metadata = {"options": json.dumps(self.options), "files": json.dumps(files)}
        self.fs.create_dir(self.path)
        table, temporary = labels.drop_columns(["file", "warnings"]), f"{self.path}/.{name}.tmp"
        table = table.replace_schema_metadata(metadata)
        pq.write_table(table, temporary, filesystem=self.fs, compression="zstd")
        self.fs.move(temporary, f"{self.path}/{name}")


class StoredImage(NamedTuple):
    """The bytes of an image file, which may be no image or be missing, and the file that holds them."""

    key: str
    content: Any
    file: str


class StoredImagePipeline(TrafficVLMPipeline):
    """A pipeline for `StoredImage`s, which its threads open. All answers about a bad image have its problem.

    Attributes:
        labels: classes to locate; None for none.
        objects: what was located in each image, in order; None for a bad image.
        describes: whether images get captions.
        captions: of each image, in order; None for a bad image.
    """

    labels: list[str] | None = None
    objects: list[list[dict[str, Any]] | None]
    describes = False
    captions: list[str | None]

    def _encode(self, rows: Sequence[Asked]) -> Any:
        encoded = super()._encode(rows)
        if rows[0].pixels is None:  # `describe` asks about an encoded image
            return encoded
        for row, one in zip(rows, encoded):
            if self.labels:
                self.objects.append(self.locate(one, self.labels, size=row.size) if row.size else None)
            if self.describes:
                self.captions.append(self.describe(one)["caption"] if row.size else None)
        return encoded

    def preprocess(self, inputs: Asked, region: Any = None, image_size: Any = None) -> Asked:
        stored = inputs.image
        if hasattr(stored, "key_values"):
            return super().preprocess(inputs, region, image_size)
        try:
            if not isinstance(stored.content, bytes):
                raise DataError("this row has no image")
            image = open_image(stored.content, os.path.basename(stored.key))
            return super().preprocess(replace(inputs, image=image, size=image.size), region, image_size)
        except (OSError, TypeError, ValueError) as error:
            problem = str(error) or type(error).__name__
        # A pass needs pixels for each of its images: here a black image, about which nothing is asked.
        questions = [replace(question, problem=problem) for question in inputs.questions]
        black = Image.new("RGB", (32, 32))
        return super().preprocess(replace(inputs, image=black, questions=questions), image_size=image_size)


class Labeler:
    """Labels blocks. Ray Data makes one in each actor and calls it; it holds a model.

    Args:
        kind: of the input, see `list_files`.
        prefix: what precedes the paths of blocks in keys, such as "s3://".
    """

    def __init__(self, options: LabelOptions, kind: str, prefix: str = ""):
        self.options, self.kind, self.prefix = options, kind, prefix
        self.pipe: Any = options.load(StoredImagePipeline)
        self.pipe.labels, self.pipe.describes = options.locate, options.describe
        schema = SCHEMA if options.loaded_thresholds is None else SCHEMA.append(NOT_SURE)
        schema = schema.append(OBJECTS) if options.locate else schema
        schema = schema.append(CAPTION) if options.describe else schema
        self.schema = pa.schema([*schema, pa.field("file", pa.string()), pa.field("warnings", pa.list_(pa.string()))])

    def __call__(self, block: pa.Table) -> pa.Table:
        """The labels of a block: a row for each image and question, with the image's file and the block's warnings."""
        images, self.pipe.objects, self.pipe.captions = list(self.images(block)), [], []
        with image_warnings() as warnings:
            answers = list(self.pipe(iter(images), self.options.ask, batch_size=self.options.batch_size))
        rows = [
            {"key": image.key, "file": image.file, "warnings": warnings, "objects": objects, "caption": caption} | item
            for image, items, objects, caption in zip(
                images, answers, self.pipe.objects or repeat(None), self.pipe.captions or repeat(None)
            )
            for item in items
        ]
        return pa.Table.from_pylist(rows, self.schema)

    def images(self, block: pa.Table) -> Iterator[StoredImage]:
        """Yield the images of a block, which Ray Data has read."""
        column, key_column = self.options.column, self.options.key_column
        for number, row in enumerate(block.to_pylist()):
            file, path = row["path"], self.prefix + row["path"]
            if self.kind == "image":
                yield StoredImage(path, row["bytes"], file)
            elif self.kind == "tar":  # a sample: its files by their suffixes
                names = {f"{row['__key__']}.{end}": value for end, value in row.items() if isinstance(value, bytes)}
                yield from (StoredImage(f"{path}#{name}", names[name], file) for name in select_files(names)[0])
            else:
                image = row[column]
                content = image.get("bytes") if isinstance(image, dict) else image
                yield StoredImage(str(row[key_column]) if key_column else f"{path}#{number}", content, file)


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
    for column in columns:
        if column not in names:
            raise DataError(f"{files[0]}: has no column {column!r}; its columns are {', '.join(names)}")
    return ray.data.read_parquet(files, columns=[*columns, "path"], **shared)


def check_questions(options: LabelOptions) -> dict[str, Any]:
    """Check the questions before hours are spent on them, and return what all labels of a folder share.

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
        for note in answer_notes(question.item()):
            print(f"{question.text!r}: {note}", file=sys.stderr)
    options.ask = [question.text for question in questions]
    names = ("bf16", "image_size", "locate", "region", "column", "key_column")
    return {
        "questions": sorted(options.ask),
        "weights": checksum(pipe.model),
        "describe": options.describe or None,
        "temperature": pipe.model.config.yes_no_temperature,
        "thresholds": digest(Path(options.thresholds).read_text()) if options.thresholds else None,
        **{name: getattr(options, name) for name in names},
    }


def label(source: str, options: LabelOptions) -> None:
    """Label what has no labels yet, with the machines of Ray, and print the progress to standard error.

    Args:
        source: see `list_files`.

    Raises:
        ValueError: the input, the folder, a question or the device cannot be used.
        OSError: Ray or the model does not start, or a file cannot be read or written. Complete files of labels stay.
    """
    shared = check_questions(options)
    kind, files, left_out = list_files(source)
    if left_out:
        print(left_out, file=sys.stderr)
    folder = LabelFolder(options.output_dir, shared)
    files = [file for file in files if file not in folder.labeled]
    if not files:
        print(f"all of {source} is labeled", file=sys.stderr)
        return
    bad, warned, prefix = 0, set[str](), source[: source.find("://") + 3] if "://" in source else ""
    blocks = -(-len(files) // options.images_per_part) if kind == "image" else len(files)
    with running_ray(options.address) as ray:
        resources, room = share_machines(ray.cluster_resources(), options.device, options.threads)
        device: Literal["cpu", "cuda"] = "cuda" if "num_gpus" in resources else "cpu"
        used = replace(options, device=device, threads=resources.get("num_cpus", options.threads))
        labels = read_blocks(kind, files, blocks, open_url(source)[0], options).map_batches(
            Labeler,
            fn_constructor_args=[used, kind, prefix],
            batch_size=None,  # a block
            batch_format="pyarrow",
            concurrency=max(1, min(options.actors or room, room, blocks)),
            **resources,
        )
        with tqdm(total=len(files) if kind == "image" else None, unit=" images") as bar:
            for block in labels.iter_batches(batch_size=None, batch_format="pyarrow"):
                folder.write(block)
                for warning in block["warnings"][0].as_py():
                    if warning not in warned:
                        warned.add(warning)
                        tqdm.write(warning, file=sys.stderr)
                problems = block["problem"].is_valid().to_numpy().reshape(-1, len(options.ask))
                bad += int(problems.any(axis=1).sum())
                bar.set_postfix_str(f"{bad:,} with a problem", refresh=False)
                bar.update(len(problems))
