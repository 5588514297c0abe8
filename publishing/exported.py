"""Exported graphs in ONNX Runtime, asked as the model is, so that one evaluation and one benchmark serve both."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..generation_traffic_vlm import suppressed_tokens
from ..scoring_traffic_vlm import YesNoScorer
from .export import NAMES


@dataclass(frozen=True)
class ExportedImages:
    """Keys and values [N,I,K,P,D] of I images for all N layers of the decoder."""

    keys: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return self.keys.shape[1]

    def rows(self, index: Sequence[int]) -> dict[str, np.ndarray]:
        """What the graphs that read images take for rows of text: the image of each."""
        return {"image_keys": self.keys[:, index], "image_values": self.values[:, index]}


class ExportedModel:
    """The graphs that `scripts/export.py` wrote, with the methods of the model that `evaluation.predict` calls.

    Args:
        folder: of the graphs.
        config: that of the exported model.
        kind: what their names end in: "" or "_int8".
        threads: of a graph; by default as many as there are cores.

    Raises:
        ValueError: no such graphs, or no ONNX Runtime.
    """

    device = torch.device("cpu")
    training = False
    yes_probability = YesNoScorer.yes_probability

    def __init__(self, folder: Path, config: Any, kind: str = "", threads: int | None = None):
        try:
            import onnxruntime
        except ModuleNotFoundError:
            raise ValueError('exported graphs need ONNX Runtime: pip install "traffic_vlm[export]"') from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        self.config, self.sessions = config, {}
        for name in NAMES:
            path = folder / f"{name}{kind}.onnx"
            if not path.is_file():
                raise ValueError(f"{path}: there is no such graph; scripts/export.py writes them")
            self.sessions[name] = onnxruntime.InferenceSession(path, options)

    def encode_images(self, pixel_values: torch.Tensor) -> ExportedImages:
        """Look at images [I,3,H,W]."""
        return ExportedImages(*self.sessions["vision"].run(None, {"pixel_values": pixel_values.numpy()}))

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
        """Logits [Q,V] of the first word of every answer: a tensor for each packed row."""
        text = {"input_ids": input_ids, "position_ids": position_ids, "segment_ids": segment_ids}
        text["question_ends"] = question_ends
        index = range(len(input_ids)) if image_index is None else image_index.tolist()
        inputs = {name: tensor.numpy() for name, tensor in text.items()} | encoded_images.rows(index)
        logits = torch.from_numpy(self.sessions["score"].run(["logits"], inputs)[0])
        return [row[ends >= 0] for row, ends in zip(logits, question_ends)]

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        encoded_images: ExportedImages,
        image_index: torch.Tensor,
        max_new_tokens: int,
        **unused: Any,
    ) -> torch.Tensor:
        """The prompts [N,L], padded on the left, and at most so many tokens of each greedy answer."""
        lengths = attention_mask.sum(-1)
        said = torch.full((len(input_ids), max_new_tokens), self.config.get_text_config().pad_token_id)
        for length in lengths.unique().tolist():  # the graph knows no padding
            rows = (lengths == length).nonzero().flatten()
            images = encoded_images.rows(image_index[rows].tolist())
            said[rows] = self._continue(input_ids[rows, -length:].numpy(), images, max_new_tokens)
        return torch.cat([input_ids, said], 1)

    def _continue(self, ids: np.ndarray, images: dict[str, np.ndarray], max_new_tokens: int) -> torch.Tensor:
        text = self.config.get_text_config()
        empty = (text.num_hidden_layers, len(ids), text.num_key_value_heads, 0, text.head_dim)
        keys, values = np.zeros(empty, np.float32), np.zeros(empty, np.float32)
        said = np.full((len(ids), max_new_tokens), text.pad_token_id)
        never = suppressed_tokens(text)
        going = np.ones(len(ids), bool)
        for step in range(max_new_tokens):
            inputs = {"input_ids": ids, "past_keys": keys, "past_values": values} | images
            logits, keys, values = self.sessions["decode"].run(None, inputs)
            logits[:, never] = -np.inf
            words = logits.argmax(-1)
            said[going, step] = words[going]
            going &= words != text.eos_token_id
            if not going.any():
                break
            ids = words[:, None]
        return torch.from_numpy(said)
