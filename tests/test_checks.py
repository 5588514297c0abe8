"""Checks of ids, masks, positions and labels: each error names what was expected and what came."""

import pytest
import torch

from tiny import random_ids, random_pixels, tiny_model
from traffic_vlm.cache_traffic_vlm import TrafficVLMCache


IDS = torch.full((2, 3), 7)


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"input_ids": IDS.float()}, r"input_ids must be int64 \[rows,tokens\], .*; got float32 \[2, 3\]"),
        ({"input_ids": IDS[..., None]}, r"got int64 \[2, 3, 1\]"),
        ({"input_ids": IDS[:, :0]}, r"got int64 \[2, 0\]"),
        ({"attention_mask": torch.ones(2, 4)}, r"attention_mask must be \[2,3\] .*, got \[2, 4\]"),
        ({"attention_mask": torch.ones(3)}, r"attention_mask must be \[2,3\] .*, got \[3\]"),
        ({"position_ids": torch.arange(4)[None]}, r"position_ids must be int64 \[2,3\] .*, got int64 \[1, 4\]"),
        ({"position_ids": torch.ones(2, 3)}, r"position_ids must be .*, got float32 \[2, 3\]"),
        (
            {"encoder_attention_mask": torch.ones(1, 256)},
            r"encoder_attention_mask must be \[2,256\] .*, got \[1, 256\]",
        ),
        ({"image_index": torch.tensor([0.0, 1.0])}, r"image_index must be int64 \[2\], .*, got float32 \[2\]"),
    ],
)
@torch.no_grad()
def test_bad_inputs_raise_and_name_both_shapes(model, inputs, message):
    given = {"input_ids": IDS, "pixel_values": random_pixels(2)} | inputs
    with pytest.raises(ValueError, match=message):
        model(**given)
    with pytest.raises(ValueError, match=message):
        model.generate(**given, max_new_tokens=2)


@torch.no_grad()
def test_bad_labels_raise(model):
    with pytest.raises(ValueError, match=r"labels must be int64 \[2,3\] to match the logits, got float32 \[2, 3\]"):
        model(IDS, labels=IDS.float())
    for wrong in (500, -1):
        with pytest.raises(ValueError, match=rf"labels must be in \[0, 500\) or -100 .*, got {wrong}"):
            model(IDS, labels=IDS.masked_fill(torch.eye(2, 3).bool(), wrong))


@torch.no_grad()
def test_one_row_of_positions_applies_to_all_rows(model):
    alone = model(IDS, position_ids=torch.arange(3)[None]).logits
    torch.testing.assert_close(alone, model(IDS, position_ids=torch.arange(3).expand(2, -1)).logits)


@torch.no_grad()
def test_a_tuple_of_keys_and_values_raises_and_the_named_cache_works(model):
    ids, pixels = random_ids(1, 6), random_pixels(1)
    cache = model(ids[:, :5], pixels, use_cache=True).past_key_values
    past = tuple((layer.keys, layer.values) for layer in cache.layers)
    message = r"past_key_values must be a cache, got tuple. TrafficVLMCache\(past_key_values\) makes one"
    for given in ({"input_ids": ids[:, 5:]}, {"input_ids": ids[:, 5:], "pixel_values": pixels}):
        with pytest.raises(ValueError, match=message):
            model(**given, past_key_values=past)
    with pytest.raises(ValueError, match=message):
        model.generate(input_ids=ids, pixel_values=pixels, past_key_values=past, max_new_tokens=2)
    step = model(ids[:, 5:], pixels, past_key_values=TrafficVLMCache(past)).logits[:, 0]
    torch.testing.assert_close(step, model(ids, pixels).logits[:, 5], atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_dynamic_quantization_needs_float32():
    ids, pixels, quantize = random_ids(1, 6), random_pixels(1), torch.ao.quantization.quantize_dynamic
    model = tiny_model(text={"initializer_range": 0.05})
    quantized = quantize(model)
    expected = model.score_yes_no(input_ids=ids, pixel_values=pixels)[0]
    actual = quantized.score_yes_no(input_ids=ids, pixel_values=pixels)[0]
    torch.testing.assert_close(actual, expected, atol=0.02, rtol=0)
    assert not torch.equal(actual, expected)
    image = quantized.encode_images(pixels)
    assert quantized.generate(input_ids=ids, encoded_images=image, max_new_tokens=3).shape[1] > 6
    assert quantized.attention_maps(input_ids=ids, pixel_values=pixels).shape == (1, 6, 16, 16)
    fused = quantized.fuse_for_inference().score_yes_no(input_ids=ids, pixel_values=pixels)[0]
    torch.testing.assert_close(fused, actual)
    with pytest.raises(ValueError, match=r"loaded in bfloat16: load it with dtype=torch.float32, then quantize it"):
        quantize(model.bfloat16()).score_yes_no(input_ids=ids, pixel_values=pixels)
