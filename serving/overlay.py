"""Pictures of what the model sees: attention maps of words over the image, and boxes of located objects.

A map is orange where a word of a question attends. The page shows one word at a time, `ask --overlay` the word that
each question is about. The surer the model is that there is nothing to see, the fainter is the map.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from ..common.answers import answer_text, map_strength, words_to_map
from ..common.files import atomic_write
from ..data.scene import CLASSES, class_words
from ..pipeline_traffic_vlm import WHOLE, TrafficVLMPipeline


HEAT = (255, 120, 0)
FULL_HEAT = 8.0  # times the mean attention, from which the color is full: 190 of 255 over the image
NOUNS = {word for label in CLASSES for word in class_words(label)}
LINE_HEIGHT, LETTER_WIDTH = 22, 7  # pixels of a line under an image, and of a letter on average


def mapped_words(pipe: TrafficVLMPipeline, question: str) -> list[tuple[int, str]]:
    """(column, word) of each word of a question whose map is shown; the word that it is about comes first."""
    tokens = pipe.tokenizer.convert_ids_to_tokens(pipe.read_question(question).input_ids)
    return words_to_map(tokens, NOUNS)


def asked_word(pipe: TrafficVLMPipeline, question: str) -> tuple[int, str] | None:
    """(column, word) that a question is about; None if it has no words."""
    return next(iter(mapped_words(pipe, question)), None)


def attention_of_question(pipe: TrafficVLMPipeline, encoded: Any, question: str) -> torch.Tensor:
    """Maps [L,h,w], one for each token of a question about one encoded image; each sums to 1."""
    ids = torch.tensor([pipe.read_question(question).input_ids], device=pipe.device)
    return pipe.model.attention_maps(ids, encoded_images=encoded)[0].cpu()


def heat_over(image: Image.Image, weights: torch.Tensor, strength: float = 1.0) -> Image.Image:
    """The image under a map [h,w] of this strength (0..1). A uniform map leaves the image unchanged."""
    heat = ((weights.float() * weights.numel() - 1) / (FULL_HEAT - 1)).clamp(0, 1) * 190 * strength
    mask = Image.fromarray(heat.round().to(torch.uint8).numpy()).resize(image.size, Image.Resampling.BICUBIC)
    return Image.composite(Image.new("RGB", image.size, HEAT), image, mask)


def draw_objects(
    pipe: TrafficVLMPipeline, picture: Image.Image, encoded: Any, labels: str | Sequence[str]
) -> tuple[Image.Image, int]:
    """(copy of the encoded picture with the boxes of objects, their number)."""
    picture, font = picture.copy(), ImageFont.load_default(12)
    draw = ImageDraw.Draw(picture)
    objects = pipe.locate(encoded, labels, region=WHOLE, size=picture.size)
    for found in objects:
        x0, y0, x1, y1 = map(round, found["box"])
        # A dark and a light line: one of them is seen on any background.
        draw.rectangle((x0 - 1, y0 - 1, x1 + 1, y1 + 1), outline="black", width=3)
        draw.rectangle((x0, y0, x1, y1), outline="yellow")
    for found in reversed(objects):  # above all boxes, and the best above the others
        text = f"{found['label']} {found['score']:.2f}"
        _, _, right, bottom = draw.textbbox((0, 0), text, font, stroke_width=2)
        x, y = max(0, min(found["box"][0], picture.width - right)), max(0, found["box"][1] - bottom)
        draw.text((x, y), text, "yellow", font, stroke_width=2, stroke_fill="black")
    return picture, len(objects)


def draw_overlay(
    pipe: TrafficVLMPipeline,
    picture: Image.Image,
    encoded: Any,
    items: Sequence[Mapping[str, Any]],
    labels: Sequence[str] = (),
) -> Image.Image:
    """A sheet of copies of the image: one for each answer, under the map of the word that the question is about.

    With labels to locate, one more has the boxes of their objects; without answers it is larger.
    """
    width = 336 if items else 896
    picture = picture.resize((width, max(1, round(width * picture.height / picture.width))))
    font = ImageFont.load_default(14)
    tiles = []
    for item in items:
        question = item["question"]
        column, word = asked_word(pipe, question) or (-1, "")
        weights = attention_of_question(pipe, encoded, question)[column]
        texts = (question, f"{answer_text(item)}   (attention of “{word}”)")
        lines = [line for text in texts for line in textwrap.wrap(text, width // LETTER_WIDTH)]
        tiles.append((heat_over(picture, weights, map_strength(item, pipe.read_question(question).is_negated)), lines))
    if labels:
        boxes, count = draw_objects(pipe, picture, encoded, labels)
        tiles.append((boxes, [f"objects: {count}"]))
    columns = 2 if len(tiles) == 4 else min(3, len(tiles))
    rows = -(-len(tiles) // columns)
    caption_height = LINE_HEIGHT * max(len(lines) for _, lines in tiles)
    tile_width, tile_height = width + 8, picture.height + caption_height + 8
    sheet = Image.new("RGB", (tile_width * columns, tile_height * rows), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (tile, lines) in enumerate(tiles):
        left, top = index % columns * tile_width + 4, index // columns * tile_height + 4
        sheet.paste(tile, (left, top))
        for row, line in enumerate(lines):
            draw.text((left, top + picture.height + 2 + row * LINE_HEIGHT), line, fill="black", font=font)
    return sheet


def save_overlay(path: Path, *shown: Any) -> None:
    """Write the sheet of `draw_overlay`, which has the other arguments, to a PNG file."""
    with atomic_write(path) as temporary:
        draw_overlay(*shown).save(temporary, "PNG")


def name_overlays(output: Path, images: Sequence[Path]) -> list[Path]:
    """The file to write for each image: `output` for a single one, otherwise numbered names.

    Raises:
        ValueError: not a PNG, or the file of an image.
    """
    if output.suffix.lower() != ".png":
        raise ValueError(f"--overlay must be a PNG file, got {str(output)!r}")
    outputs = [output]
    if len(images) > 1:  # numbered, as images of different folders can have the same name
        digits = len(str(len(images)))
        names = [f"{output.stem}_{i:0{digits}}_{path.stem}{output.suffix}" for i, path in enumerate(images, start=1)]
        outputs = [output.with_name(name) for name in names]
    for path in outputs:
        if path.resolve() in {image.resolve() for image in images}:
            raise ValueError(f"--overlay {output}: {path} is an image that is asked about")
    return outputs
