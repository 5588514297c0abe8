"""Images as they are stored in large numbers: files, lists of files, tars, and Parquet files with a column of images.

    folder, glob, file or list ── list_input ──→ kind and files ── count_images ──→ sources ── read_source ──→ images

A source is read as a whole: an image file, a tar, or a row group of Parquet, which is named "file.parquet#3".
"""

import gzip
import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs
from PIL import Image

from ..files import DataError
from ..image_files import IMAGE_SUFFIXES, MAX_BYTES, escape_brackets, fixed_part, open_image, select_files


KINDS = {"image": tuple(IMAGE_SUFFIXES), "tar": (".tar", ".tar.gz", ".tgz"), "parquet": (".parquet",)}
READING_THREADS = 16  # for the ends of Parquet files, which may be on a slow file system


def list_input(source: str) -> tuple[str, list[str], str]:
    """The kind of the input ("image", "tar" or "parquet"), its files as paths or URLs, and a note on other files.

    Args:
        source: a folder, a glob, a file, or a text file with the paths of images; a path or a URL of fsspec.

    Raises:
        DataError: no such files, files of several kinds, or an empty list. Links are followed.
    """
    try:
        fs, path = url_to_fs(source)
        is_path = fs.exists(path)  # a path may have brackets and not be a glob
        if is_path and path.endswith(".txt"):
            return "image", _read_list(fs.cat_file(path), source), ""
        matches = [path] if is_path else fs.glob(path) or fs.glob(escape_brackets(path))
        # `find` returns nothing for a link to a missing file: the link is kept, and its row gets the error.
        found_in = ([match] if fs.isfile(match) else fs.find(match) or [match] for match in matches)
        names = sorted({name for found in found_in for name in found})
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{source}: cannot be listed: {error}") from error
    root = os.path.dirname(path) if names == [path] else path if is_path else fixed_part(path)
    files, left_out = select_files(names, [suffix for suffixes in KINDS.values() for suffix in suffixes], root)
    kinds = Counter(map(_kind, files))
    if len(kinds) != 1:
        listed = ", ".join(f"{count:,} of kind {kind}" for kind, count in sorted(kinds.items())) or "none"
        message = f"{source}: must hold images, Parquet files or tars, one of these kinds; found {listed}. {left_out}"
        raise DataError(message.rstrip(" ."))
    return next(iter(kinds)), [fs.unstrip_protocol(file) if "://" in source else file for file in files], left_out


def _kind(name: str) -> str:
    """The kind of a file by its name: one of KINDS."""
    return next(kind for kind, suffixes in KINDS.items() if name.lower().endswith(suffixes))


def _read_list(content: bytes, source: str) -> list[str]:
    """The images that a text file lists, one per line. Relative paths start at its folder."""
    lines = content.decode("utf-8-sig", "surrogateescape").splitlines()
    names = dict.fromkeys(line.strip() for line in lines if line.strip())
    if not names:
        raise DataError(f"{source}: lists no images")
    return [name if "://" in name else os.path.join(os.path.dirname(source), name) for name in names]


def count_images(kind: str, files: Sequence[str], columns: Sequence[str]) -> dict[str, int]:
    """The number of images of each source, 0 for a tar: not known. Raises a `DataError` for a bad Parquet file."""
    if kind != "parquet":
        return dict.fromkeys(files, int(kind == "image"))
    with ThreadPoolExecutor(READING_THREADS) as pool:
        groups = pool.map(partial(_count_rows, columns=columns), files)
        counted = [(f"{file}#{i}", rows) for file, counts in zip(files, groups) for i, rows in enumerate(counts)]
        return {source: rows for source, rows in counted if rows}


def _count_rows(path: str, columns: Sequence[str]) -> list[int]:
    """The number of rows of each row group."""
    try:
        with fsspec.open(path) as file:
            metadata = pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
    names = metadata.schema.to_arrow_schema().names
    for column in columns:
        if column not in names:
            raise DataError(f"{path}: has no column {column!r}; its columns are {', '.join(names)}")
    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


class StoredImage(NamedTuple):
    """An image that is not opened yet. `content`: its bytes; None, if `key` is its file; or why there are none."""

    key: str
    content: bytes | str | None = None

    def open(self) -> Image.Image:
        """The image. Raises a ValueError if it is not one, and an OSError if its file cannot be read."""
        name, content = os.path.basename(self.key), self.content
        if isinstance(content, str):
            raise DataError(content)
        if content is None:
            if os.path.exists(self.key) and not os.path.isfile(self.key):
                raise DataError(f"{name} is not a regular file")  # a FIFO would block
            with fsspec.open(self.key) as file:
                content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise DataError(f"{name} has more than {MAX_BYTES:,} bytes.")
        return open_image(content, name)


def read_source(kind: str, source: str, column: str, key_column: str | None) -> Iterator[StoredImage]:
    """Yield the images of a source. After damage, the last item has the name of the tar or row group and the problem.

    Args:
        column, key_column: Parquet columns of the images and of their keys; by default, keys are file and row number.

    Raises:
        OSError: a file cannot be read now, but perhaps later.
    """
    try:
        if kind == "image":
            yield StoredImage(source)
        elif kind == "tar":
            yield from _read_tar(source)
        else:
            yield from _read_row_group(source, column, key_column)
    except Exception as error:  # readers of broken files raise many types; one file must not end the run
        if is_temporary(error, source):
            raise
        yield StoredImage(source, str(error) or type(error).__name__)


def _read_tar(path: str) -> Iterator[StoredImage]:
    is_empty = True
    with fsspec.open(path) as file, tarfile.open(fileobj=file, mode="r|*") as tar:
        for member in tar:
            tar.members.clear()  # type: ignore[attr-defined]  # they would fill the memory
            if member.isfile() and select_files([member.name])[0] and (content := tar.extractfile(member)):
                yield StoredImage(f"{path}#{member.name}", content.read(MAX_BYTES + 1))
                is_empty = False
    if is_empty:  # a file of labels without rows could not be read by `datasets`
        yield StoredImage(path, "the tar has no images")


def _read_row_group(source: str, column: str, key_column: str | None) -> Iterator[StoredImage]:
    path, _, group = source.rpartition("#")
    with fsspec.open(path) as file:
        parquet = pq.ParquetFile(file)
        row = sum(parquet.metadata.row_group(i).num_rows for i in range(int(group)))
        columns = [name for name in (column, key_column) if name]
        for batch in parquet.iter_batches(64, row_groups=[int(group)], columns=columns):
            for values in batch.to_pylist():
                image: Any = values[column]
                content = image.get("bytes") if isinstance(image, dict) else image
                key = str(values[key_column]) if key_column else f"{path}#{row}"
                yield StoredImage(key, content if isinstance(content, bytes) else "this row has no image")
                row += 1


def is_temporary(error: Exception, path: str) -> bool:
    """Whether reading a file may succeed later: a network or a disk has failed, or its whole folder is missing.

    A local error without an errno is about the content. Remote file systems raise any `OSError` for a lost connection.
    """
    if not isinstance(error, OSError):
        return False
    if "://" in path:
        return not isinstance(error, FileNotFoundError | gzip.BadGzipFile)
    is_of_file = isinstance(error, FileNotFoundError | PermissionError) and os.path.isdir(os.path.dirname(path))
    return error.errno is not None and not is_of_file
