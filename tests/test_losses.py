"""Auxiliary losses: closed forms, and gradients through the results that a forward pass records."""

import math

import numpy as np
import pytest
import torch

from tiny import tiny_model
from traffic_vlm.training.auxiliary.losses import (
    agreement_loss,
    consistency_loss,
    grounding_loss,
    intermediate_loss,
    recording,
)


def test_grounding_loss_is_the_negative_log_of_attention_on_the_object():
    maps = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.9, 0.0]])
    patches = torch.tensor([[True, True, False], [False, True, True]])
    assert grounding_loss(maps, patches).item() == pytest.approx(-(math.log(0.75) + math.log(0.9)) / 2)
    assert grounding_loss(maps[:0], patches[:0]).item() == 0


def test_consistency_loss_is_the_symmetric_divergence():
    log_odds = torch.tensor([2.0, 0.5, -1.0, 0.5], requires_grad=True)
    first, second = log_odds.split(2)  # 2.0 with -1.0; 0.5 with 0.5
    yes = log_odds.detach().sigmoid()
    one, other = (torch.stack([1 - yes[i], yes[i]]) for i in (0, 2))
    both = (one * (one / other).log()).sum() + (other * (other / one).log()).sum()
    loss = consistency_loss(first, second)
    assert loss.item() == pytest.approx(both.item() / 2)
    loss.backward()
    assert log_odds.grad[0] > 0 > log_odds.grad[2] and not log_odds.grad[1::2].any()
    assert consistency_loss(log_odds[:0], log_odds[:0]).item() == 0


def test_agreement_loss_is_the_excess_of_probability():
    first, second = torch.tensor([2.0, -1.0, 2.0], requires_grad=True), torch.tensor([0.0, 1.0, 1.0])
    loss = agreement_loss(first, second, torch.tensor([False, False, True]))
    p = first.detach().sigmoid()
    assert loss.item() == pytest.approx(float((p[0] - 0.5) + (p[2] + second[2].sigmoid() - 1)) / 3)
    loss.backward()
    assert first.grad[0] > 0 and first.grad[1] == 0 and first.grad[2] > 0
    assert agreement_loss(first[:0], second[:0], torch.zeros(0, dtype=torch.bool)).item() == 0


def test_intermediate_loss_is_the_cross_entropy_of_the_models_own_head():
    model = tiny_model()
    torch.nn.init.zeros_(model.get_decoder().norm.weight)  # makes all words equally likely
    values = torch.tensor([7, 8, 9])
    states = torch.randn(3, model.config.text_config.hidden_size)
    vocabulary = model.config.text_config.vocab_size
    assert intermediate_loss(model, states, values).item() == pytest.approx(math.log(vocabulary - 1))  # without [PAD]
    assert intermediate_loss(model, states[:0], values[:0]).item() == 0
    model.get_decoder().norm.weight.data.fill_(1)
    intermediate_loss(model, states, values).backward()
    gradient = model.lm_head.weight.grad
    assert not gradient[0].any() and gradient[1:].any(1).all()
    with recording(model) as recorded:
        model.get_decoder()(torch.tensor([[2, 9, 3]]))
    assert recorded.mid_layer_states.shape[:2] == (1, 3) and recorded.mid_layer_states.requires_grad


def test_recorded_attention_equals_attention_maps_and_has_gradients_also_with_checkpointing(processor):
    texts = [["Is there a car?", "What color is the traffic light?"], ["Is it dark?"]]
    images = list(np.random.default_rng(0).integers(0, 255, (2, 224, 224, 3), np.uint8))
    batch = processor(images=images, text=texts, packed=True, return_tensors="pt")
    rows, columns = torch.tensor([0, 0, 1]), torch.tensor([3, 7, -2])

    def gradients(model):
        with recording(model) as recorded:
            outputs = model(**batch, use_cache=False)
        maps = recorded.attention_maps(rows, columns)
        (maps.square().sum() + outputs.logits[..., 1:].square().mean()).backward()
        return maps, [weight.grad for weight in model.parameters()]

    plain, checkpointed = tiny_model().train(), tiny_model().train()
    checkpointed.gradient_checkpointing_enable()
    maps, wanted = gradients(plain)
    torch.testing.assert_close(maps, plain.attention_maps(**batch)[rows, columns].flatten(1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradients(checkpointed), (maps, wanted))
