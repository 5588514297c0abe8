"""Keys and values: of images that are encoded once, and of the text that is asked about them.

    EncodedImages     layer 0, 1, …   image [I,K,P,D]     shared by all questions, beams and generated tokens
    TrafficVLMCache   layer 0, 1, …   text  [B,K,past,D]  keys already rotated, one column per token
                      image           EncodedImages, one image for each row, the same at every step

Latent attention caches one vector for each token, the latent and the rotated key side by side. Text and image then
have one head (K = 1), the vectors are the keys, and the values have width 0:

    text  [B,1,past,kv_latent_size + rope_head_dim]        image [I,1,P,image_latent_size]

transformers 5.24 calls a cache `cache` where older releases call it `past_key_values`. Here it is `past_key_values`;
methods that the library or a user calls take both names, and what the library reads has the name that it uses
(`CACHE_NAME`).
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.utils import is_torchdynamo_compiling


# The library's name of a cache, in arguments of `generate()` and `forward` and in their outputs.
NAMES = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_NAME = "cache" if "cache" in NAMES else "past_key_values"

OPTIONAL = ("attention_mask", "centers")  # tensors of `EncodedImages` that may be missing
KeyValues = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer, each [B,K,P,D]; see above for latents


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
        image_size: (height, width) of the images in pixels; None if it is not known.
        centers: [I,K + 4,H/8,W/8] of the tower's center head, for `model.locate`; None if there is none.
    """

    key_values: tuple[KeyValues, ...]
    weights_version: str | None = None
    attention_mask: torch.Tensor | None = None
    image_size: tuple[int, int] | None = None
    centers: torch.Tensor | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.key_values[0][0].shape[0]

    def __deepcopy__(self, memo: dict) -> "EncodedImages":
        return self  # immutable; assisted decoding copies its arguments

    @property
    def device(self) -> torch.device:
        return self.key_values[0][0].device

    @staticmethod
    def combine(function: Callable[..., torch.Tensor], *parts: "EncodedImages") -> "EncodedImages":
        """Images whose tensors are results of a function of the parts' tensors; None where a part has none."""

        def result(tensors: Sequence[Any]) -> Any:
            return None if any(tensor is None for tensor in tensors) else function(*tensors)

        layers = zip(*(part.key_values for part in parts), strict=True)
        key_values: Any = tuple(tuple(map(result, zip(*layer))) for layer in layers)
        optional: Any = {name: result([getattr(part, name) for part in parts]) for name in OPTIONAL}
        return replace(parts[0], key_values=key_values, **optional)

    def __getitem__(self, index: Any) -> "EncodedImages":
        """Images of an index, a slice or a list of indices; one index gives `EncodedImages` of one image.

        Raises:
            IndexError, TypeError: those of torch.
        """
        chosen = torch.arange(len(self))[index].reshape(-1)  # on the CPU, as a GPU cannot recover from a wrong index
        return self.combine(lambda tensor: tensor[chosen.to(tensor.device)], self)

    @staticmethod
    def join(parts: Sequence["EncodedImages"]) -> "EncodedImages":
        """Images that were encoded separately, concatenated for questions about all of them in one pass.

        Raises:
            ValueError: parts of different models or sizes; some with an attention mask and some without.
        """
        models, sizes = ({getattr(part, name): None for part in parts} for name in ("weights_version", "image_size"))
        if len(models) > 1:
            raise ValueError(f"Encoded images to join must be of one model, got images of {len(models)}.")
        if len(sizes) > 1:
            raise ValueError(f"Encoded images to join must be of one size, got {' and '.join(map(str, sizes))}.")
        if len({part.attention_mask is None for part in parts}) > 1:
            raise ValueError("Encoded images with and without an attention mask cannot be joined.")
        return EncodedImages.combine(lambda *tensors: torch.cat(tensors), *parts)

    def rows(self, image_index: torch.Tensor | None) -> "EncodedImages":
        """What the decoder reads, one image for each row of text: `image_index[i]`, by default i. Not checked."""
        read = replace(self, centers=None)
        if image_index is None:
            return read
        chosen = image_index.to(self.device)
        return self.combine(lambda tensor: tensor[chosen], read)


torch.serialization.add_safe_globals([EncodedImages])  # for `torch.load`, which otherwise refuses classes


class TrafficVLMCache(DynamicCache):
    """A cache of the library with room for an image.

        TrafficVLMCache(config=model.config.get_text_config())          a dynamic cache
        TrafficVLMCache.around(StaticCache(config, max_cache_len=64))   any other

    When rows of the text are reordered, the rows of the image are, too. A cache that holds an image refuses another
    image. `reset()` removes the image.

    Attributes:
        image: one image for each row; None before the first pass.
    """

    image: EncodedImages | None = None

    @classmethod
    def around(cls, cache: Cache) -> "TrafficVLMCache":
        """A cache with room for an image, which shares the layers of a cache of the library."""
        new = cls.__new__(cls)  # without the constructor, which would make new layers
        new.__dict__.update(cache.__dict__)
        return new

    def keep_image(self, image: EncodedImages) -> None:
        """Keep one image for each row, unless the cache holds the same; a mask can be left out then.

        Raises:
            ValueError: the cache holds another image, by the keys of the first layer, or the image with another mask.
        """
        held = self.image
        if held is None:
            self.image = image
        elif not is_torchdynamo_compiling():
            pairs: list[Any] = [(held.key_values[0][0], image.key_values[0][0])]
            if image.attention_mask is not None:
                pairs.append((held.attention_mask, image.attention_mask))
            if not all(old is not None and torch.equal(old, new) for old, new in pairs):
                advice = "pass no image to ask more about the one it holds, or a new cache with a new image."
                raise ValueError(
                    f"past_key_values holds another image than the one given, or hides other parts of it: {advice}"
                )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.image is not None:
            self.image = self.image.rows(beam_idx)

    def reset(self) -> None:
        super().reset()
        self.image = None


def holds_image(past_key_values: Any) -> bool:
    """Whether a cache already holds an image."""
    return getattr(past_key_values, "image", None) is not None
