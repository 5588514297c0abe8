"""Masks and positions of the decoder, and checks of its inputs.

Example of a packed row, "is it wet ? is it dark ?" with `[SOS]` before each question:

    segment_ids   1 1 1 1 1 2 2 2 2 2      token 7 reads tokens 5, 6 and 7, but no later tokens (causal),
    position_ids  0 1 2 3 4 0 1 2 3 4      no other question (segment_ids) and no padding (attention_mask)

Public methods check their arguments, and what they call trusts them. Shapes are always checked. Values are checked
only where reading them costs nothing (`is_readable`), and those of a text only in the first step of a cache. Each
`check_...` raises `ValueError`, which names what was expected and what came.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import is_torchdynamo_compiling

from .configuration_traffic_vlm import SIDE_STEP


INTEGER_DTYPES = (torch.int64, torch.int32)  # accepted for token ids, positions and image indices
MASKED = ("eager", "sdpa")  # implementations of attention that take a mask [B,1,L,S]
MAX_PIXEL = 10.0  # of normalized pixels; the common means and standard deviations give at most 2.7


def packed_mask(segment_ids: torch.Tensor, attention_mask: torch.Tensor | None, columns: int) -> torch.Tensor:
    """Mask [B,1,L,columns] of packed rows [B,L], True at the columns that a token reads, as in the example above.

    Columns beyond the row, which a static cache has, are hidden. The library's own masks are evaluated entry by entry,
    which takes longer than a decoder layer.
    """
    length = segment_ids.shape[1]
    seen = (segment_ids[:, :, None] == segment_ids[:, None]).tril()
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, :length].bool()
    return nn.functional.pad(seen, (0, columns - length))[:, None]


def count_positions(text: torch.Tensor, attention_mask: torch.Tensor | None, past_length: int) -> torch.Tensor:
    """Position [B,L] or [1,L] of each token of text [B,L,...]; with left or right padding, the first real token is 0.

    Positions are counted from the mask [B, past + L], or without one from the length of the cache.
    """
    length = text.shape[1]
    if attention_mask is None or attention_mask.ndim != 2:
        return (torch.arange(length, device=text.device) + past_length)[None]
    counted = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)  # padding on the left gets 0
    return counted[:, past_length : past_length + length]


def padding_mask(input_ids: torch.Tensor | None, pad_token_id: int | None) -> torch.Tensor | None:
    """Attention mask [B,L] of input_ids, 0 at `[PAD]`; None if no token is padding, and while compiling."""
    if input_ids is None or pad_token_id is None or is_torchdynamo_compiling():
        return None
    mask = input_ids.ne(pad_token_id)
    return None if bool(mask.all()) else mask.long()


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether values may be read to check them: not in compiled or recorded graphs, nor in training on a GPU.

    In training the CPU would wait for the GPU in each step to check what the processor returns, which is valid anyway.
    """
    if is_torchdynamo_compiling() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return tensor.device.type == "cpu" or not torch.is_grad_enabled()


def dtype_and_shape(tensor: torch.Tensor) -> str:
    """Dtype and shape of a tensor for error messages: "int64 [2, 7]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check_range(name: str, ids: torch.Tensor, limit: int, meaning: str = "") -> None:
    """Refuse integers that are not in [0, limit)."""
    low, high = (int(value) for value in ids.aminmax())
    if low < 0 or high >= limit:
        raise ValueError(f"{name} must be in [0, {limit}){meaning}; got {low if low < 0 else high}.")


def check_text(
    config: PreTrainedConfig,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    segment_ids: torch.Tensor | None = None,
    past_length: int = 0,
) -> None:
    """Refuse token ids [B,L] or embeddings [B,L,C] that do not fit their masks and the decoder's configuration."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Pass exactly one of input_ids and inputs_embeds.")
    text: Any = input_ids if inputs_embeds is None else inputs_embeds
    if input_ids is not None and (text.dtype not in INTEGER_DTYPES or text.ndim != 2 or not text.numel()):
        raise ValueError(f"input_ids must be integers [rows,tokens], at least one token; got {dtype_and_shape(text)}.")
    rows, length = text.shape[:2]
    if attention_mask is not None and attention_mask.ndim != 4:
        past, shape = int(past_length), list(attention_mask.shape)
        if shape != [rows, past + length]:
            parts = f"rows by {past} cached and {length} new tokens"
            raise ValueError(f"attention_mask must be [{rows},{past + length}], {parts}; got {shape}.")
    # Sizes are compared one by one: torch.compile cannot compare tuples of them.
    fits = position_ids is None or (position_ids.shape[1:] == (length,) and position_ids.shape[0] in (1, rows))
    if position_ids is not None and not (fits and position_ids.dtype in INTEGER_DTYPES):
        got = dtype_and_shape(position_ids)
        raise ValueError(f"position_ids must be integers [{rows},{length}] to match the tokens, got {got}.")
    if segment_ids is not None:
        if segment_ids.shape != (rows, length) or int(past_length) > 0:
            got = f"{list(segment_ids.shape)} with {int(past_length)} cached tokens"
            raise ValueError(f"segment_ids must be [{rows},{length}] with an empty cache, got {got}.")
        if position_ids is None:
            raise ValueError("segment_ids need position_ids that start at 0 for each question, got None.")
        if (name := config._attn_implementation) not in MASKED:
            raise ValueError(f"Packed rows need a mask [B,1,L,S], which {name} does not support: use sdpa or eager.")
    if not is_readable(text) or int(past_length) > 0:
        return
    if input_ids is not None:
        check_range("input_ids", text, config.vocab_size, ", the vocabulary")
    if position_ids is None:
        limit = config.max_position_embeddings
        if attention_mask is not None and attention_mask.ndim == 2:
            length = int(attention_mask.sum(-1).max())
        if length > limit:
            raise ValueError(f"A text of {length} tokens is longer than max_position_embeddings={limit}.")


def check_prompt_ends(last_ids: torch.Tensor, eos_token_id: int) -> None:
    """Refuse prompts whose last token [N] is `[EOS]`: no answer follows the end of a text."""
    if bool((last_ids == eos_token_id).any()):
        reason = "which the tokenizer adds to a complete text, so no answer can follow"
        raise ValueError(f"A prompt ends in [EOS] ({eos_token_id}), {reason}. The processor leaves [EOS] out.")


def check_pixels(pixel_values: torch.Tensor, shape: tuple[int, int, int], any_size: bool = False) -> None:
    """Refuse pixels that are not normalized floats [I,C,H,W] of the shape [C,H,W].

    Args:
        any_size: also accept other heights and widths, multiples of 32.
    """
    given = tuple(pixel_values.shape[1:])
    is_size = any_size and given[:1] == shape[:1] and all(side > 0 and side % SIDE_STEP == 0 for side in given[1:])
    if pixel_values.ndim != 4 or not (given == shape or is_size):
        others = f", or of another height and width, multiples of {SIDE_STEP}" if any_size else ""
        expected = f"[images,{','.join(map(str, shape))}]{others}"
        raise ValueError(f"pixel_values must be {expected}, got {list(pixel_values.shape)}.")
    if not pixel_values.is_floating_point():
        got = dtype_and_shape(pixel_values)
        raise ValueError(f"pixel_values must be normalized floats, as the processor returns them, got {got}.")
    if not is_readable(pixel_values) or not pixel_values.numel():
        return
    low, high = pixel_values.aminmax()  # NaN if a pixel is
    if not bool((low >= -MAX_PIXEL) & (high <= MAX_PIXEL)):
        expected = f"normalized, as the processor returns them, in {-MAX_PIXEL:g}..{MAX_PIXEL:g}"
        got = f"{float(low):g}..{float(high):g}"
        raise ValueError(f"pixel_values must be {expected}, without NaN or infinity; got {got}.")


def check_image_index(image_index: torch.Tensor | None, rows: int, images: int) -> None:
    """Refuse another index than [rows], in [0, images); without one, another number of images than rows."""
    if image_index is None:
        if images != rows:
            raise ValueError(f"{rows} rows of text for {images} images: pass image_index, the image of each row.")
        return
    if image_index.shape != (rows,) or image_index.dtype not in INTEGER_DTYPES:
        raise ValueError(
            f"image_index must be integers [{rows}], one index per row; got {dtype_and_shape(image_index)}."
        )
    if rows and is_readable(image_index):
        check_range("image_index", image_index, images)
