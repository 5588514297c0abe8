"""Auxiliary losses: values by hand, gradients through a recorded forward pass, and patches of the objects named."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tiny import tiny_model
from traffic_vlm.data.questions import Question
from traffic_vlm.data.scene import Scene, SceneObject
from traffic_vlm.training.auxiliary import agreement, grounding
from traffic_vlm.training.auxiliary.grounding import box_patches, named_patches, object_patches
from traffic_vlm.training.auxiliary.losses import ForwardPass, recording


GRID = (4, 4)


# Losses


def check(loss, made, given, expected):
    """The loss of tensors whose rows are questions, its gradient in all of them, and 0 without questions."""
    made = made.clone().requires_grad_()
    found = loss(made, *given)
    assert found.item() == pytest.approx(expected)
    found.backward()
    assert made.grad[0].any()
    assert loss(made, *(one[:0] for one in given)).item() == 0


def test_grounding_loss_is_the_negative_log_of_attention_on_the_object():
    maps = torch.tensor([[0.0, 0.5, 0.25, 0.25], [0.0, 0.1, 0.9, 0.0]])  # the first column is a token of counts

    def loss(maps, words, patches):
        return grounding.loss(SimpleNamespace(attention_maps=lambda rows, _: maps[rows]), words, patches)

    words, patches = torch.tensor([[0, 3], [1, 4]]), torch.tensor([[True, True, False], [False, True, True]])
    check(loss, maps, (words, patches), -(math.log(0.75) + math.log(0.9)) / 2)


def test_agreement_loss_is_the_excess_of_probability():
    """0.9 implies 0.5, 0.3 implies 0.6, and 0.8 excludes 0.7."""
    model = tiny_model()
    text = model.config.get_text_config()

    def loss(log_odds, pairs):
        logits = nn.functional.pad(log_odds[..., None], (text.yes_token_id, text.vocab_size))
        return agreement.loss(ForwardPass(model, logits=logits), pairs)

    log_odds = torch.tensor([[0.9, 0.5, 0.3], [0.6, 0.8, 0.7]]).logit()
    pairs = torch.tensor([[0, 0, 0, 1, 0], [0, 2, 1, 0, 0], [1, 1, 1, 2, 1]])
    check(loss, log_odds, (pairs,), (0.4 + 0.0 + 0.5) / 3)


def test_recorded_results_equal_outputs_and_have_gradients_also_with_checkpointing(processor):
    texts = [["Is there a car?", "What color is the traffic light?"], ["Is it dark?"]]
    images = list(np.random.default_rng(0).integers(0, 255, (2, 224, 224, 3), np.uint8))
    batch = processor(images=images, text=texts, packed=True, return_tensors="pt")
    rows, columns = torch.tensor([0, 0, 1]), torch.tensor([3, 7, -2])

    def gradients(model):
        with recording(model) as recorded:
            outputs = model(**batch, use_cache=False)
        maps, tokens = recorded.attention_maps(rows, columns), recorded.seen.last_hidden_state
        (maps.square().sum() + tokens.square().mean() + outputs.logits[..., 1:].square().mean()).backward()
        return maps, tokens, [weight.grad for weight in model.parameters()]

    plain, checkpointed = tiny_model().train(), tiny_model().train()
    checkpointed.gradient_checkpointing_enable()
    maps, tokens, _ = wanted = gradients(plain)
    torch.testing.assert_close(maps, plain.attention_maps(**batch)[rows, columns].flatten(1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(tokens, plain.model.vision_tower(batch["pixel_values"]).last_hidden_state)
    torch.testing.assert_close(gradients(checkpointed), wanted)


# Grounding targets


def test_patches_of_a_word_do_not_depend_on_the_answer():
    red, far = SceneObject("car", (20, 20, 40, 40)), SceneObject("car", (0, 0, 10, 10))
    hidden = SceneObject("car", (0, 30, 10, 40), visible=0.1)
    scene = Scene(40, 40, (red, far, hidden))
    both, one = [0, 10, 11, 14, 15], [10, 11, 14, 15]
    expected = {
        Question("Is there a car?", "yes", "presence", "car", "presence/car", (red.box, far.box)): both,
        Question("Is there a car ahead?", "no", "place", "car", "place/car/center"): both,
        Question("Is there a car on the right?", "yes", "place", "car", "place/car/right", (red.box,)): both,
        Question("How many cars are there?", "2", "count", "car", "count/car/what"): both,
        # Words that limit a noun come after it, except for colors.
        Question("Is there a red car?", "yes", "color", "car", "color/car/any/red", (red.box,)): one,
        Question("Is there a blue car?", "no", "color", "car", "color/car/any/blue"): both,
        Question("Is there a bus?", "no", "presence", "bus", "presence/bus"): [],
        Question("Is it raining?", "no", "weather", "weather", "weather/weather/is/rainy"): [],
    }
    covered = object_patches(scene, GRID)
    found = {question: [*named_patches(question, scene, covered).nonzero()[0]] for question in expected}
    assert found == expected


def test_patches_of_a_word_are_those_of_the_mask_not_of_its_box():
    coverage = tuple(tuple(float(i == j) for j in range(4)) for i in range(4))  # a diagonal, whose box is the image
    scene = Scene(40, 40, (SceneObject("road", (0, 0, 40, 40), coverage=coverage, is_instance=False),))
    question = Question("Is there a road?", "yes", "presence", "road", "presence/road", ((0, 0, 40, 40),))
    found = named_patches(question, scene, object_patches(scene, GRID))
    assert (found.reshape(GRID) == np.eye(4, dtype=bool)).all()


@pytest.mark.parametrize(
    ("box", "covered"),
    [
        ((10, 0, 30, 20), {(0, 1): 1, (0, 2): 1, (1, 1): 1, (1, 2): 1}),
        ((5, 5, 10, 15), {(0, 0): 0.25, (1, 0): 1}),  # the second patch holds the center
        ((24, 24, 24.4, 24.4), {(2, 2): 1}),  # however small: it would vanish otherwise
    ],
)
def test_coverage_is_the_fraction_of_each_patch_but_1_at_the_center(box, covered):
    [found] = box_patches([box], Scene(40, 40), GRID)
    assert {place: value for place, value in np.ndenumerate(found) if value} == covered
