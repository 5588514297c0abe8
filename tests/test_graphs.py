"""Recorded passes give the answers of the model's own. On a CPU functions run again from the same buffers."""

import copy

import pytest
import torch

from tiny import TINY_TEXT, TINY_TOWER, close, each_attention, pack, random_ids, random_pixels, stack
from traffic_vlm import fast_traffic_vlm
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.fast_traffic_vlm import Graphs
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def make(device="cpu", text=None, **tower):
    """A model in a context with recorded passes, and the same without."""
    torch.manual_seed(0)
    config = TrafficVLMConfig(TINY_TOWER | tower, TINY_TEXT | (text or {}))
    plain = TrafficVLMForConditionalGeneration(config).eval()
    plain = plain.to(device)
    recorded = copy.deepcopy(plain)
    recorded.fast_context().__enter__()
    if device == "cpu":
        recorded.model.fast.graphs = Graphs(recorded)
    return recorded, plain


def questions(*lengths: int, padding: int = 0) -> dict[str, torch.Tensor]:
    return pack([random_ids(length, seed=length) for length in lengths], padding)


def kinds(model) -> list[str]:
    return sorted(key[0] for key in model.model.fast.graphs.passes)


@each_device
@each_attention
@torch.no_grad()
def test_packed_questions_about_several_images(attention, device):
    recorded, plain = make(device, attention)
    for images, inputs in (
        (1, questions(5)),
        (1, questions(5, 9, 3, 12)),
        (2, stack(questions(7, 4, 6), questions(9, 5, padding=3))),
        (1, questions(6, 11, 2, 4)),  # less than what the buffers hold from before
        (1, questions(5, padding=4) | {"segment_ids": torch.zeros(1, 9, dtype=torch.long)}),  # 0 is not padding here
    ):
        pixels = random_pixels(images, seed=images).to(device)
        found, counts = recorded.question_logits(pixel_values=pixels, **inputs)
        expected, numbers = plain.question_logits(pixel_values=pixels, **inputs)
        close(found, expected, 1e-4)
        assert counts == numbers and len(counts) == images
    assert kinds(recorded) == ["answer"] * 3 + ["encode_images"] * 2


@each_device
@torch.no_grad()
def test_rows_share_encoded_images(device):
    recorded, plain = make(device)
    inputs = stack(questions(7, 4), questions(6, 5), questions(9, 2))
    pixels, index = random_pixels(2).to(device), torch.tensor([1, 0, 1], device=device)
    expected = plain.question_logits(encoded_images=plain.encode_images(pixels), image_index=index, **inputs)
    for _ in range(2):
        images = recorded.encode_images(pixels)
        recorded.encode_images(random_pixels(2, seed=5).to(device))  # must not change those encoded before
        found = recorded.question_logits(encoded_images=images, image_index=index, **inputs)
    assert found[1] == expected[1] == [2, 4]
    close(found[0], expected[0], 1e-4)
    assert kinds(recorded) == ["answer", "encode_images"]


@each_device
@torch.no_grad()
def test_changed_weights_drop_the_graphs(device):
    recorded, plain = make(device)
    pixels, inputs = random_pixels(1).to(device), questions(5, 4)
    images = recorded.encode_images(pixels)
    for change in (lambda model: model.model.projector.weight.data.mul_(1.5), lambda model: model.bfloat16().float()):
        before = recorded.score_yes_no(pixel_values=pixels, **inputs)[0]
        fast = recorded.model.fast
        graphs = fast.graphs
        fast.__exit__()
        for model in (recorded, plain):
            change(model)
        fast.__enter__()
        after = recorded.score_yes_no(pixel_values=pixels, **inputs)[0]
        close(after, plain.score_yes_no(pixel_values=pixels, **inputs)[0], 1e-4)
        assert not torch.equal(after, before) and fast.graphs is not graphs
        if device == "cpu":
            fast.graphs = Graphs(recorded)
    with pytest.raises(ValueError, match="weights that have changed"):
        recorded.score_yes_no(encoded_images=images, **inputs)


@torch.no_grad()
def test_unusual_passes_are_not_recorded():
    recorded, plain = make()
    inputs = questions(5, 4) | {"pixel_values": random_pixels(1)}
    hidden = {"encoder_attention_mask": (torch.arange(256) < 100)[None].long()}
    close(recorded.question_logits(**inputs, **hidden)[0], plain.question_logits(**inputs, **hidden)[0], 1e-4)
    assert kinds(recorded) == ["encode_images"]
    recorded.model.fast.graphs.passes.clear()
    with torch.autocast("cpu", torch.bfloat16):
        recorded.question_logits(**inputs)
    assert kinds(recorded) == []


@torch.no_grad()
def test_few_shapes_are_kept(monkeypatch):
    monkeypatch.setattr(fast_traffic_vlm, "MOST", 2)
    recorded, _ = make()
    images = recorded.encode_images(random_pixels(1))
    for lengths in ((3,), (4,), (20,)):
        recorded.score_yes_no(encoded_images=images, **questions(*lengths))
    assert kinds(recorded) == ["answer"]  # the third shape took the place of both


@each_attention
@torch.no_grad()
def test_recorded_functions_read_no_values(attention):
    """A graph cannot be recorded, nor compiled as a whole, if the CPU reads a value within."""
    recorded, plain = make(text=attention | {"num_hidden_layers": 1}, conv_depths=[1, 1, 1, 1])
    pixels, inputs = random_pixels(1), questions(5, 4)
    recorded.score_yes_no(pixel_values=pixels, **inputs)
    for one in recorded.model.fast.graphs.passes.values():
        one.function = torch.compile(one.function, fullgraph=True, backend="eager")
    scores = [model.score_yes_no(pixel_values=pixels, **inputs)[0] for model in (recorded, plain)]
    close(*scores)
