"""Ask the same questions about very many images, and write the answers as Parquet files.

    files ──→ Ray Data: a block for 200 images, a tar or a Parquet file ──→ actors, each with a pipeline
    labels of a block ──→ this process ──→ part-<digest of its files>.parquet, which appears complete or not at all

The next run leaves out what has labels, so it continues a run that was stopped. Actors that outlive it write nothing.
"""

import glob
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from pyarrow.fs import FileSelector, FileSystem, LocalFileSystem
from tqdm import tqdm
from transformers.utils import cached_file

from ..common.answers import answer_notes
from ..common.files import DataError
from ..common.image_files import IMAGE_SUFFIXES, escape_brackets, fixed_part, open_image, select_files
from ..common.loading import base_of_adapter
from ..common.options import option
from ..pipeline_traffic_vlm import Asked, TrafficVLMPipeline
from .cluster import load_data, load_ray, share_machines, start_ray
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


@dataclass(kw_only=True)
class LabelOptions(ModelOptions):
    """Options of `label`."""

    device: Literal["cpu", "cuda"] | None = option(None, "by default GPUs if the machines have any")
    threads: int = option(2, "CPU cores of an actor")
    ask: list[str] = field(metadata={"help": "a question; repeat the option for more", "action": "extend"})
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
        self.output_dir = absolute(self.output_dir)
        if os.path.isdir(self.model):
            self.model = os.path.abspath(self.model)

    def shared(self) -> dict[str, Any]:
        """The options that all labels of a folder share."""
        return {
            "questions": sorted(self.ask),
            "weights": weights_digest(self.model),
            "bf16": self.bf16,
            "thresholds": digest(Path(self.thresholds).read_bytes()) if self.thresholds else None,
            "region": self.region,
            "column": self.column,
            "key_column": self.key_column,
        }


def absolute(path: str) -> str:
    """The absolute path of a local path; a URL unchanged."""
    return path if "://" in path else os.path.abspath(path)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def weights_digest(model: str) -> str:
    """A digest of the weights and settings in a model folder, or in the cached files of a Hub repository."""
    name = "adapter_config.json" if base_of_adapter(model) else "config.json"
    folder = Path(str(cached_file(model, name))).parent
    paths = sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")])
    return digest(b"".join(path.name.encode() + hashlib.sha256(path.read_bytes()).digest() for path in paths))


def file_system(url: str) -> tuple[FileSystem, str]:
    """The file system of an absolute path or a URL, and the path on it. Raises a `DataError`."""
    try:
        return FileSystem.from_uri(url) if "://" in url else (LocalFileSystem(), url)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{url}: there is no such file system: {error}") from error


def list_files(source: str) -> tuple[str, list[str], str]:
    """The kind of the input ("image", "tar" or "parquet"), its files as paths without "s3://", and a note on others.

    Args:
        source: an absolute path or a URL of a folder or a file; or of local files, a glob or a list.txt with a path in
            each line.

    Raises:
        DataError: no such files, or files of several kinds.
    """
    fs, path = file_system(source)
    if "://" in source:
        [info] = fs.get_file_info([path])
        found = [info] if info.is_file else fs.get_file_info(FileSelector(path, allow_not_found=True, recursive=True))
        names, root = [info.path for info in found if info.is_file], path
    elif path.endswith(".txt") and os.path.isfile(path):
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        names = [os.path.join(os.path.dirname(path), line.strip()) for line in lines if line.strip()]
        return "image", list(dict.fromkeys(names)), ""
    else:
        found = [path] if os.path.exists(path) else glob.glob(path, recursive=True) or glob.glob(escape_brackets(path))
        below = [name for one in found for name in glob.glob(f"{glob.escape(one)}/**", recursive=True)]
        names = [name for name in {*found, *below} if os.path.isfile(name)]
        root = os.path.dirname(path) if names == [path] else path if os.path.exists(path) else fixed_part(path)
    files, left_out = select_files(sorted(names), [end for ends in KINDS.values() for end in ends], root)
    kinds = Counter(kind for name in files for kind, ends in KINDS.items() if name.lower().endswith(ends))
    if len(kinds) != 1:
        listed = ", ".join(f"{count:,} of kind {kind}" for kind, count in sorted(kinds.items())) or "none"
        message = f"{source}: must hold images, Parquet files or tars, one of these kinds; found {listed}. {left_out}"
        raise DataError(message.rstrip(" ."))
    return next(iter(kinds)), files, left_out


class LabelFolder:
    """A folder of labels on this machine or on another file system of pyarrow.

    Raises:
        DataError: there is no such file system.
    """

    def __init__(self, url: str):
        self.fs, self.path = file_system(url)

    def names(self) -> set[str]:
        """The names of the label files."""
        found = self.fs.get_file_info(FileSelector(self.path, allow_not_found=True))
        return {info.base_name for info in found if info.base_name.endswith(".parquet")}

    def check(self, options: dict[str, Any]) -> None:
        """Raise a `DataError` if a label file of the folder was written with other options, or is none of ours."""
        for name in sorted(self.names())[:1]:
            try:
                metadata = pq.read_schema(f"{self.path}/{name}", filesystem=self.fs).metadata or {}
                before = json.loads(metadata[b"options"])
            except (pa.ArrowException, KeyError) as error:
                raise DataError(f"{self.path}/{name} holds no labels: choose another --output_dir") from error
            others = [f"{key} {before.get(key)!r}, now {new!r}" for key, new in options.items() if before[key] != new]
            if others:
                what = "; ".join(others)
                raise DataError(f"{self.path} has labels of another run ({what}): choose another --output_dir")

    def keys(self) -> set[str]:
        """The keys of all labels. Raises a `DataError` if a file is damaged."""
        found: set[str] = set()
        for name in self.names():
            try:
                table = pq.read_table(f"{self.path}/{name}", columns=["key"], filesystem=self.fs)
                found.update(table["key"].to_pylist())
            except pa.ArrowException as error:
                message = f"{self.path}/{name} is damaged: {error}. Remove it, and its images are labeled again"
                raise DataError(message) from error
        return found

    def write(self, labels: pa.Table, options: dict[str, Any]) -> None:
        """Write the labels of a block, from a `Labeler`, as a file that appears complete or not at all."""
        self.fs.create_dir(self.path)
        name = labels["file"][0].as_py()
        temporary = f"{self.path}/.{name}.tmp"
        table = labels.drop_columns("file").replace_schema_metadata({"options": json.dumps(options)})
        pq.write_table(table, temporary, filesystem=self.fs, compression="zstd")
        self.fs.move(temporary, f"{self.path}/{name}")


def part_name(paths: Sequence[str]) -> str:
    """The name of the label file of some files."""
    return f"part-{digest(chr(0).join(paths).encode())}.parquet"


class StoredImage(NamedTuple):
    """The bytes of an image file, which may be no image or be missing."""

    key: str
    content: Any

    def open(self) -> Image.Image:
        """The image. Raises a ValueError if there is none."""
        if not isinstance(self.content, bytes):
            raise DataError("this row has no image")
        return open_image(self.content, os.path.basename(self.key))


class StoredImagePipeline(TrafficVLMPipeline):
    """A pipeline for `StoredImage`s, which its threads open. All answers about a bad image have its problem."""

    def preprocess(self, inputs: Asked, region: Any = None) -> Asked:
        try:
            return super().preprocess(replace(inputs, image=inputs.image.open()), region)
        except (OSError, TypeError, ValueError) as error:
            problem = str(error) or type(error).__name__
        # A pass needs pixels for each of its images: here a black image, about which nothing is asked.
        questions = [replace(question, problem=problem) for question in inputs.questions]
        return super().preprocess(replace(inputs, image=Image.new("RGB", (32, 32)), questions=questions))


class Labeler:
    """Labels blocks. Ray Data makes one in each actor and calls it; it holds a model.

    Args:
        kind: of the input, see `list_files`.
        prefix: what precedes the paths of blocks in keys, such as "s3://".
    """

    def __init__(self, options: LabelOptions, kind: str, prefix: str = ""):
        self.options, self.kind, self.prefix = options, kind, prefix
        self.pipe = options.load(StoredImagePipeline)
        self.schema = SCHEMA if options.loaded_thresholds is None else SCHEMA.append(NOT_SURE)

    def __call__(self, block: pa.Table) -> pa.Table:
        """The labels of a block, a row for each image and question, and a column with the name of their file."""
        images = list(self.images(block))
        answers = self.pipe(iter(images), self.options.ask, batch_size=self.options.batch_size)
        rows = [{"key": image.key, **item} for image, items in zip(images, answers) for item in items]
        name = part_name(sorted(set(block["path"].to_pylist())))
        return pa.Table.from_pylist(rows, self.schema).append_column("file", pa.array([name] * len(rows), pa.string()))

    def images(self, block: pa.Table) -> Iterator[StoredImage]:
        """Yield the images of a block, which Ray Data has read."""
        column, key_column = self.options.column, self.options.key_column
        for number, row in enumerate(block.to_pylist()):
            path = self.prefix + row["path"]
            if self.kind == "image":
                yield StoredImage(path, row["bytes"])
            elif self.kind == "tar":  # a sample: its files by their suffixes
                names = {f"{row['__key__']}.{end}": value for end, value in row.items() if isinstance(value, bytes)}
                yield from (StoredImage(f"{path}#{name}", names[name]) for name in select_files(names)[0])
            else:
                image = row[column]
                content = image.get("bytes") if isinstance(image, dict) else image
                yield StoredImage(str(row[key_column]) if key_column else f"{path}#{number}", content)


def check_questions(options: LabelOptions) -> list[str]:
    """The questions without repeats, checked before hours are spent on them.

    Raises:
        OSError: there is no such model.
        ValueError: a question cannot be answered, or has a word that the model does not know.
    """
    questions = read_questions(replace(options, device="cpu").load(), options.ask)
    for question in questions:
        if question.unknown_words and not options.answer_untaught:
            words = ", ".join(question.unknown_words)
            raise DataError(f"{question.text!r}: the model does not know {words}. Correct or rephrase the question")
        for note in answer_notes(question.item()):
            print(f"{question.text!r}: {note}", file=sys.stderr)
    return [question.text for question in questions]


def without_labels(kind: str, files: Sequence[str], prefix: str, folder: LabelFolder) -> list[str]:
    """The files that have no labels. A tar or Parquet file has them if its label file exists."""
    done = folder.keys() if kind == "image" else folder.names()
    return [file for file in files if (prefix + file if kind == "image" else part_name([file])) not in done]


def read_blocks(kind: str, files: list[str], blocks: int, readers: int, fs: FileSystem, options: LabelOptions) -> Any:
    """A dataset of Ray that has this number of blocks, each with whole files. Raises a `DataError`: no such column."""
    data = load_data()
    context = data.DataContext.get_current()
    context.target_max_block_size = None  # otherwise large blocks would be split
    context.use_datasource_v2 = False  # its blocks are not whole files, and its listing waits for a core
    shared: dict[str, Any] = {"filesystem": fs, "include_paths": True, "override_num_blocks": blocks}
    # Actors may take all cores, so reading must not wait for one; without a limit, each block would get a process.
    shared |= {"num_cpus": 0, "concurrency": readers}
    if kind == "image":
        return data.read_binary_files(files, **shared)
    if kind == "tar":
        return data.read_webdataset(files, decoder=None, **shared)
    names = pq.read_schema(files[0], filesystem=fs).names
    columns = [name for name in (options.column, options.key_column) if name]
    for column in columns:
        if column not in names:
            raise DataError(f"{files[0]}: has no column {column!r}; its columns are {', '.join(names)}")
    return data.read_parquet(files, columns=[*columns, "path"], **shared)


def label(source: str, options: LabelOptions) -> None:
    """Label what has no labels yet, with the machines of Ray, and print the progress to standard error.

    Args:
        source: see `list_files`; it may be a relative path.

    Raises:
        ValueError: the input, the folder, a question or the device cannot be used.
        OSError: Ray or the model does not start, or a file cannot be read or written. Complete files of labels stay.
    """
    options.ask = check_questions(options)
    source = absolute(source)
    kind, files, left_out = list_files(source)
    if left_out:
        print(left_out, file=sys.stderr)
    folder, prefix = LabelFolder(options.output_dir), source[: source.find("://") + 3] if "://" in source else ""
    shared = options.shared()
    folder.check(shared)
    files = without_labels(kind, files, prefix, folder)
    if not files:
        print(f"all of {source} is labeled", file=sys.stderr)
        return
    ray = load_ray(options.address)
    is_running = ray.is_initialized()  # started by the caller
    if not is_running:
        start_ray(ray, options.address)
    try:
        resources, room = share_machines(ray.nodes(), options.device, options.threads, options.actors or 0)
        device: Literal["cpu", "cuda"] = "cuda" if "num_gpus" in resources else "cpu"
        threads = int(resources.get("num_cpus", options.threads))
        blocks = -(-len(files) // options.images_per_part) if kind == "image" else len(files)
        actors = min(options.actors or room, blocks)
        dataset = read_blocks(kind, files, blocks, actors, file_system(source)[0], options)
        labels = dataset.map_batches(
            Labeler,
            fn_constructor_args=[replace(options, device=device, threads=threads), kind, prefix],
            batch_size=None,  # a block
            batch_format="pyarrow",
            concurrency=actors,
            **resources,
        )
        bad = 0
        with tqdm(total=len(files) if kind == "image" else None, unit=" images") as bar:
            for block in labels.iter_batches(batch_size=None, batch_format="pyarrow"):
                folder.write(block, shared)
                problems = block["problem"].is_valid().to_numpy().reshape(-1, len(options.ask))
                bad += int(problems.any(axis=1).sum())
                bar.set_postfix_str(f"{bad:,} with a problem", refresh=False)
                bar.update(len(problems))
    except ray.exceptions.RayError as error:
        last = str(error).strip().splitlines()[-1]
        raise OSError(f"Ray has failed: {last}. Complete files stay; the same command continues") from error
    finally:
        if not is_running:
            ray.shutdown()
