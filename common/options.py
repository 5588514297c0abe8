"""Command-line options of the scripts, and settings of their processes. This module does not import the model."""

import argparse
import os
import signal
import warnings
from collections.abc import Iterable
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
from transformers import HfArgumentParser
from transformers.utils import logging


def silence_libraries() -> None:
    """Hide progress bars and all warnings, except the warning of `to_rgb` about a guessed range of pixels."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"traffic_vlm\.images_traffic_vlm")


def handle_signals() -> None:
    """Let Ctrl-C and SIGTERM raise a KeyboardInterrupt, also in a background job, for which shells ignore SIGINT."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def choose_threads(threads: int | None = None) -> None:
    """Set the number of threads of torch. By default torch's own, but no more cores than the container's limit.

    The limit (cgroup v2) is what torch does not see: threads without a core of their own wait for each other.
    """
    limit = Path("/sys/fs/cgroup/cpu.max")
    if threads is None and "OMP_NUM_THREADS" not in os.environ and limit.is_file():
        quota, period = limit.read_text().split()
        threads = None if quota == "max" else max(1, min(torch.get_num_threads(), int(quota) // int(period)))
    if threads is not None:
        torch.set_num_threads(threads)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Show the description as written, and the default of every option."""


def option(default: Any, help: str) -> Any:
    """A field of a dataclass of options: its default, and what `--help` says."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


def option_parser(types: Iterable[Any], description: str | None) -> HfArgumentParser:
    """The command-line parser of a script, whose options are the fields of dataclasses; see `option`.

    Its `parse_args_into_dataclasses()` returns them, and a namespace of other arguments, if any were added.
    `--help` shows the description, usually the `__doc__` of the script.
    """
    return HfArgumentParser(types, description=description, formatter_class=_HelpFormatter, allow_abbrev=False)
