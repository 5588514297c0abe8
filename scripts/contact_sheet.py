"""Draw a sheet of synthetic scenes with questions and answers, to see what the model is trained on.

python scripts/contact_sheet.py                                    # docs/synthetic.png, 24 scenes
python scripts/contact_sheet.py --output /tmp/sheet.png --num_images 6 --first_seed 100
"""

import random
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from traffic_vlm.common.options import option, option_parser
from traffic_vlm.data.questions import Balancer, ask
from traffic_vlm.data.synthetic import render
from traffic_vlm.data.truth import GroundTruth
from traffic_vlm.scripts import command


COLUMNS, QUESTIONS = 6, 4  # scenes in a row, questions below each


@dataclass
class SheetOptions:
    output: Path = option(Path(__file__).resolve().parent.parent / "docs" / "synthetic.png", "PNG file to write")
    num_images: int = option(24, "number of scenes")
    first_seed: int = option(20000, "seed of the first scene")

    def __post_init__(self) -> None:
        if self.num_images < 1:
            raise ValueError(f"--num_images must be at least 1, got {self.num_images}")


@command("data")
def main() -> None:
    [options] = option_parser([SheetOptions], __doc__).parse_args_into_dataclasses()
    rng, balancer, items = random.Random(options.first_seed), Balancer(), []
    for seed in range(options.first_seed, options.first_seed + options.num_images):
        image, scene = render(seed)
        texts = [f"{one.text} {one.answer}" for one in ask(GroundTruth(scene), rng, QUESTIONS, balancer)]
        items.append((image, [line for text in texts for line in textwrap.wrap(text, 40, subsequent_indent="   ")]))
    width, height = items[0][0].size
    step = height + 6 + 11 * max(len(lines) for _, lines in items)
    rows = -(-len(items) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (width + 6) + 6, rows * step + 6), "white")
    pen = ImageDraw.Draw(sheet)
    for index, (image, lines) in enumerate(items):
        x, y = 6 + index % COLUMNS * (width + 6), 6 + index // COLUMNS * step
        sheet.paste(image, (x, y))
        pen.multiline_text((x, y + height + 1), "\n".join(lines), fill="black", font_size=10, spacing=1)
    sheet.save(options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    sys.exit(main())
