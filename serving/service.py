"""The model behind the HTTP service: many queries wait, and one pass of the model answers questions of several.

    image bytes ── decoded in threads ────────────────┐
    seen before ── encoded image from the cache ──────┴→ waiting queries ──→ one packed pass ──→ answers
                                                              └── questions that did not fit ←──┘

One thread runs the model. All else happens in the event loop, and needs no locks between threads.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from .options import ModelOptions


Answer = dict[str, Any]  # an item of the pipeline


@dataclass
class Settings(ModelOptions):
    """Options of the model and limits of the service."""

    may_be_zero: ClassVar[tuple[str, ...]] = ("min_score", "cached_images", "cache_seconds")
    device: Literal["cpu", "cuda"] | None = option(None, "by default a GPU if there is one")
    threads: int = option(2, "CPU threads of the model")
    max_bytes: int = option(20_000_000, "size of a request; above: 413")
    max_pixels: int = option(MAX_PIXELS, "size of an image; above: 422")
    max_questions: int = option(64, "questions in a request; above: 422")
    seconds: float = option(30.0, "time to receive a request, and time to answer it; above: 504")
    max_waiting: int = option(256, "requests in progress; above: 503 with Retry-After")
    batch_size: int = option(16, "requests in one pass of the model")
    pass_tokens: int = option(1024, "tokens in one pass: questions, answers in words, and padding")
    cached_images: int = option(256, "encoded images to keep, 1.8 MB each in float32")
    cache_seconds: float = option(600.0, "time to keep an encoded image")


@dataclass(eq=False)
class Query:
    """Questions about an image, and the answers to the first of them so far."""

    key: str  # hash of the image's bytes
    pixels: torch.Tensor  # [3,H,W]
    questions: list[str]
    answer_untaught: bool
    lengths: list[int]  # tokens of each question, with room for its answer in words
    encoded: Any = None  # the encoded image, from the first pass on
    cached: bool = False  # whether the encoded image was in the cache
    answers: list[Answer] = field(default_factory=list)
    error: Exception | None = None

    @property
    def open_lengths(self) -> list[int]:
        """The lengths of the questions without an answer."""
        return self.lengths[len(self.answers) :]


def fill_pass(waiting: Sequence[Sequence[int]], max_queries: int, max_tokens: int) -> list[int]:
    """How many questions of each query go into the next pass, for the first queries that fit.

    A query is one row of at most `ROW_TOKENS`. Rows are padded to the longest, and so are questions answered in words.
    The cost of a pass is the larger of (queries × longest row) and (questions × longest question), in tokens.

    Args:
        waiting: the lengths of each query's questions, in the order in which queries are taken.
        max_tokens: limit of the cost, except for a pass of a single question.
    """
    counts: list[int] = []
    longest_row = longest_question = questions = 0
    for lengths in waiting[:max_queries]:
        row = count = 0
        for length in lengths:
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


class Service:
    """The pipeline, with a queue of queries and a cache of encoded images."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.pipe = settings.load()
        self.cache: TTLCache = TTLCache(settings.cached_images, settings.cache_seconds)  # for the model's thread only
        self.model_thread = ThreadPoolExecutor(1)
        self.queue: dict[Query, asyncio.Future[None]] = {}  # in the order of arrival
        self.worker: asyncio.Task | None = None  # runs passes while there are queries
        self.passes = 0
        self.model_turn = asyncio.Lock()
        self.stream_turn = asyncio.Lock()

    def read(self, image: bytes, questions: Sequence[str], answer_untaught: bool) -> Query:
        """A query with its image decoded and its questions checked. Slow, so it must not run in the event loop.

        Raises:
            ValueError: an image that cannot be read, or too many questions.
        """
        limit = self.settings.max_questions
        if len(questions) > limit:
            raise ValueError(f"{len(questions)} questions: at most {limit} are answered at once.")
        read = [self.pipe.read_question(text.strip(), answer_untaught) for text in questions]
        lengths = [len(one.input_ids) + (0 if one.form.is_yes_no or one.problem else MAX_NEW_TOKENS) for one in read]
        picture = open_image(image, max_pixels=self.settings.max_pixels)
        inputs = self.pipe.processor(images=[picture], region=self.settings.part_of_image, return_tensors="pt")
        key = hashlib.sha256(image).hexdigest()
        texts = [question.text for question in read]
        return Query(key, inputs["pixel_values"][0], texts, answer_untaught, lengths)

    async def answer(self, query: Query) -> None:
        """Answer all questions of a query, in one pass or more, together with other queries."""
        done = self.queue[query] = asyncio.get_running_loop().create_future()
        if self.worker is None or self.worker.done():
            self.worker = asyncio.create_task(self._run_passes())
        try:
            await done
        finally:
            self.queue.pop(query, None)  # also if the request timed out, or its client left

    async def _run_passes(self) -> None:
        """Answer the waiting queries, as many questions at a time as fit into one pass.

        `@serve.batch` of Ray Serve counts requests, not tokens, and closes a batch after a fixed time, even while the
        model is busy. With a time short enough for a single request, its batches held one or two requests: 0.6 of the
        throughput at 200 clients.
        """
        while self.queue:
            async with self.model_turn:
                if batch := self._next_pass():
                    await self._in_model_thread(self._answer_pass, batch)
            for query, _ in batch:
                if query in self.queue and (query.error or not query.open_lengths):
                    done = self.queue.pop(query)
                    if query.error and not done.cancelled():
                        done.set_exception(query.error)
                    elif not done.cancelled():
                        done.set_result(None)

    def _next_pass(self) -> list[tuple[Query, int]]:
        """The queries of the next pass, and how many of their questions it answers.

        Every other pass begins with the shortest query, so that it need not wait for long ones. The others begin with
        the oldest query, so that long ones get their turn.
        """
        self.passes += 1
        first = next(iter(self.queue), None)
        waiting = [query for query in self.queue if first and query.answer_untaught == first.answer_untaught]
        if self.passes % 2:
            waiting.sort(key=lambda query: sum(query.open_lengths))
        lengths = [query.open_lengths for query in waiting]
        return list(zip(waiting, fill_pass(lengths, self.settings.batch_size, self.settings.pass_tokens)))

    def _answer_pass(self, batch: Sequence[tuple[Query, int]]) -> None:
        """Answer the next questions of queries, as many of each as given. Runs in the model's thread."""
        try:
            self._encode_images([query for query, _ in batch])
            rows = [query.questions[len(query.answers) :][:count] for query, count in batch]
            untaught = batch[0][0].answer_untaught
            answers = self.pipe(
                [query.encoded for query, _ in batch], rows, batch_size=len(batch), answer_untaught=untaught
            )
        except Exception as error:
            if len(batch) == 1:
                batch[0][0].error = error
                return
            for one in batch:  # one failing query must not fail the others
                self._answer_pass([one])
            return
        for (query, _), row in zip(batch, answers):
            query.answers += row

    def _encode_images(self, queries: Sequence[Query]) -> None:
        """Encode the images of queries, or take them from the cache. Runs in the model's thread."""
        new: dict[str, torch.Tensor] = {}
        for query in queries:
            if query.encoded is None:
                query.encoded = self.cache.get(query.key)
                query.cached = query.encoded is not None
            if query.encoded is None:
                new[query.key] = query.pixels
        if not new:
            return
        encoded = self.pipe.model.encode_images(torch.stack(list(new.values())).to(self.pipe.device))
        images = {key: encoded[[i]] for i, key in enumerate(new)}  # copies: the cache must not keep the whole batch
        for query in queries:
            query.encoded = images.get(query.key, query.encoded)
        if self.cache.maxsize:
            self.cache.update(images)

    async def encode(self, query: Query) -> None:
        """Encode the image of a query, for `stream`."""
        await self._between_passes(self._encode_images, [query])

    async def stream(self, query: Query) -> AsyncIterator[tuple[int, str | Answer]]:
        """Yield (index of a question, piece) while its answer in words is generated, then (index, complete answer).

        Raises:
            TimeoutError: no token in time.
        """
        for i, question in enumerate(query.questions):
            streamer = AsyncTextIteratorStreamer(
                self.pipe.tokenizer, skip_prompt=True, timeout=self.settings.seconds, skip_special_tokens=True
            )
            answer = asyncio.create_task(self._generate(query, question, streamer))
            try:
                async for piece in streamer:
                    if piece:
                        yield i, piece
                yield i, await answer
            finally:
                answer.cancel()  # if still waiting for its turn, it would be generated for nobody

    async def _generate(self, query: Query, question: str, streamer: AsyncTextIteratorStreamer) -> Answer:
        """The answer to a question about an encoded image. The streamer gets its words."""
        ask = partial(self.pipe, streamer=streamer, answer_untaught=query.answer_untaught)
        try:
            return (await self._between_passes(ask, query.encoded, question))[0]
        finally:
            streamer.end()  # a yes/no answer or an error would leave its reader waiting

    async def _between_passes(self, work: Callable[..., Any], *args: Any) -> Any:
        """The result of a stream's work, done between two passes. Only one stream works between any two passes."""
        async with self.stream_turn, self.model_turn:  # locks are given in the order of arrival
            return await self._in_model_thread(work, *args)

    async def _in_model_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.model_thread, work, *args)
