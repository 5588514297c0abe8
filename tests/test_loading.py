"""Incomplete and damaged weights are refused."""

import pytest

from tiny import tiny_config, tiny_model
from traffic_vlm.common.loading import load_weights


def test_unexpected_and_missing_weights_are_named(tmp_path):
    tiny_model(text={"num_hidden_layers": 4}).save_pretrained(tmp_path)
    tiny_config().save_pretrained(tmp_path)  # of 2 layers
    with pytest.raises(ValueError, match=r"unexpected tensors: model\.text_model\.layers\.2\..* do not belong"):
        load_weights(tmp_path)
    tiny_config(text={"num_hidden_layers": 5}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the weights have no model\.text_model\.layers\.4\."):
        load_weights(tmp_path)


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    tiny_model().save_pretrained(tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"cut")
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "cut"), str(tmp_path / "empty"), "nowhere"):
        with pytest.raises(OSError, match=f"{name}: no model can be loaded from this folder or the Hub: "):
            load_weights(name)
