"""`fuse_for_inference`: the same answers as the model's own passes, before and after its weights change."""

import copy
import pickle

import pytest
import torch

from tiny import TINY_TEXT, TINY_TOWER
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.fusing_traffic_vlm import is_supported, pack_convolution
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration
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
    fused = logits(model.fuse_for_inference())
    assert not torch.equal(fused, own)  # other products
    assert (fused - exact).abs().mean() < 1.5 * (own - exact).abs().mean()


@pytest.mark.parametrize(("kernel_size", "stride", "groups"), [(1, 1, 1), (1, 2, 1), (1, 1, 16), (5, 2, 16)])
def test_a_packed_convolution_gives_the_same(kernel_size, stride, groups):
    torch.manual_seed(0)
    block = TrafficVLMConvNorm(16, 16, kernel_size, stride, groups).eval()
    x = torch.randn(2, 16, 9, 11)  # not with channels last
    with torch.no_grad():
        torch.testing.assert_close(pack_convolution(block)(x), block(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_suit_all_image_sizes(dtype, capfd):
    block = TrafficVLMConvNorm(1152, 320).eval().to(dtype)
    if not is_supported(block[0].weight):
        pytest.skip("this CPU has no bfloat16 instructions")
    packed = pack_convolution(block)
    for shape in ((1, 1152, 8, 8), (2, 1152, 8, 8), (1, 1152, 10, 10)):
        x = torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last)
        with torch.no_grad(), torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
            y = packed(x)
        assert y.is_contiguous(memory_format=torch.channels_last)
    log = capfd.readouterr().out
    assert ",exec," in log and "reorder,simple:any" not in log  # oneDNN's slowest way to change a layout


def test_changed_weights_are_packed_again(model):
    logits(model.fuse_for_inference())
    other = copy.deepcopy(model)
    logits(other)  # a copy packs its own weights, before they change
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
        next(module for module in other.modules() if isinstance(module, torch.nn.BatchNorm2d)).running_mean.add_(1.0)
    plain = TrafficVLMForConditionalGeneration(model.config).eval()
    plain.load_state_dict(other.state_dict())
    torch.testing.assert_close(logits(other), logits(plain), atol=1e-4, rtol=1e-4)
    assert (logits(other) - logits(model)).abs().max() > 1e-2


def test_training_moving_and_saving_work_as_before(model, tmp_path):
    own = model.state_dict()
    model.fuse_for_inference()
    logits(model)
    assert model.state_dict().keys() == own.keys()
    model.save_pretrained(tmp_path)
    assert pickle.loads(pickle.dumps(model)).state_dict().keys() == own.keys()
    model.train()(IDS, PIXELS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.model.vision_tower.parameters())
    half = model.eval().half()  # oneDNN has no float16 on CPUs: the own passes are used
    assert logits(half).isfinite().all()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model.float()(IDS, PIXELS).logits.dtype == torch.bfloat16
