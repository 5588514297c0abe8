"""Ask a model every question of a dataset, which gives the table that all metrics are functions of.

rows {image, questions, answers, ...} → the pipeline, which never sees the answers → a row for each question
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice, tee
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from tqdm import tqdm

from ..data.scene import SYNTHETIC, Scene, classes_of, scene_of
from ..data.truth import NONE
from ..images_traffic_vlm import to_rgb
from ..pipeline_traffic_vlm import TrafficVLMPipeline


KINDS = KNOWN, UNSEEN, RENDERED = "known", "unseen", "rendered"  # of sources
UNSEEN_PREFIX = "unseen_"
# The columns of the table, and their types.
ANSWERS = {
    "source": str,
    "kind": str,  # see `kind_of_source`
    "image_id": str,
    "question_type": str,
    "category": str,
    "question_id": str,
    "question": str,  # the text that was asked
    "side": float,  # the shorter side of the largest object of the category, as a fraction of the image, if known
    "truth": str,  # as the tokenizer writes it: "grey" becomes "gray"
    "answer": object,  # None for a question with a problem
    "score": float,  # the probability of the answer; NaN without one
    "p_yes": float,  # P(yes) at the model's temperature; NaN for a question in words, and for a problem
    "margin": float,  # l_yes - l_no, without temperature, also of a question in words; NaN for a problem
    "is_right": bool,  # whether the answer is the truth
}

Row = Mapping[str, Any]


def predict(
    model: Any,
    processor: Any,
    rows: Iterable[Row],
    batch_size: int = 16,
    image: Image.Image | None = None,
    unseen: Collection[str] = (),
) -> pd.DataFrame:
    """Table of the answers to every question of `rows`, also to questions that the pipeline refuses by default.

    Args:
        model: a `TrafficVLMForConditionalGeneration` in evaluation mode; the caller chooses device, dtype, autocast.
        processor: its `TrafficVLMProcessor`.
        rows: rows of `data.datasets.load_rows`, or with its columns.
        batch_size: images encoded together.
        image: ask about this image in place of the rows' own; it is encoded once.
        unseen: names of unseen sources; see `kind_of_source`.

    Returns:
        the columns ANSWERS, and a row for each question in the order of the rows and their questions, numbered from 0.

    Raises:
        ValueError: lists of a row have unequal lengths; batch_size below 1; a model in training mode.
        FloatingPointError: a logit is NaN or infinite.
    """
    pipe = TrafficVLMPipeline(model=model, processor=processor, device=model.device, answer_untaught=True)
    shared = None if image is None else pipe.encode(image)

    def ask(row: Row) -> dict[str, Any]:
        return {"image": row["image"] if shared is None else shared, "question": list(row["questions"])}

    asked, answered = tee(with_questions(rows))
    answers = pipe(map(ask, asked), batch_size=batch_size, margins=True)
    found = []
    for row, items in zip(answered, answers):
        source, sides = str(row["source"]), largest_sides(scene_of(row))
        about = {"source": source, "kind": kind_of_source(source, unseen), "image_id": str(row["image_id"])}
        lists = {
            "question_type": row["question_types"],
            "category": row["categories"],
            "question_id": row["question_ids"],
            "question": row["questions"],
            "truth": normalize(processor, row["answers"]),
        }
        for *values, item in zip(*lists.values(), items, strict=True):
            one = dict(zip(lists, values))
            found.append({**item, **about, **one, "side": sides.get(one["category"], math.nan)})
    table = pd.DataFrame(found, columns=list(ANSWERS), dtype=object)
    table["is_right"] = table["answer"] == table["truth"]
    return table.astype(ANSWERS)


def largest_sides(scene: Scene | None) -> dict[str, float]:
    """{class: the shorter side of its largest object, as a fraction of the image} of a scene, if it is known."""
    sides: dict[str, float] = {}
    if scene is None:
        return sides
    for item in scene.objects:
        left, top, right, bottom = item.box
        side = min((right - left) / scene.width, (bottom - top) / scene.height)
        for category in classes_of(item.category):
            sides[category] = max(side, sides.get(category, 0.0))
    return sides


def kind_of_source(source: str, unseen: Collection[str] = ()) -> str:
    """Kind of a source: "rendered", "unseen" by training, or "known".

    A source is unseen if a part of its name ("runs/unseen_camera") begins with "unseen_" or is in `unseen`.
    """
    if source == SYNTHETIC:
        return RENDERED
    names = {source, *source.split("/")}
    return UNSEEN if any(name.startswith(UNSEEN_PREFIX) or name in unseen for name in names) else KNOWN


def with_questions(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows that have questions, with a progress bar in a terminal."""
    total = len(rows) if isinstance(rows, Sized) else None
    return (row for row in tqdm(rows, total=total, unit="image", disable=None, leave=False) if len(row["questions"]))


def normalize(processor: Any, answers: Sequence[str]) -> list[str]:
    """Answers as the tokenizer writes them: "gray" for "grey", [UNK] for an unknown word; "none" always stays."""
    ids = processor.tokenizer(list(answers), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return [NONE if answer == NONE else text for answer, text in zip(answers, processor.batch_decode(ids))]


def mean_image(rows: Sequence[Row], processor: Any) -> Image.Image:
    """The mean of the images of one row or more, each resized to the model's input size."""
    size = processor.image_processor.size["width"], processor.image_processor.size["height"]
    total: Any = sum(np.asarray(to_rgb(row["image"]).resize(size), dtype=np.float64) for row in rows)
    return Image.fromarray(np.rint(total / len(rows)).astype(np.uint8))


@torch.no_grad()
def loss_metrics(model: Any, processor: Any, rows: Iterable[Row], batch_size: int = 16) -> dict[str, float]:
    """Mean cross-entropy of the tokens of the true answers, [EOS] included, and its exp.

    Returns:
        "answer_loss" and "perplexity"; empty without questions.
    """
    total, tokens, asked = 0.0, 0, with_questions(rows)
    while batch := list(islice(asked, batch_size)):
        asked_of = [processor.rules.all_as_asked(row["questions"], row["answers"]) for row in batch]
        inputs = processor(
            images=[to_rgb(row["image"]) for row in batch],
            text=[[text for text, _ in pairs] for pairs in asked_of],
            suffix=[[answer for _, answer in pairs] for pairs in asked_of],
            packed=True,
            on_unknown="ignore",
            return_tensors="pt",
        ).to(model.device)
        count = int((inputs["labels"] >= 0).sum())
        total += float(model(**inputs, use_cache=False).loss) * count
        tokens += count
    return {"answer_loss": total / tokens, "perplexity": math.exp(total / tokens)} if tokens else {}
