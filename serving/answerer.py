"""One `Answerer` for all commands: images and questions in, answers out.

    images → read → encode once → classify all questions in one packed pass ─┬─ yes or no: done, with P(yes)
                                                                             └─ other: generate the answer

The rule is in `answering.py`, which evaluation shares. With thresholds, the limit between yes and no depends on
the question type.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer

from ..answering import FirstWord, first_words, generate_answers
from ..data.ground_truth import NONE
from ..evaluation.thresholds import Thresholds
from ..images_traffic_vlm import to_rgb
from ..loading import load_weights
from ..processing_traffic_vlm import TrafficVLMProcessor
from ..question_form_traffic_vlm import is_yes_no_question
from .pictures import Region


def notes_on_words(unknown: Sequence[str], untaught: Sequence[str]) -> list[str]:
    """What to tell about words of a question: a note on unknown words, and one on words that were not taught."""
    notes = {"unknown, so ignored": unknown, "not taught, or not reliably, so guessed": untaught}
    return [f"{note}: {', '.join(words)}" for note, words in notes.items() if words]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question.

    Attributes:
        answer: "yes", "no", or words.
        probability: of this answer. For yes and no relative to each other, for words the mean of its words.
        yes_probability: calibrated P(yes); None for an answer in words.
        unknown_words: words of the question that are not in the vocabulary; the model ignores them.
        untaught_words: words of the question that the model was not taught; it guesses what they mean.
        not_sure: whether P(yes) lies in the band of its threshold; None for an answer in words, and without
            thresholds.
    """

    question: str
    answer: str
    probability: float
    yes_probability: float | None = None
    unknown_words: tuple[str, ...] = ()
    untaught_words: tuple[str, ...] = ()
    not_sure: bool | None = None

    @property
    def shown(self) -> str:
        """The answer as people read it: "none seen" for "none"."""
        return "none seen" if self.answer == NONE else self.answer

    @property
    def score(self) -> float:
        """The probability in files of labels and timelines: P(yes), or that of the answer in words."""
        return self.probability if self.yes_probability is None else self.yes_probability

    @property
    def notes(self) -> list[str]:
        return notes_on_words(self.unknown_words, self.untaught_words)

    def to_dict(self) -> dict[str, Any]:
        """The fields for JSON, with the answer as shown; `not_sure` only if it is known."""
        values = asdict(self) | {"answer": self.shown}
        if self.not_sure is None:
            del values["not_sure"]
        return values

    def to_text(self) -> str:
        """ "yes, 0.97" or "yes, 0.55, not sure" """
        return f"{self.shown}, {self.probability:.2f}{', not sure' if self.not_sure else ''}"


@dataclass(frozen=True, slots=True)
class CheckedQuestion:
    """A question that can be answered.

    Attributes:
        tokens: length of its prompt.
        about: the fields of an `Answer` about its words: "unknown_words" and "untaught_words".
    """

    tokens: int
    about: dict[str, Any]


class Answerer:
    """A loaded model that answers questions about images.

    Args:
        folder: a model folder, or the name of a repository on the Hub.
        device: "cpu", "cuda", ...; by default a GPU if there is one.
        dtype: by default bfloat16 on a GPU and float32 on a CPU.
        thresholds: on P(yes); by default the more likely of yes and no is the answer.
        region: the part of each image that is asked about; by default all of it.

    Raises:
        OSError: no such model, or it has no weights.
        ValueError: the weights are damaged or do not match config.json.
        RuntimeError: no such device.
    """

    def __init__(
        self,
        folder: str | Path,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        thresholds: Thresholds | None = None,
        region: Region | None = None,
    ):
        self.thresholds, self.region = thresholds, region
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = dtype or (torch.float32 if self.device.type == "cpu" else torch.bfloat16)
        model: Any = load_weights(folder, dtype=dtype).eval()  # first, as it says when there is no such folder
        self.processor: Any = TrafficVLMProcessor.from_pretrained(str(folder))
        try:
            self.model = model.to(self.device)
        except AssertionError as error:  # raised by torch builds without support for the device
            raise RuntimeError(f"{self.device}: {error}") from error
        self.model.fuse_for_inference()
        self.text_config = self.model.config.get_text_config()
        self.thread = ThreadPoolExecutor(1)  # generates streamed answers
        # Cached because the same questions are usually asked about many images.
        self.check_question = lru_cache(maxsize=4096)(self._check_question)

    def __call__(self, images: Sequence[Any], questions: Sequence[Sequence[str]]) -> list[list[Answer]]:
        """Answer a list of questions about each image.

        Args:
            images: anything the processor reads: PIL images, arrays, paths.
            questions: one list for each image.

        Raises:
            ValueError: an unreadable image, or a question that is empty, too long or without any known word.
        """
        return self.ask(self.encode(self.read(images)), questions)

    def read(self, images: Sequence[Any]) -> torch.Tensor:
        """Preprocess images to pixels [I,3,H,W]. Does not use the model: other threads can call it ahead of time."""
        return self.processor(images=[self.open(image) for image in images], return_tensors="pt")["pixel_values"]

    def open(self, image: Any) -> Image.Image:
        """What the model sees of anything the processor reads: an RGB image, cut to the region."""
        picture = to_rgb(image)
        return picture if self.region is None else picture.crop(self.region.box(*picture.size))

    def encode(self, pixels: torch.Tensor) -> Any:
        """Encode pixels [I,3,H,W] once, for any number of questions."""
        return self.model.encode_images(pixels.to(self.device))

    def try_questions(self, questions: Sequence[str]) -> list[Answer]:
        """Answer questions about a gray image: their answers have `notes`, and later passes are faster.

        Raises:
            ValueError: a question is empty, too long or without any known word.
        """
        return self([Image.new("RGB", (64, 64), "gray")], [questions])[0]

    def ask(self, encoded: Any, questions: Sequence[Sequence[str]], always_yes_no: bool = False) -> list[list[Answer]]:
        """Answer a list of questions about each encoded image.

        Args:
            always_yes_no: answer every yes/no question with yes or no, also where the model prefers other words.
        """
        answers: list[list[Any]] = self.classify(encoded, questions, always_yes_no)
        pending = [(i, j) for i, row in enumerate(answers) for j, answer in enumerate(row) if answer is None]
        generated = self._generate(encoded, [(i, questions[i][j]) for i, j in pending])
        for (i, j), answer in zip(pending, generated):
            answers[i][j] = answer
        return answers

    @torch.no_grad()
    def classify(
        self, encoded: Any, questions: Sequence[Sequence[str]], always_yes_no: bool = False
    ) -> list[list[Answer | None]]:
        """Answer yes/no questions in one pass. Questions whose answer starts with another token get None."""
        for question in {question for row in questions for question in row}:
            self.check_question(question)
        first = first_words(self.model, self.processor, encoded, questions)
        return [
            [self._to_answer(question, word, always_yes_no) for question, word in zip(*row)]
            for row in zip(questions, first)
        ]

    def _to_answer(self, question: str, first: FirstWord, always_yes_no: bool) -> Answer | None:
        if not (first.is_yes_no or (always_yes_no and is_yes_no_question(question))):
            return None
        p_yes, about = first.yes_probability, self.check_question(question).about
        if self.thresholds is None:
            return Answer(question, first.text, max(p_yes, 1 - p_yes), p_yes, **about)
        threshold = self.thresholds.for_question(question)
        answer = threshold.answer(p_yes)
        probability = p_yes if answer == "yes" else 1 - p_yes
        return Answer(question, answer, probability, p_yes, **about, not_sure=threshold.is_unsure(p_yes))

    def stream(self, encoded: Any, question: str) -> Iterator[str | Answer]:
        """Generate an answer in words about one encoded image: yield its text in pieces, then the `Answer`."""
        streamer = TextIteratorStreamer(self.processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
        generated = self._submit(self.thread.submit, encoded, question, streamer)
        try:
            yield from filter(None, streamer)
            yield generated.result()[0]
        finally:
            generated.cancel()  # if it has not started, there is no reader left

    async def stream_async(
        self, encoded: Any, question: str, seconds: float, submit: Callable[..., Future]
    ) -> AsyncIterator[str | Answer]:
        """Like `stream`, but no thread waits for the tokens: any number of streams can be open.

        Args:
            seconds: time to wait for each token.
            submit: like the method of an executor: runs the generation.

        Raises:
            TimeoutError: no token in time.
        """
        streamer = AsyncTextIteratorStreamer(
            self.processor.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=seconds
        )
        generated = self._submit(submit, encoded, question, streamer)
        try:
            async for piece in streamer:
                if piece:
                    yield piece
            yield generated.result()[0]
        finally:
            generated.cancel()

    def _submit(self, submit: Callable[..., Future], encoded: Any, question: str, streamer: Any) -> Future:
        generated = submit(self._generate, encoded, [(0, question)], streamer)
        generated.add_done_callback(lambda _: streamer.end())  # also after an error
        return generated

    def _check_question(self, question: str) -> CheckedQuestion:
        """Check that the processor takes the question, and that the model can answer it.

        Raises:
            ValueError: no word, no known word, or no room for an answer.
        """
        tokenizer = self.processor.tokenizer
        limit = min(self.text_config.max_position_embeddings, tokenizer.model_max_length)
        try:
            [ids] = self.processor(text=question, on_unknown="ignore", truncation=True, max_length=limit)["input_ids"]
        except ValueError as error:
            raise ValueError(f"The question {question!r} has no word.") from error
        if len(ids) >= limit:
            raise ValueError(
                f"A question of at least {limit} tokens leaves no room for an answer: both have at most {limit}."
            )
        unknown = tuple(self.processor.unknown_words(question))
        if unknown and not any(token.isalnum() for token in tokenizer.convert_ids_to_tokens(ids)):
            raise ValueError(f"The model knows no word of the question {question!r}.")
        about = {"unknown_words": unknown, "untaught_words": tuple(self.processor.untaught_words(question))}
        return CheckedQuestion(len(ids), about)

    def _generate(self, encoded: Any, asked: Sequence[tuple[int, str]], streamer: Any = None) -> list[Answer]:
        """Generate the answer to each (image index, question)."""
        if not asked:
            return []
        found = generate_answers(self.model, self.processor, encoded, asked, streamer)
        return [
            Answer(question, text, probability or 0.0, **self.check_question(question).about)
            for (_, question), (text, probability) in zip(asked, found)
        ]
