"""Whether answers can be trusted: nothing presupposed, answers that agree, values of the right type, taught words.

predictions of a dataset        → "none" where nothing is there; values of the question's type; gain of each word
fixed questions about its images → pairs of answers that contradict each other; P(yes) of questions never taught
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..data.agreement import PROBES, exclusions, implications
from ..data.ground_truth import MAX_COUNT, NONE, THIRDS, UNNAMED
from ..data.questions import SCENE_ATTRIBUTE_OF_TYPE
from ..data.scene import (
    ATTRIBUTES,
    CLASSES,
    COLORS,
    DIRECTIONS,
    LIGHT_STATES,
    SCENE_ATTRIBUTES,
    SPEED_LIMITS,
    SYNTHETIC,
    is_a,
)
from ..data.templates import paraphrases_of, with_article
from ..taught_traffic_vlm import TaughtWords, is_content_word
from .metrics import group, mean
from .predict import Prediction, predict


TOLERANCE = 0.1  # of a probability, beyond which two answers contradict each other
CONFIDENT = 0.9
MIN_GAIN_QUESTIONS = 30  # with a word, to measure its gain
# Nouns of the vocabulary for "Is there a ...?"; those that the weights were taught are not asked about.
NOUNS = (
    "roundabout pothole bump curve wall arrow wheelchair stroller umbrella backpack phone helmet debris smoke "
    "tunnel bridge school bird cat sheep taxi policeman worker"
).split()
VALUES: dict[str, frozenset[str]] = {  # of the answers to open questions, by question type
    "light_state": frozenset({*LIGHT_STATES, NONE}),
    "color": frozenset({*COLORS, NONE}),
    "status": frozenset({*ATTRIBUTES["status"], "with rider", "without rider", NONE}),
    "facing": frozenset(DIRECTIONS),
    "side": frozenset({*THIRDS, NONE}),
    "sign_value": frozenset({*SPEED_LIMITS, *(name for name in CLASSES if is_a(name, "traffic sign")), NONE}),
    "closest": frozenset({*(name for name in CLASSES if is_a(name, "vehicle") and name != "vehicle"), NONE}),
    "count": frozenset(map(str, range(MAX_COUNT + 1))),
    **{kind: frozenset(SCENE_ATTRIBUTES[name]) - UNNAMED for kind, name in SCENE_ATTRIBUTE_OF_TYPE.items()},
}


def presuppositions(predictions: Iterable[Prediction]) -> dict[str, dict[str, Any]]:
    """How often open questions are answered "none": "all", by question type, and "photographs" where some are not.

    Returns:
        "none_if_absent": fraction where the object is not there; "none_if_present": fraction where it is; "absent",
        "present": numbers of these questions. Types that are never answered "none" are left out.
    """
    asked = [one for one in predictions if NONE in VALUES.get(one.question_type, ()) and not one.is_yes_no]
    photographs = [one for one in asked if one.source != SYNTHETIC]
    groups = {"all": asked} | ({"photographs": photographs} if 0 < len(photographs) < len(asked) else {})
    groups |= group(asked, "question_type")
    found = {}
    for name, members in groups.items():
        absent = [float(one.text == NONE) for one in members if one.answer == NONE]
        present = [float(one.text == NONE) for one in members if one.answer != NONE]
        found[name] = {
            "none_if_absent": mean(absent),
            "none_if_present": mean(present),
            "absent": len(absent),
            "present": len(present),
        }
    return found if asked else {}


def answer_types(predictions: Iterable[Prediction]) -> dict[str, dict[str, Any]]:
    """The fraction of open questions that are answered with a value of their own type, "all" and by question type."""
    asked = [one for one in predictions if one.question_type in VALUES and not one.is_yes_no]
    groups = {"all": asked} | group(asked, "question_type")
    return {
        name: {
            "own_type": mean(float(one.text in VALUES[one.question_type]) for one in members),
            "questions": len(members),
        }
        for name, members in groups.items()
        if members
    }


def contradictions(
    model: Any, processor: Any, rows: Iterable[Mapping[str, Any]], batch_size: int = 16, progress: str | None = None
) -> dict[str, Any]:
    """Ask PROBES about each image, and count the pairs of answers that contradict each other by more than 0.1.

    Returns:
        "violated": fraction of pairs; "pairs": their number; "by_pair": {pair of questions: fraction}. Empty without
        images.
    """
    texts = [paraphrases_of(question_id)[0] for question_id in PROBES]
    asked = ({**_about(row, index), "questions": texts, **_filler(len(texts))} for index, row in enumerate(rows))
    found = predict(model, processor, asked, batch_size, generate_words=False, progress=progress)
    if not found:
        return {}
    p = np.array([one.probability for one in found]).reshape(-1, len(PROBES))
    excess = {f"{texts[i]} → {texts[j]}": p[:, i] - p[:, j] for i, j in implications(PROBES)}
    excess |= {f"{texts[i]} ≠ {texts[j]}": p[:, i] + p[:, j] - 1 for i, j in exclusions(PROBES)}
    by_pair = {name: float((values > TOLERANCE).mean()) for name, values in excess.items()}
    return {"violated": mean(by_pair.values()), "pairs": len(by_pair) * len(p), "images": len(p), "by_pair": by_pair}


def word_gains(
    predictions: Sequence[Prediction], blind: Sequence[Prediction], processor: Any
) -> dict[str, dict[str, float]]:
    """For each content word, how much better the questions that hold it are answered than about the mean image.

    Args:
        predictions, blind: of the same questions, in the same order.

    Returns:
        {word: {"gain": mean difference of accuracy, "error": its standard error}}, of words in 30 questions or more.
    """
    tokenizer = processor.tokenizer
    texts = list(dict.fromkeys(one.question for one in predictions))
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    words_of = {text: set(tokenizer.convert_ids_to_tokens(row)) for text, row in zip(texts, ids)}
    differences: defaultdict[str, list[int]] = defaultdict(list)
    for one, other in zip(predictions, blind, strict=True):
        for word in words_of[one.question]:
            differences[word].append(one.is_right - other.is_right)
    return {
        word: {"gain": float(np.mean(values)), "error": float(np.std(values, ddof=1) / math.sqrt(len(values)))}
        for word, values in sorted(differences.items())
        if is_content_word(word) and len(values) >= MIN_GAIN_QUESTIONS
    }


def taught_coverage(taught: TaughtWords | None, vocabulary: Iterable[str]) -> dict[str, list[str]]:
    """The content words of the vocabulary by what the weights were taught; empty if that is unknown."""
    if taught is None:
        return {}
    found: dict[str, list[str]] = {"taught on real images": [], "taught on synthetic images only": []}
    found |= {"unreliable": [], "untaught": []}
    for word in sorted(filter(is_content_word, vocabulary)):
        status = taught.status(word)
        if status == "taught":
            status = "taught on real images" if taught.is_real(word) else "taught on synthetic images only"
        found[status].append(word)
    return found


def untaught_questions(
    model: Any, processor: Any, rows: Iterable[Mapping[str, Any]], batch_size: int = 16, progress: str | None = None
) -> dict[str, Any]:
    """P(yes) of "Is there a ...?" with nouns that the weights were never taught: it should not be near 1.

    Returns:
        "mean" of P(yes); "confident": fraction of answers with P(yes) above 0.9 or below 0.1; "words" asked about;
        "questions". Empty if nothing is known of taught words, all are taught, or there are no images.
    """
    taught = processor.taught_words
    vocabulary = processor.tokenizer.get_vocab()
    words = [word for word in NOUNS if word in vocabulary and taught and taught.status(word) == "untaught"]
    if not words:
        return {}
    texts = [f"Is there {with_article(word)}?" for word in words]
    asked = ({**_about(row, index), "questions": texts, **_filler(len(texts))} for index, row in enumerate(rows))
    found = predict(model, processor, asked, batch_size, generate_words=False, progress=progress)
    if not found:
        return {}
    p = [one.probability for one in found]
    confident = mean(float(max(value, 1 - value) > CONFIDENT) for value in p)
    return {"mean": mean(p), "confident": confident, "words": words, "questions": len(p)}


def _about(row: Mapping[str, Any], index: int) -> dict[str, Any]:
    return {"image": row["image"], "source": row["source"], "image_id": str(index)}


def _filler(count: int) -> dict[str, list[str]]:
    """Columns of questions whose answers are unknown."""
    return {name: [""] * count for name in ("answers", "question_types", "categories", "question_ids")}
