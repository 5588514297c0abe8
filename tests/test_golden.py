"""What the shipped weights answer about the three photographs of docs/, which were checked by eye.

The numbers belong to the weights: whoever commits other weights looks at the photographs and writes new ones.
"""

import numpy as np
import pytest
import torch
from transformers import pipeline

from tiny import ROOT


GOLDEN: dict[str, list[tuple[str, str, float | None]]] = {}
for line in (ROOT / "tests/data/golden.txt").read_text().splitlines()[1:]:
    name, question, answer, *p_yes = line.split(" | ")
    GOLDEN.setdefault(name, []).append((question, answer, float(p_yes[0]) if p_yes else None))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.01), (torch.bfloat16, 0.06)], ids=str)
def test_shipped_weights_answer_right(dtype, tolerance):
    vqa = pipeline("visual-question-answering", model=str(ROOT), dtype=dtype)
    photographs = [str(ROOT / "docs" / f"{name}.jpg") for name in GOLDEN]
    questions = [[question for question, _, _ in rows] for rows in GOLDEN.values()]
    for rows, items in zip(GOLDEN.values(), vqa(photographs, questions)):
        for (question, answer, p_yes), item in zip(rows, items):
            assert (item["question"], item["answer"]) == (question, answer)
            assert "problem" not in item and "untaught_words" not in item
            if p_yes is None:
                assert item["p_yes"] is None and item["score"] > 0.5
            else:
                assert item["p_yes"] == pytest.approx(p_yes, abs=tolerance)
                assert item["score"] == (item["p_yes"] if answer == "yes" else 1 - item["p_yes"])


def test_other_wordings_get_the_answers_of_the_taught_ones():
    """The same are 95 % of yes and no, and 92 % in words."""
    lines = (ROOT / "tests" / "data" / "wordings.txt").read_text().splitlines()[1:]
    pairs = [[part.strip() for part in line.split("|")] for line in lines]
    questions = list(dict.fromkeys(question for pair in pairs for question in pair))
    vqa = pipeline("visual-question-answering", model=str(ROOT), dtype=torch.float32)
    found = {True: [], False: []}  # whether answers are the same, for yes or no and for words
    for items in vqa([str(ROOT / "docs" / f"{name}.jpg") for name in GOLDEN], questions, answer_untaught=True):
        answered = dict(zip(questions, items))
        for one, other in ((answered[taught], answered[wording]) for taught, wording in pairs):
            found[one["p_yes"] is not None].append(one["answer"] == other["answer"])
    assert np.mean(found[True]) > 0.93 and np.mean(found[False]) > 0.88
