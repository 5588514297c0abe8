"""The decoder and the full model: an independent implementation, masks, cache, packing, gradients, heads."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import reference_decoder
from safetensors.torch import load_file
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaModel, StaticCache

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
from traffic_vlm.attention_traffic_vlm import apply_rotary, rotary_embedding
from traffic_vlm.cache_traffic_vlm import CACHE_NAME, TrafficVLMCache
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.modeling_traffic_vlm import (
    TrafficVLMForCausalLM,
    TrafficVLMForConditionalGeneration,
    TrafficVLMForSequenceClassification,
)


each_implementation = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


@pytest.fixture(scope="module")
def vision():
    """Image tokens of two images."""
    return torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(5))


# --- formulas and other implementations ---


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 4},
        {"kv_latent_size": 12, "rope_head_dim": 6},
        {"image_latent_size": 10},
        LATENT,
    ],
    ids=str,
)
@torch.no_grad()
def test_the_decoder_equals_a_float64_reference(fields, interleaved, vision):
    model = tiny_decoder(rope_interleaved=interleaved, **fields).double()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, mean=1.0, std=0.3)
    ids, image = random_ids(2, 5), vision.double()
    for implementation, tolerance in (("sdpa", 1e-9), ("eager", 1e-5)):  # eager attention has a softmax in float32
        model.set_attn_implementation(implementation)
        with_image = model(ids, encoder_hidden_states=image).last_hidden_state
        without = model(ids).last_hidden_state
        for row in range(2):
            close(with_image[row], reference_decoder(model, ids[row], image[row]), tolerance)
            close(without[row], reference_decoder(model, ids[row], None), tolerance)


@torch.no_grad()
def test_self_attention_equals_llama():
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
    expected, actual = (one(ids, attention_mask=mask).last_hidden_state[mask.bool()] for one in (llama, model))
    close(actual, expected, 1e-4)


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
@settings(max_examples=20, deadline=None)
def test_rotary_keeps_norms_and_depends_on_distance(position, distance, shift, seed):
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def rotate(x, position):
        return apply_rotary(x, rotary_embedding(torch.tensor([[position]]), 8, 10000.0, torch.float64))

    score = (rotate(query, position) * rotate(key, position + distance)).sum()
    shifted = (rotate(query, position + shift) * rotate(key, position + distance + shift)).sum()
    close(score, shifted, 1e-9)
    close(rotate(query, position).norm(), query.norm(), 1e-9)
    assert torch.equal(rotate(query, 0), query)


# --- masks and positions ---


@each_attention
@each_implementation
@given(
    pads=st.integers(1, 12),
    length=st.integers(1, 12),
    left=st.booleans(),
    options=st.sampled_from(["mask", "id", "cache"]),
)
@settings(max_examples=12, deadline=None)
@torch.no_grad()
def test_padding_does_not_change_states(attention, implementation, pads, length, left, options, vision):
    """Without a mask, padding is found by its id."""
    model = tiny_decoder(**attention)
    model.set_attn_implementation(implementation)
    ids, image = random_ids(1, length), vision[:1]
    alone = model(ids, encoder_hidden_states=image).last_hidden_state
    columns = (pads, 0) if left else (0, pads)
    padded, mask = nn.functional.pad(ids, columns), nn.functional.pad(torch.ones_like(ids), columns)
    given_mask = mask if options == "mask" else None
    output = model(padded, given_mask, encoder_hidden_states=image, use_cache=options == "cache").last_hidden_state
    assert output.isfinite().all()
    close(output[mask.bool()], alone[0])


@each_implementation
@torch.no_grad()
def test_the_encoder_mask_hides_image_tokens_and_is_kept_in_the_cache(implementation, vision):
    decoder = tiny_decoder()
    decoder.set_attn_implementation(implementation)
    ids, mask = random_ids(2, 8), torch.ones(2, 9, dtype=torch.long)
    mask[:, 6:] = 0
    expected = decoder(ids, encoder_hidden_states=vision[:, :6]).last_hidden_state
    masked = {"encoder_hidden_states": vision, "encoder_attention_mask": mask}
    close(decoder(ids, **masked).last_hidden_state, expected)
    first = decoder(ids[:, :3], **masked, use_cache=True)
    second = decoder(ids[:, 3:], past_key_values=first.past_key_values)
    close(torch.cat([first.last_hidden_state, second.last_hidden_state], dim=1), expected)
    hidden = decoder(ids, encoder_hidden_states=vision, encoder_attention_mask=0 * mask).last_hidden_state
    close(hidden, decoder(ids).last_hidden_state)
    empty = decoder(ids, attention_mask=torch.zeros_like(ids), encoder_hidden_states=vision).last_hidden_state
    assert empty.isfinite().all()


# --- cache and packing ---


@each_attention
@given(
    cuts=st.lists(st.integers(1, 9), max_size=4, unique=True).map(sorted),
    padded=st.booleans(),
    static=st.booleans(),
    name=st.sampled_from(["past_key_values", "cache"]),
)
@settings(max_examples=12, deadline=None)
@torch.no_grad()
def test_cached_equals_uncached_for_any_split(attention, cuts, padded, static, name, vision):
    model, image = tiny_decoder(**attention).double(), vision.double()
    ids, mask = random_ids(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, : 2 * padded] = 0
    expected = model(ids, attention_mask=mask, encoder_hidden_states=image).last_hidden_state
    cache = TrafficVLMCache(config=model.config)
    if static:
        cache = TrafficVLMCache.around(StaticCache(config=model.config, max_cache_len=12))
    pieces = []
    for start, stop in zip([0, *cuts], [*cuts, 10]):
        image_once = {"encoder_hidden_states": image} if start == 0 else {}
        output = model(ids[:, start:stop], mask[:, :stop], **{name: cache}, use_cache=True, **image_once)
        assert output[CACHE_NAME] is cache
        pieces.append(output.last_hidden_state)
    close(torch.cat(pieces, dim=1)[mask.bool()], expected[mask.bool()], 1e-9)
    assert int(cache.get_seq_length()) == 10


@each_attention
@each_implementation
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    padding=st.integers(0, 5),
    cache=st.sampled_from(["none", "dynamic", "static"]),
)
@settings(max_examples=12, deadline=None)
@torch.no_grad()
def test_packed_equals_separate_questions(attention, implementation, lengths, padding, cache, vision):
    model, image = tiny_decoder(**attention), {"encoder_hidden_states": vision[:1]}
    model.set_attn_implementation(implementation)
    questions = [random_ids(length, seed=i) for i, length in enumerate(lengths)]
    row = pack(questions, padding)
    del row["question_ends"]
    options = {"use_cache": cache != "none"}
    if cache == "static":
        options["past_key_values"] = TrafficVLMCache.around(StaticCache(config=model.config, max_cache_len=64))
    packed = model(**row, **image, **options).last_hidden_state[0, padding:]
    close(packed, torch.cat([model(question[None], **image).last_hidden_state[0] for question in questions]), 1e-4)


# --- training ---


def test_the_loss_is_the_mean_over_labeled_next_tokens(model):
    ids, pixels = random_ids(2, 6), random_pixels(2)
    labels = ids.clone()
    labels[:, :4] = -100
    output = model(ids, pixels, labels=labels)
    chosen = output.logits[:, 3:5].log_softmax(-1).gather(-1, ids[:, 4:6, None])
    close(output.loss, -chosen.mean(), 1e-5)
    close(model(ids, pixels, labels=labels.clamp(min=0)).loss, output.loss)  # [PAD] is ignored like -100
    halved = model(ids, pixels, labels=labels, num_items_in_batch=8).loss
    close(halved, output.loss / 2)  # Trainer divides by the tokens of all accumulated batches


def test_the_trainers_use_cache_reaches_the_decoder():
    model = tiny_model()
    for use_cache in (True, False):
        model.config.use_cache = use_cache
        assert (model(random_ids(1, 4), random_pixels(1)).get(CACHE_NAME) is not None) == use_cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("origin", ["copy", "file"])
def test_the_embedding_of_pad_stays_zero_in_training(tmp_path, origin, dtype):
    model = copy.deepcopy(tiny_model().to(dtype))
    if origin == "file":
        model.save_pretrained(tmp_path)
        model = TrafficVLMForConditionalGeneration.from_pretrained(tmp_path)
    assert model.dtype == dtype
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    ids, before = random_ids(2, 8), model.lm_head.weight.detach().clone()
    ids[0, :3] = 0
    for _ in range(2):
        optimizer.zero_grad()
        model(ids, random_pixels(2), labels=ids).loss.backward()  # pixels in float32 are cast
        optimizer.step()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert not torch.equal(model.lm_head.weight, before) and not model.lm_head.weight[0].any()


@pytest.mark.parametrize("tied", [True, False])
def test_the_logit_of_pad_is_negligible(tied):
    model = tiny_model(tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    for one in (model, model.bfloat16()):
        logits = one(random_ids(1, 4), random_pixels(1)).logits
        assert logits.isfinite().all() and (logits[..., 0] <= logits.amin(-1)).all()
        assert not logits.float().softmax(-1)[..., 0].any()


@each_attention
@pytest.mark.parametrize("reentrant", [True, False])
def test_every_weight_gets_a_gradient_and_checkpointing_gives_the_same(attention, reentrant):
    gradients, row = [], pack([random_ids(4, seed=1), random_ids(3, seed=2)])
    for checkpointing in (False, True):
        model = tiny_model(text=attention | {"hidden_dropout": 0.2}).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()  # reentrant checkpointing needs an input with a gradient
        torch.manual_seed(7)
        model(**row, pixel_values=random_pixels(1), labels=row["input_ids"]).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None and gradient.any(), name
        close(gradients[1][name], gradient)


# --- outputs and heads ---


@each_attention
@torch.no_grad()
def test_outputs_have_the_states_and_attentions_of_each_layer(attention, vision):
    model = tiny_decoder(**attention)
    model.set_attn_implementation("eager")
    options = {"output_attentions": True, "output_hidden_states": True}
    output = model(random_ids(2, 5), encoder_hidden_states=vision, **options)
    assert [tuple(states.shape) for states in output.hidden_states] == [(2, 5, 32)] * 3
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
    for recorded, columns in ((output.attentions, 5), (output.cross_attentions, 9)):
        assert [tuple(weights.shape) for weights in recorded] == [(2, 4, 5, columns)] * 2
        close(torch.stack(recorded).sum(-1), torch.ones(2, 2, 4, 5))


@torch.no_grad()
def test_a_decoder_without_an_image_is_a_language_model():
    model, ids = TrafficVLMForCausalLM(tiny_text_config(encoder_hidden_size=None)).eval(), random_ids(2, 6)
    assert not any("cross" in name for name, _ in model.named_parameters())
    output = model(ids)
    assert output.logits.shape == (2, 6, 500) and isinstance(output.past_key_values, DynamicCache)
    close(model(ids, logits_to_keep=1).logits, output.logits[:, -1:])
    close(model(ids, logits_to_keep=torch.tensor([1, 3])).logits, output.logits[:, [1, 3]])


@torch.no_grad()
def test_classification_uses_the_last_real_token():
    model = TrafficVLMForSequenceClassification(tiny_config()).eval()
    pixels, questions = random_pixels(2), [random_ids(5, seed=1), random_ids(3, seed=2)]
    labels = torch.tensor([1, 0])
    alone = torch.cat([model(q[None], pixels[i : i + 1]).logits for i, q in enumerate(questions)])
    for columns in ((0, 2), (2, 0)):
        output = model(torch.stack([questions[0], nn.functional.pad(questions[1], columns)]), pixels, labels=labels)
        close(output.logits, alone)
        close(output.loss, nn.functional.cross_entropy(alone, labels))
    packed = model(**pack(questions), pixel_values=pixels[:1], labels=labels).logits
    close(packed[:1], alone[:1])


@torch.no_grad()
def test_a_vision_tower_of_transformers():
    fields = {"model_type": "vit", "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1}
    for size in ([256, 256], [64, 128]):
        config = TrafficVLMConfig(fields | {"num_attention_heads": 2, "image_size": size}, TINY_TEXT)
        model, pixels = TrafficVLMForConditionalGeneration(config).eval(), torch.randn(1, 3, *size)
        rows, columns = (side // 16 for side in size)
        features = model.get_image_features(pixels).pooler_output
        assert features.shape == (1, rows * columns + 1, 32)  # with a class token
        assert model.attention_maps(random_ids(1, 3), pixels).shape == (1, 3, rows, columns)


# --- saving, moving, compiling ---


def test_a_saved_folder_is_complete_without_the_tied_head(tmp_path):
    tiny_model(seed=1).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in saved
    for model in (tiny_model(), TrafficVLMForConditionalGeneration.from_pretrained(tmp_path)):
        model.load_state_dict(saved, strict=False)  # as the library's Trainer loads checkpoints
        assert model.lm_head.weight is model.get_input_embeddings().weight
        assert torch.equal(model.lm_head.weight, saved["model.text_model.embed_tokens.weight"])
