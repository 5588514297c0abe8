"""Attention maps of words, drawn over the image."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from ..data.grounding import class_words
from ..data.scene import CLASSES
from ..images_traffic_vlm import to_rgb


HEAT = (255, 120, 0)
FULL_HEAT = 8.0  # times the mean attention, from which the color is full
NOUNS = {word for label in CLASSES for word in class_words(label)}
CAPTION_HEIGHT = 22  # pixels for each of the two lines under an image


def asked_word(processor: Any, question: str) -> tuple[int, str] | None:
    """Return column and text of the word that a question is about: the first known noun, else the last word."""
    ids = processor(text=question, on_unknown="ignore", return_tensors="pt")["input_ids"][0].tolist()
    words = processor.tokenizer.convert_ids_to_tokens(ids)
    nouns = [column for column, word in enumerate(words) if word in NOUNS]
    content = [column for column, word in enumerate(words) if word.isalpha()]
    found = nouns[:1] or content[-1:]
    return (found[0], words[found[0]]) if found else None


def attention_of_question(model: Any, processor: Any, encoded: Any, question: str) -> torch.Tensor:
    """Return maps [L,h,w] of all L tokens of a question about one encoded image; each map sums to 1."""
    inputs = processor(text=question, on_unknown="ignore", return_tensors="pt").to(model.device)
    return model.attention_maps(**inputs, encoded_images=encoded)[0].cpu()


def heat_over(image: Image.Image, weights: torch.Tensor) -> Image.Image:
    """Draw a map [h,w] over an image; a uniform map leaves the image unchanged."""
    heat = ((weights.float() * weights.numel() - 1) / (FULL_HEAT - 1)).clamp(0, 1) * 190
    mask = Image.fromarray(heat.round().to(torch.uint8).numpy()).resize(image.size, Image.Resampling.BICUBIC)
    return Image.composite(Image.new("RGB", image.size, HEAT), image, mask)


def draw_overlay(
    model: Any, processor: Any, image: Any, encoded: Any, captions: Sequence[tuple[str, str]], width: int = 336
) -> Image.Image:
    """Draw the image once for each (question, answer), with the attention map of the word that is asked about."""
    picture = to_rgb(image)
    picture = picture.resize((width, max(1, round(width * picture.height / picture.width))))
    columns = 2 if len(captions) == 4 else min(3, len(captions))
    rows = -(-len(captions) // columns)
    tile = (width + 8, picture.height + 2 * CAPTION_HEIGHT + 8)
    sheet = Image.new("RGB", (tile[0] * columns, tile[1] * rows), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for index, (question, answer) in enumerate(captions):
        column, word = asked_word(processor, question) or (-1, "")
        weights = attention_of_question(model, processor, encoded, question)[column]
        left, top = index % columns * tile[0] + 4, index // columns * tile[1] + 4
        sheet.paste(heat_over(picture, weights), (left, top))
        for line, text in enumerate((question, f"{answer}   (attention of “{word}”)")):
            position = (left, top + picture.height + 2 + line * CAPTION_HEIGHT)
            draw.text(position, text, fill="black", font=font)
    return sheet
