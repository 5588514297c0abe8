"""Incomplete and damaged weights are refused, and folders without a full model."""

import pytest

from tiny import tiny_config, tiny_model
from traffic_vlm.common.files import DataError
from traffic_vlm.common.loading import load_weights
from traffic_vlm.serving.options import ModelOptions


def test_unexpected_and_missing_weights_are_named(tmp_path):
    tiny_model(text={"num_hidden_layers": 4}).save_pretrained(tmp_path)
    tiny_config().save_pretrained(tmp_path)  # of 2 layers
    with pytest.raises(ValueError, match=r"unexpected tensors: model\.text_model\.layers\.2\..* do not belong"):
        load_weights(tmp_path)
    tiny_config(text={"num_hidden_layers": 5}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the weights have no model\.text_model\.layers\.4\."):
        load_weights(tmp_path)


@pytest.mark.parametrize("names", [[], ["adapter_config.json", "adapter_model.safetensors"]])
def test_a_folder_without_a_full_model_is_refused(tmp_path, names):
    for name in names:
        (tmp_path / name).touch()
    message = "has no model: give a folder with config.json; PEFT merges an adapter into a model"
    for load in (load_weights, ModelOptions):
        with pytest.raises(DataError, match=f"{tmp_path} {message}"):
            load(str(tmp_path))


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    for name in (str(tmp_path), "nowhere"):
        with pytest.raises(OSError, match=f"{name}: no model can be loaded from this folder or the Hub: "):
            load_weights(name)
