"""Multi-head latent attention: cache, adapters, weights and graphs. test_modeling.py tests both attentions."""

import copy
import math

import numpy as np
import pytest
import torch

from tiny import LATENT, close, pack, random_ids, random_pixels, tiny_decoder, tiny_model
from traffic_vlm.attention_traffic_vlm import TrafficVLMHeadLinear
from traffic_vlm.configuration_traffic_vlm import TrafficVLMTextConfig
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration, TrafficVLMTextModel


GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def latent_model() -> TrafficVLMForConditionalGeneration:
    """A full model with both latents; tests must not change it."""
    return tiny_model(text=LATENT)


@torch.no_grad()
def test_flex_attention_equals_sdpa(monkeypatch):
    uncompiled = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    monkeypatch.setattr(uncompiled, True, raising=False)  # compiling takes a minute
    model, ids, mask = tiny_decoder(**LATENT, head_dim=16), random_ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    inputs = {"attention_mask": mask, "encoder_hidden_states": torch.randn(2, 9, 24)}
    states = model(ids, **inputs).last_hidden_state
    model.set_attn_implementation("flex_attention")
    with torch._dynamo.config.patch(disable=True):
        close(model(ids, **inputs).last_hidden_state[mask.bool()], states[mask.bool()])


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


@torch.no_grad()
def test_generation(latent_model):
    model, ids, pixels = latent_model, random_ids(2, 4), random_pixels(2)
    expected = ids
    for _ in range(6):  # without a cache
        logits = model(expected, pixels, use_cache=False).logits[:, -1]
        logits[:, :4] = -math.inf  # suppressed tokens, and the end
        expected = torch.cat([expected, logits.argmax(-1)[:, None]], 1)
    for options in ({}, {"cache_implementation": "static"}):
        assert torch.equal(model.generate(ids, pixel_values=pixels, **GREEDY, **options), expected)
    together = model.generate(ids, pixel_values=pixels, num_beams=3, **GREEDY)
    alone = [model.generate(ids[i, None], pixel_values=pixels[i, None], num_beams=3, **GREEDY) for i in range(2)]
    assert torch.equal(together, torch.cat(alone))


@torch.no_grad()
def test_graphs_for_export_equal_the_model(tmp_path):
    """The graph of a decoding step in ONNX, which has values of width 0; the others before they are exported."""
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name)
    onnxruntime = pytest.importorskip("onnxruntime")
    from traffic_vlm.export import onnx

    model = tiny_model(text=LATENT | {"num_hidden_layers": 1})
    model.set_attn_implementation("eager")
    graphs, pixels, text = onnx.make_graphs(model), random_pixels(1), model.config.get_text_config()
    images = dict(zip(("image_keys", "image_values"), graphs["vision"].module(pixels)))
    packed = pack([random_ids(4, seed=1), random_ids(6, seed=2)])
    del packed["attention_mask"]
    [p_yes], _ = graphs["score"].module(**packed, **images)
    close(p_yes, model.score_yes_no(**packed, pixel_values=pixels)[0], 1e-4)
    onnx.save_onnx(graphs["decode"], tmp_path / "decode.onnx")
    decode = onnxruntime.InferenceSession(tmp_path / "decode.onnx")
    images = {name: tensor.numpy() for name, tensor in images.items()}
    heads, *widths = text.cache_shape
    keys, values = (np.zeros((1, 1, heads, 0, width), np.float32) for width in widths)
    ids, answer = random_ids(1, 4), []
    expected = model.generate(ids, pixel_values=pixels, **GREEDY)[0, 4:].tolist()
    tokens = ids.numpy()
    for _ in expected:
        inputs = {"input_ids": tokens, "past_keys": keys, "past_values": values}
        _, log_probs, keys, values, maps = decode.run(None, inputs | images)
        if not answer:
            close(torch.from_numpy(maps), model.attention_maps(ids, pixels).flatten(2), 1e-4)
        log_probs[:, [0, 1, 2, 3]] = -np.inf
        tokens = log_probs.argmax(-1)[:, None]
        answer.append(tokens.item())
    assert answer == expected


def test_lora_refuses_matrices_of_heads(latent_model):
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match="TrafficVLMHeadLinear"):
        peft.get_peft_model(copy.deepcopy(latent_model), peft.LoraConfig(target_modules=["k_up_proj"]))


def test_matrices_of_heads_are_initialized():
    """By the model itself, as the library does not know them."""
    model = tiny_decoder(**LATENT, initializer_range=0.02, hidden_size=64, num_attention_heads=16)
    matrices = [module.weight.detach() for module in model.modules() if isinstance(module, TrafficVLMHeadLinear)]
    assert len(matrices) == 2 * 4 and all(abs(float(weight.std()) - 0.02) < 0.003 for weight in matrices)
