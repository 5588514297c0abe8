"""The collator of training: packed batches with what each cell shows and where each asked word should look."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..data.collator import Prepared, TrafficCollator, augment
from ..data.scene import Scene
from ..data.targets import TARGETS, cell_targets, find_word, word_cells


@dataclass
class SupervisedCollator(TrafficCollator):
    """A `TrafficCollator` whose batches also hold, for a vision tower of `grid` rows and columns,

    - `cell_targets` int8 [I,P,T]: 1, 0, or -1 for unknown, of each of TARGETS in each cell;
    - `attention_targets` bool [I,L,P]: for the words that name an object that is there, its cells; else all False.
    """

    grid: tuple[int, int] = (14, 14)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """With `questions_per_image=0` pixels, cell targets, and as input_ids the one token that starts a text."""
        if self.questions_per_image:
            return super().__call__(rows)
        rng = self.generator()
        pairs = [augment(row["image"].convert("RGB"), Scene.from_json(row["scene"]), rng) for row in rows]
        processor: Any = self.processor
        pixels = processor(images=[image for image, _ in pairs], return_tensors="pt")
        cells = np.stack([cell_targets(scene, self.grid) for _, scene in pairs])
        start = torch.full((len(rows), 1), processor.tokenizer.bos_token_id)
        return {"pixel_values": pixels["pixel_values"], "input_ids": start, "cell_targets": torch.from_numpy(cells)}

    def finish(self, batch: dict[str, torch.Tensor], prepared: list[Prepared]) -> dict[str, torch.Tensor]:
        cells = np.full((len(prepared), self.grid[0] * self.grid[1], len(TARGETS)), -1, np.int8)
        look_at = torch.zeros(*batch["input_ids"].shape, cells.shape[1], dtype=torch.bool)
        for row, item in enumerate(prepared):
            if item.scene is None:
                continue
            cells[row] = cell_targets(item.scene, self.grid)
            for number, label, filled in word_cells(item.questions, item.scene, self.grid):
                end = int(batch["question_ends"][row, number])
                inside = (batch["segment_ids"][row, : end + 1] == batch["segment_ids"][row, end]).nonzero().flatten()
                place = find_word(self.processor, batch["input_ids"][row, inside].tolist(), label)
                if place is not None:
                    look_at[row, inside[place]] = torch.from_numpy(filled)
        return batch | {"cell_targets": torch.from_numpy(cells), "attention_targets": look_at}
