"""Image tokens as the annotations tell them, for a decoder that shall learn to read before the tower sees well.

    cells [I,P,T] of 1 and 0, places [P,W] ── least squares ──→ the token that such a cell has on average [I,P,C]

From right tokens a decoder learns within minutes; from those of a young tower, most of which are wrong, it hardly does
at all. So it first reads what is annotated, in the tower's own terms, and the tower's tokens take over step by step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..vision_traffic_vlm import TrafficVLMVisionModel, cell_coordinates


RIDGE = 10.0  # cells; what fewer cells hold hardly counts


@dataclass(frozen=True)
class AnnotatedTokens:
    """The linear map from cells and places to tokens; made by `fit`.

    Attributes:
        weight: [T + W + 1, C].
        grid: rows and columns of cells.
    """

    weight: torch.Tensor
    grid: tuple[int, int]

    def __call__(self, cells: torch.Tensor) -> torch.Tensor:
        """Tokens [I,P,C] of cell targets [I,P,T]; what nobody knows (-1) counts as not there."""
        return describe(cells.to(self.weight.device), self.grid) @ self.weight


def describe(cells: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Cells [I,P,T] with their places and a constant: [I,P,T + W + 1] in float32."""
    here = cells.clamp(min=0).float()
    places = cell_coordinates(*grid, TrafficVLMVisionModel.NUM_WAVES, here)
    constant = here.new_ones(len(places), 1)
    return torch.cat([here, torch.cat([places, constant], -1).expand(len(cells), -1, -1)], -1)


@torch.no_grad()
def fit(tower: Any, batches: Iterable[dict[str, torch.Tensor]], grid: tuple[int, int]) -> AnnotatedTokens:
    """Fit the map to a vision tower's tokens of batches with `pixel_values` and `cell_targets`."""
    was_training = tower.training
    tower.eval()
    squares: Any = 0.0
    products: Any = 0.0
    for batch in batches:
        tokens = tower(batch["pixel_values"].to(tower.device)).last_hidden_state.float()
        tokens = tokens[:, -grid[0] * grid[1] :].flatten(0, 1)  # without a class token, where a tower has one
        inputs = describe(batch["cell_targets"].to(tower.device), grid).flatten(0, 1)
        squares, products = squares + inputs.T @ inputs, products + inputs.T @ tokens
    tower.train(was_training)
    return AnnotatedTokens(torch.linalg.solve(squares + RIDGE * torch.eye(len(squares)).to(squares), products), grid)


def share_of_annotations(step: int, steps: Sequence[int]) -> float:
    """The part that annotations have in the tokens at a step: 1 before the first of `steps`, 0 from the second on."""
    first, last = steps
    return min(1.0, max(0.0, (last - step) / max(1, last - first)))


def mix(tokens: torch.Tensor, told: torch.Tensor, share: float) -> torch.Tensor:
    """Tokens [I,P,C], with `share` of `told` [I,P,C] in them; a class token before them stays as it is."""
    before, cells = tokens.split([tokens.shape[1] - told.shape[1], told.shape[1]], 1)
    return torch.cat([before, torch.lerp(cells, told.to(cells), share)], 1)
