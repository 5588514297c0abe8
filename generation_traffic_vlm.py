"""What `generate()` needs to know about images that are read by cross-attention.

The library's loop does the decoding. Around it, this mixin
- encodes the images once and passes them on as an object, which beams and sampling do not repeat;
- pairs the self-attention cache with one for the image, and stops passing the image once that cache holds it;
- moves right-padded prompts to the left, so that no pad column is read;
- never lets `[PAD]`, `[UNK]` and `[SOS]` be generated, and refuses texts beyond the decoder's positions;
- lets an assistant model look at the image with its own vision tower, once.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig
from transformers.generation import GenerationMixin, LogitsProcessorList, SuppressTokensLogitsProcessor

from .masking_traffic_vlm import check_masks, check_token_ids


MAX_NEW_TOKENS = 32  # of an answer where the caller sets no limit: sentences have up to 24 words, and commas


class TrafficVLMCache(EncoderDecoderCache):
    """Self-attention keys and values that grow, those of the image that are only read, and the image's mask.

    Of each layer it holds those of the text [B,K,past,D], with keys rotated already, and of the image [B,K,P,D].

    Attributes:
        encoder_attention_mask: [B,P], 0 at hidden image tokens, or None; its rows follow those of the cache.
        left_aligned: how many of its first columns `generate()` moved to the left, unlike in the caller's mask.
    """

    def __init__(self, *caches: Cache):
        super().__init__(*caches)
        self.encoder_attention_mask: torch.Tensor | None = None
        self.left_aligned = 0

    def _map_mask(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.encoder_attention_mask is not None:
            self.encoder_attention_mask = function(self.encoder_attention_mask)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._map_mask(lambda mask: mask[beam_idx.to(mask.device)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._map_mask(lambda mask: mask[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_mask(lambda mask: mask.repeat_interleave(repeats, dim=0))

    def reset(self) -> None:
        super().reset()
        self.encoder_attention_mask, self.left_aligned = None, 0


def never_generated(config: PreTrainedConfig) -> list[int]:
    """Tokens of a decoder's configuration that no answer may hold, whatever their logits."""
    ids = (config.pad_token_id, config.unk_token_id, config.bos_token_id)
    return [token_id for token_id in ids if token_id is not None]


def holds_image(past_key_values: Cache | None) -> bool:
    """Whether the cache holds the keys and values of an image already."""
    return bool(getattr(past_key_values, "is_updated", {}).get(0))


def find_image_cache(past_key_values: Cache | None) -> Cache | None:
    """The cache with an image that a cache of the caller was paired with before, while that still holds tokens."""
    paired = getattr(past_key_values, "paired_with_image", None)
    return past_key_values if paired is None or paired.get_seq_length() == 0 else paired


def with_image_cache(past_key_values: Cache, is_given: bool = True) -> TrafficVLMCache:
    """A cache with room for an image, made of the caller's, who may go on using theirs.

    One that nobody else holds (`is_given` false) is not paired: the two would hold each other, and with them keys and
    values, until Python looks for cycles.
    """
    if isinstance(past_key_values, TrafficVLMCache):
        return past_key_values
    if isinstance(past_key_values, EncoderDecoderCache):
        paired = TrafficVLMCache(past_key_values.self_attention_cache, past_key_values.cross_attention_cache)
    else:
        paired = TrafficVLMCache(past_key_values, DynamicCache())
    if is_given:
        past_key_values.paired_with_image = paired
    return paired


class TrafficVLMGenerationMixin(GenerationMixin):
    """`generate()` for models whose decoder reads images, or image tokens, by cross-attention."""

    @torch.no_grad()
    def generate(
        self, inputs: torch.Tensor | None = None, generation_config: Any = None, **kwargs: Any
    ) -> torch.Tensor | Any:
        """As in the library, with `pixel_values` or `encoded_images`, and `image_index` [B] when rows share images.

        Raises:
            ValueError: packed rows; images that do not fit the text; a prompt that with `max_new_tokens` would pass
                `max_position_embeddings`.
        """
        if kwargs.get("past_key_values") is not None:
            kwargs["past_key_values"] = find_image_cache(kwargs["past_key_values"])
        for name in ("segment_ids", "question_ends"):
            if kwargs.pop(name, None) is not None:
                raise ValueError(f"generate() continues one text a row, got packed rows ({name}): use packed=False.")
        ids = kwargs.get("input_ids") if inputs is None else inputs
        if isinstance(ids, torch.Tensor):
            # Here only what the library would trip over before the first pass; that checks the values.
            check_token_ids(ids, self.config.get_text_config().vocab_size, check_values=False)
            if kwargs.get("past_key_values") is None:
                check_masks(ids, kwargs.get("attention_mask"), kwargs.get("position_ids"))
        if hasattr(self, "encode_images"):
            self._encode_images_once(inputs, kwargs)
        order = self._left_order(inputs, kwargs)
        if order is None:
            return super().generate(inputs, generation_config, **kwargs)
        inputs = self._move_left(inputs, kwargs, order)
        output = super().generate(inputs, generation_config, **kwargs)
        # Unlike the mask of the caller, who may go on from a cache of their own or from that of the output.
        for cache in (find_image_cache(kwargs.get("past_key_values")), getattr(output, "past_key_values", None)):
            if cache is not None:
                cache.left_aligned = order.shape[1]
        return output

    def _encode_images_once(self, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
        """Replace pixels in the arguments by `encoded_images` and an `image_index` that beams can repeat."""
        names = ("pixel_values", "encoded_images", "image_index", "encoder_attention_mask")
        pixel_values, encoded_images, image_index, mask = (kwargs.pop(name, None) for name in names)
        encoded_images = self.model.choose_images(pixel_values, encoded_images, mask, kwargs.get("past_key_values"))
        if encoded_images is None:
            if image_index is not None and kwargs.get("past_key_values") is None:
                raise ValueError("image_index was given without images: pixel_values or encoded_images.")
            return
        text = next((t for t in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if t is not None), None)
        batch_size = len(encoded_images) if text is None else text.shape[0]
        image_index = encoded_images.check_index(image_index, batch_size)
        kwargs |= {"encoded_images": encoded_images, "image_index": image_index}

    def _left_order(self, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The columns [B,L] of right-padded prompts, padding first; None where nothing has to move."""
        embeds, input_ids = kwargs.get("inputs_embeds"), inputs if inputs is not None else kwargs.get("input_ids")
        text, mask = input_ids if embeds is None else embeds, kwargs.get("attention_mask")
        cache = kwargs.get("past_key_values")
        is_begun = cache is not None and cache.get_seq_length() > 0
        moved = getattr(cache, "left_aligned", 0)
        if is_begun and mask is not None and moved:
            # The sequences were moved when the cache was made.
            kwargs["attention_mask"] = mask = torch.cat([mask[:, :moved].sort(dim=1).values, mask[:, moved:]], dim=1)
        pad = self.config.get_text_config().pad_token_id
        if mask is None and pad is not None and text is not None and text.ndim == 2:
            mask = text.ne(pad).long()
        if text is None or mask is None or mask.shape != text.shape[:2] or bool(mask[:, -1].all()):
            return None
        if is_begun:
            raise ValueError("A cache cannot be continued with right-padded rows; pad input_ids on the left.")
        kwargs["attention_mask"] = mask
        return mask.bool().long().argsort(dim=1, stable=True)

    def _move_left(
        self, inputs: torch.Tensor | None, kwargs: dict[str, Any], order: torch.Tensor
    ) -> torch.Tensor | None:
        """Put all that has a column for each token into that order, in `kwargs` and in the returned `inputs`."""
        for name in ("input_ids", "attention_mask", "position_ids"):
            if kwargs.get(name) is not None and kwargs[name].shape == order.shape:
                kwargs[name] = kwargs[name].gather(1, order)
        if (embeds := kwargs.get("inputs_embeds")) is not None:
            kwargs["inputs_embeds"] = embeds.gather(1, order[..., None].expand_as(embeds))
        return None if inputs is None else inputs.gather(1, order)

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        model_inputs = super().prepare_inputs_for_generation(
            input_ids, past_key_values=past_key_values, inputs_embeds=inputs_embeds, **kwargs
        )
        if holds_image(past_key_values):
            for name in ("encoded_images", "image_index", "encoder_hidden_states", "encoder_attention_mask"):
                model_inputs.pop(name, None)
        return model_inputs

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        self._check_generated_positions(generation_config, model_kwargs)
        is_given = model_kwargs.get("past_key_values") is not None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        has_image = any(model_kwargs.get(name) is not None for name in ("encoded_images", "encoder_hidden_states"))
        if cache is not None and has_image:
            model_kwargs["past_key_values"] = with_image_cache(cache, is_given)

    def _check_generated_positions(self, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
        position_ids = model_kwargs["position_ids"]
        new_tokens = generation_config.max_new_tokens
        if new_tokens is None:  # max_length counts the prompt's columns, unless the prompt came as embeddings
            columns = 0 if model_kwargs.get("inputs_embeds") is not None else position_ids.shape[-1]
            new_tokens = generation_config.max_length - columns
        prompt, limit = int(position_ids[..., -1].max()) + 1, self.config.max_position_embeddings
        if prompt + new_tokens > limit:
            raise ValueError(
                f"A prompt of {prompt} tokens and max_new_tokens={new_tokens} make {prompt + new_tokens} tokens, more "
                f"than max_position_embeddings={limit}."
            )

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        processors = super()._get_logits_processor(*args, **kwargs)
        never = never_generated(self.config.get_text_config())
        generation_config = kwargs.get("generation_config") or args[0]
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            if getattr(generation_config, name, None) in never:
                raise ValueError(f"{name}={getattr(generation_config, name)} is a token that is never generated.")
        # First in the list: after top-k it could forbid all that is left.
        processors.insert(0, SuppressTokensLogitsProcessor(never, device=kwargs.get("device") or self.device))
        return processors

    def _get_candidate_generator(self, *args: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        assistant, encoded_images = kwargs.get("assistant_model"), model_kwargs.get("encoded_images")
        if assistant is not None and encoded_images is not None:
            model_kwargs = dict(model_kwargs)
            if hasattr(assistant, "encode_images"):
                if encoded_images.pixel_values is None:
                    raise ValueError("An assistant looks at the image itself: encoded_images has no pixel_values.")
                own = assistant.encode_images(encoded_images.pixel_values)
                model_kwargs["encoded_images"] = replace(own, attention_mask=encoded_images.attention_mask)
            else:  # an assistant that reads text only
                for name in ("encoded_images", "image_index"):
                    model_kwargs.pop(name)
        return super()._get_candidate_generator(*args, model_kwargs=model_kwargs, **kwargs)
