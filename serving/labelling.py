"""Labels for many images: the input in parts, each part's answers in one Parquet file, written whole.

    folder, glob │ Parquet │ WebDataset tars → plan of parts ── Ray Data hands them to actors ──→ part-000012.parquet
    in an actor: bytes → decoded by threads ahead of the model → all questions of an image in one packed pass

The plan is made once and kept with the output. A part is done when its file is there, and files appear whole, by
renaming; so a run that was killed at any moment goes on with the parts that are missing, and none is there twice.
"""

import gzip
import hashlib
import json
import os
import re
import tarfile
import uuid
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fsspec.implementations.local
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from fsspec.core import has_magic, url_to_fs

from ..data.formats import IMAGE_SUFFIXES
from .answerer import Answer, Answerer
from .pictures import open_picture


KINDS = dict.fromkeys(IMAGE_SUFFIXES, "image") | {
    ".parquet": "parquet",
    ".tar": "tar",
    ".tar.gz": "tar",
    ".tgz": "tar",
}
PLAN = "_plan.parquet"  # a name with an underscore is not read as data
DECODERS = 4  # threads of an actor that decode images
AHEAD = 2  # batches that are decoded ahead of the model
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("question", pa.string()),
        ("probability", pa.float32()),
        ("answer", pa.string()),
        ("error", pa.string()),
    ]
)


class LabelError(ValueError):
    """What cannot be labelled, in words for the user."""


@dataclass(frozen=True)
class Job:
    """What is asked of what; the same job goes on where it was stopped.

    Attributes:
        source: a folder, a glob, a Parquet file or a tar, or a folder or glob of these; local or of fsspec.
        questions: asked of every image.
        column, key_column: of a Parquet file: images (bytes, or a struct with "bytes"), and what names them; without
            a key column it is the file and the number of the row.
        images_per_part: of single files. A Parquet file has a part for each row group, a tar is one.
        model, dtype: of the answers, as for `Answerer`.
        weights: `fingerprint` of the model, None if unknown.
    """

    source: str
    questions: tuple[str, ...]
    model: str
    column: str = "image"
    key_column: str | None = None
    images_per_part: int = 1000
    dtype: str | None = None
    weights: str | None = None

    def describe(self) -> dict[str, Any]:
        return asdict(self) | {"questions": list(self.questions)}


def fingerprint(folder: str) -> str:
    """What tells the weights in a model folder from others of the same name."""
    whole = hashlib.sha256()
    for path in sorted([*Path(folder).glob("*.safetensors"), *Path(folder).glob("config.json")]):
        with path.open("rb") as file:
            whole.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


def is_local(fs: Any) -> bool:
    return isinstance(fs, fsspec.implementations.local.LocalFileSystem)


def list_input(source: str) -> tuple[str, list[str]]:
    """What kind the input is of ("image", "parquet" or "tar"), and its files in order.

    They are paths, or URLs where they are not local.

    Raises:
        LabelError: nothing there, or files of several kinds.
    """
    try:
        fs, path = url_to_fs(source)
        found = fs.glob(path) if has_magic(path) and not fs.exists(path) else [path]
        files = sorted({name for one in found for name in ([one] if fs.isfile(one) else fs.find(one))})
    except (OSError, ValueError, ImportError) as error:
        raise LabelError(f"{source}: cannot be listed: {error}") from error
    kinds: dict[str, list[str]] = {"image": [], "parquet": [], "tar": []}
    for name in files:
        kind = next((kind for suffix, kind in KINDS.items() if name.lower().endswith(suffix)), None)
        if kind:
            kinds[kind].append(name if is_local(fs) else fs.unstrip_protocol(name))
    kinds = {kind: names for kind, names in kinds.items() if names}
    if len(kinds) != 1:
        there = ", ".join(f"{len(names)} of kind {kind}" for kind, names in kinds.items()) or "none"
        raise LabelError(f"{source}: must hold images, Parquet files or tars, one of these kinds; found {there}")
    return next(iter(kinds.items()))


def make_plan(job: Job) -> pa.Table:
    """The parts of the input: a row for each file and part, "part", "kind", "path" and "group" (of a Parquet file)."""
    kind, paths = list_input(job.source)
    if kind == "image":
        rows = [(number // job.images_per_part, kind, path, 0) for number, path in enumerate(paths)]
    elif kind == "tar":
        rows = [(number, kind, path, 0) for number, path in enumerate(paths)]
    else:
        groups = [(path, group) for path in paths for group in range(_count_groups(path, job.column, job.key_column))]
        rows = [(number, kind, path, group) for number, (path, group) in enumerate(groups)]
    if not rows:
        raise LabelError(f"{job.source}: its files hold no rows")
    names = ("part", "kind", "path", "group")
    return pa.table({name: list(values) for name, values in zip(names, zip(*rows))})


def _count_groups(path: str, column: str, key_column: str | None) -> int:
    try:
        with fsspec.open(path) as file:
            source = pq.ParquetFile(file)
            names, groups = source.schema_arrow.names, source.num_row_groups
    except (OSError, pa.ArrowException) as error:
        raise LabelError(f"{path}: is no Parquet file that can be read: {error}") from error
    for name in filter(None, (column, key_column)):
        if name not in names:
            raise LabelError(f"{path}: has no column {name!r}; its columns are {', '.join(names)}")
    return groups


class Output:
    """The folder of the answers, local or of fsspec."""

    def __init__(self, folder: str):
        try:
            self.fs, self.path = url_to_fs(folder)
        except (ValueError, ImportError) as error:
            raise LabelError(f"{folder}: cannot be written to: {error}") from error

    def name(self, part: int) -> str:
        return f"{self.path}/part-{part:06d}.parquet"

    def done(self) -> set[int]:
        """Numbers of the parts whose answers are there."""
        found = (re.fullmatch(r"part-(\d+)\.parquet", os.path.basename(name)) for name in self._list())
        return {int(name[1]) for name in found if name}

    def _list(self) -> list[str]:
        self.fs.invalidate_cache()
        return self.fs.ls(self.path, detail=False) if self.fs.exists(self.path) else []

    def is_done(self, part: int) -> bool:
        self.fs.invalidate_cache()
        return self.fs.exists(self.name(part))

    def write(self, table: pa.Table, name: str) -> None:
        """Write a file that appears whole or not at all, whoever else writes it."""
        draft = f"{self.path}/_{uuid.uuid4().hex}.tmp"
        with self.fs.open(draft, "wb") as file:
            pq.write_table(table, file, compression="zstd")
        self.fs.mv(draft, name)

    def remove_drafts(self) -> None:
        """Of runs that were killed; call it while nobody writes."""
        for name in self._list():
            if name.endswith(".tmp"):
                self.fs.rm(name)

    def open_plan(self, job: Job) -> pa.Table:
        """The plan that is kept here, or a new one.

        Raises:
            LabelError: it is that of another job, or there are answers without a plan.
        """
        self.fs.makedirs(self.path, exist_ok=True)
        place = f"{self.path}/{PLAN}"
        if self.fs.exists(place):
            with self.fs.open(place) as file:
                plan = pq.read_table(file)
            before, now = json.loads(plan.schema.metadata[b"job"]), job.describe()
            weights = now.pop("weights")
            changed = [f"{key} {before.get(key)!r}, now {now[key]!r}" for key in now if before.get(key) != now[key]]
            if before.get("weights") not in (None, weights):  # earlier plans have none
                changed.append(f"the weights of {job.model} have changed")
            if changed:
                raise LabelError(
                    f"{self.path}: holds labels of another job: {'; '.join(changed)}. Choose another folder"
                )
            return plan
        if self.done():
            raise LabelError(f"{self.path}: holds labels, but not their plan ({PLAN}). Choose another folder")
        plan = make_plan(job).replace_schema_metadata({"job": json.dumps(job.describe())})
        self.write(plan, place)
        return plan


Source = tuple[str, bytes | str]  # the key of an image, and its bytes or the URL of its file


def read_part(job: Job, files: Sequence[dict[str, Any]]) -> Iterator[Source]:
    """The images of a part in order; the rows of the plan say where they are.

    Raises:
        OSError, EOFError, zlib.error, tarfile.TarError, pyarrow.ArrowException: the file breaks off, after the images
            that could be read.
    """
    first = files[0]
    if first["kind"] == "image":
        yield from ((file["path"], file["path"]) for file in files)
    elif first["kind"] == "tar":
        yield from _read_tar(first["path"])
    else:
        yield from _read_group(job, first["path"], first["group"])


def read_file(path: str) -> bytes:
    with fsspec.open(path) as file:
        return file.read()


def _read_tar(path: str) -> Iterator[Source]:
    with fsspec.open(path) as file, tarfile.open(fileobj=file, mode="r|*") as tar:
        for member in tar:
            if member.isfile() and KINDS.get(os.path.splitext(member.name.lower())[1]) == "image":
                content: Any = tar.extractfile(member)
                yield f"{path}#{member.name}", content.read()


def _read_group(job: Job, path: str, group: int) -> Iterator[Source]:
    columns = [name for name in (job.column, job.key_column) if name]
    with fsspec.open(path) as file:
        source = pq.ParquetFile(file)
        row = sum(source.metadata.row_group(number).num_rows for number in range(group))
        for batch in source.iter_batches(64, row_groups=[group], columns=columns):
            for values in batch.to_pylist():
                image = values[job.column]
                image = image.get("bytes") if isinstance(image, dict) else image
                key = str(values[job.key_column]) if job.key_column else f"{path}#{row}"
                yield key, image if isinstance(image, bytes) else b""
                row += 1


class Labeller:
    """An actor: holds the model, and answers all questions about all images of a part.

    Args:
        job, output: what is asked, and the URL of the folder to write to.
        batch_size: images in a pass of the model.
        device, threads: of the model.
    """

    def __init__(self, job: Job, output: str, batch_size: int, device: str | None = None, threads: int | None = None):
        if threads:
            torch.set_num_threads(threads)
        dtype = getattr(torch, job.dtype) if job.dtype else None
        self.job, self.output, self.batch_size = job, Output(output), batch_size
        self.answerer = Answerer(job.model, device, dtype)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Label a part, a row {"files": JSON of rows of the plan}.

        Returns:
            how many images it has, how many are broken, and the "problem" that left the part undone, or "".
        """
        files = json.loads(row["files"])
        part = files[0]["part"]
        said = {"part": part, "images": 0, "errors": 0, "problem": ""}
        try:
            if self.output.is_done(part):  # by an actor that died before it could say so
                return said
            images, errors, table = self._answers(files)
            self.output.write(table, self.output.name(part))
        except OSError as error:  # of a network or a disk; it may be better next time
            return said | {"problem": f"{files[0]['path']}: {str(error) or type(error).__name__}"}
        return said | {"images": images, "errors": errors}

    def _answers(self, files: Sequence[dict[str, Any]]) -> tuple[int, int, pa.Table]:
        """How many images a part has, how many of them are broken, and its rows."""
        answers: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        images = errors = 0
        for key, result in self.label(read_part(self.job, files), files[0]["path"]):
            images += 1
            errors += isinstance(result, str)
            for number, question in enumerate(self.job.questions):
                values = (None, None, result) if isinstance(result, str) else _values(result[number])
                for name, value in zip(SCHEMA.names, (key, question, *values)):
                    answers[name].append(value)
        return images, errors, pa.table(answers, schema=SCHEMA)

    def label(self, sources: Iterator[Source], path: str) -> Iterator[tuple[str, list[Answer] | str]]:
        """For each image its key and its answers, or what is wrong with it; `path` is where a broken part is."""
        waiting: deque[tuple[str, Future]] = deque()
        sources = _until_broken(sources, path)
        with ThreadPoolExecutor(DECODERS) as pool:
            for key, content in sources:
                waiting.append((key, pool.submit(self.decode, key, content)))
                if len(waiting) >= (1 + AHEAD) * self.batch_size:
                    yield from self._answer([waiting.popleft() for _ in range(self.batch_size)])
            while waiting:
                yield from self._answer([waiting.popleft() for _ in range(min(self.batch_size, len(waiting)))])

    def decode(self, key: str, content: bytes | str | Exception) -> torch.Tensor | str:
        """Pixels [3,H,W] of an image, or what is wrong with it.

        Raises:
            OSError: its file could not be read now, but maybe later: the part is not done then.
        """
        try:
            if isinstance(content, str):
                content = read_file(content)
        except OSError as error:
            if not is_final(error, key):
                raise
            content = error
        try:
            if isinstance(content, Exception):
                raise content
            picture = open_picture(content, os.path.basename(key))
            return self.answerer.read([picture])[0]
        except Exception as error:  # one bad image must not stop a million good ones
            return str(error) or type(error).__name__

    def _answer(self, batch: list[tuple[str, Future]]) -> Iterator[tuple[str, list[Answer] | str]]:
        decoded = [(key, future.result()) for key, future in batch]
        pixels = [value for _, value in decoded if isinstance(value, torch.Tensor)]
        answers: Iterator[list[Answer]] = iter(())
        if pixels:
            encoded = self.answerer.encode(torch.stack(pixels))
            answers = iter(self.answerer.ask(encoded, [self.job.questions] * len(pixels)))
        for key, value in decoded:
            yield key, value if isinstance(value, str) else next(answers)


def is_final(error: OSError, path: str) -> bool:
    """Whether a file that could not be read never will be: it is not what its name says, it is gone, or forbidden.

    But where its whole folder is gone, this machine may lack a disk that others have; and what is forbidden far away
    may be so for want of a password. Errors of a disk have numbers; those without are of gzip and Parquet, about what
    was read. Far away they may be anything, so a broken Parquet file there leaves its parts undone.
    """
    if isinstance(error, gzip.BadGzipFile):
        return True
    if "://" in path:
        return isinstance(error, FileNotFoundError)
    if error.errno is None:
        return True
    return isinstance(error, FileNotFoundError | PermissionError) and os.path.isdir(os.path.dirname(path))


def _until_broken(sources: Iterator[Source], path: str) -> Iterator[tuple[str, Any]]:
    """The images, and should the file break off, one more with its path as key and the error as content.

    Raises:
        OSError: the file could not be read now, but maybe later.
    """
    try:
        yield from sources
    except (EOFError, zlib.error, tarfile.TarError, pa.ArrowException) as error:
        yield path, error
    except OSError as error:
        if not is_final(error, path):
            raise
        yield path, error


def _values(answer: Answer) -> tuple[float | None, str | None, str | None]:
    """P(yes) where the answer is yes or no, else that of the words; the answer; no error."""
    p_yes = answer.yes_probability
    return answer.probability if p_yes is None else p_yes, answer.answer, None


def parts_to_do(plan: pa.Table, done: set[int]) -> list[dict[str, str]]:
    """The parts that are missing, as rows for `Labeller`."""
    parts: dict[int, list[dict[str, Any]]] = {}
    for row in plan.to_pylist():
        if row["part"] not in done:
            parts.setdefault(row["part"], []).append(row)
    return [{"files": json.dumps(files)} for files in parts.values()]
