"""Key/value cache of a decoder that reads an image: the text part grows, the image part is written once.

    layer 0   text  [B,K,past,D]  keys already rotated, one column per token
              image [B,K,P,D]     the same at every step
    layer 1   ...

Latent attention caches one vector for each token, the latent and the rotated key side by side. Both parts then have
one head (K = 1), the vectors are the keys, and the values have width 0:

    layer 0   text  [B,1,past,kv_latent_size + rope_head_dim]
              image [B,1,P,image_latent_size]

The text part is the library's dynamic or static cache, so cropping, beams, compilation and offloading work as in the
library. When rows of the text are reordered, selected or repeated, the rows of the image are, too. A cache that holds
an image refuses another image. `reset()` removes the image, and so does `crop` if it leaves no text.

transformers 5.24 calls a cache `cache` where older releases call it `past_key_values`. Here it is `past_key_values`;
methods that the library or a user calls take both names (`takes_cache`), and what the library reads has the name that
it uses (`CACHE_NAME`).
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from transformers import Cache, DynamicCache, GenerationMixin, StaticCache
from transformers.utils import is_torchdynamo_compiling


# The library's name of a cache, in arguments of `generate()` and `forward` and in their outputs.
IS_RENAMED = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_NAME = "cache" if IS_RENAMED else "past_key_values"

Method = TypeVar("Method", bound=Callable[..., Any])
KeyValues = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer, each [B,K,P,D]; see above for latents


def takes_cache(method: Method) -> Method:
    """The method, whose `past_key_values` can also be passed as `cache`, but not both.

    Raises:
        ValueError: both are passed.
    """

    @wraps(method)
    def renamed(*args: Any, cache: Any = None, **kwargs: Any) -> Any:
        if cache is not None:
            if kwargs.get("past_key_values") is not None:
                raise ValueError("Pass either cache or past_key_values, not both: they are two names of one argument.")
            kwargs["past_key_values"] = cache
        return method(*args, **kwargs)

    signature = inspect.signature(method)  # `generate()` reads there which arguments a model takes
    parameters = list(signature.parameters.values())
    parameters.insert(-1, inspect.Parameter("cache", inspect.Parameter.KEYWORD_ONLY, default=None))  # before **kwargs
    renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return renamed  # type: ignore[return-value]


class ImageCacheMixin:
    """Adds the keys and values of an image to a cache of the library.

    Attributes:
        image_key_values: keys and values [B,K,P,D] of the image for each layer; None before the first pass.
        encoder_attention_mask: [B,P], 0 at hidden image tokens; None if all are visible.
    """

    image_key_values: tuple[KeyValues, ...] | None = None
    encoder_attention_mask: torch.Tensor | None = None

    def set_image(self, key_values: tuple[KeyValues, ...], encoder_attention_mask: torch.Tensor | None) -> None:
        self.image_key_values, self.encoder_attention_mask = key_values, encoder_attention_mask

    def check_image(self, key: torch.Tensor) -> None:
        """Raise `ValueError` if the cache holds another image than that of the first layer's keys [B,K,P,D].

        Keys may differ by rounding.
        """
        if self.image_key_values is None or is_torchdynamo_compiling():
            return
        held = self.image_key_values[0][0]
        # As a fraction of the largest key; 3e-2 if either is in 16 bits.
        rounding = 1e-3 if min(held.element_size(), key.element_size()) > 2 else 3e-2
        if held.shape == key.shape:
            difference = (held.float() - key.to(held.device).float()).abs().max()
            if bool(difference <= rounding * held.float().abs().max()):
                return
        raise ValueError(
            "past_key_values holds another image than the one given: pass no image to ask more about the one it "
            "holds, or a new cache with a new image."
        )

    def _map_image(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.image_key_values is not None:
            self.image_key_values = tuple((function(key), function(value)) for key, value in self.image_key_values)
        if self.encoder_attention_mask is not None:
            self.encoder_attention_mask = function(self.encoder_attention_mask)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._map_image(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._map_image(lambda tensor: tensor[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._map_image(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Crop the text, as in the library; when none is left, the image is removed as well."""
        super().crop(*args, **kwargs)  # type: ignore[misc]
        if int(self.get_seq_length()) == 0:  # type: ignore[attr-defined]
            self.image_key_values = self.encoder_attention_mask = None

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.image_key_values = self.encoder_attention_mask = None


class TrafficVLMCache(ImageCacheMixin, DynamicCache):
    """A `DynamicCache` with room for an image: `TrafficVLMCache(config=model.config.get_text_config())`."""


class TrafficVLMStaticCache(ImageCacheMixin, StaticCache):
    """A `StaticCache` with room for an image: `TrafficVLMStaticCache(config=..., max_cache_len=64)`."""


def add_image_room(cache: Cache) -> Any:
    """Turn an empty cache of the library into one with room for an image; both share their layers.

    Raises:
        ValueError: the cache is neither dynamic nor static.
    """
    for image_class, text_class in ((TrafficVLMStaticCache, StaticCache), (TrafficVLMCache, DynamicCache)):
        if isinstance(cache, text_class):
            image_cache = image_class.__new__(image_class)  # without the constructor, which would make new layers
            image_cache.__dict__.update(cache.__dict__)
            return image_cache
    raise ValueError(f"An image needs a dynamic or static cache, got {type(cache).__name__}.")


def holds_image(past_key_values: Any) -> bool:
    """Whether a cache already holds the keys and values of an image."""
    return getattr(past_key_values, "image_key_values", None) is not None
