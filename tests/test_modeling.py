"""The decoder and the full model: closed forms, an independent implementation, masks, cache, packing, gradients."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import reference_decoder
from safetensors.torch import load_file
from torch import nn
from transformers import DynamicCache

from tiny import (
    LATENT,
    TINY_TEXT,
    close,
    each_attention,
    pack,
    random_ids,
    random_pixels,
    tiny_config,
    tiny_decoder,
    tiny_model,
    tiny_text_config,
)
from traffic_vlm import modeling_traffic_vlm
from traffic_vlm.attention_traffic_vlm import TrafficVLMRMSNorm, apply_rotary, rotary_embedding
from traffic_vlm.cache_traffic_vlm import TrafficVLMCache, TrafficVLMStaticCache
from traffic_vlm.checks_traffic_vlm import find_segments
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig, TrafficVLMTextConfig
from traffic_vlm.modeling_traffic_vlm import (
    TrafficVLMForCausalLM,
    TrafficVLMForConditionalGeneration,
    TrafficVLMForSequenceClassification,
    TrafficVLMMLP,
    TrafficVLMTextModel,
)


@pytest.fixture
def vision():
    return torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(5))


# Modules against formulas


def test_rms_norm_equals_the_formula():
    norm = TrafficVLMRMSNorm(16, eps=1e-6)
    assert torch.equal(norm.weight, torch.ones(16))
    nn.init.normal_(norm.weight)
    x = 3 * torch.randn(4, 16)
    rms = x.double().pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
    close(norm(x), x.double() / rms * norm.weight.double(), 1e-6)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_rms_norm_computes_in_float32():
    x = torch.full((1, 16), 300.0, dtype=torch.float16)  # 300² overflows float16
    assert torch.equal(TrafficVLMRMSNorm(16, eps=1e-6)(x), torch.ones(1, 16, dtype=torch.float16))


def test_swiglu_equals_the_formula():
    mlp = TrafficVLMMLP(tiny_text_config())
    x = torch.randn(5, 32)
    gate, up = (x.double() @ layer.weight.double().T for layer in (mlp.gate_proj, mlp.up_proj))
    close(mlp(x), gate / (1 + (-gate).exp()) * up @ mlp.down_proj.weight.double().T)


def test_rotary_of_an_example():
    rotary = rotary_embedding(torch.tensor([[0, 3]]), head_dim=4, theta=100.0, dtype=torch.float32)
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]]]])
    # Pairs (0, 2) and (1, 3) rotate by 3 · 100^0 = 3 and 3 · 100^(-1/2) = 0.3.
    (c0, s0), (c1, s1) = ((math.cos(a), math.sin(a)) for a in (3.0, 0.3))
    rotated = [1 * c0 - 3 * s0, 2 * c1 - 4 * s1, 3 * c0 + 1 * s0, 4 * c1 + 2 * s1]
    close(apply_rotary(x, rotary), torch.tensor([[[[1.0, 2.0, 3.0, 4.0], rotated]]]))
    # Interleaved pairs (0, 1) and (2, 3).
    rotated = [1 * c0 - 2 * s0, 2 * c0 + 1 * s0, 3 * c1 - 4 * s1, 4 * c1 + 3 * s1]
    close(apply_rotary(x, rotary, interleaved=True), torch.tensor([[[[1.0, 2.0, 3.0, 4.0], rotated]]]))


@given(position=st.integers(0, 500), distance=st.integers(0, 500), shift=st.integers(0, 500), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_rotary_keeps_norms_and_depends_on_distance(position, distance, shift, seed):
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def rotate(x, position):
        return apply_rotary(x, rotary_embedding(torch.tensor([[position]]), 8, 10000.0, torch.float64))

    score = (rotate(query, position) * rotate(key, position + distance)).sum()
    shifted = (rotate(query, position + shift) * rotate(key, position + distance + shift)).sum()
    close(score, shifted, 1e-3)
    close(rotate(query, position).norm(), query.norm(), 1e-5)
    assert rotate(query, position).shape == query.shape
    assert torch.equal(rotate(query, 0), query)


@torch.no_grad()
def test_interleaved_layout_is_a_permutation_of_the_other():
    half, paired = tiny_decoder(), tiny_decoder(rope_interleaved=True)
    paired.load_state_dict(half.state_dict())
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # dimension i of the half-split layout goes to 2i, i + 4 to 2i + 1
    for layer in paired.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.copy_(projection.weight.unflatten(0, (-1, 8))[:, order].flatten(0, 1))
    ids = random_ids(2, 9)
    close(paired(ids).last_hidden_state, half(ids).last_hidden_state, 1e-4)


# The decoder against independent implementations


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_decoder_equals_a_float64_reference(heads, implementation, vision):
    model = tiny_decoder(num_key_value_heads=heads)
    model.set_attn_implementation(implementation)
    ids = random_ids(2, 7)
    with_image = model(ids, encoder_hidden_states=vision).last_hidden_state
    without = model(ids).last_hidden_state
    for row in range(2):
        close(with_image[row], reference_decoder(model, ids[row], vision[row]), 1e-4)
        close(without[row], reference_decoder(model, ids[row], None), 1e-4)


@torch.no_grad()
def test_self_attention_equals_llama():
    from transformers import LlamaConfig, LlamaModel

    fields = {name: value for name, value in TINY_TEXT.items() if name != "hidden_dropout"}
    llama = LlamaModel(LlamaConfig(vocab_size=500, rms_norm_eps=1e-6, pad_token_id=0, **fields)).eval()
    model = tiny_decoder(encoder_hidden_size=None)
    names = {"input_layernorm": "self_attn_norm", "post_attention_layernorm": "mlp_norm"}
    weights = {}
    for name, tensor in llama.state_dict().items():
        for llama_name, own_name in names.items():
            name = name.replace(llama_name, own_name)
        weights[name] = tensor
    model.load_state_dict(weights)
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    expected, actual = (m(ids, attention_mask=mask).last_hidden_state[mask.bool()] for m in (llama, model))
    close(actual, expected, 1e-4)


@torch.no_grad()
def test_grouped_query_attention_equals_multi_head_with_repeated_weights(vision):
    grouped, full = tiny_decoder(num_key_value_heads=2), tiny_decoder(num_key_value_heads=4)
    weights = grouped.state_dict()
    for name, tensor in weights.items():
        if "k_proj" in name or "v_proj" in name:
            weights[name] = tensor.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    ids = random_ids(2, 6)
    outputs = (m(ids, encoder_hidden_states=vision).last_hidden_state for m in (grouped, full))
    close(*outputs, 1e-5)


# Shapes, masks and padding


@torch.no_grad()
def test_decoder_shapes_at_full_size():
    model = TrafficVLMTextModel(TrafficVLMTextConfig()).eval()
    output = model(random_ids(2, 12), encoder_hidden_states=torch.randn(2, 256, 768), output_hidden_states=True)
    assert output.last_hidden_state.shape == (2, 12, 512)
    assert [tuple(h.shape) for h in output.hidden_states] == [(2, 12, 512)] * 5
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
    assert model(random_ids(2, 12)).last_hidden_state.shape == (2, 12, 512)


@each_attention
@torch.no_grad()
def test_output_attentions_with_eager(attention, vision):
    model = tiny_decoder(**attention)
    model.set_attn_implementation("eager")
    output = model(random_ids(2, 5), encoder_hidden_states=vision, output_attentions=True)
    assert [tuple(a.shape) for a in output.attentions] == [(2, 4, 5, 5)] * 2
    assert [tuple(a.shape) for a in output.cross_attentions] == [(2, 4, 5, 9)] * 2
    for weights in (*output.attentions, *output.cross_attentions):
        close(weights.sum(-1), torch.ones(2, 4, 5))


def test_output_attentions_without_eager_raises(decoder):
    with pytest.raises(ValueError, match="eager"):
        decoder(random_ids(1, 5), output_attentions=True)


@torch.no_grad()
def test_later_tokens_do_not_change_earlier_states(decoder, vision):
    ids = random_ids(2, 10)
    changed = ids.clone()
    changed[:, 6:] = random_ids(2, 4, seed=1)
    before, after = (decoder(i, encoder_hidden_states=vision).last_hidden_state for i in (ids, changed))
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


@each_attention
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@given(pads=st.integers(1, 12), length=st.integers(1, 12), left=st.booleans())
@settings(max_examples=15, deadline=None)
@torch.no_grad()
def test_padding_does_not_change_states(attention, implementation, pads, length, left):
    model = tiny_decoder(**attention)
    model.set_attn_implementation(implementation)
    ids, image = random_ids(1, length), torch.randn(1, 9, 24)
    alone = model(ids, encoder_hidden_states=image).last_hidden_state
    columns = (pads, 0) if left else (0, pads)
    padded, mask = nn.functional.pad(ids, columns), nn.functional.pad(torch.ones_like(ids), columns)
    output = model(padded, attention_mask=mask, encoder_hidden_states=image).last_hidden_state
    assert output.isfinite().all()
    close(output[mask.bool()], alone[0], 1e-5)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("use_cache", [True, False])
def test_padding_without_a_mask_is_found_by_its_id(model, left, use_cache):
    ids = torch.nn.functional.pad(random_ids(2, 5), (3, 0) if left else (0, 3))
    ids[1] = random_ids(1, 8, seed=1)[0]
    inputs = {"pixel_values": random_pixels(2), "use_cache": use_cache}
    expected = model(ids, attention_mask=(ids != 0).long(), **inputs).logits
    close(model(ids, **inputs).logits, expected)
    alone = model(ids[:1, 3:] if left else ids[:1, :5], random_pixels(2)[:1]).logits[0]
    close(expected[0, 3:] if left else expected[0, :5], alone, 1e-4)


@each_attention
@torch.no_grad()
def test_given_position_ids_are_used(attention):
    decoder, ids = tiny_decoder(**attention), random_ids(1, 6)
    base = decoder(ids).last_hidden_state
    shifted = decoder(ids, position_ids=torch.arange(6)[None] + 50).last_hidden_state
    close(shifted, base, 1e-4)  # attention depends on distances only
    stretched = decoder(ids, position_ids=3 * torch.arange(6)[None]).last_hidden_state
    assert not torch.allclose(stretched, base, atol=1e-3)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_prepared_masks_are_used_unchanged(implementation):
    model = tiny_decoder()
    model.set_attn_implementation(implementation)
    ids, mask = random_ids(2, 6), torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    expected = model(ids).last_hidden_state
    close(model(ids, attention_mask=mask).last_hidden_state, expected)
    added = torch.zeros(2, 1, 6, 6).masked_fill(~mask, torch.finfo(torch.float32).min)
    close(model(ids, attention_mask=added).last_hidden_state, expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_encoder_mask_hides_image_tokens_and_is_kept_in_the_cache(implementation, vision):
    decoder = tiny_decoder()
    decoder.set_attn_implementation(implementation)
    ids, mask = random_ids(2, 8), torch.ones(2, 9, dtype=torch.long)
    mask[:, 6:] = 0
    expected = decoder(ids, encoder_hidden_states=vision[:, :6]).last_hidden_state
    close(decoder(ids, encoder_hidden_states=vision, encoder_attention_mask=mask).last_hidden_state, expected)
    first = decoder(ids[:, :3], encoder_hidden_states=vision, encoder_attention_mask=mask, use_cache=True)
    second = decoder(ids[:, 3:], past_key_values=first.past_key_values)
    close(torch.cat([first.last_hidden_state, second.last_hidden_state], dim=1), expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_fully_hidden_image_and_empty_row_give_finite_states(implementation, vision):
    model = tiny_decoder()
    model.set_attn_implementation(implementation)
    ids, all_hidden = random_ids(2, 4), torch.zeros(2, 9, dtype=torch.long)
    hidden = model(ids, encoder_hidden_states=vision, encoder_attention_mask=all_hidden).last_hidden_state
    close(hidden, model(ids).last_hidden_state)
    empty = model(ids, attention_mask=torch.zeros_like(ids), encoder_hidden_states=vision).last_hidden_state
    assert empty.isfinite().all()


# Cache


@each_attention
@pytest.mark.parametrize("static", [False, True])
@given(cuts=st.lists(st.integers(1, 9), max_size=4, unique=True).map(sorted), padded=st.booleans())
@settings(max_examples=10, deadline=None)
@torch.no_grad()
def test_cached_equals_uncached_for_any_split(attention, static, cuts, padded):
    model = tiny_decoder(**attention).double()
    image = torch.randn(2, 9, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    ids, mask = random_ids(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, : 2 * padded] = 0
    expected = model(ids, attention_mask=mask, encoder_hidden_states=image).last_hidden_state
    cache = TrafficVLMCache(config=model.config)
    if static:
        cache = TrafficVLMStaticCache(config=model.config, max_cache_len=12)
    pieces = []
    for start, stop in zip([0, *cuts], [*cuts, 10]):
        image_once = {"encoder_hidden_states": image} if start == 0 else {}
        output = model(ids[:, start:stop], mask[:, :stop], past_key_values=cache, use_cache=True, **image_once)
        assert output.past_key_values is cache
        pieces.append(output.last_hidden_state)
    close(torch.cat(pieces, dim=1)[mask.bool()], expected[mask.bool()], 1e-9)
    assert int(cache.get_seq_length()) == 10


# Packing


@each_attention
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), padding=st.integers(0, 5), use_cache=st.booleans())
@settings(max_examples=15, deadline=None)
@torch.no_grad()
def test_packed_equals_separate_questions(attention, implementation, lengths, padding, use_cache):
    model = tiny_model(text=attention)
    model.set_attn_implementation(implementation)
    questions = [random_ids(length, seed=i) for i, length in enumerate(lengths)]
    row, image = pack(questions, padding), model.encode_images(random_pixels(1))
    ends = row.pop("question_ends")
    packed = model(**row, encoded_images=image, use_cache=use_cache).logits[0, padding:]
    alone = [model(question[None], encoded_images=image).logits[0] for question in questions]
    close(packed, torch.cat(alone), 1e-4)
    assert int(ends[0, -1]) == padding + sum(lengths) - 1


@each_attention
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("use_cache", [False, True])
@torch.no_grad()
def test_positions_that_start_again_begin_a_new_text(attention, implementation, use_cache):
    """Rows without padding, as TRL makes them: no mask, and positions that start again."""
    model, pixels = tiny_model(text=attention), random_pixels(1)
    model.set_attn_implementation(implementation)
    texts = [random_ids(1, length, seed=length) for length in (4, 1, 1, 5)]
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    row = model(torch.cat(texts, dim=1), pixels, position_ids=positions, use_cache=use_cache).logits
    close(row, torch.cat([model(text, pixels).logits for text in texts], dim=1), 1e-4)


def test_positions_that_start_again_need_a_mask_of_texts():
    positions = torch.tensor([[0, 1, 2, 3]])
    assert find_segments(positions, 2, "flash_attention_2") is None
    with pytest.raises(ValueError, match="which flash_attention_2 does not support: use sdpa or eager"):
        find_segments(positions % 2, 2, "flash_attention_2")


@torch.no_grad()
def test_packed_row_with_a_static_cache(decoder, vision):
    row = pack([random_ids(4, seed=1), random_ids(3, seed=2)])
    del row["question_ends"]
    cache = TrafficVLMStaticCache(config=decoder.config, max_cache_len=20)
    expected = decoder(**row, encoder_hidden_states=vision[:1]).last_hidden_state
    cached = decoder(**row, encoder_hidden_states=vision[:1], past_key_values=cache, use_cache=True)
    close(cached.last_hidden_state, expected)


def test_packed_rows_raise_for_unsupported_inputs(decoder):
    row = pack([random_ids(4), random_ids(3)])
    del row["question_ends"]
    with pytest.raises(ValueError, match="position_ids"):
        decoder(**(row | {"position_ids": None}))
    cache = decoder(random_ids(1, 2), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="2 cached tokens"):
        decoder(**(row | {"attention_mask": None}), past_key_values=cache)
    flash = tiny_decoder()
    flash.config._attn_implementation_internal = "flash_attention_2"  # as on a GPU; attention itself never runs
    with pytest.raises(ValueError, match="flash_attention_2"):
        flash(**row)


# Training


def test_untrained_loss_is_log_of_the_vocabulary_size():
    torch.manual_seed(0)
    model = TrafficVLMForConditionalGeneration(TrafficVLMConfig()).eval()
    ids = random_ids(4, 100)
    with torch.no_grad():
        loss = model(ids, random_pixels(4), labels=ids).loss.item()
    assert abs(loss - math.log(500)) < 0.15


def test_loss_is_the_mean_over_labeled_next_tokens(model):
    ids, pixels = random_ids(2, 6), random_pixels(2)
    labels = ids.clone()
    labels[:, :4] = -100
    output = model(ids, pixels, labels=labels)
    chosen = output.logits[:, 3:5].log_softmax(-1).gather(-1, ids[:, 4:6, None])
    close(output.loss, -chosen.mean(), 1e-5)
    padded = labels.masked_fill(labels == -100, 0)
    close(model(ids, pixels, labels=padded).loss, output.loss, 1e-5)  # [PAD] is ignored like -100
    halved = model(ids, pixels, labels=labels, num_items_in_batch=8).loss
    close(halved, output.loss / 2, 1e-5)  # Trainer divides by the tokens of all accumulated batches


def test_pad_embedding_stays_zero_with_adamw():
    model = tiny_model()
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    ids, mask = random_ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    ids[0, :3], mask[0, :3] = 0, 0
    before = model.lm_head.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        model(ids, random_pixels(2), attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        optimizer.step()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert not torch.equal(model.lm_head.weight, before)
    assert model.lm_head.weight[0].abs().max() == 0


@pytest.mark.parametrize("tied", [True, False])
def test_the_logit_of_pad_is_negligible(tied):
    model = tiny_model(tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    logits = model(random_ids(1, 4), random_pixels(1)).logits
    assert (logits[..., 0] <= logits.amin(-1)).all() and not logits.softmax(-1)[..., 0].any()
    logits = model.bfloat16()(random_ids(1, 4), random_pixels(1)).logits
    assert logits.isfinite().all() and not logits.float().softmax(-1)[..., 0].any()


@each_attention
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(attention, reentrant):
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model(text=attention | {"hidden_dropout": 0.2}).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()  # reentrant checkpointing needs an input with a gradient
        torch.manual_seed(7)
        model(random_ids(2, 6), random_pixels(2), labels=random_ids(2, 6)).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        close(gradients[1][name], gradient, 1e-5)


@each_attention
@pytest.mark.parametrize("packed", [False, True])
def test_every_weight_gets_a_gradient(attention, packed):
    model = tiny_model(text=attention).train()
    inputs = {"input_ids": random_ids(1, 7)}
    if packed:
        inputs = pack([random_ids(4, seed=1), random_ids(3, seed=2)])
    model(**inputs, pixel_values=random_pixels(1), labels=inputs["input_ids"]).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


# Heads and towers


@torch.no_grad()
def test_causal_lm_without_an_image():
    torch.manual_seed(0)
    model = TrafficVLMForCausalLM(tiny_text_config(encoder_hidden_size=None)).eval()
    assert not any("cross" in name for name, _ in model.named_parameters())
    ids = random_ids(2, 6)
    output = model(ids, labels=ids)
    assert output.logits.shape == (2, 6, 500)
    assert isinstance(output.past_key_values, DynamicCache)
    assert model(ids, logits_to_keep=1).logits.shape == (2, 1, 500)
    close(model(ids, logits_to_keep=torch.tensor([1, 3])).logits, output.logits[:, [1, 3]])


@torch.no_grad()
def test_classification_uses_the_last_real_token():
    torch.manual_seed(0)
    model = TrafficVLMForSequenceClassification(tiny_config()).eval()
    pixels, questions = random_pixels(2), [random_ids(5, seed=1), random_ids(3, seed=2)]
    alone = torch.cat([model(q[None], pixels[i : i + 1]).logits for i, q in enumerate(questions)])
    for columns in ((0, 2), (2, 0)):
        rows = torch.stack([questions[0], nn.functional.pad(questions[1], columns)])
        output = model(rows, pixels, labels=torch.tensor([1, 0]))
        close(output.logits, alone, 1e-5)
        close(output.loss, nn.functional.cross_entropy(alone, torch.tensor([1, 0])), 1e-5)
    packed = model(**pack(questions), pixel_values=pixels[:1], labels=torch.tensor([1, 0])).logits
    close(packed[:1], alone[:1], 1e-5)
    rows = pack(questions)
    del rows["question_ends"]
    with pytest.raises(ValueError, match="need question_ends"):
        model(**rows, pixel_values=pixels[:1])
    assert model.config.id2label == {0: "no", 1: "yes"}


def vit_model(**fields) -> TrafficVLMForConditionalGeneration:
    vision = {"model_type": "vit", "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = TrafficVLMConfig(vision | {"intermediate_size": 32} | fields, TINY_TEXT)
    return TrafficVLMForConditionalGeneration(config).eval()


@torch.no_grad()
def test_vision_tower_of_transformers():
    model = vit_model(image_size=256)
    assert model.get_image_features(random_pixels(1)).pooler_output.shape == (1, 257, 32)  # a class token and 16 × 16
    assert model.attention_maps(random_ids(1, 3), random_pixels(1)).shape == (1, 3, 16, 16)
    wide = vit_model(image_size=[64, 128])
    assert wide.attention_maps(random_ids(1, 3), torch.randn(1, 3, 64, 128)).shape == (1, 3, 4, 8)
    half = model.bfloat16()
    assert half.get_image_features(random_pixels(1)).pooler_output.dtype == torch.bfloat16  # pixels are cast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", ["AVX512", "AVX2"])
def test_loading_bfloat16_warns_on_avx2(monkeypatch, tmp_path, dtype, capability):
    tiny_model().save_pretrained(tmp_path)
    warnings = []
    monkeypatch.setattr(modeling_traffic_vlm.logger, "warning_once", warnings.append)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    TrafficVLMForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
    assert len(warnings) == (dtype == torch.bfloat16 and capability == "AVX2")


@torch.no_grad()
def test_settings_of_the_full_config_apply_to_the_decoder():
    model, ids, pixels = tiny_model(), random_ids(1, 4), random_pixels(1)
    assert model(ids, pixels).past_key_values is not None
    model.config.use_cache, model.config.output_hidden_states = False, True
    output = model(ids, pixels)
    assert output.past_key_values is None
    assert len(output.hidden_states) == 3


@pytest.mark.parametrize("where", ["self_attn", "cross_attn", "mlp", "attention"])
def test_dropout_acts_in_training_only(where, vision):
    model = tiny_decoder(
        num_hidden_layers=1, **{"attention_dropout" if where == "attention" else "hidden_dropout": 0.5}
    )
    model.dropout.p = 0.0  # that of the embeddings
    with torch.no_grad():  # only one module can change the output
        for name, parameter in model.named_parameters():
            if where != "attention" and ("o_proj" in name or "down_proj" in name) and f".{where}." not in name:
                parameter.zero_()

    def states(seed):
        torch.manual_seed(seed)
        return model(random_ids(1, 6), encoder_hidden_states=vision[:1]).last_hidden_state

    assert torch.equal(states(0), states(1))
    model.train()
    assert not torch.allclose(states(0), states(1))


def test_rotary_in_bfloat16_is_exact_at_large_positions():
    exact = rotary_embedding(torch.tensor([[127]]), 64, 10000.0, torch.float32)
    half = rotary_embedding(torch.tensor([[127]]), 64, 10000.0, torch.bfloat16)
    for a, b in zip(half, exact):
        close(a.float(), b, 4e-3)  # rounded once, at the end: 127 · θ in bfloat16 would be off by half a radian


def test_export_with_any_batch_and_length(model):
    ids, pixels = random_ids(2, 6), random_pixels(2)

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, pixel_values):
            return self.model(input_ids, pixel_values, use_cache=False).logits

    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=128)
    shapes = ({0: batch, 1: length}, {0: batch})
    program = torch.export.export(Logits(), (ids, pixels), dynamic_shapes=shapes).module()
    close(program(random_ids(3, 9), random_pixels(3)), model(random_ids(3, 9), random_pixels(3)).logits)


def test_tied_weights_of_a_saved_folder_are_complete(tmp_path):
    tiny_model(seed=1).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in saved
    model = tiny_model()
    assert model.load_state_dict(saved).missing_keys == []  # as the library's Trainer loads checkpoints
    assert "lm_head.weight" not in saved
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.equal(model.lm_head.weight, saved["model.text_model.embed_tokens.weight"])
    with pytest.raises(RuntimeError, match=r"lm_head\.weight"):
        tiny_model(tie_word_embeddings=False).load_state_dict(saved)


def test_the_embedding_comes_before_the_head_that_shares_it():
    for model in (tiny_model(), TrafficVLMForCausalLM(tiny_text_config())):
        embedding = model.get_input_embeddings().weight
        others = [p.numel() for module in model.modules() if isinstance(module, nn.Embedding) for p in [module.weight]]
        assert next(name for name, p in model.named_parameters() if p is embedding).endswith("embed_tokens.weight")
        assert model.num_parameters(exclude_embeddings=True) == model.num_parameters() - sum(others)


def test_weights_of_a_latent_decoder_and_a_tower_with_keys_load():
    weights, model = tiny_model(text=LATENT).state_dict(), tiny_model(text=LATENT, seed=1)
    assert any("vision_tower" in name and "k_proj" in name for name in weights)
    model.load_state_dict(weights)
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])


def test_embeddings_can_be_resized():
    model = tiny_model()
    model.resize_token_embeddings(510)
    assert model.config.text_config.vocab_size == 510
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model(torch.full((1, 3), 509), random_pixels(1)).logits.shape == (1, 3, 510)


@each_attention
@torch.no_grad()
def test_compiled_model_equals_eager_model(attention):
    model = tiny_model(text=attention)
    ids, image = random_ids(1, 6), model.encode_images(random_pixels(1))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    close(compiled(ids, encoded_images=image, use_cache=False).logits, model(ids, encoded_images=image).logits)


@pytest.mark.parametrize("where", ["memory", "disk", "disk but for the tower"])
@torch.no_grad()
def test_offloaded_model_equals_the_model(tmp_path, where):
    """Offloaded weights are on the meta device between calls, so only their own module may read them."""
    accelerate = pytest.importorskip("accelerate")
    model, ids, pixels = tiny_model(), random_ids(2, 5), random_pixels(2)
    scores, maps = torch.cat(model.score_yes_no(ids, pixels)), model.attention_maps(ids, pixels)
    text = model.generate(ids, pixel_values=pixels, max_new_tokens=4)
    if where == "memory":
        accelerate.cpu_offload(model, torch.device("cpu"))
    elif where == "disk":
        accelerate.disk_offload(model, tmp_path, torch.device("cpu"))
    else:
        device_map = {"model.vision_tower": "cpu", "model.projector": "disk", "lm_head": "disk"}
        device_map |= {f"model.text_model.{name}": "disk" for name in ("embed_tokens", "layers.0", "layers.1", "norm")}
        accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert model.lm_head.weight.device.type == "meta"
    encoded = model.encode_images(pixels)
    for image in ({"pixel_values": pixels}, {"encoded_images": encoded}, {"encoded_images": encoded.to("cpu")}):
        close(torch.cat(model.score_yes_no(ids, **image)), scores)
        close(model.attention_maps(ids, **image), maps)
        assert torch.equal(model.generate(ids, max_new_tokens=4, **image), text)


def test_fields_changed_after_building_the_config_are_checked():
    config = tiny_config()
    config.text_config.num_key_value_heads = 3
    with pytest.raises(ValueError, match="num_key_value_heads=3"):
        TrafficVLMForConditionalGeneration(config)
    config = tiny_config()
    config.yes_no_temperature = -1.0
    with pytest.raises(ValueError, match=r"yes_no_temperature=-1\.0"):
        TrafficVLMForConditionalGeneration(config)


@torch.no_grad()
def test_tuple_output(model):
    ids, pixels = random_ids(1, 3), random_pixels(1)
    values = model(ids, pixels, return_dict=False)
    assert isinstance(values, tuple) and torch.equal(values[0], model(ids, pixels).logits)
    config = tiny_config()
    config.vision_config.return_dict = config.text_config.return_dict = config.return_dict = False
    assert isinstance(TrafficVLMForConditionalGeneration(config).eval()(ids, pixels), tuple)


# Bad input


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, ["input_ids", "inputs_embeds"]),
        ({"input_ids": torch.tensor([[5, 500]])}, ["500", r"\[0, 500\)"]),
        ({"input_ids": torch.tensor([[5, -1]])}, ["-1"]),
        ({"input_ids": random_ids(1, 129)}, ["129", "128"]),
        ({"input_ids": random_ids(2, 5), "encoder_hidden_states": torch.randn(3, 9, 24)}, ["3 rows", "2"]),
        ({"input_ids": random_ids(2, 5), "encoder_hidden_states": torch.randn(2, 9, 23)}, ["24", "23"]),
        ({"input_ids": random_ids(2, 5), "encoder_attention_mask": torch.ones(2, 9)}, ["encoder_attention_mask"]),
        ({"input_ids": random_ids(1, 5), "segment_ids": torch.ones(1, 4)}, [r"\[1,5\]", r"\[1, 4\]"]),
    ],
)
def test_bad_decoder_input_raises(decoder, arguments, named):
    for name in named:
        with pytest.raises(ValueError, match=name):
            decoder(**arguments)


def test_image_for_a_decoder_without_cross_attention_raises():
    with pytest.raises(ValueError, match="encoder_hidden_size=None"):
        tiny_decoder(encoder_hidden_size=None)(random_ids(1, 3), encoder_hidden_states=torch.randn(1, 9, 24))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"pixel_values": torch.randn(2, 3, 200, 224)}, ["200", "224"]),
        ({"pixel_values": torch.randn(2, 1, 256, 256)}, [r"\[2, 1, 256, 256\]"]),
        ({"pixel_values": torch.randn(3, 256, 256)}, [r"\[3, 256, 256\]"]),
        ({"pixel_values": torch.full((2, 3, 256, 256), math.nan)}, ["NaN", r"got nan\.\.nan"]),
        ({"pixel_values": torch.full((2, 3, 256, 256), math.inf)}, ["infinity", r"got inf\.\.inf"]),
        ({"pixel_values": 60 * random_pixels(2).abs()}, [r"normalized, .* in -10\.\.10", "got 0"]),
        ({"pixel_values": torch.full((2, 3, 256, 256), -10.1)}, [r"got -10\.1\.\.-10\.1"]),
        ({"pixel_values": torch.ones(2, 3, 256, 256, dtype=torch.uint8)}, ["normalized floats", "got uint8"]),
        ({"pixel_values": random_pixels(3)}, ["2 rows", "3 images"]),
        ({"pixel_values": random_pixels(1), "image_index": torch.tensor([0, 1])}, [r"\[0, 1\)", "got 1"]),
        ({"pixel_values": random_pixels(1), "image_index": torch.tensor([0, -1])}, ["-1"]),
        ({"pixel_values": random_pixels(1), "image_index": torch.tensor([0])}, [r"\[2\]", r"\[1\]"]),
        ({"pixel_values": random_pixels(2), "labels": random_ids(2, 4)}, [r"\[2,5\]", r"\[2, 4\]"]),
        ({"pixel_values": random_pixels(2), "labels": random_ids(2, 5), "logits_to_keep": 1}, [r"\[2,1\]"]),
        ({"image_index": torch.tensor([0, 0])}, ["image_index needs"]),
        ({"encoder_attention_mask": torch.ones(2, 256)}, ["encoder_attention_mask needs"]),
    ],
)
def test_bad_input_of_the_full_model_raises(model, arguments, named):
    for name in named:
        with pytest.raises(ValueError, match=name):
            model(**({"input_ids": random_ids(2, 5)} | arguments))


def test_classification_labels_of_another_shape_raise():
    model = TrafficVLMForSequenceClassification(tiny_config())
    with pytest.raises(ValueError, match=r"\[2\].*\[3\]"):
        model(random_ids(2, 5), random_pixels(2), labels=torch.tensor([0, 1, 0]))


def test_encoded_images_of_another_model_raise(model):
    pixels, ids = random_pixels(1), random_ids(1, 4)
    with pytest.raises(ValueError, match="another model"):
        model(ids, encoded_images=tiny_model(seed=1).encode_images(pixels))
    with pytest.raises(ValueError, match="another model"):
        model(ids, encoded_images=tiny_model(text={"num_hidden_layers": 3}).encode_images(pixels))
    with pytest.raises(ValueError, match="not both"):
        model(ids, pixels, encoded_images=model.encode_images(pixels))
    with pytest.raises(TypeError, match="Tensor"):
        model(ids, encoded_images=pixels)
