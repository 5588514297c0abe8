"""Exported graphs in ONNX Runtime, with the methods of the model that the pipeline calls."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from ..scoring_traffic_vlm import yes_probability
from .greedy import generate
from .onnx import NAMES


@dataclass(frozen=True, eq=False)
class ExportedImages:
    """Encoded images.

    Attributes:
        key_values: cross-attention keys and values [N,I,K,P,D] of I images for the N layers of the decoder.
    """

    key_values: tuple[np.ndarray, np.ndarray]

    def __len__(self) -> int:
        return self.key_values[0].shape[1]

    def __getitem__(self, index: int) -> "ExportedImages":
        if not -len(self) <= index < len(self):
            raise IndexError(f"image index {index} is out of range for {len(self)} images")
        return ExportedImages(self._take([index]))

    def _take(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        keys, values = self.key_values
        return keys[:, indices], values[:, indices]

    @staticmethod
    def join(parts: Sequence["ExportedImages"]) -> "ExportedImages":
        """Concatenate images that were encoded separately."""
        keys, values = zip(*(part.key_values for part in parts))
        return ExportedImages((np.concatenate(keys, 1), np.concatenate(values, 1)))

    def rows(self, image_index: Sequence[int]) -> dict[str, np.ndarray]:
        """The inputs of `score` and `decode` for rows of text about these images."""
        return dict(zip(("image_keys", "image_values"), self._take(image_index)))


class ExportedModel:
    """The ONNX graphs that `scripts/export.py` wrote, as a model for `TrafficVLMPipeline`.

    Args:
        folder: folder of the graphs.
        config: configuration of the exported model.
        suffix: of the file names: "" or "_int8".

    Raises:
        ValueError: a graph is missing, or ONNX Runtime is not installed.
    """

    device = torch.device("cpu")
    training = False

    def __init__(self, folder: Path, config: Any, suffix: str = ""):
        try:
            import onnxruntime
        except ModuleNotFoundError:
            raise ValueError('exported graphs need ONNX Runtime: pip install "traffic_vlm[export]"') from None
        self.config, self.sessions = config, {}
        for name in NAMES:
            path = folder / f"{name}{suffix}.onnx"
            if not path.is_file():
                raise ValueError(f"{path} does not exist; scripts/export.py writes it")
            self.sessions[name] = onnxruntime.InferenceSession(path)
        about = json.loads((folder / "export.json").read_text())
        self.generation_config = GenerationConfig(max_new_tokens=about["max_new_tokens"])

    def yes_probability(self, logits: torch.Tensor) -> torch.Tensor:
        """P(yes) [...] in float32 of logits [...,V] at the last token of a question."""
        return yes_probability(logits, self.config)

    def encode_images(self, pixel_values: torch.Tensor) -> ExportedImages:
        """Encode images [I,3,H,W]."""
        return ExportedImages(tuple(self.sessions["vision"].run(None, {"pixel_values": pixel_values.numpy()})))

    def question_logits(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        segment_ids: torch.Tensor,
        question_ends: torch.Tensor,
        encoded_images: ExportedImages,
        image_index: torch.Tensor | None = None,
        **unused: Any,
    ) -> list[torch.Tensor]:
        """Logits [Q,V] of the first token of every answer, one tensor per packed row."""
        text = {"input_ids": input_ids, "position_ids": position_ids, "segment_ids": segment_ids}
        text["question_ends"] = question_ends
        index = range(len(input_ids)) if image_index is None else image_index.tolist()
        inputs = {name: tensor.numpy() for name, tensor in text.items()} | encoded_images.rows(index)
        logits = torch.from_numpy(self.sessions["score"].run(["logits"], inputs)[0])
        return [row[ends >= 0] for row, ends in zip(logits, question_ends)]

    @staticmethod
    def _find_next(find: Any, input_ids: torch.Tensor, rows: list[int], row: int, tokens: list[int]) -> list[int]:
        """Ids that can follow the new tokens of a row of a batch, which is `rows[row]` of all prompts."""
        return find(rows[row], torch.cat([input_ids[rows[row]], torch.tensor(tokens, dtype=torch.long)]))

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        encoded_images: ExportedImages,
        image_index: torch.Tensor,
        max_new_tokens: int,
        prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]],
        **unused: Any,
    ) -> GenerateDecoderOnlyOutput:
        """Greedy answers to left-padded prompts [N,L].

        Args:
            prefix_allowed_tokens_fn: (row, ids of its prompt and new tokens) → ids that can follow.

        Returns:
            sequences [N, L + max_new_tokens], padded on the right, and logits [N,V] for each new token.
        """
        lengths = attention_mask.sum(-1)
        text = self.config.get_text_config()
        answers = torch.full((len(input_ids), max_new_tokens), text.pad_token_id)
        logits = torch.zeros(len(input_ids), max_new_tokens, text.vocab_size)
        for length in lengths.unique().tolist():  # the graph cannot hide padding: one batch for each length
            rows = (lengths == length).nonzero().flatten()
            found = generate(
                self.sessions["decode"],
                input_ids[rows, -length:].numpy(),
                encoded_images.rows(image_index[rows].tolist()),
                (text.num_hidden_layers, *text.cache_shape),
                max_new_tokens,
                text.eos_token_id,
                text.pad_token_id,
                text.suppressed_tokens,
                partial(self._find_next, prefix_allowed_tokens_fn, input_ids, rows.tolist()),
            )
            for whole, part in zip((answers, logits), map(torch.from_numpy, found)):
                whole[rows, : part.shape[1]] = part
        sequences = torch.cat([input_ids, answers], 1)
        return GenerateDecoderOnlyOutput(sequences=sequences, logits=logits.unbind(1))
