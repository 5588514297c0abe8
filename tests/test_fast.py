"""Faster passes give the answers of the model's own, before and after its weights change, and leave it unchanged."""

import copy
import weakref

import pytest
import torch
from PIL import Image

from tiny import TINY_TEXT, TINY_TOWER
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.fast_traffic_vlm import fingerprint, is_supported, pack_convolution
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline
from traffic_vlm.vision_traffic_vlm import TrafficVLMConvNorm


IDS = torch.tensor([[1, 9, 30, 41], [1, 12, 7, 5]])
PIXELS = torch.randn(2, 3, 256, 256, generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")


@pytest.fixture
def model() -> TrafficVLMForConditionalGeneration:
    torch.manual_seed(0)
    model = TrafficVLMForConditionalGeneration(TrafficVLMConfig(TINY_TOWER, TINY_TEXT))
    for norm in (module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)):
        norm.running_mean.uniform_(-0.5, 0.5)
        norm.running_var.uniform_(0.5, 2.0)
    return model.eval()


def logits(model, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, PIXELS.to(model.dtype), **kwargs).logits[..., 1:].float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_change_by_rounding_only(model, dtype):
    exact = logits(copy.deepcopy(model).double())
    model = model.to(dtype)
    if not is_supported(model.lm_head.weight):
        pytest.skip("this CPU has no bfloat16 instructions")
    own = logits(model)
    with model.fast_context():
        fused = logits(model)
    assert not torch.equal(fused, own)  # other products
    assert (fused - exact).abs().mean() < 1.5 * (own - exact).abs().mean()


@pytest.mark.parametrize(("kernel_size", "stride", "groups"), [(1, 1, 1), (1, 2, 1), (1, 1, 16), (5, 2, 16)])
def test_a_packed_convolution_gives_the_same(kernel_size, stride, groups):
    torch.manual_seed(0)
    block = TrafficVLMConvNorm(16, 16, kernel_size, stride, groups).eval()
    x = torch.randn(2, 16, 9, 11)  # not with channels last
    with torch.no_grad():
        torch.testing.assert_close(pack_convolution(block)(x), block(x), atol=1e-5, rtol=1e-5)


def traces(model) -> list[set[str]]:
    """Attributes of each module; a faster pass would be one more."""
    return [set(vars(module)) for module in model.modules()]


def test_the_context_leaves_no_trace(model):
    before, weights, own = traces(model), copy.deepcopy(model.state_dict()), logits(model)
    fast = model.fast_context()
    with pytest.raises(ZeroDivisionError), fast:
        with fast, model.fast_context():  # again, as in another thread, and in another pipeline
            assert not torch.equal(logits(model), own)
        assert not torch.equal(logits(model), own) and traces(model) != before
        raise ZeroDivisionError
    assert traces(model) == before and torch.equal(logits(model), own)
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(one, weights[name]) for name, one in model.state_dict().items())
    packed = [weakref.ref(forward.run) for forward in fast.forwards if forward.run is not None]
    assert len(packed) > 20 and packed[0]() is not None
    del fast
    assert not any(one() for one in packed)


def test_training_after_asking_gives_the_same_weights(model, processor):
    asked, pipelines = copy.deepcopy(model), []
    for one in (model, asked):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(2):
            one.train()(IDS, PIXELS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            one.eval()
            if one is asked:
                before = traces(asked)
                pipelines.append(TrafficVLMPipeline(model=asked, processor=processor, device="cpu"))
                pipelines[0](Image.new("RGB", (60, 40)), ["Is there a car?", "What is ahead?"])
                assert traces(asked) == before
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, asked.state_dict()[name]), name


def replace_parameter(model):
    model.model.projector.weight = torch.nn.Parameter(model.model.projector.weight * 1.5)


def replace_module(model):
    old = model.model.projector
    model.model.projector = torch.nn.Linear(old.in_features, old.out_features)
    model.model.projector.load_state_dict({"weight": old.weight * 1.5, "bias": old.bias})


CHANGES = {
    "data in place": lambda model: model.model.projector.weight.data.mul_(1.5),
    "other parameter": replace_parameter,
    "other module": replace_module,
    "statistics": lambda model: model.model.vision_tower.convolutions.stem[1].running_mean.add_(1.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_changed_weights_count_in_the_next_answer(model, change):
    with (fast := model.fast_context()):
        old, encoded = logits(model), model.encode_images(PIXELS)
    change(model)
    expected = logits(model)
    assert (expected - old).abs().max() > 1e-2
    with fast:
        torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)
        with pytest.raises(ValueError, match="weights that have changed"):
            model(IDS, encoded_images=encoded)


@torch.no_grad()
def test_a_change_of_one_row_counts_in_the_next_answer(model):
    with (fast := model.fast_context()):
        old = logits(model)
    model.lm_head.weight[9].mul_(3)  # too few bytes for the checksum
    with fast:
        new = logits(model)
    assert not torch.equal(new, old)
    torch.testing.assert_close(new, logits(model), atol=1e-4, rtol=1e-4)


def test_a_checksum_is_that_of_the_tensor_alone():
    module, storage = torch.nn.Module(), torch.zeros(3, 100)
    module.register_buffer("middle", storage[1])
    before = fingerprint(module)[1]
    storage[::2] = 1
    assert fingerprint(module)[1] == before
    storage[1] = 1
    assert fingerprint(module)[1] != before


def test_in_the_context_a_model_can_be_saved_but_not_copied(model, tmp_path):
    own = logits(model)
    with model.fast_context():
        logits(model)
        with pytest.raises(TypeError, match=r"copy a model outside of fast_context\(\)"):
            copy.deepcopy(model)
        model.save_pretrained(tmp_path)
    assert torch.equal(logits(TrafficVLMForConditionalGeneration.from_pretrained(tmp_path).eval()), own)
    copy.deepcopy(model)


def test_unusual_passes_are_left_to_the_model(model):
    before = traces(model)
    with model.fast_context():
        model(IDS, PIXELS, labels=IDS).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert model(IDS, PIXELS).logits.dtype == torch.bfloat16
        with torch.no_grad():
            model.model.vision_tower.train()(PIXELS)  # the statistics of its norms change
    assert model.model.vision_tower.convolutions.stem[1].num_batches_tracked == 1
    assert traces(model) == before
