"""Multi-head latent attention: cache and weights. test_modeling.py tests both attentions."""

import pytest
import torch

from tiny import LATENT, random_ids, tiny_decoder
from traffic_vlm.attention_traffic_vlm import TrafficVLMHeadLinear
from traffic_vlm.configuration_traffic_vlm import TrafficVLMTextConfig
from traffic_vlm.modeling_traffic_vlm import TrafficVLMTextModel


@pytest.mark.parametrize(
    ("fields", "text", "image"),  # numbers for each layer and token
    [
        ({}, 2 * 128, 2 * 128),
        ({"kv_latent_size": 128}, 128 + 32, 2 * 128),
        ({"image_latent_size": 128}, 2 * 128, 128),
        ({"kv_latent_size": 128, "image_latent_size": 128}, 128 + 32, 128),
    ],
)
@torch.no_grad()
def test_the_cache_of_one_image_and_50_tokens_has_the_documented_size(fields, text, image):
    config = TrafficVLMTextConfig(hidden_size=64, intermediate_size=8, encoder_hidden_size=8, **fields)
    output = TrafficVLMTextModel(config).eval()(random_ids(1, 50), encoder_hidden_states=torch.randn(1, 256, 8))
    cache = output.past_key_values
    pairs = [(layer.keys, layer.values) for layer in cache.layers] + list(cache.image.key_values)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for pair in pairs for t in pair}
    storages.pop(0, None)  # of tensors of width 0
    assert sum(storages.values()) == 4 * 4 * (50 * text + 256 * image)  # layers, bytes of a number


def test_matrices_of_heads_are_initialized():
    """By the model itself, as the library does not know them."""
    model = tiny_decoder(**LATENT, initializer_range=0.02, hidden_size=64, num_attention_heads=16)
    matrices = [module.weight.detach() for module in model.modules() if isinstance(module, TrafficVLMHeadLinear)]
    assert len(matrices) == 2 * 4 and all(abs(float(weight.std()) - 0.02) < 0.003 for weight in matrices)
