"""Memory of training and inference, against sizes counted by hand."""

import json
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tiny import ROOT, TINY_TOWER, random_ids, random_pixels, save_folder, tiny_config, tiny_model
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration


script = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "measure_memory.py")))


def test_state_of_a_linear_layer():
    layer = nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    # 3 x 5 weights and 5 biases of 4 bytes; AdamW has two numbers for each, and a counter of 4 bytes for each tensor.
    assert script.state_bytes(layer, optimizer) == {"weights": 80, "gradients": 80, "optimizer": 168}


def test_frozen_weights_have_no_gradients_and_no_states():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    assert script.state_bytes(model, optimizer) == {"weights": 120, "gradients": 40, "optimizer": 84}


def test_shared_storages_count_once():
    tensor = torch.zeros(4, 6)
    assert script.tensor_bytes([tensor, tensor.T, tensor[1:], torch.zeros(3)]) == 96 + 12


def test_activations_of_two_linear_layers():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    inputs = torch.randn(7, 3)
    # The input, and the output of tanh, which tanh and the second layer both need; no weights.
    assert script.activation_bytes(model, lambda: model(inputs)) == (7 * 3 * 4 + 7 * 5 * 4, 0)


def test_checkpointing_keeps_only_the_inputs_of_layers():
    torch.manual_seed(0)
    vision = {"model_type": "traffic_vlm_vision", "image_size": 256, "patch_size": 16} | TINY_TOWER
    model = TrafficVLMForConditionalGeneration(tiny_config(vision=vision)).train()

    def loss(images):
        ids = random_ids(images, 6)
        return model(ids, random_pixels(images), labels=ids, use_cache=False).loss

    found = script.activations(model, loss)
    assert 0 < found["layer"] < found["checkpointing"] < found["all"]
    model.gradient_checkpointing_disable()
    three, _ = script.activation_bytes(model, lambda: loss(3))
    assert three == pytest.approx(found["step"] + 3 * found["all"], rel=1e-3)


def test_images_that_fit():
    options = script.Options("runs", memory_gb=6.0, reserved_gb=1.0)
    assert script.images_that_fit(4_000_000_000, 300_000_000, 100_000_000, options) == 3
    assert script.images_that_fit(5_100_000_000, 300_000_000, 0, options) == 0
    with pytest.raises(SystemExit, match=r"reserved_gb must be in \[0, memory_gb=1\), got 1"):
        script.Options("runs", memory_gb=1.0)


def test_the_report_of_a_tiny_model(tmp_path, monkeypatch, capsys):
    model = tiny_model()
    folder = save_folder(model, tmp_path / "model")
    command = ["measure_memory.py", "--output_dir", str(tmp_path / "out"), "--model", str(folder)]
    command += ["--questions_per_image", "4", "--timed_images", "1", "--repeats", "1", "--bfloat16", "false"]
    monkeypatch.setattr(sys, "argv", command)
    script.main()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    weights = sum(weight.nbytes for weight in model.parameters())
    assert report["training"]["state"]["weights"] == weights + sum(buffer.nbytes for buffer in model.buffers())
    assert 0 <= report["training"]["state"]["optimizer"] - 2 * weights <= 4 * len(list(model.parameters()))
    # Keys and values of 2 layers, 2 heads of size 8, 256 patches, 4 bytes.
    assert report["inference"]["image"] == 2 * 2 * 2 * 8 * 256 * 4
    assert report["training"]["checkpointing_time"] > 0
    # What a pass saves exists at its end, so the measured peak cannot be smaller.
    assert report["training"]["peak"]["all"] >= report["training"]["activations"]["float32"]["all"]
    assert (tmp_path / "out" / "report.md").read_text() in capsys.readouterr().out


def test_a_folder_without_weights_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["measure_memory.py", "--output_dir", str(tmp_path), "--model", "missing"])
    with pytest.raises(SystemExit, match="--model missing: missing: no such folder"):
        script.main()
