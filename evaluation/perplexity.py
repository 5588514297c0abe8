"""How many words the model is choosing between when it answers: exp of the mean cross-entropy of the true answers."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from ..images_traffic_vlm import to_rgb
from .predict import batches, encode, pack


@dataclass(frozen=True, slots=True)
class Perplexity:
    """
    Attributes:
        cross_entropy: mean of -log P(token) over the tokens of true answers, their ends included.
        words: exp of it, the number of equally likely words that would be as uncertain.
        tokens: number of tokens.
    """

    cross_entropy: float
    words: float
    tokens: int


@torch.no_grad()
def perplexity(
    model: Any, processor: Any, rows: Iterable[Mapping[str, Any]], batch_size: int = 16, progress: bool = True
) -> dict[str, Perplexity]:
    """The perplexity of the answers, by source, and of "all" tokens together. Empty where nothing is asked."""
    losses: dict[str, float] = defaultdict(float)
    tokens: Counter[str] = Counter()
    for batch in tqdm(batches(rows, batch_size), desc="perplexity", unit="batch", disable=not progress):
        asked = [row for row in batch if len(row["questions"])]
        if not asked:
            continue
        encoded, index = encode(model, processor, [to_rgb(row["image"]) for row in asked])
        questions = [question for row in asked for question in row["questions"]]
        answers = [answer for row in asked for answer in row["answers"]]
        packs = pack([number for number, row in enumerate(asked) for _ in row["questions"]])
        inputs = processor(
            text=[[questions[i] for i in numbers] for _, numbers in packs],
            suffix=[[answers[i] for i in numbers] for _, numbers in packs],
            packed=True,
            on_unknown="ignore",
            return_tensors="pt",
        ).to(model.device)
        labels = inputs.pop("labels")
        image_index = torch.tensor([index[number] for number, _ in packs], device=model.device)
        logits = model(**inputs, encoded_images=encoded, image_index=image_index, use_cache=False).logits
        entropy = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().transpose(1, 2), labels[:, 1:], reduction="none"
        )  # [rows,L-1], 0 where nothing is answered
        for row, (number, _) in enumerate(packs):
            source = str(asked[number]["source"])
            losses[source] += entropy[row].sum().item()
            tokens[source] += int((labels[row, 1:] >= 0).sum())
    sums = {source: (losses[source], tokens[source]) for source in sorted(tokens)}
    if sums:
        sums = {"all": (sum(losses.values()), tokens.total())} | sums
    return {name: Perplexity(total / n, math.exp(total / n), n) for name, (total, n) in sums.items()}
