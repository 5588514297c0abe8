"""What the decoder derives from masks: positions of tokens, the mask of packed rows, and whether inputs fit together.

A packed row and what its tokens see ("is it wet ? is it dark ?", every question with `[SOS]` in front):

    segment_ids   1 1 1 1 1 2 2 2 2 2      token 7 sees 5, 6 and 7: not what comes later (causal),
    position_ids  0 1 2 3 4 0 1 2 3 4      not the other question (segments), not padding (attention_mask)
"""

from collections.abc import Callable
from typing import Any

import torch


def same_segment(segment_ids: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Mask function of the library's form: whether query and key of a packed row [B,L] belong to the same question."""
    last = segment_ids.shape[1] - 1

    def mask_function(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        # A static cache has columns beyond the row; they are after every query, so the causal mask hides them.
        return segment_ids[batch_idx, q_idx] == segment_ids[batch_idx, kv_idx.clamp(max=last)]

    return mask_function


def count_positions(text: torch.Tensor, attention_mask: torch.Tensor | None, past_length: int) -> torch.Tensor:
    """Position of each token of text [B,L,...] in its sequence: the first real token is 0 under either padding.

    Counted from a mask [B, past + L] if there is one, else from the length of the cache. Returns [B,L] or [1,L].
    """
    length = text.shape[1]
    if attention_mask is None or attention_mask.ndim != 2:
        return (torch.arange(length, device=text.device) + past_length)[None]
    counted = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)  # pads before the first token stay at 0
    return counted[:, past_length : past_length + length]


def check_attention_output(wanted: bool | None, attn_implementation: str) -> None:
    """Raise `ValueError` where attention weights are wanted and the implementation does not keep them."""
    if wanted and attn_implementation != "eager":
        raise ValueError(
            f"{attn_implementation} attention does not keep its weights: load with attn_implementation='eager' for "
            "output_attentions=True, or call attention_maps(), which works with every implementation."
        )


def check_token_ids(input_ids: torch.Tensor, vocab_size: int) -> None:
    """Raise `ValueError` for ids outside the vocabulary."""
    if input_ids.numel():
        low, high = (int(value) for value in input_ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"input_ids must lie in [0, {vocab_size}), the vocabulary; got {low if low < 0 else high}."
            )


def check_length(position_ids: torch.Tensor, limit: int) -> None:
    """Raise `ValueError` for counted positions beyond the decoder's limit."""
    longest = int(position_ids.max()) + 1 if position_ids.numel() else 0
    if longest > limit:
        raise ValueError(f"A text of {longest} tokens is longer than max_position_embeddings={limit}.")


def check_masks(
    text: torch.Tensor,
    attention_mask: torch.Tensor | None,
    segment_ids: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    past_length: int,
    attn_implementation: str,
) -> None:
    """Raise `ValueError` unless the masks fit text [B,L,...] after `past_length` cached tokens."""
    rows, length = text.shape[:2]
    if attention_mask is not None and attention_mask.ndim == 2:
        columns = int(past_length) + length
        if attention_mask.shape[0] != rows or attention_mask.shape[1] < columns:
            shape = list(attention_mask.shape)
            raise ValueError(f"attention_mask must be [{rows},{columns}] (rows, cached and new tokens), got {shape}.")
    if segment_ids is None:
        return
    if segment_ids.shape != (rows, length) or int(past_length) > 0:
        got = f"{list(segment_ids.shape)} with {int(past_length)} cached tokens"
        raise ValueError(f"segment_ids must be [{rows},{length}] and without a filled cache, got {got}.")
    if position_ids is None:
        raise ValueError("segment_ids need position_ids that start again at 0 for each question, got None.")
    if "flash" in attn_implementation:
        raise ValueError(
            f"Packed rows need an attention mask, which {attn_implementation} has not: use sdpa or eager."
        )
