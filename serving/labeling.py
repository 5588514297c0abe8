"""Ask the same questions about very many images, and write the answers as Parquet files.

    sources of images ──→ parts: 200 images, a tar, or a row group of Parquet each
    parts without a file ──→ Ray Data: actors, each with a pipeline ──→ part-<digest of its sources>.parquet

The file of a part appears complete or not at all, and its schema names the sources. The next run labels the sources
that no file names: it continues a run that was killed, and new images get new parts. A part is named after its
sources, so a process that outlives a killed run writes only files that the next run would write, too.
"""

import hashlib
import io
import json
import os
import sys
import uuid
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import tee
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs
from PIL import Image
from tqdm import tqdm
from transformers.utils import cached_file

from ..files import DataError
from ..loading import base_of_adapter
from ..options import option
from ..pipeline_traffic_vlm import Asked, TrafficVLMPipeline
from ..question_traffic_vlm import answer_notes
from .cluster import load_data, load_ray, share_machines, start_ray
from .options import ModelOptions, read_questions
from .stored_images import READING_THREADS, count_images, is_temporary, list_input, read_source


CLAIM = ".options.json"  # hidden, so that readers of Parquet folders skip it
ANSWERING_FILES = (
    *("model*.safetensors", "config.json", "processor_config.json", "tokenizer.json"),
    *("adapter_model.*", "adapter_config.json"),
)
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
    output_dir: str = field(metadata={"help": "folder to write to: a path, or a URL of fsspec"})
    column: str = option("image", "column of Parquet files with the images: bytes, or a struct with bytes")
    key_column: str | None = option(None, "column of Parquet files to use as key; without it, file and row number")
    images_per_part: int = option(200, "single images in one file of labels")
    batch_size: int = option(32, "images in one pass of the model")
    address: str | None = option(None, "Ray cluster: auto, or ray://host:10001; without it, Ray on this machine")
    actors: int | None = option(None, "processes with a model each; without it, as many as have room")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.output_dir = absolute(self.output_dir)
        if os.path.isdir(self.model):
            self.model = os.path.abspath(self.model)

    def shared(self, source: str) -> dict[str, Any]:
        """The options that all labels of a folder share."""
        return {
            "input": source,
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
    """A digest of the files of a model that determine its answers; of a Hub repository, of the cached files."""
    base = base_of_adapter(model)
    folder = Path(str(cached_file(model, "adapter_config.json" if base else "config.json"))).parent
    paths = sorted(path for pattern in ANSWERING_FILES for path in folder.glob(pattern))
    own = digest(b"".join(path.name.encode() + hashlib.sha256(path.read_bytes()).digest() for path in paths))
    return f"{own} on {weights_digest(base)}" if base else own


class Part(NamedTuple):
    """The sources of one file of labels, all of one kind, and the number of their images, 0 if it is not known."""

    kind: str
    sources: list[str]
    images: int

    def name(self) -> str:
        """The name of the file: a digest of the sources."""
        return f"part-{digest(os.fsencode(chr(0).join(self.sources)))}.parquet"


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

    def files(self, suffix: str) -> list[str]:
        """The paths of the files with this suffix."""
        return [name for name in self.fs.find(self.path, maxdepth=1) if name.endswith(suffix)]

    def sources(self) -> set[str]:
        """The sources that have labels.

        Raises:
            DataError: a file is damaged, or was not written by `label`.
        """
        with ThreadPoolExecutor(READING_THREADS) as pool:
            return set().union(*pool.map(self._sources_of, self.files(".parquet")))

    def _sources_of(self, name: str) -> list[str]:
        try:
            with self.fs.open(name) as file:
                return json.loads((pq.read_schema(file).metadata or {})[b"sources"])
        except (pa.ArrowException, KeyError) as error:
            problem = f"is damaged: {error}" if isinstance(error, pa.ArrowException) else "holds no labels"
            raise DataError(f"{name}: {problem}. Remove it, and its images are labeled again") from error

    def write(self, name: str, content: bytes) -> None:
        """Write a file that appears complete or not at all."""
        temporary = f"{self.path}/.{uuid.uuid4().hex}.tmp"
        self.fs.pipe_file(temporary, content)
        self.fs.mv(temporary, f"{self.path}/{name}")


def claim(folder: LabelFolder, options: dict[str, Any]) -> None:
    """Write the options that all files of a folder share.

    Raises:
        DataError: the folder has files with other options, or its .options.json is damaged.
    """
    try:
        before = dict(json.loads(folder.fs.cat_file(f"{folder.path}/{CLAIM}")))
    except FileNotFoundError:
        if folder.files(".parquet"):
            raise DataError(f"{folder.path} has other Parquet files: choose another --output_dir") from None
        folder.fs.makedirs(folder.path, exist_ok=True)
        folder.write(CLAIM, json.dumps(options, indent=1).encode())
        return
    except (ValueError, TypeError) as error:
        raise DataError(f"{folder.path}/{CLAIM} is damaged ({error}): choose another --output_dir") from error
    others = [f"{name} {before.get(name)!r}, now {new!r}" for name, new in options.items() if before.get(name) != new]
    if others:
        raise DataError(f"{folder.path} has labels of another run ({'; '.join(others)}): choose another --output_dir")


class StoredImagePipeline(TrafficVLMPipeline):
    """A pipeline for `StoredImage`s, which its threads open. All answers about a bad image have its problem."""

    def preprocess(self, inputs: Asked, region: Any = None) -> Asked:
        image = inputs.image
        try:
            return super().preprocess(replace(inputs, image=image.open(), index=None), region)
        except (OSError, TypeError, ValueError) as error:
            if is_temporary(error, image.key):
                raise
            problem = to_utf8(str(error) or type(error).__name__)
        # A pass needs pixels for each of its images: here a black image, about which nothing is asked.
        questions = [replace(question, problem=problem) for question in inputs.questions]
        return super().preprocess(replace(inputs, image=Image.new("RGB", (32, 32)), questions=questions))


def to_utf8(text: str) -> str:
    """Replace the bytes of a file name that are not UTF-8 by escapes such as \\xe9: Parquet has only UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


class Labeler:
    """Labels parts. Ray Data makes one in each actor and calls it; it holds a model."""

    def __init__(self, options: LabelOptions):
        self.options, self.folder = options, LabelFolder(options.output_dir)
        self.pipe = options.load(StoredImagePipeline)
        self.schema = SCHEMA if options.loaded_thresholds is None else SCHEMA.append(NOT_SURE)

    def __call__(self, row: dict[str, str]) -> dict[str, Any]:
        """Write the file of a part.

        Args:
            row: "part": a `Part` as JSON, which can hold file names that are not UTF-8.

        Returns:
            "images": their number; "bad": the number of images with a problem; "failure": why the part has no file, or
            ""; "notes": on images whose pixels were guessed, one per line.
        """
        part = Part(*json.loads(row["part"]))
        with warnings.catch_warnings(record=True) as caught:  # Ray does not show what its processes print
            try:
                images = list(self.label(part))
                self.folder.write(part.name(), self.to_parquet(images, part.sources))
            except (OSError, FloatingPointError) as error:  # of a network, a disk or the model
                failure = to_utf8(f"{part.sources[0]}: {str(error) or type(error).__name__}")
                return {"images": 0, "bad": 0, "failure": failure, "notes": ""}
        bad = sum(any("problem" in row for row in rows) for rows in images)
        notes = {str(one.message) for one in caught if "images_traffic_vlm" in one.filename}
        return {"images": len(images), "bad": bad, "failure": "", "notes": "\n".join(notes)}

    def label(self, part: Part) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of each image of a part."""
        columns = self.options.column, self.options.key_column
        stored = (image for source in part.sources for image in read_source(part.kind, source, *columns))
        asked, images = tee(stored)
        answers = self.pipe(asked, self.options.ask, batch_size=self.options.batch_size)
        for items, image in zip(answers, images):
            yield [{"key": to_utf8(image.key), **item} for item in items]

    def to_parquet(self, images: Sequence[list[dict[str, Any]]], sources: list[str]) -> bytes:
        """A Parquet file of the rows of images, whose schema names the sources."""
        rows = [row for rows in images for row in rows]
        schema = self.schema.with_metadata({"sources": json.dumps(sources)})
        stream = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, schema), stream, compression="zstd")
        return stream.getvalue()


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
        for note in answer_notes(question.answer()):
            print(f"{question.text!r}: {note}", file=sys.stderr)
    return [question.text for question in questions]


def find_parts(source: str, options: LabelOptions) -> tuple[list[Part], int]:
    """The parts that have no labels yet, and the number of all images, 0 if it is not known. This claims the folder.

    Raises:
        DataError: the input or the folder cannot be used.
    """
    kind, files, left_out = list_input(source)
    if left_out:
        print(left_out, file=sys.stderr)
    sources = count_images(kind, files, [name for name in (options.column, options.key_column) if name])
    folder = LabelFolder(options.output_dir)
    claim(folder, options.shared(source))
    for name in folder.files(".tmp"):
        if name.rpartition("/")[2].startswith("."):  # left by a killed writer
            folder.fs.rm(name)
    labeled, size = folder.sources(), options.images_per_part if kind == "image" else 1
    missing = [name for name in sources if name not in labeled]
    cut = [missing[i : i + size] for i in range(0, len(missing), size)]
    return [Part(kind, names, sum(sources[name] for name in names)) for names in cut], sum(sources.values())


def label(source: str, options: LabelOptions) -> None:
    """Label what has no labels yet, with the machines of Ray, and print the progress to standard error.

    Args:
        source: see `list_input`.

    Raises:
        ValueError: the input, the folder, a question or the device cannot be used.
        OSError: Ray or the model cannot start, or parts cannot be labeled now. Repeating the call tries them again.
    """
    options.ask = check_questions(options)
    parts, total = find_parts(absolute(source), options)
    if not parts:
        print(f"all of {source} is labeled", file=sys.stderr)
        return
    failed = show_progress(label_parts(parts, options), parts, total)
    if failed:
        raise OSError(f"{failed:,} of {len(parts):,} parts are not done; the same command tries them again")


def label_parts(parts: Sequence[Part], options: LabelOptions) -> Iterator[dict[str, Any]]:
    """Yield what `Labeler` reports of each part, in the order in which Ray's actors finish them.

    Raises:
        ValueError: the machines do not have the device.
        OSError: Ray or the model does not start, or Ray has failed.
    """
    ray = load_ray(options.address)
    is_running = ray.is_initialized()  # started by the caller
    if not is_running:
        start_ray(ray, options.address)
    try:
        resources, room = share_machines(ray.nodes(), options.device, options.threads, options.actors or 0)
        options = replace(
            options,
            device="cuda" if "num_gpus" in resources else "cpu",
            threads=int(resources.get("num_cpus", options.threads)),
            actors=min(options.actors or room, len(parts)),
        )
        if ray.util.client.ray.is_connected():  # by ray://: Ray Data must then run in a process of the cluster
            remote = ray.remote(num_cpus=0)(Reports).remote(parts, options, resources)
            yield from iter(lambda: ray.get(remote.next.remote()), None)
        else:
            yield from Reports(parts, options, resources).reports
    except ray.exceptions.RayError as error:
        raise OSError(f"Ray has failed; the same command continues from here: {error}") from error
    finally:
        if not is_running:
            ray.shutdown()


class Reports:
    """The reports of Ray Data's actors, one for each part. `resources` are those of one actor."""

    def __init__(self, parts: Sequence[Part], options: LabelOptions, resources: dict[str, float]):
        data, rows = load_data(), [{"part": json.dumps(part)} for part in parts]
        dataset = data.from_items(rows, override_num_blocks=len(rows)).map(  # a block of one row is reported when done
            Labeler,
            fn_constructor_args=[options],
            compute=data.ActorPoolStrategy(size=options.actors),
            **resources,
        )
        self.reports = iter(dataset.iter_rows())

    def next(self) -> dict[str, Any] | None:
        """The next report; None after the last one."""
        return next(self.reports, None)


def show_progress(reports: Iterable[dict[str, Any]], parts: Sequence[Part], total: int) -> int:
    """Show the progress of `label_parts`, and return how many parts could not be done.

    Args:
        total: number of images, also of those that earlier runs have labeled; 0 if it is not known.
    """
    bad = failed = 0
    noted = {""}
    with tqdm(total=total or None, initial=total - sum(part.images for part in parts), unit=" images") as bar:
        for count, report in enumerate(reports, 1):
            bad, failed = bad + report["bad"], failed + bool(report["failure"])
            for message in {report["failure"], *report["notes"].split("\n")} - noted:
                bar.write(message, file=sys.stderr)
                noted.add(message)
            if not total:  # an estimate: further tars have as many images as those so far
                bar.total = round((bar.n + report["images"]) / count * len(parts))
            bar.set_postfix_str(f"{bad:,} with a problem", refresh=False)
            bar.update(report["images"])
    return failed
