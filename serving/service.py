"""The model behind the HTTP service. Requests that arrive while it is busy are answered together in its next pass.

image bytes → decoded in threads ─────────────────────────┐
seen before → encoded image from the cache, by its hash ──┴→ waiting requests → one packed pass → answers
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from cachetools import TTLCache

from ..operating_points import load_operating_points
from ..scoring_traffic_vlm import EncodedImages
from .answerer import Answer, Answerer
from .fetching import FetchError, fetch
from .pictures import MAX_PIXELS, open_picture


ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Settings:
    """Options of the model and limits of the service."""

    model: str = field(default=str(ROOT), metadata={"help": "model folder, or the name of a repository on the Hub"})
    device: Literal["cpu", "cuda"] | None = field(default=None, metadata={"help": "by default a GPU if there is one"})
    bf16: bool = field(default=False, metadata={"help": "compute in bfloat16 (always on a GPU)"})
    threads: int = field(default=2, metadata={"help": "CPU threads of the model"})
    max_bytes: int = field(default=20_000_000, metadata={"help": "size of a request; above: 413"})
    max_pixels: int = field(default=MAX_PIXELS, metadata={"help": "size of an image; above: 422"})
    max_questions: int = field(default=64, metadata={"help": "questions in a request; above: 422"})
    seconds: float = field(default=30.0, metadata={"help": "time for a request; above: 504"})
    max_waiting: int = field(default=256, metadata={"help": "requests in progress; above: 503 with Retry-After"})
    batch_size: int = field(default=16, metadata={"help": "requests in one pass of the model"})
    cached_images: int = field(default=256, metadata={"help": "encoded images to keep, 1.4 MB each in float32"})
    cache_seconds: float = field(default=600.0, metadata={"help": "time to keep an encoded image"})
    allow_urls: bool = field(default=False, metadata={"help": "fetch image_url from public addresses"})
    thresholds: str | None = field(default=None, metadata={"help": "thresholds.json of scripts/evaluate.py"})

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and (value < 0 or (value == 0 and not name.startswith("cache"))):
                raise ValueError(f"--{name} must be positive, got {value}")
        # Read here: the machines of a cluster need not have the file.
        self.operating_points = None if self.thresholds is None else load_operating_points(self.thresholds)


@dataclass(frozen=True)
class Item:
    """A decoded image, identified by the hash of its bytes, and questions about it."""

    key: str
    pixels: torch.Tensor  # [3,H,W]
    questions: list[str]


class Service:
    """Decode images in a few threads; run the model in one."""

    def __init__(self, settings: Settings):
        self.settings = settings
        torch.set_num_threads(settings.threads)
        dtype = torch.bfloat16 if settings.bf16 else None
        self.answerer = Answerer(settings.model, settings.device, dtype, settings.operating_points)
        self.decoders = ThreadPoolExecutor(4)
        self.waiting = 0  # requests that have no response yet
        self.queue: deque[tuple[Item, Future]] = deque()
        self.cache: TTLCache = TTLCache(settings.cached_images, settings.cache_seconds)  # for the model thread only

    async def prepare(self, image: bytes | str, questions: Sequence[str]) -> Item:
        """Check the questions, then fetch the image if it is a URL, and decode it.

        Raises:
            ValueError: too many questions; one that is empty, too long or entirely unknown; or an unreadable image.
        """
        if len(questions) > self.settings.max_questions:
            raise ValueError(
                f"{len(questions)} questions: at most {self.settings.max_questions} are answered at once."
            )
        questions = [question.strip() for question in questions]
        for i, question in enumerate(questions, 1):
            if not question:
                raise ValueError(f"question {i} is empty.")
            self.answerer.check_question(question)
        if isinstance(image, str):
            if not self.settings.allow_urls:
                raise FetchError("image_url: this server does not fetch URLs; send the image.")
            image = await fetch(image, self.settings.max_bytes, self.settings.seconds)
        return await asyncio.get_running_loop().run_in_executor(self.decoders, self._decode, image, questions)

    def _decode(self, content: bytes, questions: list[str]) -> Item:
        picture = open_picture(content, max_pixels=self.settings.max_pixels)
        return Item(hashlib.sha256(content).hexdigest(), self.answerer.read([picture])[0], questions)

    async def answer(self, item: Item) -> tuple[list[Answer], bool]:
        """Return the answers, and whether the image was in the cache."""
        future: Future = Future()
        self.queue.append((item, future))
        self.answerer.thread.submit(self._answer_queue)
        return await asyncio.wrap_future(future)  # cancelled together with the request

    async def stream(self, item: Item) -> Iterator[str | Answer]:
        """Encode the image; return the growing text of the answer and the answer, as `Answerer.stream` does."""
        loop = asyncio.get_running_loop()
        images, _ = await loop.run_in_executor(self.answerer.thread, self._encode, [item])
        return self.answerer.stream(images[item.key], item.questions[0], self.settings.seconds)

    def _answer_queue(self) -> None:
        """Answer as many waiting requests as fit into one pass. Skip those that were cancelled.

        `@serve.batch` of Ray Serve closes a batch after a fixed time, even while the model is busy. With a time short
        enough for a single request, its batches held one or two requests: 0.6 of the throughput at 200 clients.
        """
        batch: list[tuple[Item, Future]] = []
        while self.queue and len(batch) < self.settings.batch_size:
            item, future = self.queue.popleft()
            if future.set_running_or_notify_cancel():
                batch.append((item, future))
        if batch:  # otherwise an earlier pass has answered them
            self._answer_batch(batch)

    def _answer_batch(self, batch: Sequence[tuple[Item, Future]]) -> None:
        items = [item for item, _ in batch]
        try:
            images, cached = self._encode(items)
            encoded = EncodedImages.join([images[item.key] for item in items])
            answers = self.answerer.ask(encoded, [item.questions for item in items])
        except Exception as error:
            if len(batch) == 1:
                batch[0][1].set_exception(error)
            else:  # one failing request must not fail the others
                for one in batch:
                    self._answer_batch([one])
            return
        for (item, future), row in zip(batch, answers):
            future.set_result((row, item.key in cached))

    def _encode(self, items: Sequence[Item]) -> tuple[dict[str, Any], set[str]]:
        """Return the encoded images by key, and the keys that were in the cache."""
        images: dict[str, Any] = {item.key: self.cache.get(item.key) for item in items}
        cached = {key for key, encoded in images.items() if encoded is not None}
        new = {item.key: item.pixels for item in items if item.key not in cached}
        if new:
            encoded = self.answerer.encode(torch.stack(list(new.values())))
            for i, key in enumerate(new):
                images[key] = encoded[[i]]  # a copy, so that the cache does not keep the whole batch
                if self.cache.maxsize:
                    self.cache[key] = images[key]
        return images, cached
