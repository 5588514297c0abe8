"""Configuration of Traffic VLM: a vision tower, a projector and a text decoder with cross-attention.

What is special here:
- constraints between fields are checked when a configuration is built; an error names the fields and their values;
- `encoder_hidden_size` is the width of the image tokens that cross-attention reads; None means no cross-attention;
- every save writes a complete `auto_map` and `custom_pipelines`, so that the folder loads without this repository.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, PreTrainedConfig


AUTO_MAP = {
    "AutoConfig": "configuration_traffic_vlm.TrafficVLMConfig",
    "AutoModel": "modeling_traffic_vlm.TrafficVLMForConditionalGeneration",
    "AutoModelForImageTextToText": "modeling_traffic_vlm.TrafficVLMForConditionalGeneration",
    "AutoModelForMultimodalLM": "modeling_traffic_vlm.TrafficVLMForConditionalGeneration",
    "AutoModelForSequenceClassification": "modeling_traffic_vlm.TrafficVLMForSequenceClassification",
    "AutoTokenizer": ["tokenization_traffic_vlm.TrafficVLMTokenizer", None],
    "AutoProcessor": "processing_traffic_vlm.TrafficVLMProcessor",
}
# What the library needs to build a pipeline of a loaded folder.
CUSTOM_PIPELINES = {
    "visual-question-answering": {
        "impl": "pipeline_traffic_vlm.TrafficVLMPipeline",
        "pt": ["AutoModelForImageTextToText"],
        "default": None,
        "type": "multimodal",
    }
}
TEXT_AUTO_MAP = {
    "AutoConfig": "configuration_traffic_vlm.TrafficVLMTextConfig",
    "AutoModel": "modeling_traffic_vlm.TrafficVLMTextModel",
    "AutoModelForCausalLM": "modeling_traffic_vlm.TrafficVLMForCausalLM",
}

SIDE_STEP = 32  # pixels of one cell of the coarsest feature map: sides of images are multiples


def height_and_width(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width of images or patches from a configuration, where one number means a square."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def check_image_size(size: Any) -> tuple[int, int]:
    """(height, width) of images in pixels, from one number for a square, or both.

    Raises:
        ValueError: not whole numbers that are multiples of 32.
    """
    sides = [size] if isinstance(size, int) else [*size] if isinstance(size, tuple | list) else []
    if len(sides) not in (1, 2) or not all(type(side) is int and side > 0 and side % SIDE_STEP == 0 for side in sides):
        expected = f"a multiple of {SIDE_STEP} pixels, or (height, width) in multiples of {SIDE_STEP}"
        raise ValueError(f"image_size must be {expected}, got {size!r:.80}")
    return sides[0], sides[-1]


def token_grid(vision_config: Any, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the tokens of an image of `height` × `width` pixels, for any vision tower."""
    patch_height, patch_width = height_and_width(vision_config.patch_size)
    pool_above = getattr(vision_config, "pool_above", None)
    side = 2 if pool_above is not None and height * width > pool_above**2 else 1  # in patches
    return height // (side * patch_height), width // (side * patch_width)


def _check(config: Any, condition: bool, message: str, *names: str) -> None:
    """Raise `ValueError` with the message and the values of these fields, unless the condition holds."""
    if not condition:
        values = ", ".join(f"{name}={getattr(config, name, None)!r}" for name in names)
        raise ValueError(f"{message}: got {values}.")


class TrafficVLMTextConfig(PreTrainedConfig):
    """Configuration of the text decoder. The defaults are the "small" size.

    The decoder has 18.4 M parameters alone, and 18.1 M inside the full model, where `encoder_hidden_size` is 512.

    Args:
        vocab_size: number of tokens; the six special ids below must lie inside.
        hidden_size, intermediate_size: width of the residual stream and of the feed-forward layer.
        num_hidden_layers: number of decoder layers.
        num_attention_heads, num_key_value_heads: query heads and key/value heads. Equal numbers give multi-head
            attention, 1 key/value head multi-query, a divisor in between grouped-query attention
            (https://arxiv.org/abs/2305.13245). Latent attention has no key/value heads: with kv_latent_size their
            number applies to cross-attention only, with image_latent_size to self-attention only.
        kv_latent_size: size of the latent of multi-head latent attention (https://arxiv.org/abs/2405.04434), for
            instance 128; None means grouped-query self-attention. The cache holds kv_latent_size + rope_head_dim
            numbers for each token and layer.
        rope_head_dim: with kv_latent_size, the number of dimensions of a head that RoPE rotates, even. Otherwise
            RoPE rotates all of head_dim.
        image_latent_size: size of the latent of cross-attention, which has no RoPE; None means grouped-query.
        head_dim: size of one head, even because RoPE rotates pairs.
        max_position_embeddings: maximum number of tokens of a question with its answer.
        rope_parameters: by default `{"rope_type": "default", "rope_theta": 10000.0}`.
        rope_interleaved: rotate the pairs (2i, 2i+1) instead of (i, i + head_dim/2), for weights trained that way.
        encoder_hidden_size: width of the image tokens that cross-attention reads; None means no cross-attention. In
            the full model it is the projector's output width.
        attention_dropout, hidden_dropout: probabilities, used in training only.
        pad_token_id ... no_token_id: ids of `[PAD]`, `[UNK]`, `[SOS]`, `[EOS]`, `[YES]`, `[NO]`.
        yes_bias: added to the logit of `[YES]`, because a model says no too often about cameras that are new to it.

    Raises:
        ValueError: if fields are invalid or contradict each other; the message names them and their values.
    """

    model_type = "traffic_vlm_text"
    base_config_key = "text_config"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # the latter from transformers 5.24 on

    def __init__(
        self,
        vocab_size: int = 500,
        hidden_size: int = 512,
        intermediate_size: int = 2048,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 8,
        num_key_value_heads: int = 2,
        kv_latent_size: int | None = None,
        rope_head_dim: int = 32,
        image_latent_size: int | None = None,
        head_dim: int = 64,
        max_position_embeddings: int = 128,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-6,
        rope_parameters: dict[str, Any] | None = None,
        rope_interleaved: bool = False,
        encoder_hidden_size: int | None = 768,
        attention_dropout: float = 0.0,
        hidden_dropout: float = 0.1,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        pad_token_id: int = 0,
        unk_token_id: int = 1,
        bos_token_id: int = 2,
        eos_token_id: int = 3,
        yes_token_id: int = 4,
        no_token_id: int = 5,
        yes_bias: float = 0.0,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.kv_latent_size = kv_latent_size
        self.rope_head_dim = rope_head_dim
        self.image_latent_size = image_latent_size
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.rope_parameters = dict(rope_parameters or {"rope_type": "default", "rope_theta": 10000.0})
        self.rope_interleaved = rope_interleaved
        self.encoder_hidden_size = encoder_hidden_size
        self.attention_dropout = attention_dropout
        self.hidden_dropout = hidden_dropout
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.tie_word_embeddings = tie_word_embeddings
        self.pad_token_id = pad_token_id
        self.unk_token_id = unk_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.yes_token_id = yes_token_id
        self.no_token_id = no_token_id
        self.yes_bias = yes_bias
        self.check_fields()
        super().__init__(**kwargs)

    def check_fields(self) -> None:
        """Raise `ValueError` if a field is invalid or fields contradict each other."""
        heads = ("num_attention_heads", "num_key_value_heads")
        is_divisible = self.num_attention_heads % self.num_key_value_heads == 0
        _check(self, is_divisible, "num_attention_heads must be divisible by num_key_value_heads", *heads)
        for name in ("head_dim", "rope_head_dim"):
            _check(self, getattr(self, name) % 2 == 0, f"{name} must be even because RoPE rotates pairs", name)
        is_default = self.rope_parameters.get("rope_type") == "default"
        _check(self, is_default, "rope_parameters must have rope_type='default'", "rope_parameters")
        for name in ("pad_token_id", "unk_token_id", "bos_token_id", "eos_token_id", "yes_token_id", "no_token_id"):
            is_inside = getattr(self, name) in range(self.vocab_size)
            _check(self, is_inside, f"{name} must be an id inside the vocabulary", name, "vocab_size")

    @property
    def suppressed_tokens(self) -> list[int]:
        """Ids of the special tokens that are never generated."""
        return [self.pad_token_id, self.unk_token_id, self.bos_token_id]

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a query head that RoPE rotates in self-attention."""
        return self.head_dim if self.kv_latent_size is None else self.rope_head_dim

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Heads, width of a key and width of a value in the cache of self-attention."""
        if self.kv_latent_size is None:
            return self.num_key_value_heads, self.head_dim, self.head_dim
        return 1, self.kv_latent_size + self.rope_head_dim, 0

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        self.auto_map = dict(TEXT_AUTO_MAP)  # only here: the full model's configuration has its own
        super().save_pretrained(save_directory, *args, **kwargs)


class TrafficVLMVisionConfig(PreTrainedConfig):
    """Configuration of the custom vision tower. The defaults give 7.0 M parameters.

    The defaults are the tower of the shipped weights, without the center head that `located` adds: convolutions, and
    layers that mix each patch with the 7 × 7 patches around it.

    Args:
        conv_widths: channels after the stem, after each stage of residual blocks, and after the last convolution.
        conv_depths, conv_kernel_sizes, conv_strides: for each stage the number of blocks, the kernel size, and the
            stride of the first block, 1 or 2.
        hidden_size: width of the image tokens.
        neck_width, num_hidden_layers, intermediate_size: width and number of the layers after the convolutions, and
            the width of their MLPs.
        image_size: side of the images, or (height, width). The weights do not depend on it.
        patch_size: side of a patch in pixels, the product of the strides.
        pool_above: side in pixels. Images of a larger area have one token for 2 × 2 patches. None: no image has.
        located: classes that the center head locates, in alphabetical order, each with the score from which an object
            is reported. Image tokens begin with one for each of them, which tells how many there are. Empty: there is
            no center head.

    Raises:
        ValueError: if fields are invalid or contradict each other; the message names them and their values.
    """

    model_type = "traffic_vlm_vision"
    base_config_key = "vision_config"

    def __init__(
        self,
        conv_widths: tuple[int, ...] | list[int] = (32, 16, 24, 40, 80, 112, 192, 320, 1280),
        conv_depths: tuple[int, ...] | list[int] = (1, 2, 2, 3, 3, 4, 1),
        conv_kernel_sizes: tuple[int, ...] | list[int] = (3, 3, 5, 3, 5, 5, 3),
        conv_strides: tuple[int, ...] | list[int] = (1, 2, 2, 2, 1, 2, 1),
        hidden_size: int = 768,
        neck_width: int = 384,
        intermediate_size: int = 1536,
        num_hidden_layers: int = 2,
        image_size: int | list[int] = 384,
        patch_size: int = 16,
        pool_above: int | None = 320,
        located: dict[str, float] | None = None,
        **kwargs: Any,
    ):
        self.conv_widths = list(conv_widths)
        self.conv_depths = list(conv_depths)
        self.conv_kernel_sizes = list(conv_kernel_sizes)
        self.conv_strides = list(conv_strides)
        self.hidden_size = hidden_size
        self.neck_width = neck_width
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.image_size = image_size
        self.patch_size = patch_size
        self.pool_above = pool_above
        self.located = dict(sorted((located or {}).items()))
        self.check_fields()
        super().__init__(**kwargs)

    def check_fields(self) -> None:
        """Raise `ValueError` if a field is invalid or fields contradict each other."""
        stages = ("conv_depths", "conv_kernel_sizes", "conv_strides")
        has_stages = {len(self.conv_widths) - 2} == {len(getattr(self, name)) for name in stages}
        message = "conv_widths needs two more entries than the other lists, which have one per stage"
        _check(self, has_stages, message, "conv_widths", *stages)
        strides, stride = self.conv_strides, math.prod(self.conv_strides)
        fits = set(strides) <= {1, 2} and self.patch_size == stride and math.prod(strides[1:]) >= 4
        message = "strides must be 1 or 2, two of them 2 after the first stage, and patch_size must be their product"
        _check(self, fits, message, "patch_size", "conv_strides")


class TrafficVLMConfig(PreTrainedConfig):
    """Configuration of the full model: `vision_config`, `text_config` and the temperature of P(yes).

    Args:
        vision_config: configuration of the vision tower: a `TrafficVLMVisionConfig` or its fields (the default), or
            any vision configuration of `transformers` (or its dict with `model_type`) whose model returns image
            tokens [B,P,C].
        text_config: configuration of the decoder. `encoder_hidden_size` is set to its `hidden_size`, which is the
            projector's output width.
        yes_no_temperature: T > 0 in P(yes) = softmax([l_no, l_yes] / T)[1]; fitted after training.
        size_temperatures: T of other sizes than the default: {"384": 1.2}, by the side of a square of equal area.
        tie_word_embeddings: whether the language-model head shares the embedding table; None uses the decoder's value.

    Raises:
        ValueError: if fields are invalid or contradict each other; the message names them and their values.
    """

    model_type = "traffic_vlm"
    sub_configs = {"vision_config": AutoConfig, "text_config": TrafficVLMTextConfig}
    pipelines = CUSTOM_PIPELINES  # empty once `import traffic_vlm` has registered the class
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # the latter from transformers 5.24 on

    def __init__(
        self,
        vision_config: dict[str, Any] | PreTrainedConfig | None = None,
        text_config: dict[str, Any] | PreTrainedConfig | None = None,
        yes_no_temperature: float = 1.0,
        size_temperatures: dict[str, float] | None = None,
        tie_word_embeddings: bool | None = None,
        **kwargs: Any,
    ):
        self.vision_config = self._build_vision_config(vision_config)
        self.text_config = self._build_text_config(text_config, tie_word_embeddings)
        self.tie_word_embeddings = self.text_config.tie_word_embeddings
        self.yes_no_temperature = yes_no_temperature
        self.size_temperatures = dict(size_temperatures or {})
        self.check_fields()
        kwargs["custom_pipelines"] = copy.deepcopy(self.pipelines)  # the library changes it when it builds a pipeline
        if kwargs.get("id2label") is None and kwargs.get("num_labels", 2) == 2:
            kwargs |= {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
        super().__init__(**({"auto_map": dict(AUTO_MAP)} | kwargs))

    @staticmethod
    def _build_vision_config(vision_config: dict[str, Any] | PreTrainedConfig | None) -> PreTrainedConfig:
        if isinstance(vision_config, PreTrainedConfig):
            config = copy.deepcopy(vision_config)
        else:
            fields = {"model_type": TrafficVLMVisionConfig.model_type} | (vision_config or {})
            is_custom = fields["model_type"] == TrafficVLMVisionConfig.model_type
            config = TrafficVLMVisionConfig(**fields) if is_custom else AutoConfig.for_model(**fields)
        # The configurations of SigLIP, CLIP and others contain one for vision and one for text.
        config = getattr(config, "vision_config", config)
        if config.model_type == "siglip_vision_model":
            config.vision_use_head = False  # unused: cross-attention reads the tokens, not the pooled output
        return config

    def check_fields(self) -> None:
        """Raise `ValueError` if fields are invalid or contradict each other; the text config checks its own fields."""
        temperatures = (self.yes_no_temperature, *self.size_temperatures.values())
        are_positive = all(value > 0 for value in temperatures)
        _check(self, are_positive, "temperatures must be positive", "yes_no_temperature", "size_temperatures")
        vision = self.vision_config
        grid = ("hidden_size", "image_size", "patch_size")
        is_complete = all(getattr(vision, name, None) is not None for name in grid)
        _check(vision, is_complete, "vision_config must define the width and grid of its tokens", *grid)
        sides = zip(height_and_width(vision.image_size), height_and_width(vision.patch_size))
        fits = all(size >= patch and size % patch == 0 for size, patch in sides)
        _check(vision, fits, "image_size must be a multiple of patch_size", *grid)

    def temperature_at(self, image_size: tuple[int, int] | None) -> float:
        """The temperature of P(yes) for images of (height, width): that of the nearest size that was measured."""
        if image_size is None or not self.size_temperatures:
            return self.yes_no_temperature
        measured, side = self.measured_temperatures(), math.prod(image_size) ** 0.5
        return measured[min(measured, key=lambda one: abs(math.log(one / side)))]

    def measured_temperatures(self) -> dict[float, float]:
        """The temperatures of the default size and all others, by the side of a square of equal area."""
        measured = {float(side): value for side, value in self.size_temperatures.items()}
        return measured | {math.prod(height_and_width(self.vision_config.image_size)) ** 0.5: self.yes_no_temperature}

    @staticmethod
    def _build_text_config(
        text_config: dict[str, Any] | PreTrainedConfig | None, tie_word_embeddings: bool | None
    ) -> TrafficVLMTextConfig:
        fields = dict(text_config.to_dict() if isinstance(text_config, PreTrainedConfig) else text_config or {})
        fields = {key: value for key, value in fields.items() if key not in ("auto_map", "model_type")}
        fields["encoder_hidden_size"] = fields.get("hidden_size", 512)
        if tie_word_embeddings is not None:
            fields["tie_word_embeddings"] = tie_word_embeddings
        return TrafficVLMTextConfig(**fields)

    @classmethod
    def medium(cls, **kwargs: Any) -> "TrafficVLMConfig":
        """The "medium" size, 68.1 M parameters: the default vision tower, a decoder of 6 layers and width 768.

        The decoder has 60.6 M (6 layers of 10.0 M, embeddings of 0.4 M), the tower 7.0 M, the projector 0.6 M.
        """
        widths = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6}
        heads = {"num_attention_heads": 12, "num_key_value_heads": 3}
        return cls(text_config=widths | heads | kwargs.pop("text_config", {}), **kwargs)

    @classmethod
    def with_patch_tower(cls, **kwargs: Any) -> "TrafficVLMConfig":
        """The library's SigLIP tower of 3 layers and width 768 on 16×16 patches (22.0 M parameters), 40.5 M in all.

        It reads images of 224 × 224 pixels, or of another `image_size` in `vision_config`.
        """
        fields = {"model_type": "siglip_vision_model", "num_hidden_layers": 3}
        return cls(vision_config=fields | kwargs.pop("vision_config", {}), **kwargs)

    @property
    def max_position_embeddings(self) -> int:
        """The decoder's maximum length; `generate()` reads it here to limit its default length."""
        return self.text_config.max_position_embeddings

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict() | {"auto_map": dict(AUTO_MAP), "custom_pipelines": CUSTOM_PIPELINES}
        fields["text_config"].pop("auto_map", None)
        return fields


TrafficVLMTextConfig.register_for_auto_class()
TrafficVLMConfig.register_for_auto_class()
