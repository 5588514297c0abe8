"""Damaged and incomplete weights are refused."""

import pytest
from safetensors.torch import load_file, save_file

from tiny import tiny_config, tiny_model
from traffic_vlm.loading import load_weights


def test_unexpected_and_missing_weights_are_named(tmp_path):
    tiny_model(text={"num_hidden_layers": 4}).save_pretrained(tmp_path)
    tiny_config().save_pretrained(tmp_path)  # of 2 layers
    with pytest.raises(ValueError, match=r"unexpected tensors: model\.text_model\.layers\.2\..* do not belong"):
        load_weights(tmp_path)
    tiny_config(text={"num_hidden_layers": 5}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the weights have no model\.text_model\.layers\.4\."):
        load_weights(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(tmp_path, value):
    tiny_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"training_head.weight": weights["model.projector.bias"].clone()}, file, {"format": "pt"})
    load_weights(tmp_path)  # heads of training are no part of the model
    weights["model.projector.bias"][3] = value
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"NaN or infinite weights in model\.projector\.bias \(1 in all\)"):
        load_weights(tmp_path)
