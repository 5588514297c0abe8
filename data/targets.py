"""Targets: what the losses of a training batch compare the model with, in addition to the answers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


def _none() -> torch.Tensor:
    return torch.zeros(0, dtype=torch.long)


@dataclass
class Targets:
    """Targets of a batch of I images, and of R packed rows of L tokens of questions about them.

    In a target that an image has, 1 is present or yes, 0 absent or no, -1 unknown. A target that a training does not
    use is empty. Places are lists, found on the CPU: to search for them on a GPU, the CPU would wait for it.

    Attributes:
        region: int8 [I,C,4], presence of each category of `presence.py` in the whole image and in its thirds.
        patch: int8 [I,C,rows,columns], presence of each category in each patch.
        source: [I], the index of each image's source.
        facts: int8 [I,F], answers to other yes/no questions about the whole image.
        grounding: bool [K,P], for each word that names an object in the image the patches of this object.
        grounding_words: [K,2], row and column of each of these words.
        intermediate: [K,3], row and column of the last token of each question about a value ("Is the light red?"),
            and the id of the word for the true value ("green").
        paraphrases: [K,4], row and column of the last tokens of two paraphrases of a yes/no question.
        agreement: [K,5], row and column of the last tokens of two questions about an image whose answers must agree,
            and 1 if they exclude each other, 0 if the first implies the second.
        distillation: [K,5], row and column of the last token of each yes/no question that the query head answers, too,
            its image, and the category and region of the head's output.
    """

    region: torch.Tensor
    patch: torch.Tensor
    source: torch.Tensor
    facts: torch.Tensor = field(default_factory=_none)
    grounding: torch.Tensor = field(default_factory=_none)
    grounding_words: torch.Tensor = field(default_factory=_none)
    intermediate: torch.Tensor = field(default_factory=_none)
    paraphrases: torch.Tensor = field(default_factory=_none)
    agreement: torch.Tensor = field(default_factory=_none)
    distillation: torch.Tensor = field(default_factory=_none)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Targets":
        """Targets with each tensor changed."""
        return Targets(**{name: change(value) for name, value in vars(self).items()})

    def to(self, *args: Any, **kwargs: Any) -> "Targets":
        """Targets on another device, as `torch.Tensor.to`; the Trainer's data loader calls it."""
        return self.each(lambda value: value.to(*args, **kwargs))

    def pin_memory(self) -> "Targets":
        """Targets in pinned memory; a data loader calls it."""
        return self.each(torch.Tensor.pin_memory)
