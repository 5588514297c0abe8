"""Encoded images, P(yes) of many questions, and attention maps: functions that are methods of the full models.

P(yes) = softmax([l_no, l_yes] / temperature)[1], where l_no and l_yes are the logits of `[NO]` and `[YES]` at the last
token of a question. Logits are computed at these tokens only.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.utils import logging

from .cache_traffic_vlm import KeyValues
from .checks_traffic_vlm import (
    INTEGER_DTYPES,
    check_image_mask,
    check_prompt_ends,
    check_token_ids,
    describe,
    is_readable,
    on_cpu,
    padding_mask,
)


logger = logging.get_logger(__name__)


def height_and_width(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width of images or patches from a configuration, where one number means a square."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """Cross-attention keys and values of images, computed once per image by `model.encode_images`.

    This is deliberately not a tensor: `generate()` repeats every tensor argument for beams. It must repeat
    `image_index` but not the images. `torch.save` stores it for other processes: load the model there first, because
    that defines this class.

    Attributes:
        key_values: for each decoder layer the keys and values of I images, each [I,K,P,D]; with `image_latent_size`
            the latents [I,1,P,image_latent_size] and values of width 0.
        weights_version: checksum of the weights that computed them, so that a model rejects images encoded by other
            weights; None disables the check.
        attention_mask: [I,P], 0 at hidden image tokens; None if all are visible.
        pixel_values: [I,3,H,W] as given; an assistant model encodes them with its own vision tower.
    """

    key_values: tuple[KeyValues, ...]
    weights_version: str | None = None
    attention_mask: torch.Tensor | None = None
    pixel_values: torch.Tensor | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.key_values[0][0].shape[0]

    def __deepcopy__(self, memo: dict) -> "EncodedImages":
        return self  # immutable; assisted decoding copies its arguments

    @property
    def device(self) -> torch.device:
        return self.key_values[0][0].device

    def to(self, device: torch.device | str) -> "EncodedImages":
        """The same images on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def cast(self, dtype: torch.dtype) -> "EncodedImages":
        """The same images with keys and values of another dtype."""
        if self.key_values[0][0].dtype == dtype:
            return self
        return replace(self, key_values=tuple((key.to(dtype), value.to(dtype)) for key, value in self.key_values))

    def __getitem__(self, index: Any) -> "EncodedImages":
        """Select images by a slice, or by an integer or a list of integers, also as an array or tensor.

        One integer gives `EncodedImages` of one image.

        Raises:
            TypeError: another index. IndexError: an index out of range.
        """
        if not isinstance(index, slice):
            indices = torch.as_tensor(index)
            is_integer = not (indices.dtype.is_floating_point or indices.dtype == torch.bool)
            if indices.ndim > 1 or (indices.numel() and not is_integer):  # the tensor of [] is floating point
                raise TypeError(f"an image index must be an integer, a slice or a list of integers, got {index!r}")
            for i in indices.reshape(-1).tolist():
                if not -len(self) <= i < len(self):
                    raise IndexError(f"image index {i} is out of range for {len(self)} images")
            # A slice gives a view, not a copy. It ends at None after the last image, -1, since -1 + 1 is 0.
            index = indices.long() if indices.ndim else slice(int(indices), int(indices) + 1 or None)
        return self._map(lambda tensor: tensor[index])

    @staticmethod
    def join(parts: Sequence["EncodedImages"]) -> "EncodedImages":
        """Concatenate images that were encoded separately, for questions about all of them in one pass.

        Raises:
            ValueError: no parts; some parts with an attention mask and some without; parts of different models.
        """
        if not parts:
            raise ValueError("There are no encoded images to join.")
        if len({part.weights_version for part in parts}) > 1:
            raise ValueError("Encoded images of different models cannot be joined.")
        masks = [part.attention_mask for part in parts if part.attention_mask is not None]
        if len(masks) not in (0, len(parts)):
            raise ValueError("Encoded images with and without an attention mask cannot be joined.")
        pixels = [part.pixel_values for part in parts if part.pixel_values is not None]
        layers = zip(*(part.key_values for part in parts), strict=True)
        key_values = tuple((torch.cat([k for k, _ in layer]), torch.cat([v for _, v in layer])) for layer in layers)
        mask = torch.cat(masks) if masks else None
        all_pixels = torch.cat(pixels) if len(pixels) == len(parts) else None
        return EncodedImages(key_values, parts[0].weights_version, mask, all_pixels)

    def rows(self, image_index: torch.Tensor | None, batch_size: int) -> "EncodedImages":
        """One image for each of `batch_size` rows of text: image `image_index[i]` for row i, or by default image i."""
        chosen = self.check_index(image_index, batch_size)
        check_image_mask(self.attention_mask, self.key_values[0][0])
        if image_index is None:
            return self
        chosen = chosen.to(self.device)
        return replace(self, pixel_values=None)._map(lambda tensor: tensor[chosen])

    def check_index(self, image_index: torch.Tensor | None, batch_size: int) -> torch.Tensor:
        """Check and return the index [batch_size] of each row's image; None means image i for row i.

        Raises:
            ValueError: another number of rows, or an index out of range.
        """
        images = self.key_values[0][0].shape[0]  # len() would be a constant in an exported graph
        if image_index is None:
            if images != batch_size:
                raise ValueError(
                    f"{batch_size} rows of text for {images} images: pass image_index, the image of each row."
                )
            return torch.arange(batch_size)
        image_index = torch.as_tensor(image_index)
        if image_index.shape != (batch_size,) or image_index.dtype not in INTEGER_DTYPES:
            got = describe(image_index)
            raise ValueError(f"image_index must be int64 [{batch_size}], one index per row, got {got}.")
        if is_readable(image_index):
            low, high = (int(value) for value in image_index.aminmax())
            if low < 0 or high >= images:
                raise ValueError(f"image_index must be in [0, {images}), got {low if low < 0 else high}.")
        return image_index

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "EncodedImages":
        optional = (self.attention_mask, self.pixel_values)
        mask, pixels = (None if tensor is None else function(tensor) for tensor in optional)
        key_values = tuple((function(key), function(value)) for key, value in self.key_values)
        return replace(self, key_values=key_values, attention_mask=mask, pixel_values=pixels)


torch.serialization.add_safe_globals([EncodedImages])  # for `torch.load`, which otherwise refuses classes


@torch.no_grad()
def encode_images(
    model: Any, pixel_values: torch.Tensor, encoder_attention_mask: torch.Tensor | None = None
) -> EncodedImages:
    """Encode images [I,3,256,256] once, to pass as `encoded_images=` instead of pixels in many calls.

    encoder_attention_mask [I,P] hides image tokens where it is 0. No gradients are kept.
    """
    if model.model.vision_tower.training:
        logger.warning_once(
            "encode_images in training mode: batch normalization mixes the images, and asking later gives other "
            "answers than in evaluation. Call model.eval() first."
        )
    version = model.model.weights_version()  # first, so that it need not wait for a GPU that encodes
    return replace(model.model.encode(pixel_values, encoder_attention_mask), weights_version=version)


def question_states(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, question_ends: torch.Tensor | None = None
) -> torch.Tensor:
    """States [N,C] at the last token of each of N questions, row after row.

    Args:
        attention_mask: [B,L], 0 at padding.
        question_ends: [B,Q], the last token of each question of packed rows, -1 if a row has fewer. Without it, a row
            is one question.
    """
    if question_ends is not None:
        rows, questions = (question_ends >= 0).nonzero(as_tuple=True)
        return hidden_states[rows, question_ends[rows, questions]]
    if attention_mask is None:
        return hidden_states[:, -1]
    columns = torch.arange(1, hidden_states.shape[1] + 1, device=attention_mask.device)
    last = (attention_mask * columns).argmax(-1)  # the last visible column of each row
    return hidden_states[torch.arange(last.shape[0], device=last.device), last]


@torch.no_grad()
def question_logits(
    model: Any,
    input_ids: torch.Tensor,
    pixel_values: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
    question_ends: torch.Tensor | None = None,
    encoded_images: EncodedImages | None = None,
    image_index: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Logits of the first token of every answer: one tensor [Q,V] per image, its Q questions in the given order.

    Takes the output of the processor, packed (several questions per row) or not, with pixels or `encoded_images`.
    `image_index` holds the index of each row's image. Answers, which have labels, are ignored.

    Raises:
        ValueError: no image; a number of images that does not match the rows; packed rows without `question_ends`
            or `position_ids`; labels that cover a whole row; a question that ends in `[EOS]`.
    """
    # Checks read the text. On the CPU they need not wait for a GPU, which encodes the images meanwhile.
    input_ids, attention_mask, position_ids, segment_ids, question_ends, image_index, labels = on_cpu(
        input_ids, attention_mask, position_ids, segment_ids, question_ends, image_index, labels
    )
    images = model.model.choose_images(pixel_values, encoded_images, encoder_attention_mask)
    if images is None:
        raise ValueError("Questions need pixel_values or encoded_images.")
    text_config = model.config.get_text_config()
    check_token_ids(input_ids, text_config.vocab_size if is_readable(input_ids) else None)
    for name, tensor in (("attention_mask", attention_mask), ("labels", labels)):
        if tensor is not None and tensor.shape != input_ids.shape:
            raise ValueError(f"{name} must be {list(input_ids.shape)} like input_ids, got {describe(tensor)}.")
    if attention_mask is None:
        attention_mask = padding_mask(input_ids, text_config.pad_token_id)
    image_of_row = images.check_index(image_index, input_ids.shape[0])
    image_of_question = image_of_row
    if segment_ids is not None:
        if question_ends is None or position_ids is None:
            raise ValueError("Packed rows (segment_ids) need question_ends and position_ids from the processor.")
        check_question_ends(segment_ids, attention_mask, question_ends, text_config.max_position_embeddings)
        image_of_question = image_of_row.repeat_interleave((question_ends >= 0).sum(-1))
    else:
        question_ends = None
        if labels is not None:  # hide answers: their tokens have labels
            attention_mask = (labels < 0).long() if attention_mask is None else attention_mask * (labels < 0)
            if not bool(attention_mask.any(1).all()):
                raise ValueError("labels must be -100 at the tokens of questions; a row has no such token.")
    check_prompt_ends(question_states(input_ids, attention_mask, question_ends), text_config.eos_token_id)
    text = {"attention_mask": attention_mask, "position_ids": position_ids, "segment_ids": segment_ids}
    logits, graphs = None, model.graphs
    if graphs is not None:
        logits = graphs.answer(images, image_of_row, input_ids, question_ends, **text)
    if logits is None:
        moved = {name: None if tensor is None else tensor.to(images.device) for name, tensor in text.items()}
        chosen = {"encoded_images": images, "image_index": image_index}
        outputs = model.get_decoder()(input_ids.to(images.device), **moved, **chosen, use_cache=False)
        logits = model.compute_logits(question_states(outputs.last_hidden_state, attention_mask, question_ends))
    if bool((image_of_question.diff() < 0).any()):  # rows are not in the order of their images
        logits = logits[image_of_question.argsort(stable=True)]
    return list(logits.split(torch.bincount(image_of_question, minlength=len(images)).tolist()))


def check_question_ends(
    segment_ids: torch.Tensor, attention_mask: torch.Tensor | None, question_ends: torch.Tensor, limit: int
) -> None:
    """Raise ValueError unless `question_ends` [B,Q] has exactly one column of each question of packed rows [B,L].

    A question is a run of equal `segment_ids`, of at most `limit` tokens.
    """
    mask = torch.ones_like(segment_ids) if attention_mask is None else attention_mask
    for segments, visible, ends in zip(segment_ids.tolist(), mask.tolist(), question_ends.tolist()):
        columns = [column for column, is_visible in enumerate(visible) if is_visible]
        starts = [c for i, c in enumerate(columns) if i == 0 or segments[c] != segments[columns[i - 1]]]
        stops = [*starts[1:], columns[-1] + 1] if columns else []
        ends = [end for end in ends if end >= 0]
        if len(ends) != len(starts) or any(not a <= e < b for a, e, b in zip(starts, ends, stops)):
            raise ValueError(
                f"question_ends must name exactly one column per question; questions start at {starts}, got {ends}."
            )
        longest = max((stop - start for start, stop in zip(starts, stops)), default=0)
        if longest > limit:
            raise ValueError(f"A question of {longest} tokens is longer than max_position_embeddings={limit}.")


def yes_probability(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """P(yes) = softmax([l_no, l_yes] / temperature)[1] in float32, of logits [...,V], with a full model's config."""
    text_config = config.get_text_config()
    # `logits[..., [no, yes]]` would copy the two indices to a GPU, and wait for it.
    no_yes = torch.stack([logits[..., text_config.no_token_id], logits[..., text_config.yes_token_id]], -1).float()
    return (no_yes / config.yes_no_temperature).softmax(-1)[..., 1]


@torch.no_grad()
def attention_maps(
    model: Any,
    input_ids: torch.Tensor,
    pixel_values: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    layers: list[int] | None = None,
    heads: list[int] | None = None,
    **inputs: Any,
) -> torch.Tensor:
    """Cross-attention maps of each token, averaged over layers and heads (all by default).

    Works with every attention implementation: the weights are computed in addition to the model's attention.

    Args:
        input_ids, pixel_values, attention_mask, **inputs: the output of the processor, packed or not; or
            `encoded_images` instead of pixels.
        layers, heads: indices of the layers and query heads to average over.

    Returns:
        [B,L,h,w] in float32, [16,16] patches for each token; a map sums to 1, that of padding is all 0.

    Raises:
        ValueError: no image, or a layer or head that does not exist.
    """
    given = inputs.pop("encoded_images", None), inputs.pop("encoder_attention_mask", None)
    images = model.model.choose_images(pixel_values, *given)
    if images is None:
        raise ValueError("attention_maps needs pixel_values or encoded_images.")
    text_config, vision_config = model.config.get_text_config(), model.config.vision_config
    layers = _check_indices("layers", layers, text_config.num_hidden_layers)
    heads = _check_indices("heads", heads, text_config.num_attention_heads)
    if attention_mask is None:
        attention_mask = padding_mask(input_ids, text_config.pad_token_id)
    chosen = images.check_index(inputs.get("image_index"), input_ids.shape[0])
    visible = None if images.attention_mask is None else images.attention_mask[chosen]
    maps: list[torch.Tensor] = []
    caller = threading.get_ident()

    def record(module: Any, args: tuple[torch.Tensor, ...], output: Any) -> None:
        if threading.get_ident() != caller:  # hooks also run in forward passes of other threads
            return
        maps.append(module.attention_weights(*args[:2], visible)[:, heads].mean(1))

    decoder = model.get_decoder()
    handles = [decoder.layers[i].cross_attn.register_forward_hook(record) for i in layers]
    try:
        inputs = {key: value for key, value in inputs.items() if key not in ("question_ends", "labels")}
        decoder(input_ids, attention_mask, encoded_images=images, use_cache=False, **inputs)
    finally:
        for handle in handles:
            handle.remove()
    weights = torch.stack(maps).mean(0)  # [B,L,P]
    if attention_mask is not None:
        weights = weights * attention_mask[..., None]
    sizes = height_and_width(vision_config.image_size), height_and_width(vision_config.patch_size)
    rows, columns = (size // patch for size, patch in zip(*sizes))
    return weights[..., -rows * columns :].unflatten(-1, (rows, columns))  # drops a leading class token


def _check_indices(name: str, indices: list[int] | None, count: int) -> list[int]:
    """Indices in [0, count), by default all; raise `ValueError` for others."""
    if indices is None:
        return list(range(count))
    if not indices or any(not 0 <= index < count for index in indices):
        raise ValueError(f"{name} must be indices in [0, {count}), at least one; got {indices}.")
    return list(indices)
