"""Multi-head latent attention: its formulas and its use. test_modeling.py runs its own tests with both attentions."""

import copy
import math

import numpy as np
import pytest
import torch
from reference import reference_decoder
from torch import nn

from tiny import (
    LATENT,
    close,
    pack,
    random_ids,
    random_pixels,
    tiny_config,
    tiny_decoder,
    tiny_model,
    tiny_text_config,
)
from traffic_vlm.attention_traffic_vlm import (
    TrafficVLMHeadLinear,
)
from traffic_vlm.configuration_traffic_vlm import TrafficVLMTextConfig
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration, TrafficVLMTextModel


SELF = {"kv_latent_size": 12, "rope_head_dim": 6}
IMAGE = {"image_latent_size": 10}
KINDS = [SELF, IMAGE, LATENT]
GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
ADAPTED = ["q_proj", "kv_down_proj", "q_rope_proj", "k_rope_proj", "o_proj"]


def latent_decoder(kind=LATENT, **fields) -> TrafficVLMTextModel:
    """A decoder in float64 whose norms are not all one."""
    model = tiny_decoder(**kind, **fields).double()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model


@pytest.fixture(scope="module")
def latent_model() -> TrafficVLMForConditionalGeneration:
    """A full model with both latents; tests must not change it."""
    return tiny_model(text=LATENT)


@pytest.fixture
def image():
    return torch.randn(2, 9, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


# Formulas


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_absorbed_attention_equals_the_formulas_token_by_token(kind, interleaved, image):
    """The formulas reconstruct a key and a value of each head."""
    model, ids = latent_decoder(kind, rope_interleaved=interleaved), random_ids(2, 5)
    states = model(ids, encoder_hidden_states=image).last_hidden_state
    for row in range(2):
        close(states[row], reference_decoder(model, ids[row], image[row]), 1e-9)


@torch.no_grad()
def test_flex_attention_equals_sdpa(image, monkeypatch):
    uncompiled = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    monkeypatch.setattr(uncompiled, True, raising=False)  # compiling takes a minute
    model, ids, mask = tiny_decoder(**LATENT, head_dim=16), random_ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    inputs = {"attention_mask": mask, "encoder_hidden_states": image.float()}
    states = model(ids, **inputs).last_hidden_state
    model.set_attn_implementation("flex_attention")
    with torch._dynamo.config.patch(disable=True):
        close(model(ids, **inputs).last_hidden_state[mask.bool()], states[mask.bool()])


# Use


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 1_253_376),
        ({"kv_latent_size": 128}, 4 * 4 * (50 * (128 + 32) + 256 * 2 * 128)),  # 1,176,576
        ({"image_latent_size": 128}, 4 * 4 * (50 * 2 * 128 + 256 * 128)),  # 729,088
        ({"kv_latent_size": 128, "image_latent_size": 128}, 4 * 4 * (50 * (128 + 32) + 256 * 128)),  # 652,288
    ],
)
@torch.no_grad()
def test_cache_size_of_one_image_and_50_tokens(fields, size):
    config = TrafficVLMTextConfig(hidden_size=64, intermediate_size=8, encoder_hidden_size=8, **fields)
    cache = TrafficVLMTextModel(config).eval()(random_ids(1, 50), encoder_hidden_states=torch.randn(1, 256, 8))
    cache = cache.past_key_values
    pairs = [(layer.keys, layer.values) for layer in cache.layers] + list(cache.image_key_values)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for pair in pairs for t in pair}
    storages.pop(0, None)  # of tensors of width 0
    assert sum(storages.values()) == sum(t.nbytes for pair in pairs for t in pair) == size
    heads, key_width, value_width = config.cache_shape
    assert [tuple(t.shape) for t in pairs[0]] == [(1, heads, 50, key_width), (1, heads, 50, value_width)]


@torch.no_grad()
def test_generation(latent_model):
    model, ids, pixels = latent_model, random_ids(2, 4), random_pixels(2)
    expected = ids
    for _ in range(6):  # without a cache
        logits = model(expected, pixels, use_cache=False).logits[:, -1]
        logits[:, :4] = -math.inf  # suppressed tokens, and the end
        expected = torch.cat([expected, logits.argmax(-1)[:, None]], 1)
    assert torch.equal(model.generate(ids, pixel_values=pixels, **GREEDY), expected)
    static = model.generate(ids, pixel_values=pixels, **GREEDY, cache_implementation="static")
    assert torch.equal(static, expected)
    padded = nn.functional.pad(ids, (3, 0))
    mask = padded.ne(0).long()
    assert torch.equal(model.generate(padded, pixel_values=pixels, attention_mask=mask, **GREEDY)[:, 3:], expected)
    for options in ({"assistant_model": tiny_model(seed=1, text=SELF)}, {"prompt_lookup_num_tokens": 2}):
        text = model.generate(ids[:1], pixel_values=pixels[:1], **GREEDY, **options)
        assert torch.equal(text, expected[:1])
    together = model.generate(ids, pixel_values=pixels, num_beams=3, **GREEDY)
    for row in range(2):
        alone = model.generate(ids[row : row + 1], pixel_values=pixels[row : row + 1], num_beams=3, **GREEDY)
        assert torch.equal(together[row : row + 1], alone)


@torch.no_grad()
def test_saving_loading_and_fusing(tmp_path, latent_model):
    ids, pixels = random_ids(2, 5), random_pixels(2)
    logits = latent_model(ids, pixels).logits
    latent_model.save_pretrained(tmp_path)
    model = TrafficVLMForConditionalGeneration.from_pretrained(tmp_path)
    assert isinstance(model, TrafficVLMForConditionalGeneration)
    assert torch.equal(model(ids, pixels).logits, logits)
    close(model.fuse_for_inference()(ids, pixels).logits, logits, 1e-4)
    model, info = TrafficVLMForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and model.config.text_config.kv_latent_size == 12


@pytest.mark.parametrize("target", ADAPTED)
def test_lora_changes_each_projection(target, latent_model):
    peft = pytest.importorskip("peft")
    ids, pixels = random_ids(1, 6), random_pixels(1)
    config = peft.LoraConfig(target_modules=[target], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(latent_model), config).eval()
    layer = model.base_model.model.model.text_model.layers[0].self_attn
    assert hasattr(getattr(layer, target), "lora_A")
    with torch.no_grad():
        assert (model(ids, pixels).logits - latent_model(ids, pixels).logits)[..., 1:].abs().max() > 1e-4


def test_lora_on_matrices_per_head_is_refused(latent_model):
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match="TrafficVLMHeadLinear"):
        peft.get_peft_model(copy.deepcopy(latent_model), peft.LoraConfig(target_modules=["k_up_proj"]))


@torch.no_grad()
def test_exported_graphs_equal_the_model(tmp_path):
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name)
    onnxruntime = pytest.importorskip("onnxruntime")
    from traffic_vlm.export.greedy import generate
    from traffic_vlm.export.onnx import export_onnx

    model = tiny_model(text=LATENT)
    model.set_attn_implementation("eager")
    export_onnx(model, tmp_path)
    vision, score, decode = (
        onnxruntime.InferenceSession(tmp_path / f"{name}.onnx") for name in ("vision", "score", "decode")
    )
    pixels, text = random_pixels(1), model.config.get_text_config()
    keys, values = vision.run(None, {"pixel_values": pixels.numpy()})
    assert keys.shape == (2, 1, 1, 256, 10) and values.shape == (2, 1, 1, 256, 0)
    images = {"image_keys": keys, "image_values": values}
    packed = pack([random_ids(4, seed=1), random_ids(6, seed=2)])
    names = ("input_ids", "position_ids", "segment_ids", "question_ends")
    [p_yes], _ = score.run(None, {name: packed[name].numpy() for name in names} | images)
    close(torch.from_numpy(p_yes), model.score_yes_no(**packed, pixel_values=pixels)[0], 1e-4)
    ids = random_ids(1, 4)
    ends = {"end": text.eos_token_id, "pad": text.pad_token_id, "suppressed": [0, 1, 2, 3]}
    answers, _ = generate(decode, ids.numpy(), images, (2, *text.cache_shape), 6, **ends)
    assert np.array_equal(answers, model.generate(ids, pixel_values=pixels, **GREEDY)[:, 4:])


# Configuration and weights


def test_structure_of_the_latent_attentions():
    config = tiny_text_config(**LATENT, initializer_range=0.02, hidden_size=64, num_attention_heads=16)
    layer = TrafficVLMTextModel(config).layers[0]
    assert layer.self_attn.is_causal and not layer.cross_attn.is_causal
    matrices = [module for module in layer.modules() if isinstance(module, TrafficVLMHeadLinear)]
    assert [tuple(m.weight.shape) for m in matrices] == [(16, 8, 12), (16, 12, 8), (16, 8, 10), (16, 10, 8)]
    assert all(abs(float(m.weight.detach().std()) - 0.02) < 0.003 for m in matrices)


@pytest.mark.parametrize(
    ("saved", "asked", "named"),
    [
        ({}, SELF, r"grouped-query attention \(.*self_attn\.k_proj\.weight\).* kv_latent_size=12"),
        (SELF, {}, r"latent attention \(.*self_attn\.kv_down_proj\.weight\).* kv_latent_size=None"),
        ({}, IMAGE, r"grouped-query attention \(.*cross_attn\.k_proj\.weight\).* image_latent_size=10"),
        (IMAGE, {}, r"latent attention \(.*cross_attn\.kv_down_proj\.weight\).* image_latent_size=None"),
    ],
)
def test_weights_of_another_attention_are_refused(tmp_path, saved, asked, named):
    model = tiny_model(text=saved)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=named):
        TrafficVLMForConditionalGeneration.from_pretrained(tmp_path, config=tiny_config(asked))
    with pytest.raises(ValueError, match=named):
        tiny_model(text=asked).load_state_dict(model.state_dict(), strict=False)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kv_latent_size": 0}, "kv_latent_size must be a positive integer: got kv_latent_size=0"),
        ({"kv_latent_size": -128}, "got kv_latent_size=-128"),
        ({"kv_latent_size": 128.0}, "got kv_latent_size=128.0"),
        ({"image_latent_size": 0}, "image_latent_size must be a positive integer: got image_latent_size=0"),
        ({"rope_head_dim": 31}, "rope_head_dim must be even because RoPE rotates pairs: got rope_head_dim=31"),
        ({"rope_head_dim": 0}, "rope_head_dim must be a positive integer: got rope_head_dim=0"),
    ],
)
def test_sizes_that_cannot_be_raise(fields, named):
    with pytest.raises(ValueError, match=named):
        tiny_text_config(**fields)
    config = tiny_text_config()
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=named):
        TrafficVLMTextModel(config)
