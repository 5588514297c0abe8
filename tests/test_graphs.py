"""Recorded passes give the answers of the model's own. On a CPU functions run again from the same buffers."""

import copy
import pickle

import pytest
import torch

from tiny import TINY_TEXT, TINY_TOWER, close, each_attention, pack, random_ids, random_pixels, stack
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.fast_traffic_vlm import KEPT, Graphs
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def make(device="cpu", text=None):
    """A model with recorded passes, and the same without."""
    torch.manual_seed(0)
    plain = TrafficVLMForConditionalGeneration(TrafficVLMConfig(TINY_TOWER, TINY_TEXT | (text or {}))).eval()
    plain = plain.to(device)
    recorded = copy.deepcopy(plain)
    recorded.fuse_for_inference()
    if device == "cpu":
        recorded.fast.graphs = Graphs(recorded)
    return recorded, plain


def questions(*lengths: int, padding: int = 0) -> dict[str, torch.Tensor]:
    return pack([random_ids(length, seed=length) for length in lengths], padding)


def kinds(model) -> list[str]:
    return sorted(key[0] for key in model.graphs.passes)


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
        for _ in range(2):  # a shape is recorded when it comes again
            found, counts = recorded.question_logits(pixel_values=pixels, **inputs)
        expected, numbers = plain.question_logits(pixel_values=pixels, **inputs)
        close(found, expected, 1e-4)
        assert counts == numbers and len(counts) == images
    assert kinds(recorded) == ["images"] * 2 + ["questions"] * 3


@each_device
@torch.no_grad()
def test_rows_of_one_question_share_encoded_images(device):
    recorded, plain = make(device)
    ids = random_ids(3, 9).to(device)
    ids[0, 6:], ids[2, :2] = 0, 0  # padding on the right, and on the left
    pixels, index = random_pixels(2).to(device), torch.tensor([1, 0, 1], device=device)
    expected = plain.question_logits(ids, encoded_images=plain.encode_images(pixels), image_index=index)
    for _ in range(2):
        images = recorded.encode_images(pixels)
        recorded.encode_images(random_pixels(2, seed=5).to(device))  # must not change those encoded before
        found = recorded.question_logits(ids, encoded_images=images, image_index=index)
    assert found[1] == expected[1] == [1, 2]
    close(found[0], expected[0], 1e-4)
    assert kinds(recorded) == ["images", "questions"]


@torch.no_grad()
def test_invalid_inputs_raise_the_errors_of_the_model():
    recorded, _ = make()
    pixels, inputs = random_pixels(1), questions(5, 4)
    for _ in range(2):
        recorded.score_yes_no(pixel_values=pixels, **inputs)
    with pytest.raises(ValueError, match="normalized"):
        recorded.score_yes_no(pixel_values=pixels * float("nan"), **inputs)
    for name, column, value, match in (
        ("input_ids", 2, 500, "vocabulary"),
        ("input_ids", 8, 3, "EOS"),
    ):
        wrong = {key: tensor.clone() for key, tensor in inputs.items()}
        wrong[name][0, column] = value
        with pytest.raises(ValueError, match=match):
            recorded.score_yes_no(pixel_values=pixels, **wrong)


@each_device
@torch.no_grad()
def test_changed_weights_drop_the_graphs(device):
    recorded, plain = make(device)
    pixels, inputs = random_pixels(1).to(device), questions(5, 4)
    images = recorded.encode_images(pixels)
    for change in (
        lambda model: model.model.projector.weight.data.mul_(1.5),
        lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight * 1.5)),
        lambda model: model.bfloat16().float(),
    ):
        for _ in range(2):
            before = recorded.score_yes_no(pixel_values=pixels, **inputs)[0]
        graphs = recorded.graphs
        for model in (recorded, plain):
            change(model)
        for _ in range(2):
            after = recorded.score_yes_no(pixel_values=pixels, **inputs)[0]
            close(after, plain.score_yes_no(pixel_values=pixels, **inputs)[0], 1e-4)
        assert not torch.equal(after, before) and recorded.graphs is not graphs
        if device == "cpu":
            recorded.fast.graphs = Graphs(recorded)
    with pytest.raises(ValueError, match="weights that have changed"):
        recorded.score_yes_no(encoded_images=images, **inputs)


@torch.no_grad()
def test_shapes_are_recorded_when_they_come_again_and_few_are_kept():
    recorded, _ = make()
    for count in (1, 2, 1):
        recorded.encode_images(random_pixels(count))
    assert kinds(recorded) == ["images"]
    sizes = [(length,) * count for length in (3, 20, 40) for count in (1, 2, 3, 4, 6)]
    images = recorded.encode_images(random_pixels(1))
    for size in [*sizes, sizes[0], (60,)]:
        for _ in range(2):
            recorded.score_yes_no(encoded_images=images, **questions(*size))
    assert len(recorded.graphs.passes) == KEPT


@each_attention
@torch.no_grad()
def test_recorded_functions_read_no_values(attention):
    """A graph cannot be recorded, nor compiled as a whole, if the CPU reads a value within."""
    recorded, plain = make(text=attention | {"num_hidden_layers": 1})
    pixels, inputs = random_pixels(1), questions(5, 4)
    for _ in range(2):
        recorded.score_yes_no(pixel_values=pixels, **inputs)
    for one in recorded.graphs.passes.values():
        one.function = torch.compile(one.function, fullgraph=True, backend="eager")
    scores = [model.score_yes_no(pixel_values=pixels, **inputs)[0] for model in (recorded, plain)]
    close(*scores)


def test_gradients_copies_and_pickles_work_as_before():
    recorded, plain = make()
    pixels, inputs = random_pixels(1), questions(5, 4)
    for _ in range(2):
        recorded.score_yes_no(pixel_values=pixels, **inputs)
    for model in (pickle.loads(pickle.dumps(recorded)), copy.deepcopy(recorded)):
        assert model.fast.model is model and model.graphs is None
    assert recorded.state_dict().keys() == plain.state_dict().keys()
    recorded.model.encode(pixels).key_values[0][0].sum().backward()
    assert recorded.model.projector.weight.grad is not None


@needs_cuda
@torch.no_grad()
def test_fast_passes_on_a_gpu_do_not_wait():
    plain = make("cuda")[1].bfloat16()
    model = copy.deepcopy(plain)
    inputs, pixels = questions(5, 4), random_pixels(1).to("cuda", torch.bfloat16)
    with model.fast_context():  # reads the checksum of the weights
        for _ in range(3):
            model.score_yes_no(pixel_values=pixels, **inputs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = model.score_yes_no(pixel_values=pixels, **inputs)[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    close(found, plain.score_yes_no(pixel_values=pixels, **inputs)[0], 1e-2)
