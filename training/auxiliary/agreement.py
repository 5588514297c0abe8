"""Agreement loss: P(yes) of a question ≤ P(yes) of one that it implies; of two that exclude each other ≤ 1 in sum."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...data.agreement import exclusions, implications
from ..collator import Prepared


def targets(images: Sequence[Prepared], batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Questions about an image whose answers must agree.

    Returns:
        pairs: [K,5], row and column of the last tokens of both questions, and 1 if they exclude each other, 0 if the
        first implies the second.
    """
    found = []
    for item in images:
        places = [(row, end) for row, _, end in item.spans]
        ids = [question.question_id for question in item.questions]
        found += [(*places[i], *places[j], 0) for i, j in implications(ids)]
        found += [(*places[i], *places[j], 1) for i, j in exclusions(ids)]
    return {"pairs": torch.tensor(found, dtype=torch.long).reshape(-1, 5)}


def loss(passed: Any, pairs: torch.Tensor) -> torch.Tensor:
    """By how much pairs of answers contradict each other, mean over pairs."""
    text = passed.model.config.get_text_config()
    log_odds = passed.logits[..., text.yes_token_id] - passed.logits[..., text.no_token_id]
    row, end, other_row, other_end, is_exclusion = pairs.unbind(-1)
    p, q = log_odds[row, end].float().sigmoid(), log_odds[other_row, other_end].float().sigmoid()
    return torch.where(is_exclusion.bool(), p + q - 1, p - q).clamp(min=0).sum() / max(1, len(p))
