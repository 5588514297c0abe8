"""The works that are timed and whose memory is measured: so many questions about so many images, tokens, a step."""

from dataclasses import dataclass
from itertools import cycle, islice, product
from typing import Literal

from .contestants import Contestant
from .timing import Run


THINGS = (
    "car, bus, truck, van, taxi, bicycle, motorcycle, tram, train, pedestrian, cyclist, child, dog, crosswalk, "
    "barrier, trailer, traffic light, stop sign, police car, fire truck, traffic cone, speed limit sign"
).split(", ")
FORMS = (
    "Is there a {}?",
    "Can you see a {}?",
    "Is there a {} on the left?",
    "Do you see a {} ahead?",
    "Is a {} crossing the street?",
)
PROMPT = "What is ahead?"


def ask_about(images: int, questions: int) -> list[list[str]]:
    """So many yes/no questions, of 6 to 11 tokens, about each image; over 110 they come again."""
    endless = cycle(form.format(thing) for thing, form in product(THINGS, FORMS))
    return [list(islice(endless, questions)) for _ in range(images)]


@dataclass(frozen=True)
class Work:
    """A work of a contestant.

    Attributes:
        kind: "yes_no" scores all questions; "generate" answers one with `tokens` tokens; "train" makes one step.
        images, questions: images, and questions about each.
    """

    kind: Literal["yes_no", "generate", "train"]
    images: int = 1
    questions: int = 1
    tokens: int = 0

    @property
    def name(self) -> str:
        asked = f"{self.images} × {self.questions} questions"
        names = {"yes_no": asked, "generate": f"{self.tokens} tokens", "train": f"training step, {asked}"}
        return names[self.kind]

    def prepare(self, contestant: Contestant) -> Run:
        """A run of this work, with all inputs made."""
        pixels = contestant.setup.pixels(self.images)
        if self.kind == "generate":
            return contestant.generation(pixels, PROMPT, self.tokens)
        questions = ask_about(self.images, self.questions)
        if self.kind == "yes_no":
            return contestant.yes_no(pixels, questions)
        answers = [["yes" if number % 2 else "no" for number in range(len(row))] for row in questions]
        return contestant.training(pixels, questions, answers)


@dataclass(frozen=True)
class Amounts:
    """How much of each work a benchmark does.

    Attributes:
        questions: numbers of yes/no questions about one image.
        images: images, and questions about each, of the batch.
        tokens: numbers of generated tokens.
        compiled_tokens: tokens of compiled generation.
        training: images, and questions about each, of a training step.
        cached_tokens: lengths at which generation with a cache is held against generation without one.
        cache_tokens: text tokens beside one image, for the bytes of a cache.
        grown_questions, grown_images: numbers at which growth of cost is measured.
        tower_images: images in a pass of the vision tower whose rate is measured.
        products: rows, inner size and columns of matrix products, the fastest of which is the rate of the machine.
    """

    questions: tuple[int, ...] = (1, 4, 16, 64)
    images: tuple[int, int] = (32, 8)
    tokens: tuple[int, ...] = (8, 32, 96)
    compiled_tokens: int = 32
    training: tuple[int, int] = (16, 16)
    cached_tokens: tuple[int, ...] = (8, 32, 64, 96, 120)
    cache_tokens: int = 50
    grown_questions: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
    grown_images: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64)
    tower_images: tuple[int, ...] = (1, 8, 32)
    products: tuple[tuple[int, int, int], ...] = ((1024, 1024, 1024), (2048, 2048, 2048), (6272, 768, 3072))


TINY_AMOUNTS = Amounts(
    questions=(1, 16),
    images=(3, 2),
    tokens=(2, 32),
    training=(2, 3),
    cached_tokens=(2, 8),
    cache_tokens=5,
    grown_questions=(1, 4, 8),
    grown_images=(1, 2, 3),
    tower_images=(1, 2),
    products=((32, 32, 32), (64, 64, 64)),
)
