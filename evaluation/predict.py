"""Ask a model every question of a dataset.

    rows {image, questions, answers, ...} → images encoded once → first word of each answer ─┬─ yes, no: the answer
                                                                                             └─ other: generate words

The ground truth has no part in this: questions are answered as in serving, by `answering.py`. Answers are compared
with the ground truth afterwards.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from tqdm import tqdm

from ..answering import first_words, generate_answers
from ..data.folders import COLUMNS, LISTS
from ..data.ground_truth import NONE
from ..files import atomic_write
from ..images_traffic_vlm import to_rgb


Transform = Callable[[Image.Image], Image.Image]
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A question with its ground truth and the model's answer.

    Attributes:
        source, image_id: the image.
        question_type, category, question_id: question type, category and question id.
        question: the text that was asked.
        answer: the ground truth, as the tokenizer writes it ("grey" becomes "gray").
        text: the model's answer: "yes", "no" or words; None for words that were not generated.
        probability: P(yes) at the model's temperature, whatever the answer is.
        logit_margin: l_yes - l_no, without temperature.
    """

    source: str
    image_id: str
    question_type: str
    category: str
    question_id: str
    question: str
    answer: str
    text: str | None
    probability: float
    logit_margin: float

    @property
    def is_yes_no(self) -> bool:
        """Whether the ground truth is yes or no."""
        return self.answer in ("yes", "no")

    @property
    def is_right(self) -> bool:
        return self.text == self.answer


@torch.no_grad()
def predict(
    model: Any,
    processor: Any,
    rows: Iterable[Row],
    batch_size: int = 16,
    generate_words: bool = True,
    transform: Transform | None = None,
    image: Image.Image | None = None,
    progress: str | None = None,
) -> list[Prediction]:
    """Ask `model` every question of `rows`. The caller chooses device, dtype and autocast.

    Args:
        model: a `TrafficVLMForConditionalGeneration` in evaluation mode, also with adapters, or an `ExportedModel`.
        processor: its `TrafficVLMProcessor`.
        rows: rows with COLUMNS.
        batch_size: images encoded together.
        generate_words: generate the answers that are neither yes nor no; otherwise their text is None.
        transform: change each image, upright and RGB, before it is encoded.
        image: ask about this image in place of the rows' own; it is encoded once.
        progress: title of a progress bar; None shows no bar.

    Returns:
        one prediction per question, in the order of the rows and of their questions.

    Raises:
        ValueError: a row lacks a column or has lists of unequal lengths; batch_size below 1; a model in training mode.
        FloatingPointError: a logit is NaN or infinite.
    """
    if model.training:
        raise ValueError("the model is in training mode, where dropout changes every answer: call model.eval() first")
    shared = None if image is None else encode(model, processor, [image])
    predictions: list[Prediction] = []
    for batch in batches(rows, batch_size, progress):
        if shared is None:
            images = [to_rgb(row["image"]) for row in batch]
            encoded = encode(model, processor, images if transform is None else list(map(transform, images)))
            questions = [list(row["questions"]) for row in batch]
        else:  # all questions are about one image
            encoded, questions = shared, [[question for row in batch for question in row["questions"]]]
        answers = iter(_answer(model, processor, encoded, questions, generate_words))
        for row in batch:
            columns = zip(row["question_types"], row["categories"], row["question_ids"], row["questions"])
            for asked, answer in zip(columns, normalize(processor, row["answers"])):
                predictions.append(
                    Prediction(str(row["source"]), str(row["image_id"]), *asked, answer, *next(answers))
                )
    return predictions


def write_predictions(predictions: Sequence[Prediction], path: Path) -> None:
    """Write predictions as Parquet, one row for each.

    The columns are source, image_id, question_type, category, question_id, question, ground_truth, yes_probability
    (P(yes), also where the answer is in words), answer and is_right.
    """
    names = ("source", "image_id", "question_type", "category", "question_id", "question")
    columns: dict[str, list[Any]] = {name: [getattr(one, name) for one in predictions] for name in names}
    columns["ground_truth"] = [one.answer for one in predictions]
    columns["yes_probability"] = [one.probability for one in predictions]
    columns["answer"] = [one.text for one in predictions]
    columns["is_right"] = [one.is_right for one in predictions]
    with atomic_write(path) as temporary:
        pq.write_table(pa.table(columns), temporary, compression="zstd")


def batches(rows: Iterable[Row], batch_size: int, progress: str | None = None) -> Iterator[list[Row]]:
    """Yield the rows that have questions, in lists of at most `batch_size`.

    Raises:
        ValueError: batch_size below 1; a row lacks a column or has lists of unequal lengths.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    total = len(rows) if isinstance(rows, Sized) else None
    iterator = iter(rows)
    with tqdm(total=total, desc=progress, unit="image", disable=not progress) as bar:
        while batch := list(islice(iterator, batch_size)):
            for row in batch:
                check_row(row)
            if asked := [row for row in batch if len(row["questions"])]:
                yield asked
            bar.update(len(batch))


def check_row(row: Row) -> None:
    """Raise a ValueError for a row that lacks a column or has lists of unequal lengths."""
    if missing := [name for name in COLUMNS if name not in row]:
        raise ValueError(f"a row has no {', '.join(missing)}; evaluation needs the columns {', '.join(COLUMNS)}")
    sizes = {name: len(row[name]) for name in LISTS}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the lists of row {row['image_id']!r} have unequal lengths: {sizes}")


def encode(model: Any, processor: Any, images: Sequence[Image.Image]) -> Any:
    """Encode images once, to ask many questions about them."""
    pixels = processor(images=list(images), return_tensors="pt")["pixel_values"]
    return model.encode_images(pixels.to(model.device))


def normalize(processor: Any, answers: Sequence[str]) -> list[str]:
    """Write answers as the tokenizer does: "gray" for "grey", [UNK] for a word outside the vocabulary.

    "none" stays where a vocabulary does not have it: such a model is wrong, as it should be.
    """
    ids = processor.tokenizer(list(answers), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return [NONE if answer == NONE else text for answer, text in zip(answers, processor.batch_decode(ids))]


def _answer(
    model: Any, processor: Any, encoded: Any, questions: list[list[str]], generate_words: bool
) -> list[tuple[str | None, float, float]]:
    """Text, P(yes) and l_yes - l_no of each question; `questions` has one list for each encoded image."""
    found = [one for row in first_words(model, processor, encoded, questions) for one in row]
    asked = [(image, question) for image, row in enumerate(questions) for question in row]
    in_words = [pair for pair, one in zip(asked, found) if not one.is_yes_no]
    texts: Iterator[str | None] = iter([None] * len(in_words))
    if generate_words and in_words:
        texts = iter([text for text, _ in generate_answers(model, processor, encoded, in_words)])
    return [(one.text if one.is_yes_no else next(texts), one.yes_probability, one.logit_margin) for one in found]


@torch.no_grad()
def perplexity(
    model: Any, processor: Any, rows: Iterable[Row], batch_size: int = 16, progress: str | None = None
) -> dict[str, dict[str, float]]:
    """Perplexity of the ground-truth answers, their [EOS] included, of "all" and of each source.

    Returns:
        for each: "cross_entropy", the mean of -log P(token); "words", exp of it: the number of equally likely words
        that would be as uncertain; "tokens". Empty without questions.
    """
    losses: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for batch in batches(rows, batch_size, progress):
        encoded = encode(model, processor, [to_rgb(row["image"]) for row in batch])
        inputs = processor(
            text=[list(row["questions"]) for row in batch],
            suffix=[list(row["answers"]) for row in batch],
            packed=True,
            on_unknown="ignore",
            return_tensors="pt",
        ).to(model.device)
        images = inputs.get("image_index", torch.arange(len(batch))).tolist()  # of each row
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs, encoded_images=encoded, use_cache=False).logits[:, :-1].float()
        entropy = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")  # [R,L-1]
        for image, loss, count in zip(images, entropy.sum(-1).tolist(), (labels >= 0).sum(-1).tolist()):
            for name in ("all", str(batch[image]["source"])):
                losses[name] += loss
                tokens[name] += count
    means = {name: losses[name] / tokens[name] for name in sorted(tokens, key=lambda name: (name != "all", name))}
    return {name: {"cross_entropy": x, "words": math.exp(x), "tokens": tokens[name]} for name, x in means.items()}
