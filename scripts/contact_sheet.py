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

from traffic_vlm.data.ground_truth import GroundTruth
from traffic_vlm.data.questions import Balancer, ask
from traffic_vlm.data.synthetic import render
from traffic_vlm.options import option, option_parser
from traffic_vlm.scripts import command


ROOT = Path(__file__).resolve().parent.parent


@dataclass
class SheetOptions:
    output: Path = option(ROOT / "docs" / "synthetic.png", "PNG file to write")
    num_images: int = option(24, "number of scenes")
    questions_per_image: int = option(4, "questions below each scene")
    first_seed: int = option(20000, "seed of the first scene")
    columns: int = option(6, "scenes in a row")

    def __post_init__(self) -> None:
        for name, minimum in {"num_images": 1, "questions_per_image": 0, "columns": 1}.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"--{name} must be at least {minimum}, got {getattr(self, name)}")
        if self.output.suffix.lower() != ".png" or self.output.is_dir():
            raise ValueError(f"--output must be a PNG file, got {str(self.output)!r}")


def contact_sheet(items: list[tuple[Image.Image, list[str]]], path: Path, columns: int) -> None:
    """Write images with lines of text below each as one PNG; make its folder if it is missing."""
    width, height = items[0][0].size
    step = height + 6 + 11 * max(len(lines) for _, lines in items)
    rows = -(-len(items) // columns)
    sheet = Image.new("RGB", (columns * (width + 6) + 6, rows * step + 6), "white")
    pen = ImageDraw.Draw(sheet)
    for index, (image, lines) in enumerate(items):
        x, y = 6 + index % columns * (width + 6), 6 + index // columns * step
        sheet.paste(image, (x, y))
        pen.multiline_text((x, y + height + 1), "\n".join(lines), fill="black", font_size=10, spacing=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


@command("data")
def main() -> None:
    [options] = option_parser([SheetOptions], __doc__).parse_args_into_dataclasses()
    rng, balancer, items = random.Random(options.first_seed), Balancer(), []
    for seed in range(options.first_seed, options.first_seed + options.num_images):
        image, scene = render(seed)
        lines = []
        for question in ask(GroundTruth(scene), rng, options.questions_per_image, balancer):
            lines += textwrap.wrap(f"{question.text} {question.answer}", 40, subsequent_indent="   ")
        items.append((image, lines))
    contact_sheet(items, options.output, options.columns)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    sys.exit(main())
