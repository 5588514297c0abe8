"""Ask a model all questions of a dataset: one prediction for each question.

    rows {image, questions, answers, ...} → images encoded once → margins of packed yes/no questions, generated words

What is special here:
- the truth of a question decides how it is asked: a yes or no is scored, anything else is generated greedily;
- what is kept of a yes/no answer is the margin l_yes - l_no: P(yes) at any temperature follows from it;
- an image that serves several rows (the blind baseline shows one image to all) is encoded once a batch.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from PIL import Image
from tqdm import tqdm

from ..images_traffic_vlm import to_rgb


COLUMNS = ("image", "questions", "answers", "kinds", "labels", "facts", "source", "image_id")
QUESTIONS_PER_ROW = 32  # packed together; attention's square stays small beside the rest
SHORT_ANSWER = 4  # tokens; longer ones are generated apart, so that "red" does not wait for a whole sentence

Transform = Callable[[Image.Image], Image.Image]


@dataclass(frozen=True, slots=True)
class Prediction:
    """One question, its truth and what the model says.

    Attributes:
        source, image_id: the image.
        kind, label, fact: what is asked, in the terms of the question grammar.
        question: the wording.
        answer: the truth, as the tokenizer writes it ("grey" is "gray").
        probability: P(yes) at the model's temperature, where the truth is yes or no; else None.
        logit_margin: l_yes - l_no without temperature, where the truth is yes or no; else None.
        text: the generated words, where the truth is words and they were asked for; else None.
    """

    source: str
    image_id: str
    kind: str
    label: str
    fact: str
    question: str
    answer: str
    probability: float | None = None
    logit_margin: float | None = None
    text: str | None = None

    @property
    def is_yes_no(self) -> bool:
        return self.logit_margin is not None

    @property
    def said(self) -> str | None:
        """The model's answer: "yes" from a P(yes) of 0.5 on, "no", or its words."""
        return self.text if self.logit_margin is None else "yes" if self.logit_margin >= 0 else "no"

    @property
    def is_right(self) -> bool:
        return self.said == self.answer


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question of a batch: its image's number there, its place in the row, and the ids of its true answer."""

    image: int
    number: int
    question: str
    answer: str
    answer_ids: list[int]


@torch.no_grad()
def predict(
    model: Any,
    processor: Any,
    rows: Iterable[Mapping[str, Any]],
    batch_size: int = 16,
    generate_words: bool = True,
    transform: Transform | None = None,
    progress: bool = True,
    description: str = "asking",
) -> list[Prediction]:
    """Ask `model` every question of `rows`. The caller decides on device, dtype and autocast.

    Args:
        model: a `TrafficVLMForConditionalGeneration` in evaluation mode, or one wrapped with adapters.
        processor: its `TrafficVLMProcessor`.
        rows: rows of a dataset as `scripts/make_dataset.py` writes it, with COLUMNS.
        batch_size: images encoded together.
        generate_words: else questions that are answered in words have no `text`.
        transform: changes each image, upright and RGB, before the model sees it.
        progress, description: show a bar, and what it says.

    Returns:
        one prediction for each question, in the order of the rows and of their questions.

    Raises:
        ValueError: rows without a needed column, with lists of unequal lengths, or a model in training mode.
        FloatingPointError: the model answers with NaN or infinity.
    """
    if model.training:
        raise ValueError("the model is in training mode, where dropout changes every answer: call model.eval() first")
    total = len(rows) if isinstance(rows, Sized) else None
    predictions: list[Prediction] = []
    with tqdm(total=total, desc=description, unit="image", disable=not progress) as bar:
        for batch in batches(rows, batch_size):
            predictions += _predict_batch(model, processor, batch, generate_words, transform)
            bar.update(len(batch))
    return predictions


def batches(rows: Iterable[Mapping[str, Any]], batch_size: int) -> Iterator[list[Mapping[str, Any]]]:
    """Rows in lists of `batch_size`, checked.

    Raises:
        ValueError: a batch size below 1; rows without a needed column or with lists of unequal lengths.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    iterator = iter(rows)
    while batch := list(islice(iterator, batch_size)):
        for row in batch:
            check_row(row)
        yield batch


def check_row(row: Mapping[str, Any]) -> None:
    """Raises a ValueError that names what a row lacks or which of its lists have other lengths."""
    if missing := [name for name in COLUMNS if name not in row]:
        raise ValueError(f"a row has no {', '.join(missing)}; evaluation needs the columns {', '.join(COLUMNS)}")
    sizes = {name: len(row[name]) for name in ("questions", "answers", "kinds", "labels", "facts")}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the lists of row {row['image_id']!r} have unequal lengths: {sizes}")


def encode(model: Any, processor: Any, pictures: Sequence[Image.Image]) -> tuple[Any, list[int]]:
    """Look at each different picture once: the encoded images, and for each picture the number of its own there."""
    numbers: dict[int, int] = {}  # by identity: equal pictures are not looked for
    index = [numbers.setdefault(id(picture), len(numbers)) for picture in pictures]
    different = list({id(picture): picture for picture in pictures}.values())
    pixels = processor(images=different, return_tensors="pt")["pixel_values"]
    return model.encode_images(pixels.to(model.device)), index


def _predict_batch(
    model: Any, processor: Any, rows: list[Mapping[str, Any]], generate_words: bool, transform: Transform | None
) -> list[Prediction]:
    rows = [row for row in rows if len(row["questions"])]
    if not rows:
        return []
    pictures = [to_rgb(row["image"]) for row in rows]
    encoded, index = encode(model, processor, pictures if transform is None else list(map(transform, pictures)))
    asked = list(_questions(processor, rows, index))
    text_config = model.config.get_text_config()
    decisions = ([text_config.yes_token_id], [text_config.no_token_id])
    yes_no = [number for number, one in enumerate(asked) if one.answer_ids in decisions]
    words = [number for number, one in enumerate(asked) if one.answer_ids not in decisions]
    found: dict[int, dict[str, Any]] = {}
    for number, (margin, probability) in zip(yes_no, _score(model, processor, encoded, [asked[i] for i in yes_no])):
        found[number] = {"logit_margin": margin, "probability": probability}
    if generate_words:
        for number, text in zip(words, _generate(model, processor, encoded, [asked[i] for i in words])):
            found[number] = {"text": text}
    sources = [(row, i) for row in rows for i in range(len(row["questions"]))]
    return [
        Prediction(
            source=str(row["source"]),
            image_id=str(row["image_id"]),
            kind=row["kinds"][i],
            label=row["labels"][i],
            fact=row["facts"][i],
            question=row["questions"][i],
            answer=asked[number].answer,
            **found.get(number, {}),
        )
        for number, (row, i) in enumerate(sources)
    ]


def normalise(processor: Any, answers: Sequence[str]) -> tuple[list[str], list[list[int]]]:
    """Answers as the tokenizer writes them, and their ids: "gray" for "grey", [UNK] for a word not known."""
    ids = processor.tokenizer(list(answers), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return processor.batch_decode(ids), ids


def _questions(processor: Any, rows: list[Mapping[str, Any]], index: list[int]) -> Iterator[_Asked]:
    """All questions of a batch, with their true answers as the tokenizer writes them."""
    truths = iter(zip(*normalise(processor, [answer for row in rows for answer in row["answers"]])))
    for row, image in zip(rows, index):
        for number, question in enumerate(row["questions"]):
            answer, answer_ids = next(truths)
            yield _Asked(image, number, question, answer, answer_ids)


def pack(images: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Which questions stand in one row together.

    Args:
        images: for each question the image that it is about.

    Returns:
        rows of at most QUESTIONS_PER_ROW questions: an image, and the numbers of questions about it.
    """
    asked: dict[int, list[int]] = {}
    for number, image in enumerate(images):
        asked.setdefault(image, []).append(number)
    return [
        (image, numbers[start : start + QUESTIONS_PER_ROW])
        for image, numbers in asked.items()
        for start in range(0, len(numbers), QUESTIONS_PER_ROW)
    ]


def _score(model: Any, processor: Any, encoded: Any, asked: list[_Asked]) -> list[tuple[float, float]]:
    """Margin and P(yes) of each question, packed into a row for each image."""
    if not asked:
        return []
    rows: dict[int, list[int]] = {}  # numbers of the questions about each image
    for number in sorted(range(len(asked)), key=lambda number: asked[number].image):
        rows.setdefault(asked[number].image, []).append(number)
    text = [[asked[number].question for number in numbers] for numbers in rows.values()]
    inputs = processor(text=text, packed=True, on_unknown="ignore", return_tensors="pt").to(model.device)
    image_index = torch.tensor(list(rows), device=model.device)
    logits = torch.cat(model.question_logits(**inputs, encoded_images=encoded, image_index=image_index)).float()
    text_config = model.config.get_text_config()
    margins = logits[:, text_config.yes_token_id] - logits[:, text_config.no_token_id]
    results: list[tuple[float, float]] = [(0.0, 0.0)] * len(asked)
    numbers = [number for row in rows.values() for number in row]
    for number, margin, probability in zip(numbers, margins.tolist(), model.yes_probability(logits).tolist()):
        if not math.isfinite(margin):
            raise FloatingPointError(f"the model answers {asked[number].question!r} with l_yes - l_no = {margin}")
        results[number] = (margin, probability)
    return results


def _generate(model: Any, processor: Any, encoded: Any, asked: list[_Asked]) -> list[str]:
    """Greedy answers. They are cut one token after the length of the truth: what goes on there is wrong anyway."""
    if not asked:
        return []
    texts = [""] * len(asked)
    limit = model.config.get_text_config().max_position_embeddings
    inputs = processor(text=[one.question for one in asked], on_unknown="ignore", return_tensors="pt")
    lengths = inputs["attention_mask"].sum(-1).tolist()
    for chosen in _together([len(one.answer_ids) + 1 for one in asked], lengths, limit):
        width = max(lengths[i] for i in chosen)
        output = model.generate(
            input_ids=inputs["input_ids"][chosen, -width:].to(model.device),  # padded on the left
            attention_mask=inputs["attention_mask"][chosen, -width:].to(model.device),
            encoded_images=encoded,
            image_index=torch.tensor([asked[i].image for i in chosen], device=model.device),
            max_new_tokens=min(limit - width, max(len(asked[i].answer_ids) for i in chosen) + 1),
            do_sample=False,
            num_beams=1,
        )
        for i, text in zip(chosen, processor.batch_decode(output[:, width:], skip_special_tokens=True)):
            texts[i] = text
    return texts


def _together(wanted: Sequence[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Numbers of questions that are answered together: those with short answers, those with long ones.

    Args:
        wanted, lengths: tokens of the answer to, and of, each question.
        limit: of both. A question so long that not every answer of its group would fit behind it is answered alone,
            lest it cuts theirs; one that leaves no room is not answered.
    """
    groups = []
    for is_short in (True, False):
        chosen = [i for i, tokens in enumerate(wanted) if (tokens <= SHORT_ANSWER + 1) == is_short]
        most = max((wanted[i] for i in chosen), default=0)
        fitting = [i for i in chosen if lengths[i] + most <= limit]
        groups += [fitting, *([i] for i in chosen if limit - most < lengths[i] < limit)]
    return [group for group in groups if group]
