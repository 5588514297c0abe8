"""Questions to suggest: those of the grammar whose words the weights were taught."""

from typing import Any

from .grammar import CONTENT, paraphrases_of
from .scene import CLASSES, LIGHT_STATES, SCENE_ATTRIBUTES, UNBOXED
from .truth import UNCOUNTED


SCENE = ("time of day", "weather", "traffic density", "road type")


def suggest_questions(processor: Any) -> dict[str, str]:
    """The simplest paraphrase of each question that photographs can answer, and its type.

    Only questions that the model answers, all of whose words are known and taught.
    """
    located = [category for category in CLASSES if category not in UNBOXED | UNCOUNTED]
    ids = [f"presence/{category}" for category in CLASSES]
    ids += [f"place/{category}/{region}" for category in located for region in ("left", "right", "near")]
    ids += [f"{question_type}/{category}/what" for question_type in ("side", "count") for category in located]
    ids += [f"color/{category}/what" for category in CONTENT["colored"]]
    ids += ["comparison/car/more/person", "light_state/traffic light/what"]
    ids += [f"light_state/traffic light/is/{state}" for state in LIGHT_STATES]
    ids += ["sign_value/speed limit sign/what", "sign_value/traffic sign/which"]
    for key in (f"{name.replace(' ', '_')}/{name}" for name in SCENE):
        ids += [f"{key}/what", *(f"{key}/is/{value}" for value in SCENE_ATTRIBUTES[key.partition("/")[2]])]
    questions = {paraphrases_of(one)[0]: one.partition("/")[0].replace("_", " ") for one in [*ids, "ahead/scene/what"]}
    limit, taught = processor.tokenizer.model_max_length, processor.taught_words

    def is_answered(question: str) -> bool:
        read = processor.rules.read(question, processor.prompt, limit, taught)
        return not (read.problem or read.unknown_words or read.untaught_words)

    return {question: question_type for question, question_type in questions.items() if is_answered(question)}
