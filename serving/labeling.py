"""Ask the same questions about very many images, and write the answers as Parquet files.

    folder or glob of images │ Parquet files │ tars ──→ plan: numbered parts ──→ Ray actors, one part each at a time
    in an actor: images decoded by threads → all questions of an image in one packed row → part-000012.parquet

The plan is stored with the labels. Images that come later get new parts, in another file of the plan; its name is the
number of the first one, so that of two runs at once only one can create it. A part is done when its file has a row
for every question about every image. Otherwise the next run asks only what is missing, and replaces the file by
renaming. So a run that was killed can be repeated, images can be added, and questions can be added: each
image is in one file only, and no answer is lost.
"""

import contextlib
import gzip
import hashlib
import json
import os
import re
import sys
import tarfile
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from ..data.formats import IMAGE_SUFFIXES
from ..files import DataError, check_file
from ..options import option
from ..question_traffic_vlm import answer_notes
from .cluster import load_ray, process_with_actors, share_machines, start_ray
from .options import ModelOptions, read_questions
from .pictures import MAX_BYTES, open_picture


KINDS = {
    "image": tuple(IMAGE_SUFFIXES),
    "parquet": (".parquet",),
    "tar": (".tar", ".tar.gz", ".tgz"),
}
# Parquet, but *.parquet matches only labels, and readers of folders skip names with an underscore. Images that come
# later are in files such as _plan-000012, where 12 is the number of their first part.
PLAN = "_plan"
DECODING_THREADS = 4
READING_THREADS = 16  # for labels of earlier runs and ends of Parquet files, which may be on a slow file system
LARGE = 10_000_000  # bytes: of such images, one at a time waits to be decoded
MAX_HEADERS = 200_000  # bytes between two members of a tar: their names, attributes, and maps of sparse files
SCHEMA = pa.schema(
    {
        "key": pa.string(),
        "question": pa.string(),
        "answer": pa.string(),
        "score": pa.float32(),
        "p_yes": pa.float32(),
        "problem": pa.string(),  # of the image or of the answer; the other columns are then null
    }
)
NOT_SURE = pa.field("not_sure", pa.bool_())  # another column, with --thresholds
PLAN_SCHEMA = pa.schema({"part": pa.int64(), "kind": pa.string(), "path": pa.binary(), "group": pa.int64()})


@dataclass(kw_only=True)
class LabelOptions(ModelOptions):
    """Options of `label`."""

    device: Literal["cpu", "cuda"] | None = option(None, "by default GPUs if the machines have any")
    threads: int = option(2, "CPU cores of an actor")
    ask: list[str] = field(metadata={"help": "a question; repeat the option for more", "action": "extend"})
    output_dir: str = field(metadata={"help": "folder to write to: a path, or a URL of fsspec"})
    column: str = option("image", "column of Parquet files with the images: bytes, or a struct with bytes")
    key_column: str | None = option(None, "column of Parquet files to use as key; without it, file and row number")
    images_per_part: int = option(1000, "single images in one file of labels")
    batch_size: int = option(32, "images in one pass of the model")
    address: str | None = option(None, "Ray cluster: auto, or ray://host:10001; without it, Ray on this machine")
    actors: int | None = option(None, "processes with a model each; without it, as many as have room")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.output_dir = _absolute(self.output_dir)
        if os.path.isdir(self.model):
            self.model = os.path.abspath(self.model)

    def job(self, source: str) -> dict[str, Any]:
        """What identifies the job that a folder of labels belongs to. Runs that add to the folder cannot change it."""
        return {
            "source": _absolute(source),
            "model": self.model,
            "column": self.column,
            "key_column": self.key_column,
            "dtype": "bfloat16" if self.bf16 else None,
            "weights": weights_digest(self.model),
            "thresholds": hashlib.sha256(Path(self.thresholds).read_bytes()).hexdigest() if self.thresholds else None,
            "region": self.region,
        }


def _absolute(path: str) -> str:
    """A local path as seen from any folder. URLs stay."""
    return path if "://" in path else os.path.abspath(path)


def weights_digest(model: str) -> str | None:
    """SHA-256 of the weights and the configuration in a model folder; None for a name on the Hub."""
    if not os.path.isdir(model):
        return None
    digest = hashlib.sha256()
    for path in sorted([*Path(model).glob("*.safetensors"), *Path(model).glob("config.json")]):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def list_input(source: str) -> tuple[str, list[str]]:
    """The kind of the input ("image", "parquet" or "tar"), and its files in order, as local paths or URLs.

    Raises:
        DataError: no such files, files of several kinds, a link out of the source, or a FIFO.
    """
    try:
        fs, path = url_to_fs(source)
        matches = [path] if fs.exists(path) else fs.glob(path)
        # Nothing is found in a link to a missing file; its row has the error.
        found_in = ([match] if fs.isfile(match) else fs.find(match) or [match] for match in matches)
        names = sorted({name for found in found_in for name in found})
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{source}: cannot be listed: {error}") from error
    files = {kind: [name for name in names if name.lower().endswith(suffixes)] for kind, suffixes in KINDS.items()}
    found = [kind for kind in KINDS if files[kind]]
    if len(found) != 1:
        counts = ", ".join(f"{len(files[kind])} of kind {kind}" for kind in found) or "none"
        raise DataError(f"{source}: must hold images, Parquet files or tars, one of these kinds; found {counts}")
    kind = found[0]
    if not isinstance(fs, LocalFileSystem):
        return kind, [fs.unstrip_protocol(name) for name in files[kind]]
    root = path if fs.exists(path) else re.split(r"[*?[]", path)[0].rpartition("/")[0] or "/"
    resolved = os.path.realpath(root)
    for name in files[kind]:
        with contextlib.suppress(OSError):  # a file that is missing gets a row with this error
            check_file(name, root, resolved)
    return kind, files[kind]


def extend_plan(plan: pa.Table, job: dict[str, Any], images_per_part: int) -> pa.Table:
    """Add a row for each image, row group or tar that the plan does not have, sorted by part.

    Args:
        plan: rows with "part", "kind", "path" (bytes: names of files need not be UTF-8) and "group".

    Raises:
        DataError: the input cannot be listed, a Parquet file lacks a column, or it has other row groups than before.
    """
    kind, paths = list_input(job["source"])
    planned = Counter(plan["path"].to_pylist())  # number of row groups
    counts = [1] * len(paths)
    if kind == "parquet":
        with ThreadPoolExecutor(READING_THREADS) as pool:
            counts = list(pool.map(lambda path: _count_row_groups(path, job), paths))
    rows = []
    for path, groups in zip(paths, counts):
        known = planned[os.fsencode(path)]
        if known and known != groups:
            raise DataError(
                f"{path}: has {groups} row groups, but {known} when its labels began. Choose another folder"
            )
        rows += [(path, group) for group in range(known, groups)]
    if not rows and not plan.num_rows:
        raise DataError(f"{job['source']}: its files hold no rows")
    first = plan["part"][-1].as_py() + 1 if plan.num_rows else 0
    part_size = images_per_part if kind == "image" else 1
    new = {
        "part": [first + index // part_size for index in range(len(rows))],
        "kind": [kind] * len(rows),
        "path": [os.fsencode(path) for path, _ in rows],
        "group": [group for _, group in rows],
    }
    return pa.concat_tables([plan, pa.table(new, PLAN_SCHEMA)])


def _count_row_groups(path: str, job: dict[str, Any]) -> int:
    try:
        with fsspec.open(path) as file:
            parquet = pq.ParquetFile(file)
            names, count = parquet.schema_arrow.names, parquet.num_row_groups
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
    for column in filter(None, (job["column"], job["key_column"])):
        if column not in names:
            raise DataError(f"{path}: has no column {column!r}; its columns are {', '.join(names)}")
    return count


class LabelFolder:
    """A folder of labels, local or on any file system of fsspec.

    Raises:
        DataError: there is no such file system.
    """

    def __init__(self, url: str):
        try:
            self.fs, self.path = url_to_fs(url, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise DataError(f"{url}: cannot be written to: {error}") from error

    def parts(self) -> list[int]:
        """The numbers of the parts that have labels."""
        names = (re.search(r"/part-(\d+)\.parquet$", name) for name in self.fs.find(self.path, maxdepth=1))
        return sorted(int(name[1]) for name in names if name)

    def read(self, part: int, columns: list[str] | None = None) -> pa.Table | None:
        """The labels of a part; None if it has none.

        Raises:
            DataError: the file is damaged.
        """
        path = f"{self.path}/{part_name(part)}"
        try:
            with self.fs.open(path) as file:
                return pq.read_table(file, columns=columns)
        except FileNotFoundError:
            return None
        except pa.ArrowException as error:
            raise DataError(f"{path}: is damaged: {error}. Remove it, and its images are labeled again") from error

    def find_done(self, questions: Sequence[str]) -> tuple[set[int], set[str]]:
        """The parts whose images all have rows for these questions, and the other questions that have answers here.

        Raises:
            DataError: a file is damaged.
        """

        def check(part: int) -> tuple[set[str], bool]:
            table: Any = self.read(part, ["question"])
            answered = set(table["question"].unique().to_pylist())
            return answered, answered.issuperset(questions) or not len(table)

        parts = self.parts()
        with ThreadPoolExecutor(READING_THREADS) as pool:
            found = list(pool.map(check, parts))
        done = {part for part, (_, is_done) in zip(parts, found) if is_done}
        return done, set().union(*(answered for answered, _ in found)).difference(questions)

    def write(self, table: pa.Table, name: str) -> None:
        """Write a file that appears complete or not at all, even if several machines write it at once."""
        temporary = f"{self.path}/_{uuid.uuid4().hex}.tmp"
        with self.fs.open(temporary, "wb") as file:
            pq.write_table(table, file, compression="zstd")
        self.fs.mv(temporary, f"{self.path}/{name}")

    def remove_temporary_files(self) -> None:
        """Remove what killed writers left. Call it only while nothing is being written."""
        for name in self.fs.find(self.path, maxdepth=1):
            if name.endswith(".tmp"):
                self.fs.rm(name)

    def create(self, table: pa.Table, name: str) -> None:
        """Write a file that does not exist yet. Of several writers on a local disk or an object store, one succeeds.

        Raises:
            FileExistsError: the file exists.
        """
        with self.fs.open(f"{self.path}/{name}", "xb") as file:
            pq.write_table(table, file, compression="zstd")

    def read_plan(self) -> list[pa.Table]:
        """The plan and its extensions, in order.

        Raises:
            DataError: a file is damaged.
        """
        names = (name for name in self.fs.find(self.path, maxdepth=1) if re.search(rf"/{PLAN}(-\d+)?$", name))
        tables = []
        for name in sorted(names, key=lambda name: (len(name), name)):
            try:
                with self.fs.open(name) as file:
                    tables.append(pq.read_table(file))
            except pa.ArrowException as error:
                hint = "If another run is just writing it, try again; if one was killed then, remove it"
                raise DataError(f"{name}: is damaged: {error}. {hint}") from error
        return tables

    def open_plan(self, job: dict[str, Any], images_per_part: int) -> pa.Table:
        """The plan that is stored here, extended by new images; if there is none, make and store it.

        Raises:
            DataError: the input cannot be used; the labels here belong to another job, or have no plan.
            OSError: another run has extended the plan at the same time.
        """
        self.fs.makedirs(self.path, exist_ok=True)
        tables = self.read_plan()
        if tables:
            before = json.loads(tables[-1].schema.metadata[b"job"])
            changes = [
                f"{name} {before.get(name)!r}, now {job[name]!r}" for name in job if before.get(name) != job[name]
            ]
            if changes:
                raise DataError(
                    f"{self.path}: holds labels of another job: {'; '.join(changes)}. Choose another folder"
                )
        elif self.parts():
            raise DataError(f"{self.path}: holds labels, but not their plan ({PLAN}). Choose another folder")
        stored = pa.concat_tables([PLAN_SCHEMA.empty_table(), *(table.replace_schema_metadata() for table in tables)])
        plan = extend_plan(stored, job, images_per_part)
        new = plan.slice(len(stored))
        if len(new):
            name = f"{PLAN}-{new['part'][0].as_py():06d}" if len(stored) else PLAN
            try:
                self.create(new.replace_schema_metadata({"job": json.dumps(job)}), name)
            except FileExistsError as error:
                message = "another run has just planned the same images; the same command continues from there"
                raise OSError(f"{self.path}/{name}: {message}") from error
        return plan


def part_name(part: int) -> str:
    return f"part-{part:06d}.parquet"


def missing_parts(plan: pa.Table, done: set[int]) -> Iterator[list[dict[str, Any]]]:
    """The rows of the plan of each part that is not done, with paths as text."""
    rows = (row for batch in plan.to_batches(max_chunksize=1000) for row in batch.to_pylist())
    rows = (row | {"path": os.fsdecode(row["path"])} for row in rows)
    for part, files in groupby(rows, key=lambda row: row["part"]):
        if part not in done:
            yield list(files)


Rows = list[dict[str, Any]]  # of labels
Content = bytes | Exception | None  # an encoded image, or what is wrong with it; None: in the file that the key names


def read_part(files: Sequence[dict[str, Any]], options: LabelOptions) -> Iterator[tuple[str, Content]]:
    """The key and the content of each image of a part, in order.

    A file that breaks off gives the images before the break, and then its own path with the error.

    Args:
        files: rows of the plan.

    Raises:
        OSError: the file cannot be read now, but perhaps later.
    """
    kind, path = files[0]["kind"], files[0]["path"]
    try:
        if kind == "image":
            yield from ((file["path"], None) for file in files)
        elif kind == "tar":
            yield from _read_tar(path)
        else:
            yield from _read_row_group(path, files[0]["group"], options)
    except Exception as error:  # readers of broken files raise many types; one file must not end the run
        if isinstance(error, OSError) and not is_permanent(error, path):
            raise
        yield path, error


def read_file(path: str) -> bytes:
    """The content of a file. Raises a DataError if it has more than MAX_BYTES."""
    with fsspec.open(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise DataError(f"{os.path.basename(path)} has more than {MAX_BYTES:,} bytes.")
    return content


class _LimitedFile:
    """A file that gives at most `left` more bytes: `tarfile` has no limit on headers, and keeps them in memory."""

    def __init__(self, file: Any):
        self.file, self.left = file, MAX_HEADERS

    def read(self, size: int) -> bytes:
        content = self.file.read(size)
        self.left -= len(content)
        if self.left < 0:
            raise tarfile.ReadError(f"its headers have more than {MAX_HEADERS:,} bytes")
        return content


def _read_tar(path: str) -> Iterator[tuple[str, Content]]:
    # tarfile decompresses as much at once as a few bytes of the file may hold; gzip only what is read.
    compression = None if path.lower().endswith(".tar") else "gzip"
    with fsspec.open(path, compression=compression) as file:
        limited: Any = _LimitedFile(file)
        with tarfile.open(fileobj=limited, mode="r|") as tar:
            for member in tar:
                size = tar.offset - member.offset_data  # of its content
                limited.left = size + MAX_HEADERS  # of the next member
                tar.members.clear()  # type: ignore[attr-defined]  # they would fill the memory
                tar.pax_headers.clear()  # type: ignore[attr-defined]  # so would these
                if not member.isfile() or not member.name.lower().endswith(KINDS["image"]):
                    continue
                key, name, content = f"{path}#{member.name}", os.path.basename(member.name), tar.extractfile(member)
                if member.size > MAX_BYTES:  # a small compressed tar can hold it
                    yield key, DataError(f"{name} has {member.size:,} bytes; at most {MAX_BYTES:,} are read.")
                elif content is not None:
                    yield key, content.read()


def _read_row_group(path: str, group: int, options: LabelOptions) -> Iterator[tuple[str, bytes]]:
    columns = [name for name in (options.column, options.key_column) if name]
    with fsspec.open(path) as file:
        parquet = pq.ParquetFile(file)
        row = sum(parquet.metadata.row_group(index).num_rows for index in range(group))
        for batch in parquet.iter_batches(64, row_groups=[group], columns=columns):
            for values in batch.to_pylist():
                image = values[options.column]
                image = image.get("bytes") if isinstance(image, dict) else image
                key = str(values[options.key_column]) if options.key_column else f"{path}#{row}"
                yield key, image if isinstance(image, bytes) else b""
                row += 1


def is_permanent(error: Exception, path: str) -> bool:
    """Whether reading a file would fail again later: it is damaged, missing or forbidden.

    If even the folder of a local file is missing, its disk may be unmounted. Local errors without a number are from
    Parquet, about what was read. Remote errors can be anything, so only a missing file and a damaged tar.gz count.
    """
    if "://" in path:
        return isinstance(error, FileNotFoundError | gzip.BadGzipFile)
    if getattr(error, "errno", None) is None:
        return True
    return isinstance(error, FileNotFoundError | PermissionError) and os.path.isdir(os.path.dirname(path))


class Pending(NamedTuple):
    """An image to ask about.

    Attributes:
        key: as written to the labels.
        known: its rows of earlier runs.
        missing: questions that have no answer yet.
        pixels: [3,H,W], or what is wrong with the image; None if no question is missing.
    """

    key: str
    known: Rows
    missing: list[str]
    pixels: Future | None


class Labeler:
    """A Ray actor that holds a model and labels parts."""

    def __init__(self, options: LabelOptions):
        self.options, self.folder = options, LabelFolder(options.output_dir)
        self.pipe = options.load()
        self.schema = SCHEMA if options.loaded_thresholds is None else SCHEMA.append(NOT_SURE)

    def ready(self) -> None:
        """Return when the model is loaded."""

    def process(self, files: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Ask what has no answer about the images of a part, and write its file.

        Args:
            files: rows of the plan.

        Returns:
            "part", its number; "images" that were asked about and, among them, "errors", those with a problem;
            "problem", why the part is not done, or ""; "warnings" about images whose pixels were guessed.
        """
        part = files[0]["part"]
        result: dict[str, Any] = {"part": part, "images": 0, "errors": 0, "problem": "", "warnings": set()}
        try:
            before = self.folder.read(part)
            known = [] if before is None else before.to_pylist()
            rows: Rows = []
            with warnings.catch_warnings(record=True) as caught:  # Ray shows no output of its processes
                for new, old in self.label(read_part(files, self.options), known):
                    rows += old + new
                    result["images"] += bool(new)
                    result["errors"] += any("problem" in row for row in new)
            result["warnings"] = {str(one.message) for one in caught if "images_traffic_vlm" in one.filename}
            labels = pa.Table.from_pylist(rows, self.schema)
            if before is None or not labels.equals(before):
                self.folder.write(labels, part_name(part))
        except OSError as error:  # of a network or a disk: another run may succeed
            problem = f"{files[0]['path']}: {str(error) or type(error).__name__}"
            return {"part": part, "images": 0, "errors": 0, "problem": problem, "warnings": set()}
        return result

    def label(self, images: Iterable[tuple[str, Content]], known: Rows) -> Iterator[tuple[Rows, Rows]]:
        """Yield new and known rows of labels of each image, decoding one batch of images ahead of the model.

        Args:
            known: rows of earlier runs. Their questions are not asked again.
        """
        questions = list(dict.fromkeys([*(row["question"] for row in known), *self.options.ask]))
        answered = rows_by_image(known)
        images = iter(images)
        counts: Counter[str] = Counter()
        ahead: list[Pending] = []
        with ThreadPoolExecutor(DECODING_THREADS) as pool:
            while True:
                batch = []
                for key, content in islice(images, self.options.batch_size):
                    written = to_utf8(key)
                    rows = answered.pop((written, counts[written]), [])
                    counts[written] += 1
                    asked = {row["question"] for row in rows}
                    missing = [question for question in questions if question not in asked]
                    pixels = pool.submit(self.decode, key, content) if missing else None
                    if pixels is not None and isinstance(content, bytes) and len(content) > LARGE:
                        wait([pixels])
                    batch.append(Pending(written, rows, missing, pixels))
                yield from self._answer(ahead)
                if not batch:
                    break
                ahead = batch
        yield from (([], rows) for rows in answered.values() if rows)  # their file breaks off earlier than before

    def decode(self, key: str, content: Content) -> torch.Tensor | str:
        """Pixels [3,H,W] of an image, or what is wrong with it.

        Raises:
            OSError: its file cannot be read now, but perhaps later.
        """
        try:
            if content is None:
                content = read_file(key)
            if isinstance(content, Exception):
                raise content
            picture, region = open_picture(content, os.path.basename(key)), self.options.part_of_image
            return self.pipe.processor(images=[picture], region=region, return_tensors="pt")["pixel_values"][0]
        except Exception as error:  # one broken image must not stop the others, whatever its decoder raises
            if content is None and not is_permanent(error, key):
                raise
            return str(error) or type(error).__name__

    def _answer(self, batch: Sequence[Pending]) -> Iterator[tuple[Rows, Rows]]:
        decoded: list[Any] = [image.pixels and image.pixels.result() for image in batch]
        asked = [(pixels, image.missing) for pixels, image in zip(decoded, batch) if isinstance(pixels, torch.Tensor)]
        answers: Iterator[list[Any]] = iter(())
        if asked:
            pixels, questions = torch.stack([one for one, _ in asked]), [missing for _, missing in asked]
            encoded = self.pipe.model.encode_images(pixels.to(self.pipe.device))
            answers = iter(self.pipe([encoded[i] for i in range(len(asked))], questions, batch_size=len(asked)))
        for value, image in zip(decoded, batch):
            if isinstance(value, torch.Tensor):
                yield [{"key": image.key, **item} for item in next(answers)], image.known
            else:
                rows = [{"key": image.key, "question": q, "problem": to_utf8(value)} for q in image.missing]
                yield rows, image.known


def to_utf8(text: str) -> str:
    """Replace the bytes of a file name that are not UTF-8 by escapes such as \\xe9: Parquet has only UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def rows_by_image(rows: Rows) -> dict[tuple[str, int], Rows]:
    """The rows of each image: its key, and how many images of the part before it have that key."""
    found: dict[tuple[str, int], Rows] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        pair = row["key"], row["question"]
        of_image = found.setdefault((row["key"], counts[pair]), [])
        of_image.append(row)
        counts[pair] += 1
    return found


def check_questions(options: LabelOptions) -> list[str]:
    """The questions, each once, read by the model before hours are spent on them.

    Raises:
        OSError: there is no such model.
        ValueError: a question cannot be answered, or has a word that the model does not know.
    """
    questions = read_questions(replace(options, device="cpu").load(), options.ask)
    for question in questions:
        if question.unknown_words:
            words = ", ".join(question.unknown_words)
            raise DataError(f"{question.text!r}: the model does not know {words}. Correct or rephrase the question")
        for note in answer_notes(question.answer()):
            print(f"{question.text!r}: {note}", file=sys.stderr)
    return [question.text for question in questions]


def label(source: str, options: LabelOptions) -> None:
    """Label what has no labels yet, with the machines of Ray, and print the progress to standard error.

    Args:
        source: a folder, a glob, a Parquet file or a tar, or a folder or glob of these; a path or a URL of fsspec.

    Raises:
        ValueError: the input, the folder, a question or the device cannot be used.
        OSError: Ray or the model cannot start, or parts cannot be labeled now. Repeating the call tries them again.
    """
    options.ask = check_questions(options)
    folder = LabelFolder(options.output_dir)
    plan = folder.open_plan(options.job(source), options.images_per_part)
    (done, others), total = folder.find_done(options.ask), plan["part"][-1].as_py() + 1
    done &= set(range(total))  # another run may have added parts
    folder.remove_temporary_files()
    if others:
        print(f"{folder.path} also has answers to {', '.join(map(repr, sorted(others)))}", file=sys.stderr)
    if len(done) == total:
        print(f"all {total} parts are labeled", file=sys.stderr)
        return
    ray = load_ray(options.address)
    start_ray(ray, options.address)
    try:
        resources, room = share_machines(ray.nodes(), options.device, options.threads, options.actors or 0)
        options.device = "cuda" if "num_gpus" in resources else "cpu"
        options.threads = int(resources.get("num_cpus", options.threads))
        actor_type = ray.remote(max_restarts=-1, max_task_retries=-1, **resources)(Labeler)
        count = min(options.actors or room, total - len(done))
        actors = [actor_type.remote(options) for _ in range(count)]
        undone = report_progress(process_with_actors(ray, actors, missing_parts(plan, done)), total, len(done))
    except ray.exceptions.RayError as error:
        raise OSError(f"Ray has failed; the same command continues from here: {error}") from error
    finally:
        ray.shutdown()
    folder.remove_temporary_files()  # of actors that were killed
    if undone:
        raise OSError(f"{undone:,} of {total - len(done):,} parts are not done; the same command tries them again")


def report_progress(results: Iterable[dict[str, Any]], total: int, done: int) -> int:
    """Show the progress of `Labeler.process`, and return how many parts could not be done.

    Args:
        total, done: number of all parts, and of those that earlier runs have done.
    """
    begin = time.monotonic()
    images = broken = undone = 0
    warned: set[str] = set()
    with tqdm(results, total=total, initial=done, unit="part") as bar:
        for result in bar:
            images += result["images"]
            broken += result["errors"]
            for warning in result["warnings"] - warned:
                bar.write(warning, file=sys.stderr)
            warned |= result["warnings"]
            if result["problem"]:
                undone += 1
                bar.write(f"part {result['part']} is not done: {result['problem']}", file=sys.stderr)
            rate = images / (time.monotonic() - begin)
            bar.set_postfix_str(f"{images:,} images, {broken:,} with a problem, {rate:.1f} images/s")
    return undone
