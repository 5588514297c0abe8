"""Whether answers can be trusted: nothing presupposed, answers that agree, values of the right type, taught words.

predictions of a dataset        → "none" where nothing is there; values of the question's type; gain of each word
gains, words asked in training  → the words that the weights are taught
fixed questions about its images → pairs of answers that contradict each other; P(yes) of questions never taught
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..answer_kind_traffic_vlm import CLOSEST, COLOR, COUNT, DIRECTIONS, LIGHT, NONE, SIDE, SIGN, STATUS
from ..data.agreement import exclusions, implications
from ..data.ground_truth import UNNAMED
from ..data.questions import SCENE_ATTRIBUTE_OF_TYPE
from ..data.scene import SCENE_ATTRIBUTES, SYNTHETIC
from ..data.templates import paraphrases_of, with_article
from ..processing_traffic_vlm import TAUGHT_ON
from ..tokenization_traffic_vlm import is_content_word
from .baselines import mean_image
from .metrics import group, mean
from .predict import Prediction, predict


TOLERANCE = 0.1  # of a probability, beyond which two answers contradict each other
CONFIDENT = 0.9
MIN_GAIN_QUESTIONS, MIN_OTHER_ANSWERS = 30, 10  # with a word, to measure its gain
STANDARD_ERRORS = 2.0
# Ids of questions that are asked together about each image.
PROBES = (
    *(f"presence/{name}" for name in ("vehicle", "car", "bus", "truck", "motorcycle", "person", "pedestrian")),
    *("presence/traffic light", "light_state/traffic light/any/red", "presence/traffic sign"),
    *(f"place/{name}/{side}" for name in ("car", "pedestrian") for side in ("left", "center", "right")),
    *(f"count/car/over/{limit}" for limit in (1, 2, 3)),
    *(f"road_surface/road surface/is/{value}" for value in ("dry", "wet", "snowy")),
    *(f"time_of_day/time of day/is/{value}" for value in ("day", "night")),
    *(f"weather/weather/is/{value}" for value in ("clear", "cloudy", "rainy", "snowy", "foggy")),
    *(f"traffic_density/traffic density/is/{value}" for value in ("empty", "light", "busy", "jam")),
)
# Nouns of the vocabulary for "Is there a ...?"; those that the weights were taught are not asked about.
NOUNS = (
    "roundabout pothole bump curve wall arrow wheelchair stroller umbrella backpack phone helmet debris smoke "
    "tunnel bridge school bird cat sheep taxi policeman worker"
).split()
KINDS = {"light_state": LIGHT, "color": COLOR, "status": STATUS, "side": SIDE, "sign_value": SIGN, "closest": CLOSEST}
VALUES: dict[str, frozenset[str]] = {  # of the answers to open questions, by question type
    **{name: kind.values or frozenset() for name, kind in (KINDS | {"count": COUNT}).items()},
    "facing": frozenset(DIRECTIONS),  # asked only about what is there, so never "none"
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
        absent = [float(one.answer == NONE) for one in members if one.ground_truth == NONE]
        present = [float(one.answer == NONE) for one in members if one.ground_truth != NONE]
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
            "own_type": mean(float(one.answer in VALUES[one.question_type]) for one in members),
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
    p = np.array([one.p_yes for one in found]).reshape(-1, len(PROBES))
    excess = {f"{texts[i]} → {texts[j]}": p[:, i] - p[:, j] for i, j in implications(PROBES)}
    excess |= {f"{texts[i]} ≠ {texts[j]}": p[:, i] + p[:, j] - 1 for i, j in exclusions(PROBES)}
    by_pair = {name: float((values > TOLERANCE).mean()) for name, values in excess.items()}
    return {"violated": mean(by_pair.values()), "pairs": len(by_pair) * len(p), "images": len(p), "by_pair": by_pair}


def word_questions(asked: Sequence[tuple[str, str]], processor: Any) -> dict[str, list[int]]:
    """For each content word, the indices of the questions (text, right answer) that hold it.

    Words in fewer than 30 questions are left out, and those with fewer than 10 right answers other than the most
    frequent one: where it is always day, a model that sees nothing is right about the night, too.
    """
    tokenizer = processor.tokenizer
    texts = list(dict.fromkeys(text for text, _ in asked))
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    words_of = {text: set(tokenizer.convert_ids_to_tokens(row)) for text, row in zip(texts, ids)}
    found: defaultdict[str, list[int]] = defaultdict(list)
    for index, (text, _) in enumerate(asked):
        for word in filter(is_content_word, words_of[text]):
            found[word].append(index)

    def is_enough(indices: list[int]) -> bool:
        [(_, most_frequent)] = Counter(asked[index][1] for index in indices).most_common(1)
        return len(indices) >= MIN_GAIN_QUESTIONS and len(indices) - most_frequent >= MIN_OTHER_ANSWERS

    return {word: indices for word, indices in sorted(found.items()) if is_enough(indices)}


def word_gains(
    predictions: Sequence[Prediction], blind: Sequence[Prediction], processor: Any
) -> dict[str, dict[str, float]]:
    """For each word of `word_questions`, how much better its questions are answered than about the mean image.

    Args:
        predictions, blind: of the same questions, in the same order.

    Returns:
        {word: {"gain": mean difference of accuracy, "error": its standard error, "photographs": number of questions
        about photographs}}.
    """
    asked = [(one.question, one.ground_truth) for one in predictions]
    differences = np.array([one.is_right - other.is_right for one, other in zip(predictions, blind, strict=True)])
    is_photograph = np.array([one.source != SYNTHETIC for one in predictions])
    return {
        word: {
            "gain": float(differences[indices].mean()),
            "error": float(differences[indices].std(ddof=1) / math.sqrt(len(indices))),
            "photographs": int(is_photograph[indices].sum()),
        }
        for word, indices in word_questions(asked, processor).items()
    }


def measure_word_gains(
    model: Any, processor: Any, rows: Any, words: Iterable[str], batch_size: int = 16
) -> dict[str, dict[str, float]]:
    """The `word_gains` of a model on the rows of a dataset; empty, at once, if none of `words` can be measured."""
    asked = [pair for row in rows for pair in zip(row["questions"], row["answers"])]
    if not word_questions(asked, processor).keys() & set(words):
        return {}
    blind = predict(model, processor, rows, batch_size, image=mean_image(rows, processor))
    return word_gains(predict(model, processor, rows, batch_size), blind, processor)


def update_taught(
    before: Mapping[str, Sequence[str]], asked: Mapping[str, str], gains: Mapping[str, Mapping[str, float]]
) -> dict[str, list[str]]:
    """The words that the weights are taught after a training or evaluation: {"photographs": [...], "rendered": [...]}.

    - A word that was not asked often keeps its standing.
    - A word that was asked often becomes taught if the development questions that hold it are answered better than
      blind by two standard errors. A word that was taught before loses this only if they show no gain at all.
    - If there are too few of these questions to tell, a word that was asked often is taught.

    Args:
        before: the words taught before, in the same form; {} for random weights.
        asked: {word: "photographs" or "rendered"} of the words that were asked often, with different answers.
        gains: of `word_gains`: of the words with enough development questions.
    """
    standing = {word: kind for kind, words in before.items() for word in words}
    for word, kind in asked.items():
        measured = gains.get(word)
        needed = 0.0 if measured is None or word in standing else STANDARD_ERRORS * measured["error"]
        if measured is not None and measured["gain"] <= needed:
            standing.pop(word, None)
        elif standing.get(word) != TAUGHT_ON[0]:  # taught on photographs once is enough
            standing[word] = kind
    return {kind: sorted(word for word in standing if standing[word] == kind) for kind in TAUGHT_ON}


def taught_coverage(processor: Any) -> dict[str, list[str]]:
    """The content words of the vocabulary by what the weights were taught; empty if that is unknown."""
    if processor.taught is None:
        return {}
    photographs, rendered = (processor.taught[kind] for kind in TAUGHT_ON)
    content = sorted(filter(is_content_word, processor.tokenizer.get_vocab()))
    untaught = [word for word in content if word not in {*photographs, *rendered}]
    return {"taught on photographs": photographs, "taught on rendered scenes only": rendered, "untaught": untaught}


def untaught_questions(
    model: Any, processor: Any, rows: Iterable[Mapping[str, Any]], batch_size: int = 16, progress: str | None = None
) -> dict[str, Any]:
    """P(yes) of "Is there a ...?" with nouns that the weights were not taught: it should not be near 1.

    Returns:
        "mean" of P(yes); "confident": fraction of answers with P(yes) above 0.9 or below 0.1; "words" asked about;
        "questions". Empty if nothing is known of taught words, all are taught, or there are no images.
    """
    vocabulary = processor.tokenizer.get_vocab()
    words = [word for word in NOUNS if word in vocabulary and processor.untaught_words(word)]
    if not words:
        return {}
    texts = [f"Is there {with_article(word)}?" for word in words]
    asked = ({**_about(row, index), "questions": texts, **_filler(len(texts))} for index, row in enumerate(rows))
    found = predict(model, processor, asked, batch_size, generate_words=False, progress=progress)
    if not found:
        return {}
    p = [one.p_yes for one in found if one.p_yes is not None]
    confident = mean(float(max(value, 1 - value) > CONFIDENT) for value in p)
    return {"mean": mean(p), "confident": confident, "words": words, "questions": len(p)}


def _about(row: Mapping[str, Any], index: int) -> dict[str, Any]:
    return {"image": row["image"], "source": row["source"], "image_id": str(index)}


def _filler(count: int) -> dict[str, list[str]]:
    """Columns of questions whose answers are unknown."""
    return {name: [""] * count for name in ("answers", "question_types", "categories", "question_ids")}
