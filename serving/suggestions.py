"""Questions to suggest: those of the grammar whose words the weights were taught."""

from typing import Any

from ..data.ground_truth import UNCOUNTED
from ..data.scene import CLASSES, LIGHT_STATES, SCENE_ATTRIBUTES, UNBOXED
from ..data.templates import paraphrases_of


REGIONS = ("left", "right", "near")
ATTRIBUTES = ("time of day", "weather", "traffic density", "road type")


def suggest_questions(processor: Any) -> dict[str, str]:
    """{question: question type}, grouped by type, the simplest paraphrase of each question.

    All words are in the vocabulary. Content words are taught, if `processor.taught` is known.
    """
    return {
        question: question_id.partition("/")[0].replace("_", " ")
        for question_id in _question_ids()
        if not processor.unknown_words(question := paraphrases_of(question_id)[0])
        and not processor.untaught_words(question)
    }


def _question_ids() -> list[str]:
    """Question ids that photographs can answer: no colors of objects, which are learned from rendered scenes only."""
    located = [category for category in CLASSES if category not in UNBOXED | UNCOUNTED]
    ids = [f"presence/{category}" for category in CLASSES]
    ids += [f"place/{category}/{region}" for category in located for region in REGIONS]
    ids += [f"side/{category}/what" for category in located]
    ids += [f"count/{category}/what" for category in located]
    ids += ["comparison/car/more/person", "light_state/traffic light/what"]
    ids += [f"light_state/traffic light/is/{state}" for state in LIGHT_STATES]
    ids += ["sign_value/speed limit sign/what", "sign_value/traffic sign/which"]
    for name in ATTRIBUTES:
        question_type = name.replace(" ", "_")
        ids += [f"{question_type}/{name}/what", *(f"{question_type}/{name}/is/{v}" for v in SCENE_ATTRIBUTES[name])]
    return [*ids, "ahead/scene/what"]
