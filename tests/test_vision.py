"""The vision tower: image sizes, positions, gradients and statistics."""

import pytest
import torch

from tiny import TINY_TOWER
from traffic_vlm.configuration_traffic_vlm import TrafficVLMVisionConfig
from traffic_vlm.vision_traffic_vlm import TrafficVLMDepthwiseConv2d, TrafficVLMVisionModel, patch_coordinates


def tiny_tower(seed: int = 0, **fields) -> TrafficVLMVisionModel:
    torch.manual_seed(seed)
    return TrafficVLMVisionModel(TrafficVLMVisionConfig(**(TINY_TOWER | fields))).eval()


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_tokens_are_in_row_major_order():
    tower = tiny_tower()
    tower.layers = torch.nn.ModuleList()  # they would spread the change
    plain = pixels(1, 3, 320, 320)
    changed = plain.clone()
    changed[:, :, 96:112, 224:240] += 5.0  # row 6, column 14 of 20 × 20
    difference = (tower(changed).last_hidden_state - tower(plain).last_hidden_state).abs().sum(-1)[0]
    rows, columns = difference.reshape(20, 20).nonzero(as_tuple=True)
    assert abs(rows.float().mean() - 6) < 2 and abs(columns.float().mean() - 14) < 2  # coarse maps blur
    assert len(rows) < 20 * 20 / 2


def test_the_place_of_a_token_does_not_depend_on_the_size_of_the_image():
    small, large = (patch_coordinates(size, size, 4, torch.ones(1)) for size in (3, 9))
    torch.testing.assert_close(small[4], large[40])  # the center


def test_a_layer_keeps_the_shape_and_reads_7_by_7_patches():
    tower = tiny_tower(neck_width=12, conv_depths=[1, 1, 1, 1])
    assert tower(pixels(2, 3, 64, 96)).last_hidden_state.shape == (2, 24, 24)
    layer, x = tower.layers[0], pixels(1, 15 * 15, 12)
    changed = x.clone()
    changed[0, 7 * 15 + 7] += 1.0
    rows, columns = (layer(x, (15, 15)) != layer(changed, (15, 15))).any(-1)[0].reshape(15, 15).nonzero(as_tuple=True)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (4, 10, 4, 10)


@pytest.mark.parametrize(("kernel_size", "stride"), [(3, 1), (5, 1), (3, 2), (5, 2), (7, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_depthwise_gradients_in_bfloat16_equal_those_of_torch(kernel_size, stride, dtype):
    torch.manual_seed(0)
    convolution, gradients = TrafficVLMDepthwiseConv2d(4, kernel_size, stride).to(dtype), []
    for forward in (TrafficVLMDepthwiseConv2d.forward, torch.nn.Conv2d.forward):
        x = pixels(2, 4, 12, 12).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = forward(convolution, x)
        assert y.dtype is torch.bfloat16
        y.float().square().sum().backward()
        gradients.append([x.grad, convolution.weight.grad])
        convolution.weight.grad = None
    for actual, expected in zip(*gradients):
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant):
    gradients = []
    for checkpoints in (False, True):
        tower = tiny_tower().train()
        if checkpoints:
            tower.gradient_checkpointing_enable({"use_reentrant": reentrant})
        tower(pixels(4, 3, 64, 64).requires_grad_()).last_hidden_state.square().sum().backward()
        gradients.append([weight.grad for weight in tower.parameters()])
    torch.testing.assert_close(*gradients)
    assert all(gradient.any() for gradient in gradients[0])


def running_statistics(tower: TrafficVLMVisionModel) -> dict[str, torch.Tensor]:
    buffers = tower.state_dict()
    return {name: value.clone() for name, value in buffers.items() if "running" in name or "num_batches" in name}


def test_frozen_batch_norms_keep_their_statistics_in_training():
    tower, x = tiny_tower(), pixels(4, 3, 64, 64)
    before, expected = running_statistics(tower), tower(x).last_hidden_state
    tower.train().requires_grad_(False)
    torch.testing.assert_close(tower(x).last_hidden_state, expected)
    torch.testing.assert_close(running_statistics(tower), before, rtol=0, atol=0)
    tower.convolutions.head.requires_grad_(True)
    tower(x)
    moved = {name for name, value in running_statistics(tower).items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if name.startswith("convolutions.head.")}
