"""Ask a running service as many clients at once, and count what comes back.

    python scripts/serve.py --bf16 &
    python scripts/load_test.py http://127.0.0.1:8000 --clients 200 --seconds 60 --bf16

Each client sends an image, of one of four sizes and never the same bytes twice, with its questions, waits for the
answer, and sends the next. Prints answers per second, how long they took, and each status; after a 503 it waits as
long as Retry-After says. At the end, with the service idle again, the same work is done by the bare model in batches,
and the ratio printed. The exit status is 1 where an answer was lost or of another status. Needs httpx, of the extra
"dev".
"""

import argparse
import asyncio
import io
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
from PIL import Image


ROOT = Path(__file__).resolve().parent.parent
SIZES = ((320, 240), (640, 360), (1280, 720), (1920, 1080))
QUESTIONS = ["Is there a pedestrian?", "Is there a car?", "Is the traffic light red?", "Is it raining?"]


def make_images() -> list[bytes]:
    images = []
    with Image.open(ROOT / "docs/example.jpg") as picture:
        for size in SIZES:
            stream = io.BytesIO()
            picture.convert("RGB").resize(size).save(stream, "jpeg", quality=85)
            images.append(stream.getvalue())
    return images


async def client(
    http: httpx.AsyncClient, url: str, requests: Iterator[bytes], end: float, seen: Counter, took: list[float]
) -> None:
    while time.monotonic() < end:
        image, begin = next(requests), time.perf_counter()
        try:
            answer = await http.post(f"{url}/v1/answer", files={"image": image}, data={"questions": QUESTIONS})
        except httpx.HTTPError as error:
            seen[type(error).__name__] += 1
            await asyncio.sleep(1)  # a service that is not there answers at once
            continue
        seen[answer.status_code] += 1
        if answer.status_code == 200:
            assert len(answer.json()["answers"]) == len(QUESTIONS)
            took.append(time.perf_counter() - begin)
        elif answer.status_code == 503:
            await asyncio.sleep(float(answer.headers["Retry-After"]))


async def load(url: str, clients: int, seconds: float) -> tuple[Counter, list[float], float]:
    seen: Counter = Counter()
    took: list[float] = []
    images = make_images()
    # What follows a JPEG is not read, but hashed.
    requests = (images[n % len(images)] + n.to_bytes(8, "big") for n in itertools.count())
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    begin = time.monotonic()
    async with httpx.AsyncClient(limits=limits, timeout=120) as http:
        end = begin + seconds
        await asyncio.gather(*(client(http, url, requests, end, seen, took) for _ in range(clients)))
    return seen, took, time.monotonic() - begin


def bare_rate(model: str, bf16: bool, seconds: float = 15.0) -> float:
    """Images a second that the model alone answers, decoding included, in batches of 16."""
    import torch

    from traffic_vlm.serving.answerer import Answerer
    from traffic_vlm.serving.pictures import open_picture

    answerer = Answerer(model, None, torch.bfloat16 if bf16 else None)
    images = list(itertools.islice(itertools.cycle(make_images()), 16))

    def work() -> None:
        answerer([open_picture(image) for image in images], [QUESTIONS] * len(images))

    work()
    begin, done = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        work()
        done += len(images)
    return done / (time.perf_counter() - begin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model", default=str(ROOT), help="for the bare model (default: this repository)")
    parser.add_argument("--bf16", action="store_true", help="as the service computes")
    arguments = parser.parse_args()
    seen, took, seconds = asyncio.run(load(arguments.url.rstrip("/"), arguments.clients, arguments.seconds))
    print(f"{arguments.clients} clients, {seconds:.1f} s: {dict(seen)}")
    if len(took) < 2:  # of which nothing can be said
        return 1
    quantiles = statistics.quantiles(took, n=100)
    print(f"{len(took) / seconds:.1f} answers/s; p50 {quantiles[49]:.2f} s, p99 {quantiles[98]:.2f} s")
    bare = bare_rate(arguments.model, arguments.bf16)
    print(
        f"bare model, batches of 16: {bare:.1f} images/s; the service reaches {len(took) / seconds / bare:.2f} of it"
    )
    return 0 if set(seen) <= {200, 503} else 1


if __name__ == "__main__":
    sys.exit(main())
