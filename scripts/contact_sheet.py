"""Draw a sheet of synthetic scenes with questions and answers, to see what the model is trained on.

python scripts/contact_sheet.py                                    # docs/synthetic.png, 24 scenes
python scripts/contact_sheet.py --output /tmp/sheet.png --num_images 6 --first_seed 100
"""

import random
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

from traffic_vlm.data.questions import Balancer, ask
from traffic_vlm.data.synthetic import contact_sheet, render


ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Arguments:
    output: Path = field(default=ROOT / "docs" / "synthetic.png", metadata={"help": "PNG file to write"})
    num_images: int = field(default=24, metadata={"help": "scenes"})
    questions_per_image: int = field(default=4, metadata={"help": "questions below each"})
    first_seed: int = field(default=20000, metadata={"help": "seed of the first scene"})
    columns: int = 6


def main() -> None:
    [arguments] = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    rng, balancer, items = random.Random(arguments.first_seed), Balancer(), []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.num_images):
        image, scene = render(seed)
        lines = []
        for question in ask(scene, rng, arguments.questions_per_image, balancer):
            lines += textwrap.wrap(f"{question.text} {question.answer}", 40, subsequent_indent="   ")
        items.append((image, lines))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(items, arguments.output, arguments.columns)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
