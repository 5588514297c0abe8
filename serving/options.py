"""Options of the commands that ask a model, and what several of them do: read questions, and examine an image."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..common.files import ROOT, DataError
from ..common.loading import load_weights, parse_size, set_image_size
from ..common.options import choose_threads, option
from ..evaluation.thresholds import load_thresholds
from ..images_traffic_vlm import Region
from ..pipeline_traffic_vlm import TrafficVLMPipeline
from ..processing_traffic_vlm import TrafficVLMProcessor
from ..question_traffic_vlm import Question


MAX_QUESTIONS = 64  # about one image, at once
MAY_BE_ZERO = ("min_score", "shortest")  # all other numbers must be above 0


@dataclass
class ModelOptions:
    """Options of a command that asks a model.

    Raises:
        DataError: a number out of range, or thresholds that cannot be read.
        ValueError: not a region, or no possible size.
    """

    model: str = option(
        str(ROOT) if (ROOT / "model.safetensors").is_file() else ".", "folder or Hub repository of a model"
    )
    device: str | None = option(None, "cpu, cuda, ...; by default a GPU if there is one")
    bf16: bool = option(False, "compute in bfloat16; a GPU always does")
    threads: int | None = option(None, "CPU threads of the model; by default one for each core")
    thresholds: str | None = option(None, "thresholds.json of scripts/evaluate.py")
    answer_untaught: bool = option(False, "guess at what the model was not taught, instead of saying so")
    min_score: float = option(0.05, "score below which an answer in words is no answer; colors of vehicles need 0.7")
    image_size: str | None = option(None, "side of the pixels, or height,width: smaller is faster, larger sees more")
    region: str | None = option(None, "x,y,width,height in fractions: the part of each image to ask about")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                may_be_zero = name in MAY_BE_ZERO
                if not (0 < value < float("inf") or (value == 0 and may_be_zero)):
                    raise DataError(f"--{name} must be {'0 or more' if may_be_zero else 'above 0'}, got {value}")
        if os.path.isdir(self.model):  # processes of a cluster have another working directory
            self.model = os.path.abspath(self.model)
        # Read now, because the machines of a cluster need not have the file.
        self.loaded_thresholds = None if self.thresholds is None else load_thresholds(self.thresholds)
        self.size = None if self.image_size is None else parse_size(self.image_size)
        self.part_of_image = None if self.region is None else Region.of(self.region)

    def load(self) -> TrafficVLMPipeline:
        """A pipeline with the model, thresholds and region of these options.

        Raises:
            OSError: no such model, or its weights cannot be read.
            ValueError: the weights do not match config.json, or there is no such device.
        """
        choose_threads(self.threads)
        try:
            device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"--device {self.device}: {str(error).partition(chr(10))[0]}") from error
        dtype = torch.float32 if device.type == "cpu" and not self.bf16 else torch.bfloat16
        model = load_weights(self.model, dtype=dtype).eval()
        processor = TrafficVLMProcessor.from_pretrained(self.model)
        if self.size is not None:
            set_image_size(model, processor, self.size)
        settings: dict[str, Any] = {"thresholds": self.loaded_thresholds, "region": self.part_of_image}
        settings |= {"answer_untaught": self.answer_untaught, "min_score": self.min_score}
        return TrafficVLMPipeline(model, processor=processor, device=device, **settings)


def read_questions(pipe: TrafficVLMPipeline, questions: Sequence[str]) -> list[Question]:
    """Questions to ask about many images, read, without repeats. Raises a `DataError` if one cannot be answered."""
    found = [pipe.read_question(text.strip()) for text in questions]
    for question in found:
        if question.problem:
            raise DataError(f"{question.text[:80]!r}: {question.problem}")
    return list(dict.fromkeys(found))


def examine(
    pipe: TrafficVLMPipeline, encoded: Any, size: tuple[int, int], labels: Sequence[str] | None, describe: bool
) -> dict[str, Any]:
    """{"objects": of these classes, "caption"} of one encoded image, each only if it is asked for.

    Args:
        size: (width, height) of the image in pixels.
    """
    found: dict[str, Any] = {"objects": pipe.locate(encoded, labels, size=size)} if labels else {}
    return found | ({"caption": pipe.describe(encoded)["caption"]} if describe else {})
