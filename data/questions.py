"""Questions about a scene with true answers, balanced between yes and no.

    GroundTruth of a scene → candidate keys → answers → Balancer → text of a template (`templates.py`)

Every question has an id, `type/class/form/value` ("place/car/left", "color/car/is/red"), which is the same in all
scenes and for all paraphrases. A key is a question id split at the slashes. `ground_truth.py` decides whether a
question may be asked, and holds the thresholds; `templates.yaml` lists the question types.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .candidates import OPEN_QUESTION_COPIES, Candidates
from .ground_truth import NONE, AnswerWithBoxes, Box, GroundTruth, Key
from .templates import QUESTION_TYPES, TYPES, paraphrases_of, random_paraphrase


# Maximum fraction of "none" and of "0" among the answers to a question such as "What color is the traffic light?"
NONE_FRACTION = 0.33
# Answers in words that are more frequent than the mean of their question's answers are accepted with probability
# (mean / count) ** MEAN_POWER.
MEAN_POWER = 6
# Of this many random keys, the one whose answer was asked least is tried first. Otherwise the yes of a rare class, or
# a rare number, would hardly be asked even about the few images where it is true.
CANDIDATES = 6
MAX_TRIES = 8  # keys tried for each question: limits the time spent on scenes with few questions
SCENE_ATTRIBUTE_OF_TYPE = {kind.name: kind.attribute for kind in TYPES.values() if kind.rule == "scene_attribute"}


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a scene.

    Attributes:
        text: one of the paraphrases of the question.
        answer: "yes", "no", or words of the vocabulary.
        question_type: one of QUESTION_TYPES.
        category: the class of objects, or the scene attribute that the question is about.
        question_id: `type/class/form/value`, the same for all paraphrases and all scenes.
        boxes: boxes in pixels of the objects that make the answer a yes; empty for other answers.
    """

    text: str
    answer: str
    question_type: str
    category: str
    question_id: str
    boxes: tuple[Box, ...] = ()

    @property
    def key(self) -> Key:
        return tuple(self.question_id.split("/"))


_NO_ANSWERS: Counter[str] = Counter()


def _prefixes(key: Key) -> list[Key]:
    """The prefixes of at least two parts of a key, and the key itself."""
    return [key[:length] for length in range(2, len(key) + 1)]


@dataclass
class Balancer:
    """Balances the answers over all the scenes that it is used for.

    The rarer of yes and no is always accepted, the more frequent one half of the time, until their counts differ by
    `tolerance`. This holds for every (type, class), every (type, class, form) and every question id. So a question
    whose answer is nearly always yes is soon asked only as often as its answer is no. Other answers are balanced less
    strictly: rare ones are always accepted, frequent ones with a probability that falls with their count. A question
    that has had a single answer so far is hardly asked. "none" and "0" are limited.

    Attributes:
        tolerance: maximum difference between the number of yes and of no.
        counts: number of each answer by key and by each prefix of at least two parts of a key.
    """

    tolerance: int = 3
    counts: dict[Key, Counter[str]] = field(default_factory=dict)

    def accepts(self, key: Key, answer: str, rng: random.Random) -> bool:
        """Whether to ask this question. If so, its answer is counted."""
        if key[0] == "description":  # hardly any answer occurs twice
            return True
        if answer in ("yes", "no"):
            keys = _prefixes(key)
            imbalance = self._surplus(key, answer)
            if imbalance > 0 and (imbalance >= self.tolerance or rng.random() < 0.5):
                return False
        else:
            keys = [key]
            counter = self.counts.get(key, _NO_ANSWERS)
            if answer in (NONE, "0") and counter[answer] > NONE_FRACTION * counter.total():
                return False
            if rng.random() > ((self._mean(key) + 1) / (counter[answer] + 1)) ** MEAN_POWER:
                return False
        for prefix in keys:
            if prefix not in self.counts:
                self.counts[prefix] = Counter()
            self.counts[prefix][answer] += 1
        return True

    def frequency(self, key: Key, found: AnswerWithBoxes | None) -> tuple[bool, float]:
        """Sort key of an answer: first those that are not in surplus, and among these the ones counted least."""
        if found is None:
            return True, math.inf
        answer = found.answer
        count = self.counts.get(key, _NO_ANSWERS)[answer]
        if answer in ("yes", "no"):
            return self._surplus(key, answer) > 0, count
        return count > self._mean(key), count / OPEN_QUESTION_COPIES

    def _surplus(self, key: Key, answer: str) -> int:
        """How many more times this answer was counted than the opposite: the maximum over a key and its prefixes."""
        return max(self._imbalance(prefix, answer) for prefix in _prefixes(key))

    def _mean(self, key: Key) -> float:
        """The mean count of the different answers to a question."""
        counter = self.counts.get(key, _NO_ANSWERS)
        return counter.total() / max(2, len(counter))

    def _imbalance(self, key: Key, answer: str) -> int:
        """How many more times this answer was counted than the opposite one."""
        counter = self.counts.get(key, _NO_ANSWERS)
        difference = counter.get("yes", 0) - counter.get("no", 0)
        return difference if answer == "yes" else -difference


class NaturalRates(Balancer):
    """Accepts every question, so that yes is as frequent as it is in the images."""

    def accepts(self, key: Key, answer: str, rng: random.Random) -> bool:
        return True


def enumerate_questions(truth: GroundTruth) -> list[Question]:
    """All questions with an unambiguous answer in a scene, in their simplest wording."""
    keys = [key for kind in TYPES.values() for key in dict.fromkeys(Candidates(truth, kind).keys())]
    found = [(key, truth.find(key)) for key in keys]
    return [_question(truth, key, answer, None) for key, answer in found if answer is not None]


def ask(
    truth: GroundTruth,
    rng: random.Random,
    count: int,
    balancer: Balancer | None = None,
    question_types: Sequence[str] = QUESTION_TYPES,
    presuppose: bool = True,
) -> list[Question]:
    """Questions with different ids about a scene, sampled at random.

    Args:
        truth: of the scene.
        rng: source of random numbers. The result depends only on the arguments, with the states of `rng` and
            `balancer`.
        count: maximum number of questions. There are fewer where the scene has fewer or the balancer accepts fewer.
        balancer: balances answers over all scenes, and prefers those that it has counted least; by default this scene
            is balanced by itself.
        question_types: question types to ask, in proportion to their weights.
        presuppose: also ask for the color, state, value or side of absent objects; the answer is "none".
    """
    balancer = Balancer() if balancer is None else balancer
    weights = {name: TYPES[name].weight for name in question_types}
    pools: dict[str, list[Key]] = {}
    taken: set[Key] = set()
    questions: list[Question] = []
    tries = MAX_TRIES * count
    while weights and len(questions) < count and tries > 0:
        question_type = _pick(weights, rng)
        pool = pools.get(question_type)
        if pool is None:
            pool = pools[question_type] = Candidates(truth, TYPES[question_type], rng).keys()
        for _ in range(min(MAX_TRIES, len(pool))):
            tries -= 1
            candidates = [int(rng.random() * len(pool)) for _ in range(CANDIDATES)]
            answers = {i: None if pool[i] in taken else truth.find(pool[i]) for i in candidates}
            i = min(answers, key=lambda i: balancer.frequency(pool[i], answers[i]))
            key, found = pool[i], answers[i]
            pool[i] = pool[-1]
            pool.pop()
            taken.add(key)  # also after a refusal by the balancer: a key that is listed several times gets one try
            if found is not None and found.answer == NONE and not presuppose:
                continue
            if found is not None and balancer.accepts(key, found.answer, rng):
                questions.append(_question(truth, key, found, rng))
                break
        else:
            weights[question_type] /= 4  # few questions of this type are accepted now: try other types first
        if not pool:
            del weights[question_type]
    return questions


def _question(truth: GroundTruth, key: Key, found: AnswerWithBoxes, rng: random.Random | None) -> Question:
    question_id = "/".join(key)
    text = paraphrases_of(question_id)[0] if rng is None else random_paraphrase(question_id, rng)
    return Question(text, found.answer, key[0], key[1], question_id, truth.boxes(key, found))


def rebalance(asked: Sequence[Sequence[Question]]) -> list[list[Question]]:
    """Remove questions so that each question type and class has as many yes as no.

    A `Balancer` leaves a small surplus of the more frequent answer. It adds up over many balancers, one for each file.

    Args:
        asked: the questions about each image. The last questions of an image are removed first. The only question of
            an image is kept, so that no image is lost.
    """
    steps = {"yes": 1, "no": -1}
    kept = [list(questions) for questions in asked]
    positions = [(i, questions) for questions in kept for i in range(len(questions)) if questions[i].answer in steps]
    imbalances: Counter[str | tuple[str, str]] = Counter()  # yes minus no
    for i, questions in positions:
        imbalances[questions[i].question_type, questions[i].category] += steps[questions[i].answer]
        imbalances[questions[i].question_id] += steps[questions[i].answer]
    for i, questions in sorted(positions, key=lambda position: -position[0]):
        # Remove only where the question id has a surplus too. The imbalances of the ids add up to that of the class,
        # so there are always enough of these.
        keys = ((questions[i].question_type, questions[i].category), questions[i].question_id)
        step = steps[questions[i].answer]
        if len(questions) > 1 and all(imbalances[key] * step > 0 for key in keys):
            del questions[i]
            for key in keys:
                imbalances[key] -= step
    return kept


def _pick(weights: dict[str, float], rng: random.Random) -> str:
    """A random key of `weights`, in proportion to its weight."""
    point = rng.random() * sum(weights.values())
    for question_type, weight in weights.items():
        point -= weight
        if point < 0:
            return question_type
    return next(reversed(weights))
