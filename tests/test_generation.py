"""generate(): every decoding method equals greedy decoding without a cache, and encodes an image once."""

import re

import pytest
import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, StaticCache

from tiny import LATENT, close, count_calls, pack, random_ids, random_pixels, tiny_model, tiny_text_config
from traffic_vlm.cache_traffic_vlm import CACHE_NAME, TrafficVLMCache
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForCausalLM


NO_END = {"max_new_tokens": 8, "eos_token_id": -1, "do_sample": False}
IDS, PIXELS, OTHER_PIXELS = random_ids(2, 6), random_pixels(2), random_pixels(2, seed=7)
SWAP = torch.tensor([1, 0])
either_name = pytest.mark.parametrize("name", ["past_key_values", "cache"])


@pytest.fixture(scope="module")
def expected(model):
    """Greedy continuations of two questions about two images, one by one and without a cache."""
    rows = [greedy_reference(model, IDS[i, None], PIXELS[i, None]) for i in range(2)]
    assert len({tuple(row[0, 6:].tolist()) for row in rows}) == 2  # the images make a difference
    return torch.cat(rows)


@torch.no_grad()
def greedy_reference(model, ids, pixels, new_tokens=8):
    for _ in range(new_tokens):
        logits = model(ids, pixels, use_cache=False).logits[:, -1]
        logits[:, [0, 1, 2]] = -torch.inf
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids


@pytest.fixture
def alone(model):
    """The decoder of the model, with the same weights."""
    alone = TrafficVLMForCausalLM(model.config.text_config).eval()
    alone.model.load_state_dict(model.model.text_model.state_dict())
    return alone


# --- decoding methods ---


@pytest.mark.parametrize(
    "options", [{}, {"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 4}], ids=str
)
def test_greedy(model, expected, options):
    assert torch.equal(model.generate(IDS, pixel_values=PIXELS, **NO_END, **options), expected)
    if "prefill_chunk_size" not in options:
        embeds = model.get_input_embeddings()(IDS)
        output = model.generate(inputs_embeds=embeds, pixel_values=PIXELS, **NO_END, **options)
        assert torch.equal(output, expected[:, 6:])


@pytest.mark.parametrize("given", ["ids", "mask", "embeddings"])
def test_left_padding(model, expected, given):
    long = torch.cat([random_ids(3, seed=9), IDS[1]])
    ids = torch.stack([nn.functional.pad(IDS[0], (3, 0)), long])
    text = {"input_ids": ids} if given != "embeddings" else {"inputs_embeds": model.get_input_embeddings()(ids)}
    mask = {} if given == "ids" else {"attention_mask": (ids != 0).long()}
    output = model.generate(**text, **mask, pixel_values=PIXELS, **NO_END)
    assert torch.equal(output[0, -8:], expected[0, 6:])


def test_prompt_lookup_and_assisted_decoding_equal_greedy(model, expected):
    inputs = {"input_ids": IDS[:1], "encoded_images": model.encode_images(PIXELS[:1])}
    assert torch.equal(model.generate(**inputs, prompt_lookup_num_tokens=3, **NO_END), expected[:1])
    text_only = TrafficVLMForCausalLM(tiny_text_config(encoder_hidden_size=None)).eval()
    for assistant in (model, text_only, tiny_model(seed=3)):
        assert torch.equal(model.generate(**inputs, assistant_model=assistant, **NO_END), expected[:1])


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ({}, {"num_beams": 3, "num_return_sequences": 2}),
        ({}, {"num_beams": 2, "cache_implementation": "static"}),
        ({}, {"num_beams": 2, "use_cache": False}),
        (LATENT, {"num_beams": 3}),
    ],
    ids=str,
)
def test_beams_read_the_right_image(text, options):
    model, ids, index = tiny_model(text=text), random_ids(3, 6), torch.tensor([1, 0, 1])
    together = model.generate(ids, pixel_values=PIXELS, image_index=index, **NO_END, **options)
    separate = zip(ids.split(1), PIXELS[index].split(1))
    alone = [model.generate(row, pixel_values=image, **NO_END, **options) for row, image in separate]
    assert torch.equal(together, torch.cat(alone))


def test_sampling_repeats_rows_in_order(model, expected):
    options = NO_END | {"do_sample": True, "top_k": 1, "num_return_sequences": 3}  # top_k=1 is greedy
    output = model.generate(IDS, pixel_values=PIXELS[SWAP], image_index=SWAP, **options)
    assert torch.equal(output, expected.repeat_interleave(3, dim=0))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True}, {"cache_implementation": "static"}])
def test_encoded_images_are_not_modified(model, expected, options):
    encoded = model.encode_images(PIXELS)
    before = [tensor.clone() for pair in encoded.key_values for tensor in pair]
    config = {"max_new_tokens": 5, "return_dict_in_generate": True} | options
    model.generate(IDS, encoded_images=encoded, **config).past_key_values.reset()
    model(IDS, encoded_images=encoded, use_cache=True).past_key_values.reset()
    assert all(torch.equal(a, b) for a, b in zip(before, (t for pair in encoded.key_values for t in pair)))
    assert torch.equal(model.generate(IDS, encoded_images=encoded, **NO_END), expected)


def test_generation_without_an_image(model, alone):
    output = model.generate(IDS, return_dict_in_generate=True, **NO_END)
    assert torch.equal(alone.generate(IDS, **NO_END), output.sequences)
    assert isinstance(output.past_key_values, DynamicCache)  # a plain cache
    assert model.generate(pixel_values=PIXELS, **NO_END).shape == (2, 9)  # starts from [SOS]


def test_a_decoder_alone_reads_image_tokens(model, alone):
    tokens = model.model.projector(model.model.vision_tower(PIXELS).last_hidden_state).detach()
    mask = torch.ones(2, 256, dtype=torch.long)
    mask[:, 100:] = 0
    for options in (NO_END, NO_END | {"num_beams": 3}):
        output = alone.generate(IDS, encoder_hidden_states=tokens, encoder_attention_mask=mask, **options)
        masked = model.generate(IDS, pixel_values=PIXELS, encoder_attention_mask=mask, **options)
        assert torch.equal(output, masked)
        assert not torch.equal(output, model.generate(IDS, pixel_values=PIXELS, **options))  # it reaches every step


# --- caches ---


@either_name
@pytest.mark.parametrize("give_again", [False, True])
def test_a_returned_cache_can_be_continued(model, expected, give_again, name):
    image, config = {"pixel_values": PIXELS}, NO_END | {"max_new_tokens": 4, "return_dict_in_generate": True}
    first = model.generate(IDS, **image, **config)
    cache = first.past_key_values  # holds the image
    second = model.generate(first.sequences, **{name: cache}, **(image if give_again else {}), **config)
    assert torch.equal(second.sequences, expected)


@either_name
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_a_given_cache_keeps_the_image(model, expected, static, name):
    config = model.config.text_config
    cache = (
        TrafficVLMCache.around(StaticCache(config=config, max_cache_len=20))
        if static
        else TrafficVLMCache(config=config)
    )
    output = model(IDS, PIXELS, **{name: cache}, use_cache=True)
    assert output[CACHE_NAME] is cache
    step = model(expected[:, 6:7], **{name: cache}, use_cache=True)
    assert torch.equal(step.logits[:, -1, 3:].argmax(-1) + 3, expected[:, 7])
    if static:  # before transformers 5.18 a dynamic cache keeps its length when it is reset
        cache.reset()  # for other images and questions
        close(model(IDS[SWAP], PIXELS[SWAP], past_key_values=cache).logits, model(IDS, PIXELS).logits[SWAP])


@torch.no_grad()
def test_the_image_is_reordered_with_the_text(model):
    cache, swapped = (model(IDS[rows], PIXELS[rows], use_cache=True).past_key_values for rows in ([0, 1], SWAP))
    cache.reorder_cache(torch.as_tensor(SWAP))
    close(model(IDS[:, :1], past_key_values=cache).logits, model(IDS[:, :1], past_key_values=swapped).logits)


@torch.no_grad()
def test_a_cache_refuses_another_image_or_mask(model):
    mask = torch.ones(2, 256)
    mask[:, 100:] = 0
    for image in (
        {"pixel_values": OTHER_PIXELS},
        {"encoded_images": model.encode_images(OTHER_PIXELS)},
        {"pixel_values": PIXELS, "image_index": SWAP},
        {"pixel_values": PIXELS, "encoder_attention_mask": mask},
    ):
        for call, ids in ((model, IDS), (model.generate, torch.cat([IDS, IDS], dim=1))):
            cache = model(IDS, PIXELS, use_cache=True).past_key_values
            with pytest.raises(ValueError, match="holds another image than the one given, or hides other parts"):
                call(input_ids=ids, past_key_values=cache, **image)


# --- outputs and ends ---


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 1}, {"do_sample": True}])
def test_control_tokens_are_never_generated(sampling):
    model = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():  # each step prefers [PAD], [UNK], [SOS] by far
        model.lm_head.weight.zero_()
        model.lm_head.weight[:3] = 1e3 * model.model.text_model.norm.weight.sign()
        model.lm_head.weight[3:] = 1e-3 * torch.randn(497, 32)
    config = GenerationConfig(max_new_tokens=6, eos_token_id=-1, pad_token_id=0, **sampling)
    output = model.generate(IDS, generation_config=config, pixel_values=PIXELS)
    assert (output[:, 6:] > 2).all()


def test_generation_stops_at_eos_and_pads(model, expected):
    end = next(i for i in range(6, 14) if expected[0, i] not in expected[1, 6:])  # the second row does not contain it
    output = model.generate(IDS, pixel_values=PIXELS, **(NO_END | {"eos_token_id": expected[0, end].item()}))
    assert torch.equal(output[1], expected[1])
    assert output[0].tolist() == expected[0, : end + 1].tolist() + [0] * (13 - end)


# --- bad input ---

LEFT_OVER = torch.tensor([[1, 1, 1, 1, 1, 0]])
RIGHT_PADDED = 'pass padding_side="left" to the processor'


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": IDS[:1] * LEFT_OVER}, RIGHT_PADDED),
        (pack([random_ids(4), random_ids(3)]), "packed rows (segment_ids): use packed=False"),
        ({"input_ids": torch.tensor([[0, 7, 3]])}, "A prompt ends in [EOS] (3)"),
        ({"input_ids": random_ids(1, 121)}, "121 tokens and max_new_tokens=8 make 129 tokens"),
        ({"input_ids": IDS[:1, :1], "attention_mask": torch.ones(1, 121), "past_key_values": 120}, "make 129 tokens"),
        ({"pixel_value": PIXELS}, "pixel_value"),
    ],
)
def test_bad_input_is_an_error_before_generating(model, inputs, message):
    image = {"pixel_values": PIXELS[:1]}
    if length := inputs.get("past_key_values"):
        cache = model(random_ids(1, length), **image, use_cache=True).past_key_values
        image, inputs = {}, inputs | {"past_key_values": cache}
    calls = count_calls(model.model.text_model.norm)
    with pytest.raises(ValueError, match=re.escape(message)):
        model.generate(**{"input_ids": IDS[:1]} | image | NO_END | inputs)
    assert not calls
