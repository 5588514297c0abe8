"""Masks and positions of the decoder, and checks of its inputs.

Example of a packed row, "is it wet ? is it dark ?" with `[SOS]` before each question:

    segment_ids   1 1 1 1 1 2 2 2 2 2      token 7 reads tokens 5, 6 and 7, but no later tokens (causal),
    position_ids  0 1 2 3 4 0 1 2 3 4      no other question (segment_ids) and no padding (attention_mask)

Each public method checks its arguments once; what it calls trusts them. Shapes are always checked. Values are checked
only where reading them costs nothing (`is_readable`), and those of a text only in the first step of a cache.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig, __version__
from transformers.utils import is_torchdynamo_compiling, logging


logger = logging.get_logger(__name__)

TRIED_RELEASES = ("5.5", "5.24")  # of transformers, the oldest and the newest; .ci/noxfile.py tries those between, too
INTEGER_DTYPES = (torch.int64, torch.int32)  # accepted for token ids, positions and image indices
MASKED = ("eager", "sdpa")  # implementations of attention that take a mask [B,1,L,S]
UNMASKED = "Packed rows need a mask [B,1,L,S], which {implementation} does not support: use sdpa or eager."
MAX_PIXEL = 10.0  # of normalized pixels; the common means and standard deviations give at most 2.7


def packed_mask(segment_ids: torch.Tensor, attention_mask: torch.Tensor | None, columns: int) -> torch.Tensor:
    """Bool mask [B,1,L,columns]: which columns each token of packed rows [B,L] reads, as in the example above.

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


def find_segments(position_ids: torch.Tensor, rows: int, attn_implementation: str) -> torch.Tensor | None:
    """Segments [rows,L] of position_ids [rows,L] or [1,L] that start again, as in rows without padding; else None.

    A position that is not above the one before it begins a new text.

    Raises:
        ValueError: positions start again, and the attention implementation takes no mask [B,1,L,S].
    """
    starts = nn.functional.pad(position_ids.diff(dim=-1) <= 0, (1, 0))
    takes_mask = attn_implementation in MASKED
    if (is_readable(starts) or not takes_mask) and not bool(starts.any()):
        return None
    if not takes_mask:
        raise ValueError(UNMASKED.format(implementation=attn_implementation))
    return starts.cumsum(-1).expand(rows, -1)


def is_first_step(past_key_values: Cache | None) -> bool:
    """Whether nothing is cached. Later, the new tokens do not tell which of the cached ones are padding."""
    return past_key_values is None or (not is_torchdynamo_compiling() and int(past_key_values.get_seq_length()) == 0)


def padding_mask(input_ids: torch.Tensor | None, pad_token_id: int | None) -> torch.Tensor | None:
    """The attention mask [B,L] of input_ids, 0 at `[PAD]`; None if no token is padding, and while compiling."""
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


def on_cpu(*arrays: Any) -> list[Any]:
    """The arguments, with integer tensors of other devices as int64 on the CPU, copied in one transfer."""
    is_away = [isinstance(one, torch.Tensor) and one.device.type != "cpu" for one in arrays]
    away = [one for one, moves in zip(arrays, is_away) if moves]
    if not away:
        return list(arrays)
    flat = torch.cat([one.flatten().long() for one in away]).cpu()
    parts = iter(flat.split([one.numel() for one in away]))
    return [next(parts).view(one.shape) if moves else one for one, moves in zip(arrays, is_away)]


def check_release() -> None:
    """Warn, once in a process, if transformers is newer than the newest release that was tried."""
    newest = TRIED_RELEASES[-1]
    release, tried = (tuple(map(int, version.split(".")[:2])) for version in (__version__, newest))
    if release > tried:
        logger.warning_once(
            f"transformers {__version__} is newer than {newest}, the newest release that Traffic VLM was tried with."
        )


def describe(tensor: torch.Tensor) -> str:
    """Dtype and shape of a tensor for error messages: "int64 [2, 7]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check_decoder_inputs(
    config: PreTrainedConfig,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    segment_ids: torch.Tensor | None,
    past_key_values: Cache | None,
    output_attentions: bool | None,
) -> None:
    """Raise `ValueError` unless the decoder's inputs match each other and its configuration."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Pass exactly one of input_ids and inputs_embeds.")
    implementation, limit = config._attn_implementation, config.max_position_embeddings
    if output_attentions and implementation != "eager":
        raise ValueError(
            f"{implementation} attention does not return its weights: load with attn_implementation='eager' for "
            "output_attentions=True, or call attention_maps(), which works with every implementation."
        )
    check_cache(past_key_values)
    past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
    text: Any = input_ids if input_ids is not None else inputs_embeds
    check_values = is_readable(text) and int(past_length) == 0
    if input_ids is not None:
        check_token_ids(input_ids, config.vocab_size if check_values else None)
    check_masks(text, attention_mask, position_ids, past_length)
    if segment_ids is not None:
        check_segments(segment_ids, position_ids, text, int(past_length), implementation)
    if check_values and position_ids is None:
        length = text.shape[1]
        if attention_mask is not None and attention_mask.ndim == 2 and attention_mask.numel():
            length = int(attention_mask.sum(-1).max())
        if length > limit:
            raise ValueError(f"A text of {length} tokens is longer than max_position_embeddings={limit}.")


def check_cache(past_key_values: Any) -> None:
    """Raise `ValueError` for keys and values that are not in a cache of the library, such as tuples."""
    if past_key_values is not None and not hasattr(past_key_values, "get_seq_length"):
        raise ValueError(
            f"past_key_values must be a cache, got {type(past_key_values).__name__}. TrafficVLMCache(past_key_values) "
            "makes one of a tuple of (keys, values) for each layer."
        )


def check_no_other_cache(arguments: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a cache among arguments that are not read: without it, the next words would be wrong."""
    for name, value in arguments.items():
        if isinstance(value, Cache):
            raise ValueError(f"{name} is a cache, which this model takes as past_key_values or cache only.")


def check_token_ids(input_ids: torch.Tensor, vocab_size: int | None = None) -> None:
    """Raise `ValueError` unless input_ids are integers [B,L], at least one, in a vocabulary of this size if given."""
    if input_ids.dtype not in INTEGER_DTYPES or input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids must be int64 [rows,tokens], at least one token; got {describe(input_ids)}.")
    if vocab_size is not None:
        low, high = (int(value) for value in input_ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"input_ids must be in [0, {vocab_size}), the vocabulary; got {low if low < 0 else high}."
            )


def check_masks(
    text: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    past_length: int = 0,
) -> None:
    """Raise `ValueError` unless mask and positions match text [B,L,...] after `past_length` cached tokens."""
    rows, length = text.shape[:2]
    if attention_mask is not None and attention_mask.ndim != 4:
        past, shape = int(past_length), list(attention_mask.shape)
        if shape != [rows, past + length]:
            raise ValueError(
                f"attention_mask must be [{rows},{past + length}], rows by {past} cached and {length} new tokens; "
                f"got {shape}."
            )
    if position_ids is None:
        return
    if position_ids.shape not in ((1, length), (rows, length)) or position_ids.dtype not in INTEGER_DTYPES:
        got = describe(position_ids)
        raise ValueError(f"position_ids must be int64 [{rows},{length}] to match the tokens, got {got}.")


def check_segments(
    segment_ids: torch.Tensor,
    position_ids: torch.Tensor | None,
    text: torch.Tensor,
    past_length: int,
    attn_implementation: str,
) -> None:
    """Raise `ValueError` unless packed rows have positions, no past, and an attention that takes their mask."""
    rows, length = text.shape[:2]
    if segment_ids.shape != (rows, length) or past_length > 0:
        got = f"{list(segment_ids.shape)} with {past_length} cached tokens"
        raise ValueError(f"segment_ids must be [{rows},{length}] with an empty cache, got {got}.")
    if position_ids is None:
        raise ValueError("segment_ids need position_ids that start at 0 for each question, got None.")
    if attn_implementation not in MASKED:
        raise ValueError(UNMASKED.format(implementation=attn_implementation))


def check_prompt_ends(last_ids: torch.Tensor, eos_token_id: int | list[int] | None) -> None:
    """Raise `ValueError` if the last token [N] of a prompt is `[EOS]`: no answer follows the end of a text."""
    if eos_token_id is None or is_torchdynamo_compiling():
        return
    if bool(torch.isin(last_ids, torch.tensor(eos_token_id, device=last_ids.device)).any()):
        raise ValueError(
            f"A prompt ends in [EOS] ({eos_token_id}), which the tokenizer adds to a complete text, so no answer can "
            "follow. Pass questions to the processor, which leaves [EOS] out."
        )


def check_labels(labels: torch.Tensor, logits: torch.Tensor) -> None:
    """Raise `ValueError` unless labels are int64 [B,L] for logits [B,L,V], each a token id or -100."""
    rows, length, vocab_size = logits.shape
    if labels.shape != (rows, length) or labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64 [{rows},{length}] to match the logits, got {describe(labels)}.")
    if is_readable(labels):
        wrong = labels[(labels != -100) & ((labels < 0) | (labels >= vocab_size))]
        if wrong.numel():
            raise ValueError(f"labels must be in [0, {vocab_size}) or -100 (ignored), got {int(wrong[0])}.")


def check_pixels(pixel_values: torch.Tensor, shape: tuple[int, int, int]) -> None:
    """Raise `ValueError` unless pixels are floats [I,*shape] between -MAX_PIXEL and MAX_PIXEL."""
    if pixel_values.ndim != 4 or pixel_values.shape[1:] != shape:
        expected, given = ",".join(map(str, shape)), list(pixel_values.shape)
        raise ValueError(f"pixel_values must be [images,{expected}], got {given}.")
    if not pixel_values.is_floating_point():
        got = describe(pixel_values)
        raise ValueError(f"pixel_values must be normalized floats, as the processor returns them, got {got}.")
    if not is_readable(pixel_values) or not pixel_values.numel():
        return
    low, high = pixel_values.aminmax()  # NaN if a pixel is
    if not bool((low >= -MAX_PIXEL) & (high <= MAX_PIXEL)):
        raise ValueError(
            f"pixel_values must be normalized, as the processor returns them, in {-MAX_PIXEL:g}..{MAX_PIXEL:g}, "
            f"without NaN or infinity; got {float(low):g}..{float(high):g}."
        )


def check_image_mask(encoder_attention_mask: torch.Tensor | None, key: torch.Tensor) -> None:
    """Raise `ValueError` unless the mask is None or [I,P], to match image keys [I,K,P,D]."""
    images, tokens = key.shape[0], key.shape[2]
    if encoder_attention_mask is not None and encoder_attention_mask.shape != (images, tokens):
        shape = list(encoder_attention_mask.shape)
        raise ValueError(f"encoder_attention_mask must be [{images},{tokens}] (images, image tokens), got {shape}.")


def check_no_image_options(**options: torch.Tensor | None) -> None:
    """Raise `ValueError` if an option that says how an image is read was given without an image."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} needs pixel_values or encoded_images.")


def check_quantized(linear: Any, dtype: torch.dtype) -> None:
    """Raise `ValueError` if torch.ao has quantized this layer of a model whose dtype is not float32."""
    is_quantized = callable(getattr(linear, "weight", None))  # a method in torch.ao, else a tensor
    if is_quantized and dtype != torch.float32 and not is_torchdynamo_compiling():
        raise ValueError(
            f"torch.ao quantizes models in float32, and this one was loaded in {str(dtype).removeprefix('torch.')}: "
            "load it with dtype=torch.float32, then quantize it."
        )
