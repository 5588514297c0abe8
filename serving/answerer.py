"""One `Answerer` for all commands: images and questions in, answers out.

    images → read → encode once → classify all questions in one packed pass ─┬─ yes or no: done, with P(yes)
                                                                             └─ other: generate the answer

The first token decides the type of an answer: `[YES]` and `[NO]` are final, any other token starts an answer in words.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import TextIteratorStreamer

from ..generation_traffic_vlm import MAX_NEW_TOKENS
from ..processing_traffic_vlm import QUESTION_END, TrafficVLMProcessor
from ..utils import load_weights


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question.

    Attributes:
        answer: "yes", "no", or words.
        probability: of this answer. For yes and no relative to each other, for words relative to all other texts.
        yes_probability: calibrated P(yes); None for an answer in words.
        unknown_words: words of the question that are not in the vocabulary; the model ignores them.
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
        folder: a model folder, or the name of a repository on the Hub.
        device: "cpu", "cuda", ...; by default a GPU if there is one.
        dtype: by default bfloat16 on a GPU and float32 on a CPU.

    Raises:
        OSError: no such model, or it has no weights.
        ValueError: the weights are damaged or do not match config.json.
        RuntimeError: no such device.
    """

    def __init__(self, folder: str | Path, device: str | None = None, dtype: torch.dtype | None = None):
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = dtype or (torch.float32 if self.device.type == "cpu" else torch.bfloat16)
        self.processor: Any = TrafficVLMProcessor.from_pretrained(str(folder))
        model: Any = load_weights(folder, dtype=dtype).eval()
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
        return self.processor(images=list(images), return_tensors="pt")["pixel_values"]

    def encode(self, pixels: torch.Tensor) -> Any:
        """Encode pixels [I,3,H,W] once, for any number of questions."""
        return self.model.encode_images(pixels.to(self.device))

    def ask(self, encoded: Any, questions: Sequence[Sequence[str]]) -> list[list[Answer]]:
        """Answer a list of questions about each encoded image."""
        answers: list[list[Any]] = self.classify(encoded, questions)
        pending = [(i, j) for i, row in enumerate(answers) for j, answer in enumerate(row) if answer is None]
        generated = self._generate(encoded, [(i, questions[i][j]) for i, j in pending])
        for (i, j), answer in zip(pending, generated):
            answers[i][j] = answer
        return answers

    @torch.no_grad()
    def classify(self, encoded: Any, questions: Sequence[Sequence[str]]) -> list[list[Answer | None]]:
        """Answer yes/no questions in one pass. Questions whose answer starts with another token get None."""
        rows = [list(row) for row in questions]
        unknown_words = {question: self.check_question(question) for row in rows for question in row}
        inputs = self.processor(text=rows, packed=True, on_unknown="ignore", return_tensors="pt").to(self.device)
        answers: list[list[Answer | None]] = []
        for row, logits in zip(rows, self.model.question_logits(**inputs, encoded_images=encoded)):  # [Q,V]
            answers.append([])
            first_tokens, yes = logits.argmax(-1).tolist(), self.model.yes_probability(logits).tolist()
            for question, token, p_yes in zip(row, first_tokens, yes):
                answer = None
                if token in (self.text_config.yes_token_id, self.text_config.no_token_id):
                    text, probability = ("yes", p_yes) if p_yes >= 0.5 else ("no", 1 - p_yes)
                    answer = Answer(question, text, probability, p_yes, unknown_words[question])
                answers[-1].append(answer)
        return answers

    def stream(self, encoded: Any, question: str, timeout: float | None = None) -> Iterator[str | Answer]:
        """Generate an answer in words about one encoded image: yield its growing text, then the `Answer`.

        Args:
            timeout: seconds to wait for each token.

        Raises:
            queue.Empty: no token within `timeout`.
        """
        streamer = TextIteratorStreamer(
            self.processor.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=timeout
        )
        generated = self.thread.submit(self._generate_batch, encoded, [(0, question)], streamer)
        generated.add_done_callback(lambda _: streamer.end())  # also after an error
        text = ""
        try:
            for piece in streamer:
                text += piece
                yield text
            yield generated.result()[0]
        finally:
            generated.cancel()  # if it has not started, there is no reader left

    def _check_question(self, question: str) -> tuple[str, ...]:
        """Return the words of a question that are not in the vocabulary.

        Raises:
            ValueError: no word is known, or the question leaves no room for an answer.
        """
        unknown = tuple(self.processor.unknown_words(question))
        tokenizer = self.processor.tokenizer
        ids = tokenizer(question.rstrip(QUESTION_END), add_special_tokens=False)["input_ids"]
        length, limit = len(ids) + 2, self.text_config.max_position_embeddings  # the processor adds two tokens
        if length >= limit:
            raise ValueError(f"A question of {length} tokens leaves no room for an answer: both have at most {limit}.")
        if unknown and not any(token.isalnum() for token in tokenizer.convert_ids_to_tokens(ids)):
            raise ValueError(f"The model knows no word of the question {question!r}.")
        return unknown

    def _generate(self, encoded: Any, asked: Sequence[tuple[int, str]]) -> list[Answer]:
        """Generate the answer to each (image index, question)."""
        if not asked:
            return []
        inputs = self.processor(text=[question for _, question in asked], on_unknown="ignore")
        limit = self.text_config.max_position_embeddings - MAX_NEW_TOKENS
        # Long questions form a batch of their own: they leave less room, and would cut the answers to short ones.
        batches: dict[bool, list[tuple[int, str]]] = {}
        for pair, ids in zip(asked, inputs["input_ids"]):
            batches.setdefault(len(ids) > limit, []).append(pair)
        answers: dict[tuple[int, str], Answer] = {}
        for batch in batches.values():
            answers.update(zip(batch, self._generate_batch(encoded, batch)))
        return [answers[pair] for pair in asked]

    def _generate_batch(self, encoded: Any, asked: Sequence[tuple[int, str]], streamer: Any = None) -> list[Answer]:
        image_index, questions = zip(*asked)
        inputs = self.processor(text=list(questions), on_unknown="ignore", return_tensors="pt").to(self.device)
        length = inputs["input_ids"].shape[1]
        output = self.model.generate(
            **inputs,
            encoded_images=encoded,
            image_index=torch.tensor(image_index, device=self.device),
            max_new_tokens=min(MAX_NEW_TOKENS, self.text_config.max_position_embeddings - length),
            do_sample=False,
            streamer=streamer,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = output.sequences[:, length:]  # [N,T]
        log_p = torch.stack(output.logits, 1).float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        log_p = log_p.masked_fill(tokens == self.text_config.pad_token_id, 0.0).sum(-1)
        texts = self.processor.batch_decode(tokens, skip_special_tokens=True)
        return [
            Answer(question, text, probability, unknown_words=self.check_question(question))
            for question, text, probability in zip(questions, texts, log_p.exp().tolist())
        ]
