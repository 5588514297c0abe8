"""Options that all commands share: the model, where it runs, and what part of an image it is asked about."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from ..evaluation.thresholds import load_thresholds
from ..files import DataError
from ..options import option
from .answerer import Answerer
from .pictures import Region


@dataclass
class ModelOptions:
    """Options of a command that asks a model.

    Attributes:
        may_be_zero: options that may be 0; all other numbers must be above 0.

    Raises:
        DataError: a number out of range, or thresholds that cannot be read.
        ValueError: not a region.
    """

    may_be_zero: ClassVar[tuple[str, ...]] = ()
    model: str = option(str(Path(__file__).resolve().parent.parent), "model folder, or the name of a Hub repository")
    device: str | None = option(None, "cpu, cuda, ...; by default a GPU if there is one")
    bf16: bool = option(False, "compute in bfloat16; a GPU always does")
    threads: int | None = option(None, "CPU threads of the model")
    thresholds: str | None = option(None, "thresholds.json of scripts/evaluate.py")
    region: str | None = option(None, "x,y,width,height in fractions: the part of each image to ask about")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            if not 0 <= value < float("inf") or (value == 0 and name not in self.may_be_zero):
                range_ = "0 or more" if name in self.may_be_zero else "above 0"
                raise DataError(f"--{name} must be {range_}, got {value}")
        # Read here: the machines of a cluster need not have the file.
        self.loaded_thresholds = None if self.thresholds is None else load_thresholds(self.thresholds)
        self.part_of_image = None if self.region is None else Region.from_text(self.region)

    def load(self) -> Answerer:
        """Load the model. Raises what `Answerer` raises."""
        if self.threads:
            torch.set_num_threads(self.threads)
        dtype = torch.bfloat16 if self.bf16 else None
        return Answerer(self.model, self.device, dtype, self.loaded_thresholds, self.part_of_image)
