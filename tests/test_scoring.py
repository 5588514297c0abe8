"""P(yes) of many questions, encoded images and attention maps."""

import copy
import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tiny import close, count_calls, each_attention, pack, random_ids, random_pixels, stack, tiny_model
from traffic_vlm.cache_traffic_vlm import EncodedImages


QUESTIONS = [random_ids(4, seed=1), random_ids(3, seed=2)]


# --- P(yes) ---


@torch.no_grad()
def test_p_yes_is_a_softmax_of_two_logits_at_the_last_token():
    model, ids, pixels = tiny_model(text={"yes_bias": 0.5}, yes_no_temperature=2.5), random_ids(1, 6), random_pixels(1)
    logits = model.lm_head(model.model(ids, pixels).last_hidden_state)[0, -1]
    yes, no = (logits[4] + 0.5).exp() ** (1 / 2.5), logits[5].exp() ** (1 / 2.5)
    [scores] = model.score_yes_no(ids, pixels)
    close(scores, (yes / (yes + no))[None])
    for columns in ((3, 0), (0, 3)):  # of padding, which is not the last token
        row = nn.functional.pad(ids, columns)
        close(model.score_yes_no(row, pixels)[0], scores)
        close(model.score_yes_no(row, pixels, attention_mask=(row != 0).long())[0], scores)


@given(
    lengths=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=5), min_size=1, max_size=3),
    shift=st.sampled_from([0, -1, 7]),
    left=st.integers(0, 2),
)
@settings(max_examples=20, deadline=None)
@torch.no_grad()
def test_packed_scores_equal_those_of_questions_asked_alone(model, lengths, shift, left):
    """Segments may have any numbers; rows may share and skip images."""
    pixels = random_pixels(3)
    questions = [[random_ids(n, seed=10 * i + j) for j, n in enumerate(row)] for i, row in enumerate(lengths)]
    width = max(map(sum, lengths)) + left
    batch = stack(*(pack(row, width - sum(map(len, row))) for row in questions))
    batch["segment_ids"] = batch["segment_ids"] + shift
    index = torch.tensor([2, 0, 2])[: len(lengths)]
    scores = model.score_yes_no(**batch, pixel_values=pixels, image_index=index)
    for image in range(3):
        asked = [question for row, chosen in zip(questions, index) if chosen == image for question in row]
        alone = [model.score_yes_no(question[None], pixels[image, None])[0] for question in asked]
        assert len(scores[image]) == len(asked)
        close(scores[image], torch.cat([*alone, torch.zeros(0)]))


def test_an_image_is_encoded_once_and_logits_are_computed_at_question_ends():
    model = tiny_model()
    projections = [layer.cross_attn.k_proj for layer in model.model.text_model.layers]
    calls, seen = [count_calls(module) for module in (model.model.vision_tower, *projections)], []
    model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    model.score_yes_no(**pack([random_ids(6, seed=i) for i in range(50)]), pixel_values=random_pixels(1))
    assert [len(each) for each in calls] == [1, 1, 1] and seen == [(50, 32)]


@torch.no_grad()
def test_probabilities_and_maps_are_float32_in_a_bfloat16_model(model):
    half, ids, pixels = copy.deepcopy(model).bfloat16(), random_ids(2, 5), random_pixels(2)
    logits = half(ids, pixels).logits[:, -1]
    expected = (logits[:, 4].double() - logits[:, 5].double()).sigmoid()
    close(torch.cat(half.score_yes_no(ids, pixels)).double(), expected, 1e-6)
    maps = half.attention_maps(ids, pixels)
    assert maps.dtype == torch.float32
    close(maps.sum((-1, -2)), torch.ones(2, 5))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (pack(QUESTIONS) | {"pixel_values": None}, "Questions need pixel_values or encoded_images"),
        (pack(QUESTIONS) | {"question_ends": None}, "Packed rows (segment_ids) need question_ends"),
        (pack([QUESTIONS[0], torch.tensor([7, 8, 3])]), "A prompt ends in [EOS] (3)"),
    ],
)
def test_bad_questions_are_errors_that_name_the_value(model, row, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        model.score_yes_no(**{"pixel_values": random_pixels(1)} | row)


# --- encoded images ---


@torch.no_grad()
def test_encoded_images_replace_pixels(model):
    pixels, ids = random_pixels(3), random_ids(3, 5)
    encoded, expected = model.encode_images(pixels), model(ids, pixels).logits
    assert len(encoded) == 3 and not encoded.key_values[0][0].requires_grad
    assert torch.equal(model(ids, encoded_images=encoded).logits, expected)
    assert copy.deepcopy(encoded) is encoded  # assisted decoding copies its arguments
    loaded = pickle.loads(pickle.dumps(encoded))
    assert torch.equal(model(ids, encoded_images=loaded).logits, expected)
    for index in (1, -2, slice(1, 2), [1], torch.tensor(1)):
        close(model(ids[1:2], encoded_images=encoded[index]).logits, expected[1:2])


@torch.no_grad()
def test_joined_encoded_images(model):
    pixels, ids = random_pixels(3), random_ids(3, 5)
    parts = [model.encode_images(pixels[2:]), model.encode_images(pixels[:2])]
    joined, order = EncodedImages.join(parts), torch.tensor([2, 0, 1])
    close(model(ids, encoded_images=joined).logits, model(ids, pixels[order]).logits)


@torch.no_grad()
def test_hidden_image_tokens_stay_hidden(model):
    pixels, ids, mask = random_pixels(2), random_ids(3, 5), torch.ones(2, 256, dtype=torch.long)
    mask[1, 50:] = 0
    index = torch.tensor([1, 0, 1])
    expected = model(ids, pixels, image_index=index, encoder_attention_mask=mask).logits
    encoded, bare = model.encode_images(pixels, mask), model.encode_images(pixels)
    close(model(ids, encoded_images=encoded, image_index=index).logits, expected)
    close(model(ids, encoded_images=bare, image_index=index, encoder_attention_mask=mask).logits, expected)
    assert not torch.allclose(model(ids, pixels, image_index=index).logits, expected, atol=1e-3)
    scores = model.score_yes_no(**pack([ids[0], ids[2]]), encoded_images=encoded[1])
    close(scores[0], model.score_yes_no(ids, encoded_images=encoded, image_index=index)[1])
    assert [*map(len, model.score_yes_no(ids, encoded_images=encoded, image_index=0 * index))] == [3, 0]


def test_encoded_images_of_other_weights_are_refused(model):
    pixels, ids = random_pixels(1), random_ids(1, 4)
    for other in (tiny_model(seed=1), tiny_model(text={"num_hidden_layers": 3})):
        with pytest.raises(ValueError, match="another model"):
            model(ids, encoded_images=other.encode_images(pixels))
    with pytest.raises(ValueError, match="Give one of pixel_values, encoded_images"):
        model(ids, pixels, encoded_images=model.encode_images(pixels))


# --- attention maps and masks ---


@each_attention
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_maps_equal_the_attention_of_the_model(attention, implementation):
    model, ids, pixels = tiny_model(text=attention), random_ids(2, 5), random_pixels(2)
    mask, swap = torch.ones(2, 256, dtype=torch.long), torch.tensor([1, 0])
    mask[0, 100:] = 0
    model.set_attn_implementation("eager")
    output = model(ids, pixels, output_attentions=True, encoder_attention_mask=mask)
    model.set_attn_implementation(implementation)
    every = torch.stack(output.cross_attentions).mean((0, 2))
    close(model.attention_maps(ids, pixels, encoder_attention_mask=mask).flatten(2), every)
    images = {"encoded_images": model.encode_images(pixels, mask), "image_index": swap}
    close(model.attention_maps(ids[swap], **images)[swap].flatten(2), every)
    assert not model.attention_maps(ids, pixels, encoder_attention_mask=0 * mask).any()


@torch.no_grad()
def test_maps_of_packed_and_padded_rows(model):
    pixels = random_pixels(1)
    maps = model.attention_maps(**pack(QUESTIONS, padding=2), pixel_values=pixels)
    assert not maps[0, :2].any()
    close(maps[0, 2:], torch.cat([model.attention_maps(question[None], pixels)[0] for question in QUESTIONS]))
