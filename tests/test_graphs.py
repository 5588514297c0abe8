"""Recorded passes give the answers of the model's own. On a CPU functions run again from the same buffers."""

import copy
import pickle

import pytest
import torch

from tiny import TINY_TEXT, TINY_TOWER, close, each_attention, pack, random_ids, random_pixels, stack
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.graphs_traffic_vlm import KEPT, Graphs
from traffic_vlm.greedy_traffic_vlm import GreedyText
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def make(device="cpu", text=None, **options):
    """A model with recorded passes, and the same without."""
    torch.manual_seed(0)
    plain = TrafficVLMForConditionalGeneration(TrafficVLMConfig(TINY_TOWER, TINY_TEXT | (text or {}))).eval()
    plain = plain.to(device)
    recorded = copy.deepcopy(plain)
    graphs = Graphs(recorded, devices=("cpu", "cuda"), **({"uses_before": 0} | options))
    recorded.graphs = recorded.model.graphs = graphs
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
        found = recorded.question_logits(pixel_values=pixels, **inputs)
        expected = plain.question_logits(pixel_values=pixels, **inputs)
        assert len(found) == len(expected) == images
        for actual, wanted in zip(found, expected):
            close(actual, wanted, 1e-4)
    assert kinds(recorded) == ["images"] * 2 + ["questions"] * 3


@each_device
@torch.no_grad()
def test_rows_of_one_question_share_encoded_images(device):
    recorded, plain = make(device)
    ids = random_ids(3, 9).to(device)
    ids[0, 6:], ids[2, :2] = 0, 0  # padding on the right, and on the left
    pixels, index = random_pixels(2).to(device), torch.tensor([1, 0, 1], device=device)
    expected = plain.question_logits(ids, encoded_images=plain.encode_images(pixels), image_index=index)
    images = recorded.encode_images(pixels)
    recorded.encode_images(random_pixels(2, seed=5).to(device))  # must not change those encoded before
    found = recorded.question_logits(ids, encoded_images=images, image_index=index)
    for actual, wanted in zip(found, expected):
        close(actual, wanted, 1e-4)
    assert kinds(recorded) == ["images", "questions"]


@each_device
@each_attention
@pytest.mark.parametrize("settings", [{}, {"min_new_tokens": 6}, {"max_new_tokens": 40}])
@torch.no_grad()
def test_greedy_text(attention, settings, device):
    recorded, plain = make(device, attention)
    for length in (9, 6):  # the second one finds a cache full of the first
        ids = random_ids(2, length).to(device)
        ids[1, :2] = 0
        pixels = random_pixels(2, seed=length).to(device)
        inputs = {"input_ids": ids, "pixel_values": pixels, "max_new_tokens": 8} | settings
        assert torch.equal(recorded.generate(**inputs), plain.generate(**inputs))
    eos = int(plain.generate(**inputs)[0, 9])  # a token that comes in the middle ends the row
    for model in (recorded, plain):
        model.generation_config.eos_token_id = eos
    for _ in range(2):
        assert torch.equal(recorded.generate(**inputs), plain.generate(**inputs))
    assert kinds(recorded).count("text") == 2  # one for each end


@torch.no_grad()
def test_what_only_the_library_can_generate():
    recorded, plain = make()
    inputs = {"input_ids": random_ids(1, 6), "pixel_values": random_pixels(1), "max_new_tokens": 4}
    for settings in (
        {"num_beams": 2},
        {"output_scores": True, "return_dict_in_generate": True},
        {"prefix_allowed_tokens_fn": lambda row, ids: [7]},
    ):
        expected, found = plain.generate(**inputs, **settings), recorded.generate(**inputs, **settings)
        assert torch.equal(getattr(found, "sequences", found), getattr(expected, "sequences", expected))
    assert "text" not in kinds(recorded)


@torch.no_grad()
def test_invalid_inputs_raise_the_errors_of_the_model():
    recorded, _ = make()
    pixels, inputs = random_pixels(1), questions(5, 4)
    recorded.score_yes_no(pixel_values=pixels, **inputs)
    with pytest.raises(ValueError, match="normalized"):
        recorded.score_yes_no(pixel_values=pixels * float("nan"), **inputs)
    for name, column, value, match in (
        ("input_ids", 2, 500, "vocabulary"),
        ("question_ends", 0, 6, "exactly one column"),
        ("input_ids", 8, 3, "EOS"),
    ):
        wrong = {key: tensor.clone() for key, tensor in inputs.items()}
        wrong[name][0, column] = value
        with pytest.raises(ValueError, match=match):
            recorded.score_yes_no(pixel_values=pixels, **wrong)
    prompt = {"input_ids": torch.tensor([[2, 500, 7]]), "pixel_values": pixels}
    with pytest.raises(ValueError, match="vocabulary"):
        recorded.generate(**prompt)


@each_device
@torch.no_grad()
def test_changed_weights_count(device):
    recorded, plain = make(device)
    pixels, inputs = random_pixels(1).to(device), questions(5, 4)
    images = recorded.encode_images(pixels)
    before = recorded.score_yes_no(pixel_values=pixels, **inputs)[0]
    for is_in_place, change in (
        (True, lambda model: model.model.projector.weight.mul_(1.5)),
        (False, lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight * 1.5))),
        (False, lambda model: model.bfloat16().float()),
    ):
        passes = list(recorded.graphs.passes.values())
        for model in (recorded, plain):
            change(model)
        for _ in range(2):
            after = recorded.score_yes_no(pixel_values=pixels, **inputs)[0]
            close(after, plain.score_yes_no(pixel_values=pixels, **inputs)[0], 1e-4)
        assert not torch.equal(after, before)
        is_kept = any(one in passes for one in recorded.graphs.passes.values())
        assert is_kept == is_in_place  # the others read old memory
        before = after
    with pytest.raises(ValueError, match="weights that have changed"):
        recorded.score_yes_no(encoded_images=images, **inputs)


@torch.no_grad()
def test_shapes_are_recorded_when_they_come_again_and_few_are_kept():
    recorded, _ = make(uses_before=1)
    for count in (1, 2, 1):
        recorded.encode_images(random_pixels(count))
    assert kinds(recorded) == ["images"]
    recorded.graphs.uses_before = 0
    sizes = [(length,) * count for length in (3, 20, 40) for count in (1, 2, 3, 4, 6)]
    images = recorded.encode_images(random_pixels(1))
    for size in [*sizes, sizes[0], (60,)]:
        recorded.score_yes_no(encoded_images=images, **questions(*size))
    assert len(recorded.graphs.passes) == KEPT


@each_attention
@torch.no_grad()
def test_recorded_functions_read_no_values(attention):
    """A graph cannot be recorded, nor compiled as a whole, if the CPU reads a value within."""
    recorded, plain = make(text=attention | {"num_hidden_layers": 1})
    pixels, inputs = random_pixels(1), questions(5, 4)
    prompt = {"input_ids": random_ids(1, 6), "pixel_values": pixels, "max_new_tokens": 6}
    recorded.score_yes_no(pixel_values=pixels, **inputs), recorded.generate(**prompt)
    for one in recorded.graphs.passes.values():
        for part in (one.read, one.step) if isinstance(one, GreedyText) else (one,):
            part.function = torch.compile(part.function, fullgraph=True, backend="eager")
    scores = [model.score_yes_no(pixel_values=pixels, **inputs)[0] for model in (recorded, plain)]
    close(*scores)
    assert torch.equal(recorded.generate(**prompt), plain.generate(**prompt))


def test_gradients_copies_and_pickles_work_as_before():
    recorded, plain = make()
    pixels, inputs = random_pixels(1), questions(5, 4)
    recorded.score_yes_no(pixel_values=pixels, **inputs)
    for model in (pickle.loads(pickle.dumps(recorded)), copy.deepcopy(recorded)):
        assert model.graphs.model is model and not model.graphs.passes
    assert recorded.state_dict().keys() == plain.state_dict().keys()
    recorded.model.encode(pixels).key_values[0][0].sum().backward()
    assert recorded.model.projector.weight.grad is not None


@needs_cuda
@torch.no_grad()
def test_a_fused_model_on_a_gpu_does_not_wait():
    plain = make("cuda")[1].bfloat16()
    model = copy.deepcopy(plain).fuse_for_inference()
    inputs, pixels = questions(5, 4), random_pixels(1).to("cuda", torch.bfloat16)
    for _ in range(3):
        model.score_yes_no(pixel_values=pixels, **inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = model.score_yes_no(pixel_values=pixels, **inputs)[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    close(found, plain.score_yes_no(pixel_values=pixels, **inputs)[0], 1e-2)
