"""Command-line options of the scripts. This module does not import the model."""

import argparse
import warnings
from collections.abc import Iterable
from dataclasses import field
from typing import Any

from transformers import HfArgumentParser
from transformers.utils import logging


def silence_libraries() -> None:
    """Hide progress bars, and all warnings except those of `to_rgb` about pixels whose range it had to guess."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"traffic_vlm\.images_traffic_vlm")


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
