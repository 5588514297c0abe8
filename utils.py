"""Helpers for all packages: `DataError`, checks of files, atomic writes, loading of weights, command-line options.

This module needs neither `datasets` nor OpenCV.
"""

import argparse
import os
import re
import stat
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from transformers import HfArgumentParser
from transformers.utils import logging

from .modeling_traffic_vlm import TrafficVLMForConditionalGeneration


_UMASK = os.umask(0o022)  # reading it sets it
os.umask(_UMASK)
FILE_MODE = 0o666 & ~_UMASK  # of files that `open` makes; safetensors makes its files readable for their owner only
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # of a repository: user/model


class DataError(ValueError):
    """Invalid input data. The message names the file, and the line or record."""


def check_file(path: str | Path, folder: str | Path, root: str | None = None) -> None:
    """Check that a file of a folder can be read: links could lead to files of others, and a FIFO would be waited for.

    Args:
        root: `os.path.realpath(folder)`, which is slow to find for each of millions of files.

    Raises:
        DataError: the file is outside of the folder once all links are followed, or it is not a regular file.
        OSError: for example, there is no such file.
    """
    target, root = os.path.realpath(path), root or os.path.realpath(folder)
    if os.path.commonpath([target, root]) != root:
        raise DataError(f"{path} leads to {target}, which is outside of {folder}: files of other folders are not read")
    if not stat.S_ISREG(os.stat(target).st_mode):
        raise DataError(f"{path} is not a regular file")


def open_inside(path: str | Path, folder: str | Path) -> BinaryIO:
    """Open a file of a folder to read its bytes. Raises what `check_file` and `open` raise."""
    check_file(path, folder)
    return open(path, "rb")


def silence_libraries() -> None:
    """Show no progress bars and warnings of libraries; only those of images whose pixels `to_rgb` had to guess."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"traffic_vlm\.images_traffic_vlm")


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` at the end of the block. Creates missing folders.

    After an error inside the block the temporary file is removed and `path` is unchanged. Several writers of one file,
    on one machine or many, each have a temporary file of their own; the last one to finish wins.
    The file's mode follows the umask.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        temporary.chmod(FILE_MODE)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file atomically: after a crash `path` is either the old or the complete new file."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def load_weights(name: str | Path, **options: Any) -> TrafficVLMForConditionalGeneration:
    """Load the full model from a folder or the Hub, with every weight present.

    `from_pretrained` fills missing tensors with random numbers and ignores tensors that the model does not have. Here
    both are errors, and so are NaN and infinity.

    Args:
        name: a folder, or the name of a repository on the Hub.
        options: passed to `from_pretrained`: config, dtype, attn_implementation, ...

    Raises:
        OSError: there is no such folder or model on the Hub, or it has no weights.
        ValueError: the file is damaged; tensors are missing, unexpected, of another shape, NaN or infinite; the
            message names them.
    """
    is_folder = os.path.isdir(name)
    if not is_folder and not HUB_NAME.fullmatch(str(name)):
        raise FileNotFoundError(f"{name}: no such folder")
    try:
        model, loaded = TrafficVLMForConditionalGeneration.from_pretrained(
            str(name), output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except SafetensorError as error:
        raise ValueError(f"{name}: the weights cannot be read: {error}") from error
    except OSError as error:
        if is_folder:
            raise
        reason = str(error).partition("\n")[0]
        raise OSError(f"{name}: no such folder, and it cannot be loaded from the Hub: {reason}") from error
    for problem, names in (
        ("no", sorted(loaded["missing_keys"])),
        ("unexpected tensors:", sorted(loaded["unexpected_keys"])),
        ("another shape of", sorted(key for key, *_ in loaded["mismatched_keys"])),
    ):
        if names:
            raise ValueError(
                f"{name}: the weights have {problem} {', '.join(names[:3])} ({len(names)} in all): they do not belong "
                "to the model that its config.json describes"
            )
    damaged = [key for key, tensor in model.state_dict().items() if not bool(tensor.isfinite().all())]
    if damaged:
        raise ValueError(f"{name}: NaN or infinite weights in {', '.join(damaged[:3])} ({len(damaged)} in all)")
    return model


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Show the description as written, and the default of every option."""


class _OptionParser(HfArgumentParser):
    """Report unknown options like argparse, before the dataclasses check the values of the known ones.

    Positional arguments can stand between options.
    """

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        namespace, unknown = super().parse_known_args(*args, **kwargs)
        lists = [action.dest for action in self._get_positional_actions() if action.nargs in ("*", "+")]
        if lists and not any(word.startswith("-") for word in unknown):
            # argparse fills a list from one place only; in IMAGE --json QUESTION it would leave the question over.
            getattr(namespace, lists[-1]).extend(unknown)
            return namespace, []
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown


class _Renamed(argparse.Action):
    """Reject an option of an earlier version and name the new one."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        parser.error(f"{args[-1]} is now {self.const}")


def option(default: Any, help: str) -> Any:
    """A field of a dataclass of options: its default, and what `--help` says."""
    return field(default=default, metadata={"help": help})


def option_parser(
    types: Iterable[Any], description: str | None, renamed: Mapping[str, str] | None = None
) -> HfArgumentParser:
    """Build the command-line parser of a script from dataclasses of options.

    Call `parse_args_into_dataclasses()` on it. Positional arguments can be added first; they come back as a namespace
    after the dataclasses.

    Args:
        types: dataclasses; each field is an option, see `option`.
        description: shown by `--help`, with an example; usually the `__doc__` of the script.
        renamed: options of earlier versions and what to use instead, such as `{"--output": "--output_dir"}`.
    """
    parser = _OptionParser(types, description=description, formatter_class=_HelpFormatter, allow_abbrev=False)
    for old, new in (renamed or {}).items():
        hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        parser.add_argument(old, nargs="*", action=_Renamed, const=new, **hidden)
    return parser
