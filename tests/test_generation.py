"""generate(): every decoding method equals greedy decoding without a cache, and encodes an image once."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from tiny import TINY_TEXT, count_calls, pack, random_ids, random_pixels, tiny_model, tiny_text_config
from traffic_vlm.cache_traffic_vlm import TrafficVLMCache, TrafficVLMStaticCache
from traffic_vlm.configuration_traffic_vlm import TrafficVLMTextConfig
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForCausalLM


NO_END = {"max_new_tokens": 8, "eos_token_id": -1, "do_sample": False}


@pytest.fixture(scope="module")
def expected(model):
    """Greedy continuations of two questions about two images, one by one and without a cache."""
    ids, pixels = random_ids(2, 6), random_pixels(2)
    rows = [greedy_reference(model, ids[i : i + 1], pixels[i : i + 1]) for i in range(2)]
    assert len({tuple(row[0, 6:].tolist()) for row in rows}) == 2  # the images make a difference
    return torch.cat(rows)


@torch.no_grad()
def greedy_reference(model, ids, pixels, new_tokens=8):
    for _ in range(new_tokens):
        logits = model(ids, pixels, use_cache=False).logits[:, -1]
        logits[:, [0, 1, 2]] = -torch.inf
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids


@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 4}],
)
def test_greedy(model, expected, options):
    inputs = {"input_ids": random_ids(2, 6), "pixel_values": random_pixels(2)}
    assert torch.equal(model.generate(**inputs, **NO_END, **options), expected)


@pytest.mark.parametrize("with_mask", [True, False])
def test_left_padding(model, expected, with_mask):
    short, long = random_ids(2, 6)[0], torch.cat([random_ids(3, seed=9), random_ids(2, 6)[1]])
    ids = torch.stack([nn.functional.pad(short, (3, 0)), long])
    mask = {"attention_mask": (ids != 0).long()} if with_mask else {}
    output = model.generate(input_ids=ids, pixel_values=random_pixels(2), **mask, **NO_END)
    assert torch.equal(output[0, 9:], expected[0, 6:])
    embeds = model.get_input_embeddings()(ids)
    mask = {"attention_mask": (ids != 0).long()}
    output = model.generate(inputs_embeds=embeds, pixel_values=random_pixels(2), **mask, **NO_END)
    assert torch.equal(output[0], expected[0, 6:])


@pytest.mark.parametrize("given", ["ids", "mask", "embeddings", "cache"])
def test_right_padding_raises(model, given):
    ids, mask = random_ids(1, 6), torch.tensor([[1, 1, 1, 1, 1, 0]])
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": random_pixels(1)}
    if given == "ids":
        inputs |= {"input_ids": ids * mask, "attention_mask": None}
    elif given == "embeddings":
        inputs |= {"input_ids": None, "inputs_embeds": model.get_input_embeddings()(ids)}
    elif given == "cache":
        inputs["past_key_values"] = model(ids[:, :3], random_pixels(1), use_cache=True).past_key_values
    with pytest.raises(ValueError, match='pass padding_side="left" to the processor'):
        model.generate(**inputs, **NO_END)


@pytest.mark.parametrize("static", [False, True])
def test_from_embeddings(model, expected, static):
    embeds = model.get_input_embeddings()(random_ids(2, 6))
    options = {"cache_implementation": "static"} if static else {}
    output = model.generate(inputs_embeds=embeds, pixel_values=random_pixels(2), **NO_END, **options)
    assert torch.equal(output, expected[:, 6:])


def test_prompt_lookup_and_assisted_decoding_equal_greedy(model, expected):
    inputs = {"input_ids": random_ids(2, 6)[:1], "encoded_images": model.encode_images(random_pixels(2)[:1])}
    assert torch.equal(model.generate(**inputs, prompt_lookup_num_tokens=3, **NO_END), expected[:1])
    text_only = TrafficVLMForCausalLM(tiny_text_config(encoder_hidden_size=None)).eval()
    for assistant in (model, text_only):
        assert torch.equal(model.generate(**inputs, assistant_model=assistant, **NO_END), expected[:1])
    narrow = tiny_model(seed=3, text={"hidden_size": 16}, vision={"hidden_size": 16})
    counts = [count_calls(one.model.vision_tower) for one in (model, narrow)]
    assert torch.equal(model.generate(**inputs, assistant_model=narrow, **NO_END), expected[:1])
    assert [len(calls) for calls in counts] == [0, 1]  # another model encodes the image itself, once


def test_assistant_without_pixels_raises(model):
    encoded = copy.copy(model.encode_images(random_pixels(1)))
    object.__setattr__(encoded, "pixel_values", None)
    with pytest.raises(ValueError, match="pixel_values"):
        model.generate(random_ids(1, 3), encoded_images=encoded, assistant_model=tiny_model(seed=3), **NO_END)


def test_many_questions_encode_the_image_once():
    model = tiny_model()
    tower_calls = count_calls(model.model.vision_tower)
    projections = count_calls(model.model.text_model.layers[0].cross_attn.k_proj)
    ids = random_ids(5, 6)
    output = model.generate(
        input_ids=ids, pixel_values=random_pixels(1), image_index=torch.zeros(5, dtype=torch.long), **NO_END
    )
    assert (len(tower_calls), len(projections)) == (1, 1)
    assert torch.equal(output[3:4], greedy_reference(model, ids[3:4], random_pixels(1)))


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 2, "cache_implementation": "static"},
        {"num_beams": 2, "use_cache": False},
    ],
)
def test_beams_read_the_right_image(model, options):
    ids, pixels = random_ids(3, 6), random_pixels(2)
    index = torch.tensor([1, 0, 1])
    together = model.generate(input_ids=ids, pixel_values=pixels, image_index=index, **NO_END, **options)
    alone = [
        model.generate(input_ids=ids[i : i + 1], pixel_values=pixels[index[i]][None], **NO_END, **options)
        for i in range(3)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_sampling_repeats_rows_in_order(model):
    ids, pixels = random_ids(2, 6), random_pixels(2)
    options = {"max_new_tokens": 4, "do_sample": True, "top_k": 1, "num_return_sequences": 3}  # top_k=1 is greedy
    output = model.generate(input_ids=ids, pixel_values=pixels[[1, 0]], image_index=torch.tensor([1, 0]), **options)
    plain = model.generate(input_ids=ids, pixel_values=pixels, max_new_tokens=4, do_sample=False)
    assert torch.equal(output, plain.repeat_interleave(3, dim=0))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True}, {"cache_implementation": "static"}])
def test_encoded_images_are_not_modified(model, expected, options):
    ids, encoded = random_ids(2, 6), model.encode_images(random_pixels(2))
    before = [tensor.clone() for pair in encoded.key_values for tensor in pair]
    config = {"max_new_tokens": 5, "return_dict_in_generate": True} | options
    output = model.generate(input_ids=ids, encoded_images=encoded, **config)
    output.past_key_values.reset()
    cache = model(ids, encoded_images=encoded, use_cache=True).past_key_values
    cache.reset()
    assert all(torch.equal(a, b) for a, b in zip(before, (t for pair in encoded.key_values for t in pair)))
    assert torch.equal(model.generate(input_ids=ids, encoded_images=encoded, **NO_END), expected)


def test_continue_from_a_returned_cache(model, expected):
    inputs = {"input_ids": random_ids(2, 6), "pixel_values": random_pixels(2)}
    config = NO_END | {"max_new_tokens": 4, "return_dict_in_generate": True}
    first = model.generate(**inputs, **config)
    assert isinstance(first.past_key_values, DynamicCache)
    for image in ({}, {"pixel_values": random_pixels(2)}):  # the cache holds the image; it may be passed again
        cache = copy.deepcopy(first.past_key_values)
        second = model.generate(input_ids=first.sequences, past_key_values=cache, **image, **config)
        assert torch.equal(second.sequences, expected)


@pytest.mark.parametrize("give", ["pixels", "encoded", "swapped"])
@pytest.mark.parametrize("name", ["forward", "generate"])
@torch.no_grad()
def test_a_cache_refuses_another_image(model, give, name):
    ids, pixels = random_ids(2, 6), random_pixels(2)
    cache = model(ids, pixels, use_cache=True).past_key_values
    image = {"pixel_values": random_pixels(2, seed=7)}
    if give == "encoded":
        image = {"encoded_images": model.encode_images(image["pixel_values"])}
    elif give == "swapped":
        image = {"pixel_values": pixels, "image_index": torch.tensor([1, 0])}
    more = ids if name == "forward" else torch.cat([ids, ids], dim=1)
    with pytest.raises(ValueError, match="holds another image than the one given"):
        getattr(model, name)(input_ids=more, past_key_values=cache, **image)


def test_a_cache_without_text_takes_another_image(model, expected):
    ids, pixels = random_ids(2, 6), random_pixels(2)
    cache = model.generate(ids, pixel_values=random_pixels(2, seed=7), return_dict_in_generate=True).past_key_values
    cache.crop(0)  # before transformers 5.15 it removes all text, then none
    if cache.get_seq_length():
        with pytest.raises(ValueError, match="holds another image"):
            model(ids, pixels, past_key_values=cache)
        cache.crop(-cache.get_seq_length())
    assert cache.image_key_values is None
    assert torch.equal(model.generate(ids, pixel_values=pixels, past_key_values=cache, **NO_END), expected)


@torch.no_grad()
def test_a_cached_image_of_a_decoder_alone_is_compared(model, alone):
    tokens = [model.get_image_features(random_pixels(2, seed=seed)).pooler_output for seed in (0, 7)]
    ids = random_ids(2, 6)
    cache = alone(ids, encoder_hidden_states=tokens[0], use_cache=True).past_key_values
    longer = torch.cat([ids, ids], dim=1)
    alone.generate(longer, encoder_hidden_states=tokens[0], past_key_values=copy.deepcopy(cache), **NO_END)
    with pytest.raises(ValueError, match="holds another image"):
        alone.generate(longer, encoder_hidden_states=tokens[1], past_key_values=cache, **NO_END)


@pytest.mark.parametrize("static", [False, True])
def test_given_cache_keeps_the_image(model, expected, static):
    ids, pixels, config = random_ids(2, 6), random_pixels(2), model.config.text_config
    cache = TrafficVLMStaticCache(config=config, max_cache_len=20) if static else TrafficVLMCache(config=config)
    with torch.no_grad():
        model(ids, pixels, past_key_values=cache, use_cache=True)
        step = model(expected[:, 6:7], past_key_values=cache, use_cache=True)
        assert torch.equal(step.logits[:, -1, 3:].argmax(-1) + 3, expected[:, 7])
        if static:  # before transformers 5.18 a dynamic cache keeps its length when it is reset
            cache.reset()  # for other images and questions
            swapped = model(ids[[1, 0]], pixels[[1, 0]], past_key_values=cache, use_cache=True).logits
            torch.testing.assert_close(swapped, model(ids, pixels).logits[[1, 0]], atol=1e-5, rtol=1e-5)
    cache = TrafficVLMCache(config=config)
    half = NO_END | {"max_new_tokens": 4}
    first = model.generate(ids, pixel_values=pixels, past_key_values=cache, **half)
    assert torch.equal(model.generate(first, past_key_values=cache, **half), expected)


@pytest.mark.parametrize("name", ["forward", "generate"])
def test_plain_cache_with_an_image_raises(model, name):
    cache = DynamicCache(config=model.config.text_config)
    with pytest.raises(ValueError, match="must be a TrafficVLMCache or TrafficVLMStaticCache, got DynamicCache"):
        getattr(model, name)(input_ids=random_ids(1, 4), pixel_values=random_pixels(1), past_key_values=cache)


@torch.no_grad()
def test_image_mask_is_reordered_with_the_cache(model):
    model = copy.deepcopy(model).double()  # float32 differs too much when sums are reordered
    ids, pixels, mask = random_ids(2, 6), random_pixels(2).double(), torch.ones(2, 256, dtype=torch.long)
    mask[0, 20:], mask[1, 100:] = 0, 0
    word = random_ids(2, 1, seed=3)
    plain = model(torch.cat([ids, word], dim=1), pixels, encoder_attention_mask=mask).logits[:, -1]

    def filled():
        return model(ids, pixels, encoder_attention_mask=mask, use_cache=True).past_key_values

    changes = {"reorder_cache": torch.tensor([1, 0]), "batch_select_indices": torch.tensor([1])}
    for name, index in changes.items():
        cache = filled()
        getattr(cache, name)(index)
        torch.testing.assert_close(model(word[index], past_key_values=cache).logits[:, -1], plain[index])
    cache = filled()
    cache.batch_repeat_interleave(2)
    twice = model(word.repeat_interleave(2, dim=0), past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(twice, plain.repeat_interleave(2, dim=0))


def test_assistant_gets_the_image_mask(model):
    assistant, ids, pixels = tiny_model(seed=3), random_ids(1, 6), random_pixels(1)
    mask = torch.ones(1, 256, dtype=torch.long)
    mask[:, 30:] = 0
    masks = []
    assistant.model.text_model.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(getattr(kwargs.get("encoded_images"), "attention_mask", None)),
        with_kwargs=True,
    )
    model.generate(ids, pixel_values=pixels, encoder_attention_mask=mask, assistant_model=assistant, **NO_END)
    assert torch.equal(masks[0], mask)


@pytest.mark.parametrize("name", ["forced_bos_token_id", "forced_eos_token_id"])
def test_forced_control_tokens_raise(model, name):
    with pytest.raises(ValueError, match=f"{name}=1"):
        model.generate(random_ids(1, 4), pixel_values=random_pixels(1), max_new_tokens=3, **{name: 1})


def test_unused_cache_is_freed_immediately(model):
    gc.collect()
    gc.disable()
    try:
        output = model(random_ids(1, 4), random_pixels(1), use_cache=True)
        keys = weakref.ref(output.past_key_values)
        del output
        assert keys() is None
    finally:
        gc.enable()


def test_generation_without_a_padding_token():
    config = TrafficVLMTextConfig(**(TINY_TEXT | {"pad_token_id": None, "encoder_hidden_size": None}))
    model = TrafficVLMForCausalLM(config).eval()
    assert model.generate(random_ids(2, 4), **NO_END).shape == (2, 4 + NO_END["max_new_tokens"])


def test_outputs_and_scores(model):
    eager = tiny_model()
    eager.set_attn_implementation("eager")
    flags = dict.fromkeys(["return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states"], True)
    output = eager.generate(
        input_ids=random_ids(2, 6), pixel_values=random_pixels(2), output_attentions=True, **flags, **NO_END
    )
    assert len(output.scores) == len(output.logits) == len(output.attentions) == len(output.hidden_states) == 8
    assert all(torch.isneginf(score[:, :3]).all() for score in output.scores)
    assert output.logits[0][:, 1:].isfinite().all()  # raw
    assert output.attentions[0][0].shape == (2, 4, 6, 6)
    assert output.attentions[1][0].shape == (2, 4, 1, 7)


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append("end")


def test_streaming(model, expected):
    streamer = Collector()
    inputs = {"input_ids": random_ids(2, 6)[:1], "pixel_values": random_pixels(2)[:1]}
    model.generate(**inputs, streamer=streamer, **NO_END)
    assert streamer.tokens == [*expected[0].tolist(), "end"]


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 1}, {"do_sample": True}])
def test_control_tokens_are_never_generated(sampling):
    model = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():  # each step prefers [PAD], [UNK], [SOS] by far
        model.lm_head.weight.zero_()
        model.lm_head.weight[:3] = 1e3 * model.model.text_model.norm.weight.sign()
        model.lm_head.weight[3:] = 1e-3 * torch.randn(497, 32)
    config = GenerationConfig(max_new_tokens=6, eos_token_id=-1, pad_token_id=0, **sampling)
    output = model.generate(random_ids(4, 5), generation_config=config, pixel_values=random_pixels(4))
    assert (output[:, 5:] > 2).all()


def test_generation_stops_at_eos_and_pads(model):
    ids, pixels = random_ids(2, 6), random_pixels(2)
    plain = model.generate(ids, pixel_values=pixels, **NO_END)
    end = next(i for i in range(6, 14) if plain[0, i] not in plain[1, 6:])  # the second row does not contain it
    output = model.generate(ids, pixel_values=pixels, **(NO_END | {"eos_token_id": plain[0, end].item()}))
    assert torch.equal(output[1], plain[1])
    assert output[0].tolist() == plain[0, : end + 1].tolist() + [0] * (13 - end)


@pytest.mark.parametrize(("prompt", "new", "total"), [(100, 40, 140), (128, 1, 129)])
def test_too_many_new_tokens_raise_before_generating(model, prompt, new, total):
    calls = count_calls(model.model.text_model.norm)
    with pytest.raises(ValueError, match=f"{prompt} tokens and max_new_tokens={new} make {total} tokens.*128"):
        model.generate(random_ids(1, prompt), pixel_values=random_pixels(1), max_new_tokens=new)
    assert calls == []


def test_padding_does_not_count_as_positions(model):
    ids, mask = random_ids(1, 120), torch.ones(1, 120, dtype=torch.long)
    mask[:, :60] = 0
    output = model.generate(ids, attention_mask=mask, pixel_values=random_pixels(1), **NO_END)
    assert torch.equal(output[:, 120:], greedy_reference(model, ids[:, 60:], random_pixels(1))[:, 60:])
    assert model.generate(random_ids(1, 127), pixel_values=random_pixels(1), max_new_tokens=1).shape == (1, 128)


def test_continuing_beyond_the_positions_raises(model):
    cache = model(random_ids(1, 120), random_pixels(1), use_cache=True).past_key_values
    mask = torch.ones(1, 121, dtype=torch.long)
    with pytest.raises(ValueError, match="121 tokens and max_new_tokens=8 make 129"):
        model.generate(random_ids(1, 1), attention_mask=mask, past_key_values=cache, **NO_END)


def test_no_end_token_and_several_end_tokens(tmp_path):
    def generated(eos) -> list[int]:
        model = tiny_model(text={"eos_token_id": eos})
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path)
        return model.generate(random_ids(1, 4), pixel_values=random_pixels(1), max_new_tokens=20)[0, 4:].tolist()

    endless = generated(None)
    assert len(endless) == 20
    other = next(token_id for token_id in range(8, 20) if token_id not in endless)
    assert generated([other, endless[2]]) == endless[: endless.index(endless[2]) + 1]


def test_packed_rows_raise(model):
    row = pack([random_ids(4), random_ids(3)])
    with pytest.raises(ValueError, match="packed"):
        model.generate(**row, pixel_values=random_pixels(1))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"pixel_values": random_pixels(3)}, "2 rows of text for 3 images"),
        ({"pixel_values": random_pixels(1), "image_index": torch.tensor([0, 2])}, "got 2"),
        ({"pixel_value": random_pixels(2)}, "pixel_value"),
        ({"image_index": torch.tensor([0, 0])}, "image_index needs"),
        ({"stop_strings": ["car"]}, "stop_strings need .* eos_token_id="),
        ({"assistant_early_exit": 1}, "assistant_early_exit is not supported: pass a smaller model"),
    ],
)
def test_bad_input_raises(model, arguments, named):
    with pytest.raises(ValueError, match=named):
        model.generate(random_ids(2, 4), **arguments, **NO_END)


@pytest.fixture
def alone(model):
    """The decoder of the model, with the same weights."""
    alone = TrafficVLMForCausalLM(model.config.text_config).eval()
    alone.model.load_state_dict(model.model.text_model.state_dict())
    return alone


def test_generation_without_an_image(model, alone):
    ids = random_ids(2, 6)
    full = model.generate(ids, **NO_END)
    assert torch.equal(alone.generate(ids, **NO_END), full)
    output = model.generate(ids, return_dict_in_generate=True, **NO_END)
    assert isinstance(output.past_key_values, DynamicCache)  # a plain cache
    assert model.generate(pixel_values=random_pixels(2), **NO_END).shape == (2, 9)  # starts from [SOS]


def test_decoder_with_encoder_hidden_states_and_beams(model, alone):
    ids, pixels = random_ids(2, 6), random_pixels(2)
    tokens = model.get_image_features(pixels).pooler_output.detach()
    mask = torch.ones(2, 256, dtype=torch.long)
    mask[:, 100:] = 0
    for options in ({}, {"num_beams": 3}):
        image = {"encoder_hidden_states": tokens, "encoder_attention_mask": mask}
        output = alone.generate(ids, **image, **NO_END, **options)
        image = {"pixel_values": pixels, "encoder_attention_mask": mask}
        assert torch.equal(output, model.generate(ids, **image, **NO_END, **options))
        plain = model.generate(ids, pixel_values=pixels, **NO_END, **options)
        assert not torch.equal(output, plain)  # the mask reaches every step


def test_pipelines_keep_the_number_of_new_tokens(model):
    """Pipelines of older releases of transformers pass their own default, by name, when they are built."""
    for given, expected in ((256, 32), (8, 8)):
        config, _ = model._prepare_generation_config(generation_config=GenerationConfig(max_new_tokens=given))
        assert config.max_new_tokens == expected
    config, _ = model._prepare_generation_config(generation_config=GenerationConfig(), max_new_tokens=256)
    assert config.max_new_tokens == 256
    for asked in ({"max_new_tokens": 256}, {"generation_config": GenerationConfig(max_new_tokens=256)}):
        with pytest.raises(ValueError, match="max_new_tokens=256"):
            model.generate(random_ids(1, 4), pixel_values=random_pixels(1), **asked)
