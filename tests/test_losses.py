"""Auxiliary losses: values by hand, and gradients through the results that a forward pass records."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tiny import tiny_model
from traffic_vlm.training.auxiliary import agreement, grounding
from traffic_vlm.training.auxiliary.losses import ForwardPass, recording


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
    """0.9 implies 0.5, 0.3 implies 0.7, and 0.8 excludes 0.7."""
    model = tiny_model()
    text = model.config.get_text_config()

    def loss(log_odds, pairs):
        logits = nn.functional.pad(log_odds[..., None], (text.yes_token_id, text.vocab_size))
        return agreement.loss(ForwardPass(model, logits=logits), pairs)

    log_odds = torch.tensor([[0.9, 0.5, 0.3], [0.7, 0.8, 0.7]]).logit()
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
