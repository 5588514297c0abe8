"""Taught words: those whose questions are answered better than without the image.

answers about the images ─────┐
answers about the mean image ─┴→ gain of each word ─┐
words that a training asked ────────────────────────┴→ the words that the weights are taught
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..data.scene import SYNTHETIC
from ..processing_traffic_vlm import TAUGHT_ON
from ..question_traffic_vlm import is_content_word
from . import MIN_ANSWERS, STANDARD_ERRORS


MIN_ASKED = 200  # questions with a word, for it to be asked often
MIN_GAIN_QUESTIONS = 30  # with a word, to measure its gain


def word_gains(answers: pd.DataFrame, without_image: pd.Series, processor: Any) -> dict[str, dict[str, float]]:
    """How much better the questions with each content word are answered than without the image.

    Words in fewer than 30 questions are left out, and those with fewer than 10 right answers other than the most
    frequent one: where it is always day, a model that sees nothing is right about the night, too.

    Args:
        answers: table of `predict`.
        without_image: whether each of its questions is answered right about the mean image.

    Returns:
        {word: {"gain": mean difference of accuracy, "error": its standard error, "photographs": number of questions
        about photographs}}.
    """
    words = {text: {*filter(is_content_word, processor.tokenizer.tokenize(text))} for text in set(answers["question"])}
    table = pd.DataFrame({"truth": answers["truth"], "is_photograph": answers["source"] != SYNTHETIC})
    table["gain"] = answers["is_right"].astype(float) - without_image.astype(float)
    table["word"] = answers["question"].map(words).map(sorted)
    found = {}
    for word, rows in table.explode("word").groupby("word"):
        others = len(rows) - rows["truth"].value_counts().max()
        if len(rows) >= MIN_GAIN_QUESTIONS and others >= MIN_ANSWERS:
            gain, error = float(rows["gain"].mean()), float(rows["gain"].std() / math.sqrt(len(rows)))
            found[str(word)] = {"gain": gain, "error": error, "photographs": int(rows["is_photograph"].sum())}
    return found


def asked_often(counts: np.ndarray, tokenizer: Any) -> dict[str, str]:
    """The content words that stood in at least 200 questions of a training, with different answers.

    Args:
        counts: `word_counts` [V,2,3] of the collator of training, summed over all batches.

    Returns:
        {word: "photographs" or, if fewer than 200 of these questions were about photographs, "rendered"}.
    """
    found = {}
    for word, token in tokenizer.get_vocab().items():
        yes, no, in_words = counts[token].sum(0)
        if is_content_word(word) and yes + no + in_words >= MIN_ASKED and ((yes and no) or in_words):
            found[word] = TAUGHT_ON[0 if counts[token, 0].sum() >= MIN_ASKED else 1]
    return found


def update_taught(
    before: Mapping[str, Sequence[str]], asked: Mapping[str, str], gains: Mapping[str, Mapping[str, float]]
) -> dict[str, list[str]]:
    """The words that the weights are taught after a training or evaluation: {"photographs": [...], "rendered": [...]}.

    - A word that was not asked often keeps its standing.
    - A word that was asked often becomes taught if the development questions that hold it are answered better than
      without the image by two standard errors. A word that was taught before loses this only without any gain.
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
