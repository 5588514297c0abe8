"""What `generate()` needs to know about images that are read by cross-attention.

The library's loop does the decoding. Around it, this mixin
- encodes the images once and passes them on as an object, which beams and sampling do not repeat;
- pairs the self-attention cache with one for the image, and stops passing the image once that cache holds it;
- moves right-padded prompts to the left, so that no pad column is read;
- never lets `[PAD]`, `[UNK]` and `[SOS]` be generated, and refuses texts beyond the decoder's positions;
- lets an assistant model look at the image with its own vision tower, once.
"""

from dataclasses import replace
from typing import Any

import torch
from transformers import Cache
from transformers.generation import GenerationMixin, LogitsProcessorList, SuppressTokensLogitsProcessor


def holds_image(past_key_values: Cache | None) -> bool:
    """Whether the cache holds the keys and values of an image already."""
    return bool(getattr(past_key_values, "is_updated", {}).get(0))


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
        for name in ("segment_ids", "question_ends"):
            if kwargs.pop(name, None) is not None:
                raise ValueError(f"generate() continues one text a row, got packed rows ({name}): use packed=False.")
        if hasattr(self, "encode_images"):
            self._encode_images_once(inputs, kwargs)
        inputs = self._align_left(inputs, kwargs)
        return super().generate(inputs, generation_config, **kwargs)

    def _encode_images_once(self, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
        """Replace pixels in the arguments by `encoded_images` and an `image_index` that beams can repeat."""
        names = ("pixel_values", "encoded_images", "image_index", "encoder_attention_mask")
        pixel_values, encoded_images, image_index, mask = (kwargs.pop(name, None) for name in names)
        encoded_images = self.model.choose_images(pixel_values, encoded_images, mask, kwargs.get("past_key_values"))
        if encoded_images is None:
            return
        text = next((t for t in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if t is not None), None)
        batch_size = len(encoded_images if text is None else text)
        encoded_images.check_index(image_index, batch_size)
        if image_index is None:
            image_index = torch.arange(batch_size, device=encoded_images.device)
        kwargs |= {"encoded_images": encoded_images, "image_index": image_index}

    def _align_left(self, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Move the padding of right-padded prompts to the left, in `kwargs` and in the returned `inputs`."""
        input_ids = inputs if inputs is not None else kwargs.get("input_ids")
        text = kwargs.get("inputs_embeds") if kwargs.get("inputs_embeds") is not None else input_ids
        mask = kwargs.get("attention_mask")
        if mask is None and text is not None and text.ndim == 2:
            mask = text.ne(self.generation_config.pad_token_id or 0).long()
        if text is None or mask is None or mask.shape != text.shape[:2] or bool(mask[:, -1].all()):
            return inputs
        if kwargs.get("past_key_values") is not None:
            raise ValueError("A cache cannot be continued with right-padded rows; pad input_ids on the left.")
        order = mask.bool().long().argsort(dim=1, stable=True)  # padding first, the tokens after it in their order
        kwargs["attention_mask"] = mask.gather(1, order)
        for name in ("input_ids", "position_ids"):
            if kwargs.get(name) is not None and kwargs[name].shape == order.shape:
                kwargs[name] = kwargs[name].gather(1, order)
        if kwargs.get("inputs_embeds") is not None:
            kwargs["inputs_embeds"] = text.gather(1, order[..., None].expand_as(text))
        return inputs.gather(1, order) if inputs is not None else None

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
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        model_kwargs["past_key_values"] = paired = self.get_decoder().with_image_cache(cache)
        if getattr(cache, "_is_user_defined", False):
            paired._is_user_defined = True

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
        config = self.config.get_text_config()
        never = [config.pad_token_id, config.unk_token_id, config.bos_token_id]
        # First in the list: after top-k it could forbid all that is left.
        processors.insert(0, SuppressTokensLogitsProcessor(never, device=self.device))
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
