"""Pictures of what the model sees: attention maps of words over the image, boxes of located objects, text below.

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
from ..data.scene import CLASSES, class_words
from ..pipeline_traffic_vlm import WHOLE, TrafficVLMPipeline


HEAT = (255, 120, 0)
FULL_HEAT = 8.0  # times the mean attention, from which the color is full: 190 of 255 over the image
NOUNS = {word for label in CLASSES for word in class_words(label)}
TEXT, BACKGROUND = "#ebebeb", "#181818"
MARGIN, FONT_SIZE, LINE, LETTER = 10, 14, 20, 7  # pixels; LETTER is the width of a letter on average


def with_text(picture: Image.Image, lines: Sequence[str], min_width: int = 0) -> Image.Image:
    """RGB picture of even size with lines of text below it; text wider than the picture is cut off."""
    width, height = max(picture.width, min_width), picture.height + LINE * len(lines) + MARGIN
    image = Image.new("RGB", (width + width % 2, height + height % 2), BACKGROUND)
    image.paste(picture, ((width - picture.width) // 2, 0))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(FONT_SIZE)
    for number, line in enumerate(lines):
        draw.text((MARGIN, picture.height + 4 + LINE * number), " ".join(line.split()), TEXT, font)
    return image


def mapped_words(pipe: TrafficVLMPipeline, question: str) -> list[tuple[int, str]]:
    """(column, word) of each word of a question whose map is shown; the word that it is about comes first."""
    tokens = pipe.tokenizer.convert_ids_to_tokens(pipe.read_question(question).input_ids)
    return words_to_map(tokens, NOUNS)


def attention_of_question(pipe: TrafficVLMPipeline, encoded: Any, question: str) -> torch.Tensor:
    """Maps [L,h,w], one for each token of a question about one encoded image; each sums to 1."""
    ids = torch.tensor([pipe.read_question(question).input_ids], device=pipe.device)
    return pipe.model.attention_maps(ids, encoded_images=encoded)[0].cpu()


def heat_over(image: Image.Image, weights: torch.Tensor, strength: float = 1.0) -> Image.Image:
    """The image under a map [h,w] of this strength (0..1). A uniform map leaves the image unchanged."""
    heat = ((weights.float() * weights.numel() - 1) / (FULL_HEAT - 1)).clamp(0, 1) * 190 * strength
    mask = Image.fromarray(heat.round().to(torch.uint8).numpy()).resize(image.size, Image.Resampling.BICUBIC)
    return Image.composite(Image.new("RGB", image.size, HEAT), image, mask)


def draw_attention(
    pipe: TrafficVLMPipeline, picture: Image.Image, encoded: Any, item: Mapping[str, Any], column: int
) -> Image.Image:
    """The encoded picture under the map of the word in a column of an answered question."""
    question = item["question"]
    strength = map_strength(item, pipe.read_question(question).is_negated)
    return heat_over(picture, attention_of_question(pipe, encoded, question)[column], strength)


def draw_objects(
    pipe: TrafficVLMPipeline, picture: Image.Image, encoded: Any, labels: str | Sequence[str]
) -> tuple[Image.Image, int]:
    """(copy of the encoded picture with the boxes of objects, their number)."""
    picture, font = picture.copy(), ImageFont.load_default(12)
    draw = ImageDraw.Draw(picture)
    objects = pipe.locate(encoded, labels, region=WHOLE, size=picture.size)
    for found in reversed(objects):  # the best above the others
        x0, y0, x1, y1 = map(round, found["box"])
        # A dark and a light line: one of them is seen on any background.
        draw.rectangle((x0 - 1, y0 - 1, x1 + 1, y1 + 1), outline="black", width=3)
        draw.rectangle((x0, y0, x1, y1), outline="yellow")
        text = f"{found['label']} {found['score']:.2f}"
        _, _, right, bottom = draw.textbbox((0, 0), text, font, stroke_width=2)
        place = max(0, min(x0, picture.width - right)), max(0, y0 - bottom)
        draw.text(place, text, "yellow", font, stroke_width=2, stroke_fill="black")
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
    tiles = []
    for item in items:
        column, word = next(iter(mapped_words(pipe, item["question"])), (-1, ""))
        texts = (item["question"], f"{answer_text(item)}   (attention of “{word}”)")
        lines = [line for text in texts for line in textwrap.wrap(text, width // LETTER)]
        tiles.append((draw_attention(pipe, picture, encoded, item, column), lines))
    if labels:
        boxes, count = draw_objects(pipe, picture, encoded, labels)
        tiles.append((boxes, [f"objects: {count}"]))
    most = max(len(lines) for _, lines in tiles)
    drawn = [with_text(tile, lines + [""] * (most - len(lines))) for tile, lines in tiles]
    columns = 2 if len(tiles) == 4 else min(3, len(tiles))
    wide, high = drawn[0].width + MARGIN, drawn[0].height + MARGIN
    sheet = Image.new("RGB", (wide * columns, high * -(-len(tiles) // columns)), BACKGROUND)
    for index, tile in enumerate(drawn):
        sheet.paste(tile, (index % columns * wide + MARGIN // 2, index // columns * high + MARGIN // 2))
    return sheet


def name_overlays(output: Path, images: Sequence[Path]) -> list[Path]:
    """The file to write for each image: `output` for a single one, otherwise numbered names.

    Raises:
        ValueError: not a PNG, or the file of an image.
    """
    if output.suffix.lower() != ".png":
        raise ValueError(f"--overlay must be a PNG file, got {str(output)!r}")
    outputs = [output]
    if len(images) > 1:  # numbered, as images of different folders can have the same name
        outputs = [output.with_stem(f"{output.stem}_{i}_{path.stem}") for i, path in enumerate(images, start=1)]
    if both := {path.resolve() for path in outputs} & {path.resolve() for path in images}:
        raise ValueError(f"--overlay {output}: {both.pop()} is an image that is asked about")
    return outputs
