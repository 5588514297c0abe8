"""Small seeded models, of the structure of the full model at a thousandth of its size, and helpers of the tests."""

import importlib.util
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from traffic_vlm.common.files import ROOT
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig, TrafficVLMTextConfig
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration, TrafficVLMTextModel
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor


TINY_SIZE = 256  # side of images in pixels
TINY_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_dropout": 0.0,
    # Larger than in training, so that differences between outputs exceed the tests' tolerances.
    "initializer_range": 0.3,
}
TINY_TOWER = {
    "conv_widths": [8, 8, 8, 12, 12, 16],
    "conv_depths": [1, 1, 2, 1],
    "conv_kernel_sizes": [3, 3, 5, 3],
    "conv_strides": [2, 2, 2, 2],
    "hidden_size": 24,
    "neck_width": 24,
    "intermediate_size": 32,
    "image_size": 256,
    "pool_above": None,
}
TINY_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 256,
    "patch_size": 16,
}
LATENT = {"kv_latent_size": 12, "rope_head_dim": 6, "image_latent_size": 10}
each_attention = pytest.mark.parametrize("attention", [{}, LATENT], ids=["grouped_query", "latent"])


def tiny_text_config(**fields) -> TrafficVLMTextConfig:
    return TrafficVLMTextConfig(**(TINY_TEXT | {"encoder_hidden_size": 24} | fields))


def tiny_config(text=None, vision=None, **fields) -> TrafficVLMConfig:
    return TrafficVLMConfig(TINY_VISION | (vision or {}), TINY_TEXT | (text or {}), **fields)


def tiny_decoder(seed: int = 0, **fields) -> TrafficVLMTextModel:
    torch.manual_seed(seed)
    return TrafficVLMTextModel(tiny_text_config(**fields)).eval()


def tiny_model(seed: int = 0, **fields) -> TrafficVLMForConditionalGeneration:
    torch.manual_seed(seed)
    return TrafficVLMForConditionalGeneration(tiny_config(**fields)).eval()


def any_size_model(**vision) -> TrafficVLMForConditionalGeneration:
    """A tiny model with the project's own tower, which reads images of any size; above 256 pixels it pools tokens."""
    return tiny_model(vision=TINY_TOWER | {"model_type": "traffic_vlm_vision", "pool_above": 256} | vision)


def locating_model() -> TrafficVLMForConditionalGeneration:
    """A tiny model with a center head that sees buses and cars in many places, and always says yes (0.5)."""
    model = any_size_model(located={"bus": 0.0, "car": 0.0})
    text = model.config.get_text_config()
    with torch.no_grad():
        model.lm_head.weight[text.no_token_id] = model.lm_head.weight[text.yes_token_id]
        heat = model.model.vision_tower.center_head.heat
        heat.weight.normal_()
        heat.bias.zero_()
    return model


def yes_no_model(**fields) -> TrafficVLMForConditionalGeneration:
    """A tiny model whose answers are all yes or no."""
    model = tiny_model(**fields)
    text = model.config.get_text_config()
    with torch.no_grad():
        yes = model.lm_head.weight[text.yes_token_id].clone()
        model.lm_head.weight.zero_()
        model.lm_head.weight[text.yes_token_id], model.lm_head.weight[text.no_token_id] = yes, -yes
    return model


def tiny_processor(**fields) -> TrafficVLMProcessor:
    """The processor of the repository, for the smaller images of tiny models."""
    processor = TrafficVLMProcessor.from_pretrained(ROOT, **fields)
    processor.image_processor.size = {"height": TINY_SIZE, "width": TINY_SIZE}
    return processor


def save_folder(model: TrafficVLMForConditionalGeneration, folder: Path) -> Path:
    """Save a model folder: this model, and the processor of the repository."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / name, folder)
    fields = json.loads((ROOT / "processor_config.json").read_text())
    fields["image_processor"]["size"] = {"height": TINY_SIZE, "width": TINY_SIZE}
    (folder / "processor_config.json").write_text(json.dumps(fields))
    return folder


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.detach(), expected.detach().to(actual.dtype), rtol=tolerance, atol=tolerance)


def count_calls(module: torch.nn.Module) -> list[int]:
    """A list that grows by one element with each forward pass of the module."""
    calls: list[int] = []
    module.register_forward_hook(lambda *_: calls.append(1))
    return calls


@cache
def load_script(name: str) -> ModuleType:
    """scripts/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / f"scripts/{name}.py")
    sys.modules[spec.name] = script = importlib.util.module_from_spec(spec)  # dataclasses look up their module
    spec.loader.exec_module(script)
    return script


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_process(script: str, *arguments: object, **options) -> subprocess.Popen:
    """Start a script of the repository in a new process, as people do. `options` are those of `Popen`."""
    # Ray sets variables in this process. With PYTHONSAFEPATH the folder of the script would not be on the path.
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("RAY_", "PYTHONSAFEPATH"))}
    # Ray's workers would have nice 15, and starve beside the other tests.
    environment = kept | {"RAY_worker_niceness": "0"} | options.pop("env", {})
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, **{"stdout": pipe, "stderr": pipe, "text": True} | options)


def new_process(program: str, folder: Path) -> str:
    """What code prints in a new process in a folder, without this package and with an empty cache of remote code."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    kept |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": f"{folder}/modules", "HF_HOME": f"{folder}/home"}
    hide = "import sys; sys.modules['traffic_vlm'] = None\nimport torch; torch.set_num_threads(1)\n"
    command = [sys.executable, "-c", hide + textwrap.dedent(program)]
    run = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=300)
    assert not run.returncode, run.stderr[-4000:]
    return run.stdout


def picture(seed: int = 0, size=(64, 48)) -> Image.Image:
    """An image of random pixels; `size` is (width, height)."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))


def png(seed: int = 0, size=(64, 48)) -> bytes:
    """A PNG file of such an image."""
    stream = io.BytesIO()
    picture(seed, size).save(stream, "png")
    return stream.getvalue()


def close_to(item: dict) -> dict:
    """An item whose numbers may differ as they do in other passes."""
    return {name: pytest.approx(value, abs=1e-4) if type(value) is float else value for name, value in item.items()}


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(6, 500, shape, generator=torch.Generator().manual_seed(seed))


def random_pixels(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, 256, 256, generator=torch.Generator().manual_seed(seed))


def pack(questions: list[torch.Tensor], padding: int = 0) -> dict[str, torch.Tensor]:
    """Pack questions [L] in one row [1,L] as the processor does, with `padding` pads on the left."""
    lengths = [len(question) for question in questions]
    pads = torch.zeros(padding, dtype=torch.long)
    segments = [torch.full((length,), index + 1) for index, length in enumerate(lengths)]
    return {
        "input_ids": torch.cat([pads, *questions])[None],
        "attention_mask": torch.cat([pads, torch.ones(sum(lengths), dtype=torch.long)])[None],
        "position_ids": torch.cat([pads, *(torch.arange(length) for length in lengths)])[None],
        "segment_ids": torch.cat([pads, *segments])[None],
        "question_ends": (torch.tensor(lengths).cumsum(0) - 1 + padding)[None],
    }


def stack(*rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Packed rows of one length and different numbers of questions as one batch."""
    most = max(row["question_ends"].shape[1] for row in rows)
    pad = torch.nn.functional.pad
    ends = [pad(one["question_ends"], (0, most - one["question_ends"].shape[1]), value=-1) for one in rows]
    rows = tuple(row | {"question_ends": ends[i]} for i, row in enumerate(rows))
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
