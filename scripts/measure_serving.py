"""Measure the HTTP service: requests a second and seconds per request, also beside callers of many long questions.

python scripts/serve.py &
python scripts/measure_serving.py --clients 100
python scripts/measure_serving.py --clients 1 --questions 1 --long_callers 16
python scripts/measure_serving.py --clients 1 --questions 1 --long_callers 16 --in_words
"""

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from traffic_vlm.options import option_parser


QUESTIONS = ["Is there a pedestrian?", "Is it raining?", "Is the traffic light red?", "Is there a bus on the left?"]
SIDES = ["left" if i % 2 else "right" for i in range(64)]
LONG_QUESTIONS = [f"Is there a car{' and a bus' * 34} on the {side}?" for side in SIDES]
IN_WORDS = [f"What is on the {side}?" for side in SIDES]


@dataclass
class Options:
    url: str = "http://127.0.0.1:8000"
    image: str = field(
        default="docs/example.jpg", metadata={"help": "each request has it with 8 other bytes at its end"}
    )
    clients: int = field(default=100, metadata={"help": "clients that are measured; each waits for its answer"})
    questions: int = field(default=4, metadata={"help": "questions of their requests, at most 4"})
    long_callers: int = field(
        default=0, metadata={"help": "clients beside them, with 64 questions of 108 tokens each"}
    )
    in_words: bool = field(default=False, metadata={"help": "their questions are short, and answered in words"})
    seconds: float = field(default=30.0, metadata={"help": "seconds in which requests are sent"})


async def call(session: aiohttp.ClientSession, options: Options, questions: list[str], end: float) -> list:
    """Ask again and again until `end`. Returns the status and the seconds of each request."""
    image, results = Path(options.image).read_bytes(), []
    while time.perf_counter() < end:
        form = aiohttp.FormData()
        form.add_field("image", image + os.urandom(8), filename="a.jpg")  # not the image of an earlier request
        for question in questions:
            form.add_field("questions", question)
        begin = time.perf_counter()
        async with session.post(f"{options.url}/v1/answer", data=form) as response:
            await response.read()
        results.append((response.status, time.perf_counter() - begin))
    return results


def summarize(name: str, results: list[list], seconds: float) -> str:
    statuses = Counter(status for rows in results for status, _ in rows)
    took = [each for rows in results for status, each in rows if status == 200] or [float("nan")]
    middle, high = np.percentile(took, [50, 99])
    return (
        f"{name}: {statuses[200] / seconds:.1f} requests a second, p50 {middle:.2f} s, p99 {high:.2f} s, "
        f"statuses {dict(statuses)}"
    )


async def measure(options: Options) -> None:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        begin = time.perf_counter()
        end = begin + options.seconds
        long = IN_WORDS if options.in_words else LONG_QUESTIONS
        groups = {
            "clients": [call(session, options, QUESTIONS[: options.questions], end) for _ in range(options.clients)],
            "long callers": [call(session, options, long, end) for _ in range(options.long_callers)],
        }
        results = await asyncio.gather(*(asyncio.gather(*group) for group in groups.values()))
        took = time.perf_counter() - begin
        for name, rows in zip(groups, results):
            if rows:
                print(summarize(name, rows, took), flush=True)


if __name__ == "__main__":
    parser = option_parser([Options], __doc__)
    asyncio.run(measure(parser.parse_args_into_dataclasses()[0]))
