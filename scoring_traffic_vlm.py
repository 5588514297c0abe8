"""Encoded images, P(yes) of many questions, and attention maps.

P(yes) = softmax([l_no, l_yes] / temperature)[1], where l_no and l_yes are the logits of `[NO]` and `[YES]` at the last
token of a question. Logits are computed at these tokens only.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from transformers import Cache
from transformers.utils import is_torchdynamo_compiling, logging

from .cache_traffic_vlm import KeyValues, holds_image
from .checks_traffic_vlm import (
    INTEGER_DTYPES,
    check_image_mask,
    check_prompt_ends,
    check_token_ids,
    describe,
    is_readable,
)


logger = logging.get_logger(__name__)

# What a module of PEFT keeps outside its tensors, and what decides which adapters it adds.
ADAPTER_STATE = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")


def height_and_width(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width of images or patches from a configuration, where one number means a square."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """Cross-attention keys and values of images, computed once per image by `model.encode_images`.

    This is deliberately not a tensor: `generate()` repeats every tensor argument for beams. It must repeat
    `image_index` but not the images.

    Attributes:
        key_values: for each decoder layer the keys and values of I images, each [I,K,P,D]; with `image_latent_size`
            the latents [I,1,P,image_latent_size] and values of width 0.
        weights_version: identifies the weights that computed them (see `ImageEncoder.weights_version`), so that a
            model rejects images encoded by other weights; None disables the check.
        attention_mask: [I,P], 0 at hidden image tokens; None if all are visible.
        pixel_values: [I,3,H,W] as given; an assistant model encodes them with its own vision tower.
    """

    key_values: tuple[KeyValues, ...]
    weights_version: int | None = None
    attention_mask: torch.Tensor | None = None
    pixel_values: torch.Tensor | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.key_values[0][0].shape[0]

    def __deepcopy__(self, memo: dict) -> "EncodedImages":
        return self  # immutable; assisted decoding copies its arguments

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "EncodedImages":
        optional = (self.attention_mask, self.pixel_values)
        mask, pixels = (None if tensor is None else function(tensor) for tensor in optional)
        key_values = tuple((function(key), function(value)) for key, value in self.key_values)
        return replace(self, key_values=key_values, attention_mask=mask, pixel_values=pixels)

    def to(self, device: torch.device | str) -> "EncodedImages":
        """The same images on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def cast(self, dtype: torch.dtype) -> "EncodedImages":
        """The same images with keys and values of another dtype."""
        if self.key_values[0][0].dtype == dtype:
            return self
        return replace(self, key_values=tuple((key.to(dtype), value.to(dtype)) for key, value in self.key_values))

    def __getitem__(self, index: Any) -> "EncodedImages":
        """Select images by an integer, a slice, or a list of integers; arrays and tensors of integers are both.

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
            # A slice is a view.
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
        return EncodedImages(
            tuple(
                (torch.cat([key for key, _ in layer]), torch.cat([value for _, value in layer])) for layer in layers
            ),
            parts[0].weights_version,
            torch.cat(masks) if masks else None,
            torch.cat(pixels) if len(pixels) == len(parts) else None,
        )

    @property
    def device(self) -> torch.device:
        return self.key_values[0][0].device

    def rows(self, image_index: torch.Tensor | None, batch_size: int) -> "EncodedImages":
        """One image for each of `batch_size` rows of text: image `image_index[i]` for row i, or by default image i."""
        chosen = self.check_index(image_index, batch_size)
        check_image_mask(self.attention_mask, self.key_values[0][0])
        return self if image_index is None else replace(self, pixel_values=None)._map(lambda tensor: tensor[chosen])

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
            return torch.arange(batch_size, device=self.device)
        image_index = torch.as_tensor(image_index, device=self.device)
        if image_index.shape != (batch_size,) or image_index.dtype not in INTEGER_DTYPES:
            got = describe(image_index)
            raise ValueError(f"image_index must be int64 [{batch_size}], one index per row, got {got}.")
        if is_readable(image_index):
            low, high = (int(value) for value in image_index.aminmax())
            if low < 0 or high >= images:
                raise ValueError(f"image_index must be in [0, {images}), got {low if low < 0 else high}.")
        return image_index


class ImageEncoder:
    """Part of the model without a head: encodes images, and rejects images encoded by other weights."""

    config: Any
    device: Any
    projector: Any
    text_model: Any
    vision_tower: Any
    get_image_features: Callable[..., Any]

    def encode(self, pixel_values: torch.Tensor, attention_mask: torch.Tensor | None = None) -> EncodedImages:
        """Encode pixels [I,3,H,W]: vision tower, then keys and values of every decoder layer, with gradients."""
        image_tokens = self.get_image_features(pixel_values, return_dict=True).pooler_output
        key_values = self.text_model.project_image_tokens(image_tokens)
        return EncodedImages(key_values, attention_mask=attention_mask, pixel_values=pixel_values)

    def weights_version(self) -> int:
        """A number that changes with what encodes images: weights, buffers, and which adapters are active.

        It does not read the values: torch counts the changes in place of each tensor, except those through `.data`
        and of offloaded weights. It is valid within one process.
        """
        cross_attention = [layer.cross_attn for layer in self.text_model.layers]
        parts = [self.vision_tower, self.projector, *(p for c in cross_attention for p in c.image_projections)]
        state: list[Any] = [id(self)]
        for module in chain.from_iterable(part.modules() for part in parts):
            # As module.parameters() and module.buffers(), which are slower.
            for tensor in chain(module._parameters.values(), module._buffers.values()):
                if tensor is not None and not tensor.is_meta:  # offloaded weights are other tensors after each pass
                    state += (id(tensor), 0 if tensor.is_inference() else tensor._version)
            if "_disable_adapters" in module.__dict__:
                state += (str(module.__dict__.get(name)) for name in ADAPTER_STATE)
        return hash(tuple(state))

    def choose_images(
        self,
        pixel_values: torch.Tensor | None,
        encoded_images: EncodedImages | None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> EncodedImages | None:
        """Encode the pixels, or check the encoded images.

        Returns None without images, and if the cache already holds images, which are then used.

        Raises:
            ValueError: pixels and encoded images, or images of other weights. TypeError: not `EncodedImages`.
        """
        if pixel_values is not None and encoded_images is not None:
            raise ValueError("Pass either pixel_values or encoded_images, not both.")
        if encoded_images is not None and not hasattr(encoded_images, "key_values"):
            raise TypeError(f"encoded_images must come from encode_images(), got {type(encoded_images).__name__}.")
        if holds_image(past_key_values):
            return None
        if encoded_images is None:
            return None if pixel_values is None else self.encode(pixel_values, encoder_attention_mask)
        if not is_torchdynamo_compiling() and encoded_images.weights_version is not None:
            if encoded_images.weights_version != self.weights_version():
                raise ValueError("encoded_images come from another model, or from weights that have changed since.")
            encoded_images = replace(encoded_images, weights_version=None)  # check once, not in every later pass
        if encoder_attention_mask is not None:
            encoded_images = replace(encoded_images, attention_mask=encoder_attention_mask)
        # The images may come from an autocast block. Weights may be offloaded (their device is meta) or quantized.
        if not torch.is_autocast_enabled(encoded_images.device.type):
            encoded_images = encoded_images.cast(self.text_model.dtype)
        return encoded_images


class ImageReader:
    """Methods that the full models share: encoding images, states of questions, attention maps."""

    config: Any
    device: Any
    model: Any
    get_decoder: Callable[[], Any]

    @torch.no_grad()
    def encode_images(
        self, pixel_values: torch.Tensor, encoder_attention_mask: torch.Tensor | None = None
    ) -> EncodedImages:
        """Encode images [I,3,256,256] once, to pass as `encoded_images=` instead of pixels in many calls.

        encoder_attention_mask [I,P] hides image tokens where it is 0. No gradients are kept.
        """
        if self.model.vision_tower.training:
            logger.warning_once(
                "encode_images in training mode: batch normalization mixes the images, and asking later gives other "
                "answers than in evaluation. Call model.eval() first."
            )
        images = self.model.encode(pixel_values, encoder_attention_mask)
        return replace(images, weights_version=self.model.weights_version())

    def weights_version(self) -> int:
        """A number that changes with the weights that encode images; see `ImageEncoder.weights_version`."""
        return self.model.weights_version()

    def get_image_features(self, pixel_values: torch.Tensor, **kwargs: Any) -> Any:
        """Image tokens of pixels [I,3,256,256]: an output whose `pooler_output` is [I,P,C]."""
        return self.model.get_image_features(pixel_values, **kwargs)

    def padding_mask(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The attention mask of input_ids [B,L]: 0 at `[PAD]`."""
        pad = self.config.get_text_config().pad_token_id
        return torch.ones_like(input_ids) if pad is None else input_ids.ne(pad).long()

    def question_states(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        question_ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """States [N,C] at the last token of each of N questions, without padding; packed rows follow one another."""
        if question_ends is not None:
            rows, questions = (question_ends >= 0).nonzero(as_tuple=True)
            return hidden_states[rows, question_ends[rows, questions]]
        if attention_mask is None:
            return hidden_states[:, -1]
        columns = torch.arange(1, hidden_states.shape[1] + 1, device=attention_mask.device)
        last = (attention_mask * columns).argmax(-1)
        return hidden_states[torch.arange(last.shape[0], device=last.device), last]

    @torch.no_grad()
    def attention_maps(
        self,
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
        encoded_images = self.model.choose_images(
            pixel_values, inputs.pop("encoded_images", None), inputs.pop("encoder_attention_mask", None)
        )
        if encoded_images is None:
            raise ValueError("attention_maps needs pixel_values or encoded_images.")
        text_config = self.config.get_text_config()
        layers = _check_indices("layers", layers, text_config.num_hidden_layers)
        heads = _check_indices("heads", heads, text_config.num_attention_heads)
        attention_mask = self.padding_mask(input_ids) if attention_mask is None else attention_mask
        image_index = inputs.pop("image_index", None)
        visible = encoded_images.rows(image_index, input_ids.shape[0]).attention_mask
        maps: list[torch.Tensor] = []
        caller = threading.get_ident()

        def record(module: Any, args: tuple[torch.Tensor, ...], output: Any) -> None:
            if threading.get_ident() != caller:  # hooks also run in forward passes of other threads
                return
            maps.append(module.attention_weights(*args[:2], visible)[:, heads].mean(1))

        decoder_layers = self.get_decoder().layers
        handles = [decoder_layers[i].cross_attn.register_forward_hook(record) for i in layers]
        try:
            inputs = {key: value for key, value in inputs.items() if key not in ("question_ends", "labels")}
            images = {"encoded_images": encoded_images, "image_index": image_index}
            self.model(input_ids, None, attention_mask, use_cache=False, **images, **inputs)
        finally:
            for handle in handles:
                handle.remove()
        weights = torch.stack(maps).mean(0) * attention_mask[..., None]  # [B,L,P]
        rows, columns = self._grid()
        return weights[..., -rows * columns :].unflatten(-1, (rows, columns))  # drops a leading class token

    def _grid(self) -> tuple[int, int]:
        """Rows and columns of the vision tower's grid of image tokens."""
        vision = self.config.vision_config
        (height, width), patch = height_and_width(vision.image_size), height_and_width(vision.patch_size)
        return height // patch[0], width // patch[1]


def yes_probability(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """P(yes) = softmax([l_no, l_yes] / temperature)[1] in float32, of logits [...,V], with a full model's config."""
    text_config = config.get_text_config()
    no_yes = logits[..., [text_config.no_token_id, text_config.yes_token_id]].float()
    return (no_yes / config.yes_no_temperature).softmax(-1)[..., 1]


class YesNoScorer(ImageReader):
    """P(yes) of many questions in one pass of the decoder."""

    compute_logits: Callable[[torch.Tensor], torch.Tensor]

    def yes_probability(self, logits: torch.Tensor) -> torch.Tensor:
        """P(yes) [...] in float32 of logits [...,V] at the last token of a question, see the function of this name."""
        return yes_probability(logits, self.config)

    @torch.no_grad()
    def score_yes_no(self, *args: Any, **inputs: Any) -> list[torch.Tensor]:
        """P(yes) of every question: one float32 tensor [Q] per image, its Q questions in the given order.

        Arguments and errors are those of `question_logits`.
        """
        return [self.yes_probability(logits) for logits in self.question_logits(*args, **inputs)]

    @torch.no_grad()
    def question_logits(
        self,
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
        encoded_images = self.model.choose_images(pixel_values, encoded_images, encoder_attention_mask)
        if encoded_images is None:
            raise ValueError("Questions need pixel_values or encoded_images.")
        check_token_ids(input_ids, self.config.get_text_config().vocab_size, check_values=False)
        for name, tensor in (("attention_mask", attention_mask), ("labels", labels)):
            if tensor is not None and tensor.shape != input_ids.shape:
                raise ValueError(f"{name} must be {list(input_ids.shape)} like input_ids, got {describe(tensor)}.")
        image_index = encoded_images.check_index(image_index, input_ids.shape[0])
        attention_mask = self.padding_mask(input_ids) if attention_mask is None else attention_mask
        if segment_ids is None:
            if labels is not None:  # hide answers: their tokens have labels
                attention_mask = attention_mask * (labels < 0)
                if not bool(attention_mask.any(1).all()):
                    raise ValueError("labels must be -100 at the tokens of questions; a row has no such token.")
            text = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
            logits = self._end_logits(encoded_images, image_index, None, **text)
            return [logits[image_index == image] for image in range(len(encoded_images))]
        if question_ends is None or position_ids is None:
            raise ValueError("Packed rows (segment_ids) need question_ends and position_ids from the processor.")
        packed = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        packed |= {"segment_ids": segment_ids, "question_ends": question_ends}
        check_questions(packed, self.config.get_text_config().max_position_embeddings)
        ends = packed.pop("question_ends")
        logits = self._end_logits(encoded_images, image_index, ends, **packed)  # [N,V], row by row
        images = image_index.repeat_interleave((ends >= 0).sum(-1))
        return [logits[images == image] for image in range(len(encoded_images))]

    def _end_logits(
        self,
        encoded_images: EncodedImages,
        image_index: torch.Tensor,
        question_ends: torch.Tensor | None,
        **text: torch.Tensor | None,
    ) -> torch.Tensor:
        in_order = len(image_index) == len(encoded_images) and bool((image_index.diff() == 1).all())
        images = {"encoded_images": encoded_images, "image_index": None if in_order else image_index}
        last_ids = self.question_states(text["input_ids"], text["attention_mask"], question_ends)  # type: ignore[arg-type]
        check_prompt_ends(last_ids, self.config.get_text_config().eos_token_id)
        hidden_states = self.model(**images, **text, use_cache=False, return_dict=True).last_hidden_state
        return self.compute_logits(self.question_states(hidden_states, text["attention_mask"], question_ends))


def check_questions(packed: dict[str, torch.Tensor], limit: int) -> None:
    """Raise ValueError unless `question_ends` has exactly one column of each question of packed rows.

    A question is a run of equal `segment_ids`, of at most `limit` tokens.
    """
    rows = zip(packed["segment_ids"].tolist(), packed["attention_mask"].tolist(), packed["question_ends"].tolist())
    for segments, mask, ends in rows:
        columns = [column for column, visible in enumerate(mask) if visible]
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


def _check_indices(name: str, indices: list[int] | None, count: int) -> list[int]:
    """Indices in [0, count), by default all; raise `ValueError` for others."""
    if indices is None:
        return list(range(count))
    if not indices or any(not 0 <= index < count for index in indices):
        raise ValueError(f"{name} must be indices in [0, {count}), at least one; got {indices}.")
    return list(indices)
