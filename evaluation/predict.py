"""Ask a model every question of a dataset.

rows {image, questions, answers, ...} → the pipeline, which never sees the answers → compared with the answers
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, fields, replace
from itertools import islice, tee
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from scipy.special import expit
from tqdm import tqdm

from ..data.folders import COLUMNS, LISTS
from ..data.ground_truth import NONE
from ..files import atomic_write
from ..images_traffic_vlm import to_rgb
from ..pipeline_traffic_vlm import TrafficVLMPipeline


Transform = Callable[[Image.Image], Image.Image]
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A question with its ground truth and the model's answer.

    Attributes:
        source, image_id: the image.
        question_type, category, question_id: question type, category and question id.
        question: the text that was asked.
        ground_truth: as the tokenizer writes it ("grey" becomes "gray").
        answer: the model's answer; None for a problem, and for words that were not generated.
        score: the probability of the answer; None without one.
        p_yes: P(yes) at the model's temperature, also where the answer is in words; None for a problem.
        margin: l_yes - l_no, without temperature; None for a problem.
    """

    source: str
    image_id: str
    question_type: str
    category: str
    question_id: str
    question: str
    ground_truth: str
    answer: str | None
    score: float | None = None
    p_yes: float | None = None
    margin: float | None = None

    @property
    def is_yes_no(self) -> bool:
        """Whether the ground truth is yes or no."""
        return self.ground_truth in ("yes", "no")

    @property
    def is_right(self) -> bool:
        return self.answer == self.ground_truth

    def at_temperature(self, temperature: float) -> "Prediction":
        """The same prediction with P(yes) at another temperature."""
        return (
            self if self.margin is None else replace(self, p_yes=float(expit(np.float32(self.margin / temperature))))
        )


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
    """Ask `model` every question of `rows` through the pipeline. The caller chooses device, dtype and autocast.

    Args:
        model: a `TrafficVLMForConditionalGeneration` in evaluation mode, also with adapters, or an `ExportedModel`.
        processor: its `TrafficVLMProcessor`.
        rows: rows with COLUMNS.
        batch_size: images encoded together.
        generate_words: answer questions that ask for words; otherwise their answer is None.
        transform: change each image, upright and RGB, before it is encoded.
        image: ask about this image in place of the rows' own; it is encoded once.
        progress: title of a progress bar; None shows no bar.

    Returns:
        one prediction per question, in the order of the rows and of their questions.

    Raises:
        ValueError: a row lacks a column or has lists of unequal lengths; batch_size below 1; a model in training mode.
        FloatingPointError: a logit is NaN or infinite.
    """
    pipe = TrafficVLMPipeline(model=model, processor=processor, device=model.device)
    shared = None if image is None else pipe.encode(image)

    def ask(row: Row) -> dict[str, Any]:
        about = shared
        if about is None:
            about = row["image"] if transform is None else transform(to_rgb(row["image"]))
        return {"image": about, "question": list(row["questions"])}

    asked, compared = tee(with_questions(rows, progress))
    answers = pipe(map(ask, asked), batch_size=batch_size, generate_words=generate_words, margins=True)
    temperature = model.config.yes_no_temperature
    return [
        one.at_temperature(temperature)
        for items, row in zip(answers, compared)
        for one in _compare(row, normalize(processor, row["answers"]), items)
    ]


def _compare(row: Row, truths: Sequence[str], items: Sequence[Mapping[str, Any]]) -> Iterator[Prediction]:
    columns = zip(row["question_types"], row["categories"], row["question_ids"], row["questions"])
    for asked, truth, item in zip(columns, truths, items, strict=True):
        found = (item.get(name) for name in ("answer", "score", "p_yes", "margin"))
        yield Prediction(str(row["source"]), str(row["image_id"]), *asked, truth, *found)


def write_predictions(predictions: Sequence[Prediction], path: Path) -> None:
    """Write predictions as Parquet: a row for each, with its fields and is_right."""
    names = [field.name for field in fields(Prediction)] + ["is_right"]
    columns = {name: [getattr(one, name) for one in predictions] for name in names}
    with atomic_write(path) as temporary:
        pq.write_table(pa.table(columns), temporary, compression="zstd")


def with_questions(rows: Iterable[Row], progress: str | None = None) -> Iterator[Row]:
    """Yield the rows that have questions.

    Raises:
        ValueError: a row lacks a column or has lists of unequal lengths.
    """
    total = len(rows) if isinstance(rows, Sized) else None
    for row in tqdm(rows, total=total, desc=progress, unit="image", disable=not progress):
        check_row(row)
        if len(row["questions"]):
            yield row


def batches(rows: Iterable[Row], batch_size: int, progress: str | None = None) -> Iterator[list[Row]]:
    """Yield the rows of `with_questions` in lists of at most `batch_size`.

    Raises:
        ValueError: batch_size below 1, or one of `with_questions`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    asked = with_questions(rows, progress)
    while batch := list(islice(asked, batch_size)):
        yield batch


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
