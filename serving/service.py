"""The model behind the HTTP service: what comes while it is busy is answered in its next pass, all together.

image's bytes → decoded by threads ────────────────────────┐
seen a while ago → its keys and values, kept by their hash ─┴→ requests that wait → one packed pass → answers
"""

import asyncio
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from .answerer import Answer, Answerer
from .fetching import FetchError, fetch
from .pictures import MAX_PIXELS, open_picture


@dataclass(frozen=True)
class Settings:
    """What a service does and refuses.

    Attributes:
        model, device, dtype, threads: of the model, as for `Answerer`.
        max_bytes: of a request. max_pixels: of an image. max_questions: of a request.
        seconds: a request may take; then it is answered by 504.
        max_waiting: requests at a time; more are answered by 503.
        batch_size: requests in a pass of the model.
        cached_images, cache_seconds: images whose keys and values are kept (1.4 MB each in float32), and how long.
        allow_urls: fetch images from public addresses.
        api_key: that a request must bring; None for none.
    """

    model: str
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    max_bytes: int = 20_000_000
    max_pixels: int = MAX_PIXELS
    max_questions: int = 64
    seconds: float = 30.0
    max_waiting: int = 256
    batch_size: int = 16
    cached_images: int = 256
    cache_seconds: float = 600.0
    allow_urls: bool = False
    api_key: str | None = field(default=None, repr=False)


class ImageCache:
    """Encoded images by the hash of their bytes, the latest used ones, for a while. For one thread."""

    def __init__(self, size: int, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.size, self.seconds, self.clock = size, seconds, clock
        self.kept: OrderedDict[str, tuple[float, Any]] = OrderedDict()

    def get(self, key: str) -> Any:
        begin, images = self.kept.get(key, (0.0, None))
        if images is None or self.clock() - begin > self.seconds:
            self.kept.pop(key, None)
            return None
        self.kept.move_to_end(key)
        return images

    def put(self, key: str, images: Any) -> None:
        self.kept[key] = (self.clock(), images)
        self.kept.move_to_end(key)
        while len(self.kept) > self.size:
            self.kept.popitem(last=False)


@dataclass
class Item:
    """An image, by the hash of its bytes and decoded, and questions about it."""

    key: str
    pixels: torch.Tensor  # [3,H,W]
    questions: list[str]


class Service:
    """The model behind the app: decodes in threads, answers batches in one thread of its own."""

    def __init__(self, settings: Settings):
        self.settings = settings
        if settings.threads:
            torch.set_num_threads(settings.threads)
        dtype = getattr(torch, settings.dtype) if settings.dtype else None
        self.answerer = Answerer(settings.model, settings.device, dtype)
        self.cache = ImageCache(settings.cached_images, settings.cache_seconds)
        self.decoders, self.model_thread = ThreadPoolExecutor(4), ThreadPoolExecutor(1)
        self.fetchers = ThreadPoolExecutor(4)  # of their own: who waits for a slow URL must not keep others waiting
        self.waiting = 0
        self.unanswered: deque[tuple[Item, Future]] = deque()

    async def answer(self, item: Item) -> tuple[list[Answer], bool]:
        """The answers, and whether the image was kept from before."""
        answered: Future = Future()
        self.unanswered.append((item, answered))
        self.model_thread.submit(self._answer_waiting)
        return await asyncio.wrap_future(answered)  # which is cancelled where the request is

    def _answer_waiting(self) -> None:
        """Answer those that wait, as many as go in one pass, without those that were given up.

        The batches of Ray Serve close after a fixed time, full or not, also while the model is busy; at a time that
        a lone request does not feel they would hold one or two requests however many wait.
        """
        batch: list[tuple[Item, Future]] = []
        while self.unanswered and len(batch) < self.settings.batch_size:
            item, answered = self.unanswered.popleft()
            if answered.set_running_or_notify_cancel():
                batch.append((item, answered))
        if not batch:  # an earlier pass took them along
            return
        try:
            for (_, answered), result in zip(batch, self._answer([item for item, _ in batch])):
                answered.set_result(result)
        except Exception as error:
            for _, answered in batch:
                answered.set_exception(error)

    def _look(self, items: list[Item]) -> tuple[dict[str, Any], set[str]]:
        """Encoded images by key, and the keys of those that were kept from before."""
        images = {item.key: self.cache.get(item.key) for item in items}
        before = {key for key, kept in images.items() if kept is not None}
        new = {item.key: item.pixels for item in items if item.key not in before}
        if new:
            encoded = self.answerer.encode(torch.stack(list(new.values())))
            for number, key in enumerate(new):
                images[key] = encoded[[number]]  # a copy, which does not keep the whole batch alive
                self.cache.put(key, images[key])
        return images, before

    def _answer(self, items: list[Item]) -> list[tuple[list[Answer], bool]]:
        """Answers to each item, and whether its image was kept from before."""
        images, before = self._look(items)
        first = next(iter(images.values()))
        encoded = type(first).join([images[item.key] for item in items])
        answers = self.answerer.ask(encoded, [item.questions for item in items])
        return [(row, item.key in before) for row, item in zip(answers, items)]

    def stream(self, item: Item) -> Iterator[str | Answer]:
        """Raises queue.Empty where no word came in time."""
        look = lambda: self._look([item])[0][item.key]  # noqa: E731
        return self.answerer.stream_in(self.model_thread, look, item.questions[0], self.settings.seconds)

    def check(self, questions: list[str]) -> list[str]:
        """The questions without spaces around them.

        Raises:
            ValueError: an empty one, one too long, or one without a known word.
        """
        questions = [question.strip() for question in questions]
        for number, question in enumerate(questions, 1):
            if not question:
                raise ValueError(f"question {number} is empty")
            self.answerer.unknown_words(question)
        return questions

    async def read(self, content: bytes, questions: list[str]) -> Item:
        """Raises ValueError for an image that cannot be read."""
        return await asyncio.get_running_loop().run_in_executor(self.decoders, self._read, content, questions)

    def _read(self, content: bytes, questions: list[str]) -> Item:
        picture = open_picture(content, max_pixels=self.settings.max_pixels)
        return Item(hashlib.sha256(content).hexdigest(), self.answerer.read([picture])[0], questions)

    async def fetch(self, url: str) -> bytes:
        """Raises ValueError where URLs are not allowed, or this one cannot be fetched."""
        if not self.settings.allow_urls:
            raise FetchError("image_url: this server does not fetch URLs; send the image")
        limits = (self.settings.max_bytes, self.settings.seconds)
        return await asyncio.get_running_loop().run_in_executor(self.fetchers, fetch, url, *limits)
