"""Targets: what the losses of a training batch compare the model with, in addition to the answers."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Targets:
    """Targets of a batch of I images, and of packed rows of questions about them.

    Regions and patches are 1 where a category is present, 0 where it is absent, -1 where that is unknown. Places are
    lists, found on the CPU: to search for them on a GPU, the CPU would wait for it.

    Attributes:
        region: int8 [I,C,4], presence of each category of `presence.py` in the whole image and in its thirds.
        patch: int8 [I,C,rows,columns], presence of each category in each patch.
        source: [I], the index of each image's source.
        grounding: bool [K,P], for each word that names an object in the image the patches of this object.
        grounding_words: [K,2], row and column of each of these words.
        intermediate: [K,3], row and column of the last token of each question about a value ("Is the light red?"),
            and the id of the word for the true value ("green").
        paraphrases: [K,4], row and column of the last tokens of two paraphrases of a yes/no question.
        agreement: [K,5], row and column of the last tokens of two questions about an image whose answers must agree,
            and 1 if they exclude each other, 0 if the first implies the second.
    """

    region: torch.Tensor
    patch: torch.Tensor
    source: torch.Tensor
    grounding: torch.Tensor
    grounding_words: torch.Tensor
    intermediate: torch.Tensor
    paraphrases: torch.Tensor
    agreement: torch.Tensor

    def to(self, *args: Any, **kwargs: Any) -> "Targets":
        """Targets on another device, as `torch.Tensor.to`; the Trainer's data loader calls it."""
        return Targets(*(tensor.to(*args, **kwargs) for tensor in vars(self).values()))

    def pin_memory(self) -> "Targets":
        """Targets in pinned memory; a data loader calls it."""
        return Targets(*(tensor.pin_memory() for tensor in vars(self).values()))
