"""All questions about a scene: the tests compare them with an oracle and with those that are asked at random."""

from traffic_vlm.data.grammar import TYPES, paraphrases_of
from traffic_vlm.data.questions import Candidates, Question
from traffic_vlm.data.truth import GroundTruth


def enumerate_questions(truth: GroundTruth) -> list[Question]:
    """All questions with an unambiguous answer in a scene, in their simplest wording."""
    keys = [key for kind in TYPES.values() for key in dict.fromkeys(Candidates(truth, kind).find_keys())]
    found = [("/".join(key), key, answer) for key in keys if (answer := truth.find(key)) is not None]
    return [
        Question(paraphrases_of(one)[0], answer.answer, *key[:2], one, truth.boxes(key, answer))
        for one, key, answer in found
    ]
