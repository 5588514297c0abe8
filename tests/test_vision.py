"""The vision tower: shapes, sizes, places, batches, gradients, and its configuration."""

import pytest
import torch

from tiny import TINY_TEXT, TINY_TOWER
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig, TrafficVLMVisionConfig
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from traffic_vlm.vision_traffic_vlm import TrafficVLMConvBlock, TrafficVLMVisionModel, cell_coordinates


def tiny_tower(seed: int = 0, **fields) -> TrafficVLMVisionModel:
    torch.manual_seed(seed)
    return TrafficVLMVisionModel(TrafficVLMVisionConfig(**(TINY_TOWER | fields))).eval()


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("height", "width"), [(224, 224), (64, 96), (16, 16)])
def test_a_token_for_each_16_by_16_pixels(height, width):
    tokens = tiny_tower()(pixels(2, 3, height, width)).last_hidden_state
    assert tokens.shape == (2, height // 16 * (width // 16), 24)
    assert tiny_tower()(pixels(2, 3, 32, 32), return_dict=False)[0].shape == (2, 4, 24)


def test_tokens_stand_row_by_row():
    tower = tiny_tower(num_hidden_layers=1)
    tower.layers = torch.nn.ModuleList()  # attention would carry the change everywhere
    plain = pixels(1, 3, 256, 256)
    changed = plain.clone()
    changed[:, :, 96:112, 144:160] += 5.0  # row 6, column 9 of 16 × 16
    difference = (tower(changed).last_hidden_state - tower(plain).last_hidden_state).abs().sum(-1)[0]
    rows, columns = difference.reshape(16, 16).nonzero(as_tuple=True)
    assert abs(rows.float().mean() - 6) < 0.6 and abs(columns.float().mean() - 9) < 0.6
    assert len(rows) < 16 * 16 / 2


def test_an_image_gives_the_same_tokens_alone_and_in_a_batch():
    tower, batch = tiny_tower(), pixels(3, 3, 64, 64)
    torch.testing.assert_close(
        tower(batch).last_hidden_state[1:2], tower(batch[1:2]).last_hidden_state, atol=1e-5, rtol=1e-5
    )


def test_places_do_not_depend_on_the_size_of_the_grid():
    like = torch.zeros(1)
    small, large = cell_coordinates(3, 3, 4, like), cell_coordinates(9, 9, 4, like)
    torch.testing.assert_close(small[4], large[40])  # the middle
    assert len({tuple(row) for row in large.tolist()}) == 81  # no two places look alike


def test_a_block_adds_to_its_input():
    block = TrafficVLMConvBlock(4, 4, stride=1).eval()
    block.norm2.weight.data.zero_()
    x = pixels(1, 4, 8, 8)
    torch.testing.assert_close(block(x), x.relu())


def test_gradient_checkpointing_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        tower = tiny_tower().train()
        if checkpointing:
            tower.gradient_checkpointing_enable()
        tower(pixels(2, 3, 64, 64)).last_hidden_state.square().mean().backward()
        gradients.append([parameter.grad for parameter in tower.parameters()])
    for plain, checkpointed in zip(*gradients):
        torch.testing.assert_close(plain, checkpointed)


def test_every_parameter_learns_and_images_are_told_apart():
    tower = tiny_tower().train()
    tower(pixels(2, 3, 64, 64)).last_hidden_state.square().sum().backward()
    assert all(parameter.grad is not None for parameter in tower.parameters())
    tokens = tower.eval()(pixels(2, 3, 64, 64)).last_hidden_state
    assert (tokens[0] - tokens[1]).abs().max() > 1e-3


def test_the_full_model_saves_and_loads_it(tmp_path):
    torch.manual_seed(0)
    model = TrafficVLMForConditionalGeneration(TrafficVLMConfig(TINY_TOWER, TINY_TEXT))
    model.train().get_image_features(pixels(2, 3, 224, 224))  # moves the statistics of the norms
    model.eval().save_pretrained(tmp_path)
    again = TrafficVLMForConditionalGeneration.from_pretrained(tmp_path)
    assert again.config.vision_config.conv_widths == TINY_TOWER["conv_widths"]
    image = pixels(1, 3, 224, 224)
    assert torch.equal(again.get_image_features(image), model.get_image_features(image))


def test_convolutions_find_their_weights_channels_last(tmp_path):
    tower = tiny_tower()
    tower(pixels(1, 3, 32, 32)).last_hidden_state.sum().backward()
    tower.save_pretrained(tmp_path)
    for model in (tower, TrafficVLMVisionModel.from_pretrained(tmp_path)):
        model(pixels(1, 3, 32, 32))
        convolutions = [weight for weight in model.parameters() if weight.ndim == 4]
        assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in convolutions)
        assert all(weight.shape[1] > 1 for weight in convolutions)  # else it says nothing


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"conv_depths": [2, 3]}, ["conv_depths=[2, 3]", "conv_widths=[8, 8, 12, 16]"]),
        ({"patch_size": 8}, ["patch_size=8", "conv_widths=[8, 8, 12, 16]"]),
        ({"conv_widths": [8, 0, 12, 16]}, ["conv_widths[1]=0"]),
        ({"hidden_act": "sliu"}, ["hidden_act='sliu'"]),
    ],
)
def test_a_tower_that_cannot_work_is_refused(fields, named):
    with pytest.raises(ValueError) as error:
        TrafficVLMVisionConfig(**(TINY_TOWER | fields))
    assert all(name in str(error.value) for name in named)
