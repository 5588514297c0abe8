"""One place that turns images and questions into answers.

    images → encoded once → packed questions → the first word of each answer ─┬─ yes, no: done, with P(yes)
                                                                              └─ another word: generate the rest

Whether a question wants a yes, a no or words is not guessed from its wording: the model says it with its first word.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import TextIteratorStreamer

from ..generation_traffic_vlm import MAX_NEW_TOKENS
from ..processing_traffic_vlm import QUESTION_END, TrafficVLMProcessor
from ..utils import load_weights


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model says to one question.

    Attributes:
        answer: "yes", "no", or words.
        probability: of this answer: of a yes or no beside the other, of words beside all other words.
        yes_probability: P(yes), calibrated; None for an answer in words.
        unknown_words: words of the question that the model does not know, and so did not read.
    """

    question: str
    answer: str
    probability: float
    yes_probability: float | None = None
    unknown_words: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Answerer:
    """A loaded model that answers questions about images.

    Args:
        folder: a model folder, or a name on the Hub.
        device: "cpu", "cuda", ...; by default a GPU if there is one.
        dtype: of the computation; by default bfloat16 on a GPU and float32 on a CPU.

    Raises:
        OSError: there is no such model, or it has no weights.
        ValueError: weights that are torn, or of another model than the folder's config.json tells.
        RuntimeError: there is no such device.
    """

    def __init__(self, folder: str | Path, device: str | None = None, dtype: torch.dtype | None = None):
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = dtype or (torch.float32 if self.device.type == "cpu" else torch.bfloat16)
        self.processor: Any = TrafficVLMProcessor.from_pretrained(str(folder))
        model: Any = load_weights(folder, dtype=dtype).eval()
        try:
            self.model = model.to(self.device)
        except AssertionError as error:  # so torch says that it was built without such devices
            raise RuntimeError(f"{self.device}: {error}") from error
        # The same questions are asked about image after image.
        self.unknown_words = lru_cache(maxsize=4096)(self._unknown_words)

    def __call__(self, images: Sequence[Any], questions: Sequence[Sequence[str]]) -> list[list[Answer]]:
        """For each image the answers to its questions.

        Args:
            images: whatever the processor reads: PIL images, arrays, paths.
            questions: a list for each image.

        Raises:
            ValueError: an image that cannot be read, an empty question, or one too long; the message names it.
        """
        return self.ask(self.look(images), questions)

    def read(self, images: Sequence[Any]) -> torch.Tensor:
        """Pixels [I,3,H,W] of images, which any thread may make ahead of the model."""
        return self.processor(images=list(images), return_tensors="pt")["pixel_values"]

    def encode(self, pixels: torch.Tensor) -> Any:
        """Images of `read`, encoded once; `ask` about them as often as you like."""
        return self.model.encode_images(pixels.to(self.device))

    def look(self, images: Sequence[Any]) -> Any:
        """Read and encode images."""
        return self.encode(self.read(images))

    def ask(self, encoded: Any, questions: Sequence[Sequence[str]]) -> list[list[Answer]]:
        """The answers about encoded images; a list of questions for each of them."""
        decided = self.decide(encoded, questions)
        wordy = [
            (image, question)
            for image, (row, answers) in enumerate(zip(questions, decided))
            for question, answer in zip(row, answers)
            if answer is None
        ]
        words = iter(self._say(encoded, wordy) if wordy else ())
        return [
            [answer or self._in_words(question, *next(words)) for question, answer in zip(row, answers)]
            for row, answers in zip(questions, decided)
        ]

    @torch.no_grad()
    def decide(self, encoded: Any, questions: Sequence[Sequence[str]]) -> list[list[Answer | None]]:
        """As `ask`, in one pass over all questions: those that want words have None in place of an answer."""
        rows = [list(row) for row in questions]
        unknown = {question: self.unknown_words(question) for question in dict.fromkeys(chain(*rows))}
        inputs = self.processor(text=rows, packed=True, on_unknown="ignore", return_tensors="pt").to(self.device)
        text = self.model.config.get_text_config()
        decided: list[list[Answer | None]] = []
        for row, logits in zip(rows, self.model.question_logits(**inputs, encoded_images=encoded)):  # [Q,V]
            answers: list[Answer | None] = []
            first_words, yes = logits.argmax(-1).tolist(), self.model.yes_probability(logits).tolist()
            for question, word, p_yes in zip(row, first_words, yes):
                if word in (text.yes_token_id, text.no_token_id):
                    answer = ("yes", p_yes) if p_yes >= 0.5 else ("no", 1 - p_yes)
                    answers.append(Answer(question, *answer, p_yes, unknown[question]))
                else:
                    answers.append(None)
            decided.append(answers)
        return decided

    def stream(self, encoded: Any, question: str) -> Iterator[str | Answer]:
        """The answer in words about one encoded image: its text as it grows, and at the end the `Answer`."""
        with ThreadPoolExecutor(1) as pool:
            yield from self.stream_in(pool, lambda: encoded, question)

    def stream_in(
        self, pool: Executor, look: Callable[[], Any], question: str, seconds: float | None = None
    ) -> Iterator[Any]:
        """As `stream`, looking at the image and generating in a thread of `pool`.

        Raises:
            queue.Empty: no further word came for so many seconds.
        """
        options = {"skip_prompt": True, "skip_special_tokens": True, "timeout": seconds}
        streamer = TextIteratorStreamer(self.processor.tokenizer, **options)
        said = pool.submit(lambda: self._say(look(), [(0, question)], streamer))
        said.add_done_callback(lambda _: streamer.end())  # also where it failed
        text = ""
        try:
            for piece in streamer:
                text += piece
                yield text
            yield self._in_words(question, *said.result()[0])
        finally:
            said.cancel()  # should it still wait for the thread: nobody waits for it any more

    def _in_words(self, question: str, text: str, probability: float) -> Answer:
        return Answer(question, text, probability, unknown_words=self.unknown_words(question))

    def _unknown_words(self, question: str) -> tuple[str, ...]:
        """Words of a question that the model does not know.

        Raises:
            ValueError: it knows none of them, so that an answer would be to no question; or the question is so long
                that no word of an answer fits behind it.
        """
        unknown = tuple(self.processor.unknown_words(question))
        tokenizer = self.processor.tokenizer
        ids = tokenizer(question.rstrip(QUESTION_END), add_special_tokens=False)["input_ids"]
        words = [word for word in tokenizer.convert_ids_to_tokens(ids) if word.isalnum()]  # "[UNK]" is not
        length = len(ids) + 2  # with what the processor puts before and behind it
        limit = self.model.config.get_text_config().max_position_embeddings
        if length >= limit:
            raise ValueError(f"a question of {length} tokens leaves no room for an answer: both have at most {limit}")
        if unknown and not words:
            raise ValueError(f"no word of the question {question!r} is among those that the model knows")
        return unknown

    def _say(self, encoded: Any, asked: list[tuple[int, str]], streamer: Any = None) -> list[tuple[str, float]]:
        """Answers in words and their probabilities, all generated together; a streamer takes those to one question."""
        inputs = self.processor(text=[question for _, question in asked], on_unknown="ignore", return_tensors="pt")
        length, limit = inputs["input_ids"].shape[1], self.model.config.get_text_config().max_position_embeddings
        are_long = (inputs["attention_mask"].sum(-1) > limit - MAX_NEW_TOKENS).tolist()
        if len(set(are_long)) > 1:  # the answers to short questions are not cut for the sake of long ones
            parts = {kind: [one for one, is_long in zip(asked, are_long) if is_long == kind] for kind in (True, False)}
            said = {kind: iter(self._say(encoded, part)) for kind, part in parts.items()}
            return [next(said[is_long]) for is_long in are_long]
        output = self.model.generate(
            **inputs.to(self.device),
            encoded_images=encoded,
            image_index=torch.tensor([image for image, _ in asked], device=self.device),
            max_new_tokens=min(MAX_NEW_TOKENS, limit - length),
            do_sample=False,
            streamer=streamer,
            output_logits=True,
            return_dict_in_generate=True,
        )
        said = output.sequences[:, length:]  # [N,T]
        log_p = torch.stack(output.logits, 1).float().log_softmax(-1).gather(-1, said[..., None])[..., 0]
        log_p = log_p.masked_fill(said == self.model.config.get_text_config().pad_token_id, 0.0).sum(-1)
        texts = self.processor.batch_decode(said, skip_special_tokens=True)
        return list(zip(texts, log_p.exp().tolist()))
