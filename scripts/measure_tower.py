"""Time the encoding of one image for each neck of the tower, and a training step with and without float32 backward.

    python scripts/measure_tower.py

Prints ratios of the best times over several rounds of one run, in bfloat16 on all cores.
"""

import time
from collections.abc import Callable
from unittest.mock import patch

import torch

from traffic_vlm.configuration_traffic_vlm import TrafficVLMVisionConfig
from traffic_vlm.vision_traffic_vlm import TrafficVLMDepthwiseConv2d, TrafficVLMVisionModel


LIGHT = {"neck": "depthwise", "neck_width": 384, "intermediate_size": 1536}
NECKS = {
    "two transformer layers of width 768 (shipped)": {},
    "two depthwise layers of width 384": LIGHT,
    "two depthwise layers of width 256": LIGHT | {"neck_width": 256, "intermediate_size": 1024},
    "one transformer layer of width 384": {"num_hidden_layers": 1, "neck_width": 384, "intermediate_size": 1536},
    "one transformer layer of width 768": {"num_hidden_layers": 1},
}
STEP_IMAGES, STEP_SIZE = 48, 192


def best_seconds(functions: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The best time of each function in seconds; the functions take turns."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def passes() -> dict[str, Callable[[], None]]:
    """A forward pass of one image through a tower with each neck."""
    image = torch.randn(1, 3, 224, 224, dtype=torch.bfloat16)

    def forward_pass(fields: dict) -> Callable[[], None]:
        tower = TrafficVLMVisionModel(TrafficVLMVisionConfig(**fields)).bfloat16().eval()
        return torch.inference_mode()(lambda: tower(image))

    return {name: forward_pass(fields) for name, fields in NECKS.items()}


def steps() -> dict[str, Callable[[], None]]:
    """A training step of the light tower with the depthwise convolutions of PyTorch, and with ours."""
    tower, pixels = (
        TrafficVLMVisionModel(TrafficVLMVisionConfig(**LIGHT)),
        torch.randn(STEP_IMAGES, 3, *[STEP_SIZE] * 2),
    )

    def with_our_convolutions() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            tower.train()(pixels).last_hidden_state.float().mean().backward()

    def with_torch_convolutions() -> None:
        with patch.object(TrafficVLMDepthwiseConv2d, "forward", torch.nn.Conv2d.forward):
            with_our_convolutions()

    return {
        "backward in bfloat16": with_torch_convolutions,
        "backward in float32 where that is faster": with_our_convolutions,
    }


if __name__ == "__main__":
    seconds = best_seconds(passes(), rounds=60)
    for name, value in seconds.items():
        print(f"{name}: {value / next(iter(seconds.values())):.2f} of the shipped tower's pass")
    for name, value in best_seconds(steps(), rounds=4).items():
        print(f"training step, {name}: {STEP_IMAGES / value:.1f} images/s")
