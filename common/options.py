"""Command-line options of the scripts, and settings of their processes. This module does not import the model."""

import argparse
import os
import time
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


def choose_threads(threads: int | None = None) -> None:
    """Set the number of threads of torch; by default one for each free core, unless OMP_NUM_THREADS is set.

    Threads without a core of their own make a command several times slower, as all wait for each other many times.
    """
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, min(torch.get_num_threads(), round(free_cores())))
    if threads is not None:
        torch.set_num_threads(threads)


def free_cores() -> float:
    """Number of idle cores that this process may use, measured during a tenth of a second of sleep.

    A limit of the container (cgroup v2) counts. Where the system does not tell (not Linux), the number of all cores.
    """
    if not hasattr(os, "sched_getaffinity"):
        return float(os.cpu_count() or 1)
    cores = os.sched_getaffinity(0)
    before, start = _busy_seconds(cores), time.monotonic()
    time.sleep(0.1)
    free = len(cores) - (_busy_seconds(cores) - before) / (time.monotonic() - start)
    limit = Path("/sys/fs/cgroup/cpu.max")
    quota, period = limit.read_text().split() if limit.is_file() else ("max", "1")
    return free if quota == "max" else min(free, int(quota) / int(period))


def _busy_seconds(cores: Iterable[int]) -> float:
    """Busy seconds of the cores since the system started, summed over the cores."""
    names, busy = {f"cpu{core}" for core in cores}, 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in names:
            user, nice, system, _idle, _iowait, *others = map(int, ticks[:8])
            busy += user + nice + system + sum(others)
    return busy / os.sysconf("SC_CLK_TCK")


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
            # argparse fills a list from one place only: in IMAGE --json QUESTION, QUESTION is unknown to it.
            getattr(namespace, lists[-1]).extend(unknown)
            return namespace, []
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown


def option(default: Any, help: str) -> Any:
    """A field of a dataclass of options: its default, and what `--help` says."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


def option_parser(types: Iterable[Any], description: str | None) -> HfArgumentParser:
    """Build the command-line parser of a script from dataclasses of options.

    Call `parse_args_into_dataclasses()` on it. Positional arguments can be added first; they come back as a namespace
    after the dataclasses.

    Args:
        types: dataclasses; each field is an option, see `option`.
        description: shown by `--help`, with an example; usually the `__doc__` of the script.
    """
    return _OptionParser(types, description=description, formatter_class=_HelpFormatter, allow_abbrev=False)
