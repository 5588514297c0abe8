"""Attention maps of words, drawn over the image."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from ..data.ground_truth import NONE
from ..data.grounding import class_words
from ..data.scene import CLASSES
from ..images_traffic_vlm import to_rgb
from ..taught_traffic_vlm import is_content_word
from .answerer import Answer


HEAT = (255, 120, 0)
FULL_HEAT = 8.0  # times the mean attention, from which the color is full
NOUNS = {word for label in CLASSES for word in class_words(label)}
LINE_HEIGHT = 22  # pixels of a line under an image


def mapped_words(processor: Any, question: str) -> list[tuple[int, str]]:
    """Return column and text of the content words of a question; if it has none, of all its words."""
    ids = processor(text=question, on_unknown="ignore", return_tensors="pt")["input_ids"][0].tolist()
    tokens = enumerate(processor.tokenizer.convert_ids_to_tokens(ids))
    words = [(column, word) for column, word in tokens if word.isalpha()]
    return [found for found in words if is_content_word(found[1])] or words


def asked_word(processor: Any, question: str) -> tuple[int, str] | None:
    """Return column and text of the word that a question is about: the first known noun, else the last word."""
    words = mapped_words(processor, question)
    nouns = [found for found in words if found[1] in NOUNS]
    return next(iter(nouns[:1] or words[-1:]), None)


def map_strength(answer: Answer) -> float:
    """Return how strongly to draw a map, 0..1: it fades with the confidence that there is nothing to see.

    1 up to even odds, then in proportion to P(yes), or to 1 - P for the answers "none" and "0" in words.
    """
    p_seen = answer.yes_probability
    if p_seen is None:
        p_seen = 1 - answer.probability if answer.answer in (NONE, "0") else 1.0
    return min(1.0, 2 * p_seen)


def attention_of_question(model: Any, processor: Any, encoded: Any, question: str) -> torch.Tensor:
    """Return maps [L,h,w] of all L tokens of a question about one encoded image; each map sums to 1."""
    inputs = processor(text=question, on_unknown="ignore", return_tensors="pt").to(model.device)
    return model.attention_maps(**inputs, encoded_images=encoded)[0].cpu()


def heat_over(image: Image.Image, weights: torch.Tensor, strength: float = 1.0) -> Image.Image:
    """Draw a map [h,w] over an image, as strongly as `strength` (0..1); a uniform map leaves the image unchanged."""
    heat = ((weights.float() * weights.numel() - 1) / (FULL_HEAT - 1)).clamp(0, 1) * 190 * strength
    mask = Image.fromarray(heat.round().to(torch.uint8).numpy()).resize(image.size, Image.Resampling.BICUBIC)
    return Image.composite(Image.new("RGB", image.size, HEAT), image, mask)


def draw_overlay(
    model: Any, processor: Any, image: Any, encoded: Any, answers: Sequence[Answer], width: int = 336
) -> Image.Image:
    """Draw the image once for each answer, with the attention map of the word that is asked about."""
    picture = to_rgb(image)
    picture = picture.resize((width, max(1, round(width * picture.height / picture.width))))
    font = ImageFont.load_default(14)
    tiles = []
    for answer in answers:
        column, word = asked_word(processor, answer.question) or (-1, "")
        weights = attention_of_question(model, processor, encoded, answer.question)[column]
        texts = (answer.question, f"{answer.to_text()}   (attention of “{word}”)")
        lines = [line for text in texts for line in wrap(text, font, width)]
        tiles.append((heat_over(picture, weights, map_strength(answer)), lines))
    columns = 2 if len(answers) == 4 else min(3, len(answers))
    rows = -(-len(answers) // columns)
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


def wrap(text: str, font: Any, width: int) -> list[str]:
    """Split a text into lines of at most `width` pixels, between words where possible."""
    lines = [""]
    for word in re.split(r"(?<= )", " ".join(text.split())):
        for piece in [word] if font.getlength(word) <= width else word:  # a longer word is split anywhere
            if font.getlength(lines[-1] + piece.rstrip()) > width:
                lines.append("")
            lines[-1] += piece
    return [line.rstrip() for line in lines]
