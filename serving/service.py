"""The model behind the HTTP service. Requests that arrive while it is busy are answered together in its next passes.

image bytes → decoded in threads ─────────────────────────┐
seen before → encoded image from the cache, by its hash ──┴→ waiting requests → one packed pass → answers
                                                                    └── questions that did not fit ←┘
"""

import asyncio
import hashlib
import time
import unicodedata
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from cachetools import TTLCache
from transformers import AsyncTextIteratorStreamer

from ..generation_traffic_vlm import MAX_NEW_TOKENS
from ..image_files import MAX_PIXELS, open_image
from ..options import option
from ..processing_traffic_vlm import ROW_TOKENS
from .fetching import FetchError, fetch
from .options import ModelOptions


MAX_LETTERS = 2000  # of a question

Answer = dict[str, Any]  # an item of the pipeline


@dataclass
class Settings(ModelOptions):
    """Options of the model and limits of the service."""

    may_be_zero: ClassVar[tuple[str, ...]] = ("cached_images", "cache_seconds")
    device: Literal["cpu", "cuda"] | None = option(None, "by default a GPU if there is one")
    threads: int = option(2, "CPU threads of the model")
    max_bytes: int = option(20_000_000, "size of a request; above: 413")
    max_pixels: int = option(MAX_PIXELS, "size of an image; above: 422")
    max_questions: int = option(64, "questions in a request; above: 422")
    seconds: float = option(30.0, "time for a request; above: 504")
    max_waiting: int = option(256, "requests in progress; above: 503 with Retry-After")
    batch_size: int = option(16, "requests in one pass of the model")
    pass_tokens: int = option(1024, "tokens in one pass: questions, answers in words, and padding")
    cached_images: int = option(256, "encoded images to keep, 1.4 MB each in float32")
    cache_seconds: float = option(600.0, "time to keep an encoded image")
    allow_urls: bool = option(False, "fetch image_url from public addresses")


@dataclass(frozen=True)
class Item:
    """A decoded image, identified by the hash of its bytes, and questions about it."""

    key: str
    pixels: torch.Tensor  # [3,H,W]
    questions: list[str]
    tokens: list[int]  # of each question, and of its answer in words


@dataclass(eq=False)
class Waiting:
    """A request with unanswered questions."""

    item: Item
    future: Future = field(default_factory=Future)  # its answers, and whether its image was in the cache
    answers: list[Answer] = field(default_factory=list)  # of its first questions
    encoded: Any = None  # its image, from its first pass on
    cached: bool = False
    arrived: float = field(default_factory=time.monotonic)

    @property
    def tokens(self) -> list[int]:
        """`Item.tokens` of the questions without an answer."""
        return self.item.tokens[len(self.answers) :]


def fill_pass(waiting: Sequence[Sequence[int]], max_requests: int, max_tokens: int) -> list[int]:
    """The number of questions in the next pass of each of the first requests that fit into it.

    Rows are padded to the longest, and so are questions that are answered in words: a pass costs the larger of
    requests x longest row and questions x longest question. A request gets one row of at most `ROW_TOKENS`.

    Args:
        waiting: `Item.tokens` of each request, in the order in which they are taken.
        max_tokens: limit of that cost. A first question that is longer is a pass of its own.
    """
    counts: list[int] = []
    longest_row = longest_question = questions = 0
    for tokens in waiting[:max_requests]:
        row = count = 0
        for length in tokens:
            row += length
            rows_cost = (len(counts) + 1) * max(longest_row, row)
            questions_cost = (questions + 1) * max(longest_question, length)
            if questions and (max(rows_cost, questions_cost) > max_tokens or row > ROW_TOKENS):
                break
            longest_row, longest_question = max(longest_row, row), max(longest_question, length)
            questions += 1
            count += 1
        if not count:
            break
        counts.append(count)
    return counts


def _end(streamer: Any, _: Future) -> None:
    """End a stream when its call is done: after yes or no and after an error, nothing else does."""
    streamer.end()


class Service:
    """Decode images in a few threads; run the model in one."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.pipe = settings.load()
        self.thread = ThreadPoolExecutor(1)  # runs the model
        self.decoders = ThreadPoolExecutor(4)
        self.waiting = 0  # requests whose body is here and that have no response yet
        self.body_bytes = 0  # of all requests
        # The event loop appends, the model thread removes: each is one operation, which threads cannot interrupt.
        self.queue: list[Waiting] = []
        self.pass_is_due = False
        self.passes = 0
        self.cache: TTLCache = TTLCache(settings.cached_images, settings.cache_seconds)  # for the model thread only

    def check(self, questions: Sequence[str]) -> list[str]:
        """The questions, stripped. Some take long to check: not for the event loop.

        Raises:
            ValueError: too many questions, or one that is empty, too long, or cannot be answered.
        """
        if len(questions) > self.settings.max_questions:
            raise ValueError(
                f"{len(questions)} questions: at most {self.settings.max_questions} are answered at once."
            )
        questions = [question.strip() for question in questions]
        for i, question in enumerate(questions, 1):
            if not question:
                raise ValueError(f"question {i} is empty.")
            # Counted as the tokenizer reads them: U+FDFA becomes 18 letters.
            length = len(question) if len(question) > MAX_LETTERS else len(unicodedata.normalize("NFKC", question))
            if length > MAX_LETTERS:
                raise ValueError(f"question {i} has {length:,} letters (NFKC): at most {MAX_LETTERS:,} are read.")
            if problem := self.pipe.read_question(question).problem:
                raise ValueError(f"{question[:80]!r}: {problem}")
        return questions

    async def prepare(self, image: bytes | str, questions: list[str]) -> Item:
        """Fetch the image if it is a URL, and decode it.

        Args:
            questions: as `check` returns them.

        Raises:
            ValueError: an image that cannot be fetched or read.
        """
        if isinstance(image, str):
            if not self.settings.allow_urls:
                raise FetchError("image_url: this server does not fetch URLs; send the image.")
            image = await fetch(image, self.settings.max_bytes, self.settings.seconds)
        return await asyncio.get_running_loop().run_in_executor(self.decoders, self._decode, image, questions)

    def _decode(self, content: bytes, questions: list[str]) -> Item:
        picture = open_image(content, max_pixels=self.settings.max_pixels)
        inputs = self.pipe.processor(images=[picture], region=self.settings.part_of_image, return_tensors="pt")
        read = map(self.pipe.read_question, questions)
        tokens = [len(one.input_ids) + (0 if one.form.is_yes_no else MAX_NEW_TOKENS) for one in read]
        return Item(hashlib.sha256(content).hexdigest(), inputs["pixel_values"][0], questions, tokens)

    async def answer(self, item: Item) -> tuple[list[Answer], bool]:
        """The answers, and whether the image was in the cache."""
        request = Waiting(item)
        self.queue.append(request)
        self._plan_pass()
        return await asyncio.wrap_future(request.future)  # cancelled together with the request

    async def stream(self, item: Item) -> AsyncIterator[tuple[int, str | Answer]]:
        """Encode the image; then, for each question, its index with pieces of an answer in words, and with its item.

        No thread waits for the words: any number of streams can be open.

        Raises:
            TimeoutError: no word in time; while the stream is read.
        """
        images, _ = await asyncio.wrap_future(self._submit_after_pass(self._encode, [item]))

        async def pieces() -> AsyncIterator[tuple[int, str | Answer]]:
            for i, question in enumerate(item.questions):
                streamer = AsyncTextIteratorStreamer(
                    self.pipe.tokenizer, skip_prompt=True, timeout=self.settings.seconds, skip_special_tokens=True
                )
                ask = partial(self.pipe, streamer=streamer)
                generated = self._submit_after_pass(ask, images[item.key], question)
                generated.add_done_callback(partial(_end, streamer))
                try:
                    async for piece in streamer:
                        if piece:
                            yield i, piece
                    yield i, generated.result()[0]
                finally:
                    generated.cancel()  # if it has not started, there is no reader left

        return pieces()

    def _submit_after_pass(self, work: Callable[..., Any], *args: Any) -> Future:
        """Encode or generate in the model thread, but run a pass first: it waits for one work of streams only."""

        def run() -> Any:
            self._run_pass()
            return work(*args)

        return self.thread.submit(run)

    def _plan_pass(self) -> None:
        if not self.pass_is_due:  # two threads may both find it False: the second pass then has less to do, or nothing
            self.pass_is_due = True
            self.thread.submit(self._run_planned_pass)

    def _run_planned_pass(self) -> None:
        self.pass_is_due = False  # before the queue is read, so that no request is missed
        self._run_pass()
        if self.queue:
            self._plan_pass()

    def _run_pass(self) -> None:
        """Answer questions of waiting requests, as many as fit into one pass. Drop requests that were given up.

        Every other pass begins with the shortest request, so that it does not wait for long ones; the others begin
        with the request that came first, so that each is answered at some time.

        `@serve.batch` of Ray Serve closes a batch after a fixed time, even while the model is busy. With a time short
        enough for a single request, its batches held one or two requests: 0.6 of the throughput at 200 clients.
        """
        waiting = []
        for request in self.queue.copy():
            if request.future.cancelled():
                self.queue.remove(request)
            else:
                waiting.append(request)
        self.passes += 1
        shortest_first = self.passes % 2
        waiting.sort(key=lambda request: (sum(request.tokens) if shortest_first else 0, request.arrived))
        counts = fill_pass([one.tokens for one in waiting], self.settings.batch_size, self.settings.pass_tokens)
        chosen = waiting[: len(counts)]
        for request in chosen:
            self.queue.remove(request)
        if chosen:
            self._answer(list(zip(chosen, counts)))
        self.queue += [request for request in chosen if not request.future.done()]

    def _answer(self, batch: Sequence[tuple[Waiting, int]]) -> None:
        """Answer the next questions of these requests, so many of each."""
        new = [request for request, _ in batch if request.encoded is None]
        try:
            images, cached = self._encode([request.item for request in new])
            for request in new:
                request.encoded, request.cached = images[request.item.key], request.item.key in cached
            done = [len(request.answers) for request, _ in batch]
            rows = [one.item.questions[start : start + count] for start, (one, count) in zip(done, batch)]
            answers = self.pipe([request.encoded for request, _ in batch], rows, batch_size=len(batch))
        except Exception as error:
            if len(batch) > 1:  # one failing request must not fail the others
                for one in batch:
                    self._answer([one])
            elif batch[0][0].future.set_running_or_notify_cancel():
                batch[0][0].future.set_exception(error)
            return
        for (request, _), row in zip(batch, answers):
            request.answers += row
            if not request.tokens and request.future.set_running_or_notify_cancel():
                request.future.set_result((request.answers, request.cached))

    def _encode(self, items: Sequence[Item]) -> tuple[dict[str, Any], set[str]]:
        """The encoded images by key, and the keys that were in the cache."""
        images: dict[str, Any] = {item.key: self.cache.get(item.key) for item in items}
        cached = {key for key, encoded in images.items() if encoded is not None}
        new = {item.key: item.pixels for item in items if item.key not in cached}
        if new:
            encoded = self.pipe.model.encode_images(torch.stack(list(new.values())).to(self.pipe.device))
            for i, key in enumerate(new):
                images[key] = encoded[[i]]  # a copy, so that the cache does not keep the whole batch
                if self.cache.maxsize:
                    self.cache[key] = images[key]
        return images, cached
