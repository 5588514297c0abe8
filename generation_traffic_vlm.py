"""`generate()` for models that read images by cross-attention.

The library's loop does the decoding. This mixin
- encodes the images once and passes them as an object that is not a tensor, which beams and sampling do not repeat;
- creates a cache with room for the image, and stops passing the image as soon as the cache holds it;
- suppresses `[PAD]`, `[UNK]` and `[SOS]`, and raises if a text would exceed `max_position_embeddings`;
- keeps the model's `max_new_tokens` in pipelines;
- lets an assistant model draft from the text alone.
"""

from typing import Any

import torch
from transformers import Cache, GenerationConfig
from transformers.generation import GenerationMixin, LogitsProcessorList, SuppressTokensLogitsProcessor

from .cache_traffic_vlm import CACHE_NAME, TrafficVLMCache, holds_image
from .checks_traffic_vlm import check_image_index, check_prompt_ends, check_text, padding_mask


MAX_NEW_TOKENS = 32  # default for an answer: sentences have up to 24 words, and punctuation


class TrafficVLMGenerationMixin(GenerationMixin):
    """`generate()` for models whose decoder reads images, or image tokens, by cross-attention.

    Attributes:
        image_argument: the name of the argument with images that are not encoded.
    """

    image_argument = "pixel_values"

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: Any = None,
        *,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | Any:
        """Token ids [B,L] of prompts and their answers, or an output object of the library, with its arguments.

        Images are `pixel_values` or `encoded_images`, with `image_index` [B] if rows share images.

        Raises:
            ValueError: packed or right-padded rows; a prompt that ends in `[EOS]`; a number of images that does not
                match the text; a prompt that with `max_new_tokens` would exceed `max_position_embeddings`.
        """
        for name in ("segment_ids", "question_ends"):
            if kwargs.pop(name, None) is not None:
                raise ValueError(f"generate() continues one text per row, got packed rows ({name}): use packed=False.")
        text_config, past_key_values = self.config.get_text_config(), past_key_values if cache is None else cache
        if past_key_values is not None:
            kwargs[CACHE_NAME] = past_key_values
        ids = kwargs.get("input_ids") if inputs is None else inputs
        if isinstance(ids, torch.Tensor) and past_key_values is None:
            # Errors that the library would hide, as it fails before the first pass.
            check_text(text_config, ids, None, kwargs.get("attention_mask"), kwargs.get("position_ids"))
            check_prompt_ends(ids[:, -1], text_config.eos_token_id)
        self._encode_once(kwargs.get("inputs_embeds") if ids is None else ids, kwargs)
        mask = kwargs.get("attention_mask")
        if mask is None and isinstance(ids, torch.Tensor):
            mask = padding_mask(ids, text_config.pad_token_id)
        if mask is not None and mask.ndim == 2 and not bool(mask[:, -1].all()):
            raise ValueError('generate() needs left-padded prompts: pass padding_side="left" to the processor.')
        return super().generate(inputs, generation_config, **kwargs)

    def _encode_once(self, text: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
        """Replace images in the arguments by `encoded_images` and `image_index`, a tensor that beams may repeat."""
        new, encoded = kwargs.pop(self.image_argument, None), kwargs.pop("encoded_images", None)
        if new is None and encoded is None:
            return
        images = self.model.choose_images(new, encoded, kwargs.pop("encoder_attention_mask", None))
        rows = len(images) if text is None else len(text)
        image_index = kwargs.pop("image_index", None)
        cache: Any = kwargs.get(CACHE_NAME)
        check_image_index(image_index, rows, len(images))
        if holds_image(cache):
            cache.keep_image(images.rows(image_index))
        else:
            image_index = torch.arange(rows) if image_index is None else image_index
            kwargs |= {"encoded_images": images, "image_index": image_index}

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        model_inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        if holds_image(kwargs.get(CACHE_NAME)):
            model_inputs |= {"encoded_images": None, "image_index": None}
        return model_inputs

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> tuple[GenerationConfig, dict[str, Any]]:
        """The library's result, but pipelines of transformers 5.5 to 5.10 keep the model's `max_new_tokens`.

        Their own default of 256 cannot fit. They pass it by name, `generate()` its configuration by position.
        """
        prepared, rest = super()._prepare_generation_config(*args, **kwargs)
        is_given = args or kwargs.get("max_new_tokens") is not None
        if not is_given and (prepared.max_new_tokens or 0) >= self.config.max_position_embeddings:
            prepared.max_new_tokens = self.generation_config.max_new_tokens
        return prepared, rest

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        self._check_length(generation_config, model_kwargs)
        is_given = model_kwargs.get(CACHE_NAME) is not None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get(CACHE_NAME)
        if cache is not None and model_kwargs.get("encoded_images") is not None and not is_given:
            model_kwargs[CACHE_NAME] = TrafficVLMCache.around(cache)

    def _check_length(self, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
        """Raise `ValueError` for a prompt that with its answer would exceed `max_position_embeddings`."""
        position_ids = model_kwargs["position_ids"]
        new_tokens = generation_config.max_new_tokens
        if new_tokens is None:  # max_length includes the prompt, except one given as embeddings
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
        suppressed = self.config.get_text_config().suppressed_tokens
        # Must come first: after top-k it could mask every remaining token.
        processors.insert(0, SuppressTokensLogitsProcessor(suppressed, device=kwargs.get("device") or self.device))
        return processors

    def _get_candidate_generator(self, *args: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        if kwargs.get("assistant_model") is not None:  # it drafts from the text alone; this model checks each token
            model_kwargs = {k: v for k, v in model_kwargs.items() if k not in ("encoded_images", "image_index")}
        return super()._get_candidate_generator(*args, model_kwargs=model_kwargs, **kwargs)
