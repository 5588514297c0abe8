"""Where a word looks, drawn over the image."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from ..data.grounding import class_words
from ..data.scene import CLASSES
from ..images_traffic_vlm import to_rgb


HEAT = (255, 120, 0)
STRONG = 8.0  # times an even share of attention, from which the colour is full
NOUNS = {word for label in CLASSES for word in class_words(label)}
CAPTION = 22  # pixels under each picture


def asked_word(processor: Any, question: str) -> tuple[int, str] | None:
    """Column and text of the word that a question is about: its first noun of the grammar, else its last word."""
    ids = processor(text=question, on_unknown="ignore", return_tensors="pt")["input_ids"][0].tolist()
    words = processor.tokenizer.convert_ids_to_tokens(ids)
    nouns = [column for column, word in enumerate(words) if word in NOUNS]
    content = [column for column, word in enumerate(words) if word.isalpha()]
    found = nouns[:1] or content[-1:]
    return (found[0], words[found[0]]) if found else None


def attention_of_words(model: Any, processor: Any, encoded: Any, questions: Sequence[str]) -> list[torch.Tensor]:
    """For each question about the one encoded image the map [h,w] of the word that it is about, in parts of 1."""
    maps = []
    for question in questions:
        found = asked_word(processor, question)
        maps.append(attention_of_question(model, processor, encoded, question)[found[0] if found else -1])
    return maps


def attention_of_question(model: Any, processor: Any, encoded: Any, question: str) -> torch.Tensor:
    """Maps [L,h,w] of all tokens of a question about the one encoded image, in parts of 1."""
    inputs = processor(text=question, on_unknown="ignore", return_tensors="pt").to(model.device)
    return model.attention_maps(**inputs, encoded_images=encoded)[0].cpu()


def heat_over(image: Image.Image, weights: torch.Tensor) -> Image.Image:
    """An image with a map [h,w] over it; an even map leaves it as it is."""
    heat = ((weights.float() * weights.numel() - 1) / (STRONG - 1)).clamp(0, 1) * 190
    mask = Image.fromarray(heat.round().to(torch.uint8).numpy()).resize(image.size, Image.Resampling.BICUBIC)
    return Image.composite(Image.new("RGB", image.size, HEAT), image, mask)


def draw_overlay(
    model: Any, processor: Any, image: Any, encoded: Any, captions: Sequence[tuple[str, str]], width: int = 336
) -> Image.Image:
    """The image once for each (question, answer), with the attention of the word that is asked about."""
    picture = to_rgb(image)
    picture = picture.resize((width, max(1, round(width * picture.height / picture.width))))
    columns = min(3, len(captions))
    lines = -(-len(captions) // columns)
    cell = (width + 8, picture.height + 2 * CAPTION + 8)
    sheet = Image.new("RGB", (cell[0] * columns, cell[1] * lines), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    maps = attention_of_words(model, processor, encoded, [question for question, _ in captions])
    for number, ((question, answer), weights) in enumerate(zip(captions, maps)):
        left, top = number % columns * cell[0] + 4, number // columns * cell[1] + 4
        sheet.paste(heat_over(picture, weights), (left, top))
        found = asked_word(processor, question)
        texts = (question, f"{answer}   (looking for “{found[1] if found else ''}”)")
        for line, text in enumerate(texts):
            draw.text((left, top + picture.height + 2 + line * CAPTION), text, fill="black", font=font)
    return sheet
