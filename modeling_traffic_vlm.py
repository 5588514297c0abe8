"""Traffic VLM: encode a traffic image once, answer many questions about it.

    pixel_values [I,3,384,384] → vision tower → [I,154,768] → projector → [I,154,512] ─┐ keys, values
    input_ids [B,L] → embeddings → 4 × (self-attention, cross-attention, feed-forward) ─┴→ norm → lm_head → [B,L,500]

What is special here:
- the decoder reads the image by cross-attention only. Each layer projects keys and values once per image
  (`EncodedImages`); all questions, beams and generated tokens share them;
- both attentions are grouped-query, or multi-head latent (`attention_traffic_vlm.py`); RoPE on self-attention only;
- a packed row holds several questions: `segment_ids` separate them, and each starts at position 0;
- `[PAD]` is never learned or generated: its logit is far below all others, and its embedding stays zero.

Shapes: B rows of text, L tokens, I images, P image tokens (154), S keys to read (past + L of the text, or P), K
key/value heads, D head size, C hidden size, V vocabulary.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, Cache, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    BaseModelOutputWithPooling,
    CausalLMOutputWithCrossAttentions,
    SequenceClassifierOutputWithPast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import is_torchdynamo_compiling
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention_traffic_vlm import (
    Rotary,
    TrafficVLMCrossAttention,
    TrafficVLMHeadLinear,
    TrafficVLMLatentCrossAttention,
    TrafficVLMLatentSelfAttention,
    TrafficVLMRMSNorm,
    TrafficVLMSelfAttention,
    rotary_embedding,
)
from .cache_traffic_vlm import CACHE_NAME, EncodedImages, TrafficVLMCache
from .checks_traffic_vlm import (
    check_image_index,
    check_pixels,
    check_text,
    count_positions,
    packed_mask,
    padding_mask,
)
from .configuration_traffic_vlm import TrafficVLMConfig, TrafficVLMTextConfig, height_and_width
from .fast_traffic_vlm import Fast, fingerprint
from .generation_traffic_vlm import MAX_NEW_TOKENS, TrafficVLMGenerationMixin
from .locating_traffic_vlm import Found, find_objects
from .scoring_traffic_vlm import TrafficVLMScoringMixin, attention_maps, question_states
from .vision_traffic_vlm import TrafficVLMVisionModel


IMAGES = "pixel_values, encoded_images or encoder_hidden_states"
PAD_MARGIN = 100.0  # the logit of `[PAD]` is this much below the lowest one: exp(-100) added to another word's is 0


def names_arguments_of(inner: Callable[..., Any]) -> Callable[[Any], Any]:
    """A decorator of a method that passes **kwargs on to `inner`: its signature names the arguments of both.

    `generate()` and `Trainer` read there what a model takes.
    """

    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        def named(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs)

        both: Any = {**inspect.signature(inner).parameters, **inspect.signature(method).parameters}
        rest = both.pop("kwargs")
        parameters = [one for one in both.values() if one.kind is not inspect.Parameter.VAR_POSITIONAL]
        named.__signature__ = inspect.Signature([*parameters, rest])  # type: ignore[attr-defined]
        return named

    return decorate


class TrafficVLMMLP(nn.Module):
    """SwiGLU feed-forward: down(silu(gate(x)) · up(x)) (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: TrafficVLMTextConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class TrafficVLMDecoderLayer(GradientCheckpointingLayer):
    """One layer of the decoder, pre-norm:

    x ─┬─ norm ─ self-attention ──(+)─┬─ norm ─ cross-attention ──(+)─┬─ norm ─ feed-forward ──(+)─→
       └───────────────────────────┘  └────────────↑───────────────┘  └─────────────────────────┘
                                          image keys, values
    """

    def __init__(self, config: TrafficVLMTextConfig, layer_idx: int):
        super().__init__()
        self.self_attn_norm = TrafficVLMRMSNorm(config.hidden_size, config.rms_norm_eps)
        is_latent = config.kv_latent_size is not None
        self_attention = TrafficVLMLatentSelfAttention if is_latent else TrafficVLMSelfAttention
        self.self_attn = self_attention(config, layer_idx)
        if config.encoder_hidden_size is not None:
            self.cross_attn_norm = TrafficVLMRMSNorm(config.hidden_size, config.rms_norm_eps)
            is_latent = config.image_latent_size is not None
            cross_attention = TrafficVLMLatentCrossAttention if is_latent else TrafficVLMCrossAttention
            self.cross_attn = cross_attention(config, layer_idx)
        self.mlp_norm = TrafficVLMRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = TrafficVLMMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        x: torch.Tensor,
        image_key: torch.Tensor | None,  # positional, as reentrant checkpointing has gradients for such tensors only
        image_value: torch.Tensor | None,
        rotary: Rotary,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """x [B,L,C], image keys and values [B,K,P,D], masks [B,1,L,S] of text and [B,1,L,P] of image → x [B,L,C]."""
        past_key_values = kwargs.pop(CACHE_NAME, None)  # by this name the library leaves it out in checkpointing
        text = {"rotary": rotary, "attention_mask": attention_mask, "past_key_values": past_key_values}
        image = {"key": image_key, "value": image_value, "attention_mask": encoder_attention_mask}
        x = x + self.dropout(self.self_attn(self.self_attn_norm(x), **text, **kwargs)[0])
        if image_key is not None:
            x = x + self.dropout(self.cross_attn(self.cross_attn_norm(x), **image, **kwargs)[0])
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class TrafficVLMPreTrainedModel(PreTrainedModel):
    """Base class of all models: loading, attention backends and access to the decoder."""

    fast: Fast | None = None  # of the base model, while passes are fast
    config_class: Any = TrafficVLMConfig
    base_model_prefix = "model"
    input_modalities: tuple[str, ...] = ("image", "text")
    supports_gradient_checkpointing = True
    _no_split_modules = ["TrafficVLMDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # The head used in training only, found in training checkpoints.
    _keys_to_ignore_on_load_unexpected = [r"^training_head\."]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, TrafficVLMHeadLinear):  # the library knows all other modules
            init.normal_(module.weight, std=self.config.get_text_config().initializer_range)

    def weights_version(self) -> str:
        """Checksum of the weights without those of a head; see `fingerprint`."""
        fast = self.base_model.fast  # once, as another thread may leave the context
        return fingerprint(self.base_model)[1] if fast is None else fast.version

    def fast_context(self) -> Fast:
        """A context in which passes of this model without gradients are faster; see `Fast`."""
        return Fast(self)

    def choose_images(
        self: Any,
        new: torch.Tensor | None,
        encoded_images: EncodedImages | None,
        encoder_attention_mask: torch.Tensor | None,
    ) -> EncodedImages | None:
        """The given encoded images, or those of new pixels or tokens, with the given mask; None without images.

        Encoded images of other weights are refused, but by a decoder alone: their version is that of a full model.
        """
        if new is not None and encoded_images is not None:
            raise ValueError(f"Give one of {IMAGES}, not several.")
        version = getattr(encoded_images, "weights_version", None) if hasattr(self, "vision_tower") else None
        if encoded_images is not None and version and not is_torchdynamo_compiling():
            if version != self.weights_version():
                raise ValueError("encoded_images come from another model, or from weights that have changed since.")
            encoded_images = replace(encoded_images, weights_version=None)  # check once, not in every later pass
        images = encoded_images if new is None else self.encode(new)
        if encoder_attention_mask is None:
            return images
        if images is None:
            raise ValueError(f"encoder_attention_mask needs an image: {IMAGES}. A cache keeps it for later steps.")
        expected, shape = images.key_values[0][0].shape[::2], encoder_attention_mask.shape  # [I,K,P,D] → [I,P]
        if shape != expected:
            raise ValueError(f"encoder_attention_mask must be {list(expected)}, images by tokens; got {list(shape)}.")
        return replace(images, attention_mask=encoder_attention_mask)

    def get_decoder(self) -> "TrafficVLMTextModel":
        """The text decoder of any of the models."""
        base: Any = getattr(self, "model", self)
        return getattr(base, "text_model", base)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.get_decoder().embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.get_decoder().embed_tokens = value


class TrafficVLMTextModel(TrafficVLMPreTrainedModel):
    """The text decoder. Without an image it is a plain language model."""

    config_class = TrafficVLMTextConfig
    input_modalities = ("text",)
    _can_record_outputs = {
        "hidden_states": TrafficVLMDecoderLayer,
        "attentions": OutputRecorder(TrafficVLMSelfAttention, index=1),
        "cross_attentions": OutputRecorder(TrafficVLMCrossAttention, index=1),
    }

    def __init__(self, config: TrafficVLMTextConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.layers: Any = nn.ModuleList(TrafficVLMDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = TrafficVLMRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.rotary_dim, self.rope_theta = config.rotary_dim, config.rope_parameters["rope_theta"]
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        encoded_images: EncodedImages | None = None,
        image_index: torch.Tensor | None = None,
        segment_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Last hidden states [B,L,C] of text, optionally about images.

        Args:
            input_ids: [B,L]; or pass inputs_embeds [B,L,C].
            attention_mask: [B, past + L], 0 at padding (left or right); or a prepared mask [B,1,L,S]. By default 0 at
                `[PAD]` in the first step.
            position_ids: [B,L]; by default counted from the mask, or without one from the length of the cache.
            past_key_values: a cache, also taken as `cache`; with an image, a TrafficVLMCache.
            encoder_hidden_states: image tokens [I,P,encoder_hidden_size]; or pass encoded_images. Neither is needed
                once the cache holds the image.
            encoder_attention_mask: [I,P], 0 at image tokens to hide; the cache keeps it for later steps.
            encoded_images: I images from `encode_images`.
            image_index: [B], index of the image of each row; not needed if row i is about image i.
            segment_ids: [B,L], the question that each token belongs to; tokens of other questions are hidden.

        Raises:
            ValueError: invalid shapes or values; the message names what was expected and what came.
        """
        implementation = self.config._attn_implementation
        if kwargs.get("output_attentions", self.config.output_attentions) and implementation != "eager":
            raise ValueError(
                f"{implementation} attention does not return its weights: load with attn_implementation='eager' for "
                "output_attentions=True, or call attention_maps(), which works with every implementation."
            )
        past_key_values, past_length = past_key_values if cache is None else cache, 0
        if past_key_values is not None:
            past_length = past_key_values.get_seq_length()
        text: Any = {"attention_mask": attention_mask, "position_ids": position_ids, "segment_ids": segment_ids}
        check_text(self.config, input_ids, inputs_embeds, **text, past_length=past_length)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        # Hide `[PAD]`, unless the caller says what to hide. Later, new tokens do not tell which cached ones to hide.
        is_first_step = not is_torchdynamo_compiling() and int(past_length) == 0
        if attention_mask is None and segment_ids is None and is_first_step:
            attention_mask = padding_mask(input_ids, self.config.pad_token_id)
        if use_cache and past_key_values is None:  # the decorator has replaced None by the config's value
            past_key_values = TrafficVLMCache(config=self.config)
        if position_ids is None:
            position_ids = count_positions(inputs_embeds, attention_mask, past_length)
        images = self.choose_images(encoder_hidden_states, encoded_images, encoder_attention_mask)
        images = self.images_of_rows(images, image_index, len(inputs_embeds), past_key_values)
        states = self.decode(
            inputs_embeds, position_ids, attention_mask, segment_ids, images, past_key_values, **kwargs
        )
        cached: Any = {CACHE_NAME: past_key_values}
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states, **cached)

    def decode(
        self,
        inputs_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        segment_ids: torch.Tensor | None = None,
        images: EncodedImages | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Last hidden states [B,L,C] of inputs that `forward` has checked, with one image for each row."""
        causal_mask = self.causal_mask(inputs_embeds, attention_mask, segment_ids, past_key_values)
        image_key_values: Any = [(None, None)] * len(self.layers) if images is None else images.key_values
        image_mask = None
        if images is not None and images.attention_mask is not None:
            image_mask = create_bidirectional_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=images.attention_mask,
                encoder_hidden_states=images.key_values[0][0][:, 0],  # [B,P,D], only its shape is used
            )
        rotary = rotary_embedding(position_ids, self.rotary_dim, self.rope_theta, inputs_embeds.dtype)
        hidden_states = self.dropout(inputs_embeds)
        for layer, (image_key, image_value) in zip(self.layers, image_key_values):
            hidden_states = layer(
                hidden_states,
                image_key,
                image_value,
                rotary=rotary,
                attention_mask=causal_mask,
                encoder_attention_mask=image_mask,
                **{CACHE_NAME: past_key_values},
                **kwargs,
            )
        return self.norm(hidden_states)

    def causal_mask(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        segment_ids: torch.Tensor | None,
        past_key_values: Cache | None,
    ) -> Any:
        """Mask of self-attention: a token reads itself and earlier tokens, no padding and no other question."""
        if segment_ids is None:
            return create_causal_mask(self.config, inputs_embeds, attention_mask, **{CACHE_NAME: past_key_values})
        length = segment_ids.shape[1]
        columns = length if past_key_values is None else past_key_values.get_mask_sizes(length, 0)[0]
        return packed_mask(segment_ids, attention_mask, columns)

    def encode(self, encoder_hidden_states: torch.Tensor) -> EncodedImages:
        """Encoded images of image tokens [I,P,encoder_hidden_size], with gradients."""
        return EncodedImages(tuple(layer.cross_attn.project(encoder_hidden_states) for layer in self.layers))

    @staticmethod
    def images_of_rows(
        images: EncodedImages | None, image_index: torch.Tensor | None, rows: int, past_key_values: Any
    ) -> EncodedImages | None:
        """One image for each row, or None. The first step stores the images in the cache; later steps read them."""
        if images is not None:
            count = images.key_values[0][0].shape[0]  # len() would be a constant in an exported graph
            check_image_index(image_index, rows, count)
            images = images.rows(image_index)
        elif image_index is not None:
            raise ValueError(f"image_index needs an image: {IMAGES}.")
        if images is not None and past_key_values is not None:
            if not hasattr(past_key_values, "keep_image"):
                given = type(past_key_values).__name__
                raise ValueError(f"With an image, past_key_values must be a TrafficVLMCache, got {given}.")
            past_key_values.keep_image(images)
        return getattr(past_key_values, "image", images)


class TrafficVLMModel(TrafficVLMPreTrainedModel):
    """Vision tower, projector and text decoder, without a head."""

    def __init__(self, config: TrafficVLMConfig):
        super().__init__(config)
        config.check_fields()  # again, because fields may have been changed since the configuration was built
        vision = config.vision_config
        is_custom = vision.model_type == TrafficVLMVisionModel.config_class.model_type
        build_tower = TrafficVLMVisionModel._from_config if is_custom else AutoModel.from_config
        self.vision_tower = build_tower(vision)
        self.pixel_shape = (getattr(vision, "num_channels", 3), *height_and_width(vision.image_size))
        self.any_size = is_custom  # towers of transformers have positions of one size
        self.projector = nn.Linear(vision.hidden_size, config.text_config.hidden_size)
        self.text_model = TrafficVLMTextModel._from_config(config.text_config)
        self.post_init()

    def encode(self, pixel_values: torch.Tensor) -> EncodedImages:
        """Encoded images of pixels [I,3,H,W], with gradients."""
        check_pixels(pixel_values, self.pixel_shape, self.any_size)
        height, width = pixel_values.shape[2:]
        graphs: Any = getattr(self.fast, "graphs", None)
        is_recorded = graphs is not None and graphs.is_usable()
        images = graphs.encode(pixel_values) if is_recorded else self.look(pixel_values)
        return replace(images, image_size=(height, width))

    @can_return_tuple
    def get_image_features(self, pixel_values: torch.Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        """Image tokens of pixels [I,3,H,W]: `last_hidden_state` [I,P,width], and projected `pooler_output` [I,P,C]."""
        check_pixels(pixel_values, self.pixel_shape, self.any_size)
        tokens = self.vision_tower(pixel_values.to(self.vision_tower.dtype), return_dict=True, **kwargs)[0]
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=self.projector(tokens))

    def look(self, pixel_values: torch.Tensor) -> EncodedImages:
        """What the tower sees in checked pixels [I,3,H,W], and the decoder reads."""
        seen = self.vision_tower(pixel_values.to(self.vision_tower.dtype), return_dict=True)
        return replace(self.text_model.encode(self.projector(seen.last_hidden_state)), centers=seen.get("centers"))

    @can_return_tuple
    @names_arguments_of(TrafficVLMTextModel.forward)
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoded_images: EncodedImages | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Last hidden states [B,L,C] of text about images.

        Args:
            pixel_values: [I,3,H,W]; or pass encoded_images from `encode_images`. With neither, the decoder is a
                plain language model.
            encoder_attention_mask: [I,P], 0 at image tokens to hide.
            input_ids, attention_mask, **kwargs: as of `TrafficVLMTextModel.forward`, `image_index` among them.
        """
        # The decoder reads its own config, but the library's Trainer turns `use_cache` off in the full model's.
        if kwargs.get("use_cache") is None and not getattr(self.config, "use_cache", True):
            kwargs["use_cache"] = False
        images = self.choose_images(pixel_values, encoded_images, encoder_attention_mask)
        text = {"input_ids": input_ids, "attention_mask": attention_mask, "return_dict": True}
        return self.text_model(encoded_images=images, **kwargs | text)


class TrafficVLMLanguageModel(TrafficVLMPreTrainedModel):
    """Base class of the models with a language-model head: the decoder alone and the full model."""

    model: Any
    lm_head: nn.Linear

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [...,V] of states [...,C]; the one of `[PAD]` is PAD_MARGIN below the lowest, without a gradient.

        So `[PAD]` is never generated, and its embedding stays zero. Its log-probability is finite, because label
        smoothing adds up the log-probabilities of all words.
        """
        logits, text_config = self.lm_head(hidden_states), self.config.get_text_config()
        logits[..., text_config.yes_token_id] += text_config.yes_bias
        logits[..., text_config.pad_token_id] = logits.detach().amin(-1) - PAD_MARGIN
        return logits

    @can_return_tuple
    def forward(
        self,
        *inputs: Any,
        question_ends: torch.Tensor | None = None,  # returned by the processor; only `score_yes_no` reads it
        labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithCrossAttentions:
        """Logits [B,L,V] of text, and with labels [B,L] the mean loss of next tokens whose label is not -100.

        logits_to_keep is the number of last tokens with logits, or their indices; 0 keeps all. The other arguments are
        those of `TrafficVLMModel.forward`, or of a decoder alone those of `TrafficVLMTextModel.forward`.
        """
        outputs = self.model(*inputs, **kwargs | {"return_dict": True})
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.compute_logits(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            if labels.shape != logits.shape[:2]:
                raise ValueError(f"labels must be {[*logits.shape[:2]]} to match the logits, got {[*labels.shape]}.")
            text_config = self.config.get_text_config()
            labels = labels.masked_fill(labels == text_config.pad_token_id, -100)  # never a target
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=text_config.vocab_size, **kwargs)
        return CausalLMOutputWithCrossAttentions(
            loss=loss,
            logits=logits,
            **{CACHE_NAME: outputs.get(CACHE_NAME)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
        )


class TrafficVLMForCausalLM(TrafficVLMLanguageModel, TrafficVLMGenerationMixin):
    """The text decoder with the language-model head."""

    config_class = TrafficVLMTextConfig
    input_modalities = ("text",)
    image_argument = "encoder_hidden_states"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: TrafficVLMTextConfig):
        super().__init__(config)
        self.model = TrafficVLMTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    forward = names_arguments_of(TrafficVLMTextModel.forward)(TrafficVLMLanguageModel.forward)


class TrafficVLMFullModel(TrafficVLMPreTrainedModel):
    """Base class of the full models with a head: what they do with images."""

    model: TrafficVLMModel

    @torch.no_grad()
    def encode_images(
        self, pixel_values: torch.Tensor, encoder_attention_mask: torch.Tensor | None = None
    ) -> EncodedImages:
        """Images [I,3,H,W], encoded once to pass as `encoded_images=` instead of pixels in many calls.

        encoder_attention_mask [I,P] hides image tokens where it is 0. No gradients are kept. Call `eval()` before: in
        training mode, batch normalization mixes the images and changes its statistics.
        """
        version = self.model.weights_version()  # first, so that it need not wait for a GPU that encodes
        images: Any = self.model.choose_images(pixel_values, None, encoder_attention_mask)
        return replace(images, weights_version=version)

    def locate(self, encoded_images: EncodedImages, label: str, threshold: float | None = None) -> list[list[Found]]:
        """For each image the objects of a class, best first; see `find_objects`.

        Args:
            label: a class of `located` in the configuration of the tower, which must have a center head.
            threshold: score from which an object is reported; by default that of the configuration.

        Raises:
            ValueError: a class that is not located.
        """
        located = self.config.vision_config.located
        if label not in located:
            raise ValueError(f"locate knows: {', '.join(located) or 'nothing'}; got {label!r}")
        threshold, index = located[label] if threshold is None else threshold, [*located].index(label)
        centers: Any = encoded_images.centers
        return [find_objects(one, index, threshold) for one in centers.cpu()]

    def get_image_features(self, pixel_values: torch.Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        """Image tokens, as of `TrafficVLMModel.get_image_features`."""
        return self.model.get_image_features(pixel_values, **kwargs)

    attention_maps = attention_maps


class TrafficVLMForConditionalGeneration(
    TrafficVLMLanguageModel, TrafficVLMFullModel, TrafficVLMScoringMixin, TrafficVLMGenerationMixin
):
    """The full model with the language-model head: `generate()`, `score_yes_no()`, `attention_maps()`.

    Example:

        model = AutoModel.from_pretrained(folder, trust_remote_code=True)
        questions = [["Is there a car?", "Is it raining?"]]
        inputs = processor(images=image, text=questions, packed=True, return_tensors="pt")
        [probabilities] = model.score_yes_no(**inputs)  # P(yes) of both questions
    """

    _tied_weights_keys = {"lm_head.weight": "model.text_model.embed_tokens.weight"}

    def __init__(self, config: TrafficVLMConfig):
        super().__init__(config)
        self.model = TrafficVLMModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        # The library's default of 20 truncates sentences; 256, that of pipelines, exceeds max_position_embeddings.
        self.generation_config.max_new_tokens = MAX_NEW_TOKENS
        self.post_init()

    forward = names_arguments_of(TrafficVLMModel.forward)(TrafficVLMLanguageModel.forward)


# With label smoothing, `Trainer` compares logits with the next labels only for classes whose names are listed here.
for _class in (TrafficVLMForCausalLM, TrafficVLMForConditionalGeneration):
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(_class.__name__, _class.__name__)


class TrafficVLMForSequenceClassification(TrafficVLMFullModel):
    """The full model with a linear classification head on the last token of each question; class 1 is yes."""

    def __init__(self, config: TrafficVLMConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = TrafficVLMModel(config)
        self.score = nn.Linear(config.text_config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        question_ends: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Logits [N,num_labels] of N questions; in packed rows they follow row by row. labels: [N].

        The other arguments are those of `TrafficVLMModel.forward`.
        """
        if kwargs.get("segment_ids") is not None and question_ends is None:
            raise ValueError("Packed rows (segment_ids) need question_ends from the processor.")
        if attention_mask is None and input_ids is not None:
            attention_mask = padding_mask(input_ids, self.config.text_config.pad_token_id)
        text = {"input_ids": input_ids, "attention_mask": attention_mask, "return_dict": True}
        outputs = self.model(pixel_values=pixel_values, **kwargs | text)
        logits = self.score(question_states(outputs.last_hidden_state, attention_mask, question_ends))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE_NAME: outputs.get(CACHE_NAME)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


TrafficVLMTextModel.register_for_auto_class("AutoModel")
TrafficVLMForCausalLM.register_for_auto_class("AutoModelForCausalLM")
TrafficVLMForConditionalGeneration.register_for_auto_class("AutoModel")
TrafficVLMForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
