"""The HTTP service: answers, limits, the cache, URLs, its own OpenAPI schema, and Ray Serve."""

import asyncio
import base64
import contextlib
import io
import json
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anyio.to_thread
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tiny import save_folder, tiny_model


for name in ("aiohttp", "cachetools", "fastapi", "httpx", "prometheus_client"):
    pytest.importorskip(name)

from starlette.testclient import TestClient  # noqa: E402

from traffic_vlm.processing_traffic_vlm import ROW_TOKENS  # noqa: E402
from traffic_vlm.serving import fetching  # noqa: E402
from traffic_vlm.serving.api import build_app  # noqa: E402
from traffic_vlm.serving.fetching import FetchError, fetch, is_public  # noqa: E402
from traffic_vlm.serving.service import Settings, fill_pass  # noqa: E402


EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "40"))  # of each operation
QUESTIONS = ["Is there a car?", "What is ahead?", "Is it raining?"]
AHEAD = "What is ahead?"
RAINING = {"questions": ["Is it raining?"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_folder(tiny_model(), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def start(model):
    """Start a service with these settings, to be closed by `with`."""
    return lambda api_key=None, **fields: TestClient(build_app(Settings(model, "cpu", threads=1, **fields), api_key))


@pytest.fixture(scope="module")
def client(start):
    with start(max_bytes=300_000, max_pixels=9_000) as client:
        yield client


def png(seed: int = 0, size=(64, 48)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


def ask(client, image: bytes | None = None, questions=QUESTIONS, **options):
    files = {"image": ("a.png", png() if image is None else image)}
    return client.post("/v1/answer", files=files, data={"questions": questions}, **options)


def cached_images(client) -> float:
    """How many requests have found their image in the cache."""
    return client.app.state.metrics.registry.get_sample_value("traffic_vlm_images_total", {"cached": "true"}) or 0.0


def close_to(item: dict) -> dict:
    """An item whose numbers may differ as they do in other passes."""
    numbers = {name: pytest.approx(value, abs=1e-4) for name, value in item.items() if isinstance(value, float)}
    return item | numbers


def base64_of(image: bytes) -> str:
    return base64.b64encode(image).decode()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def hold(monkeypatch):
    """Make the model of a service wait until the returned gate is set; list the number of images of each pass."""
    gate, passes = threading.Event(), []

    def hold(client):
        model = client.app.state.service.pipe.model
        encode = model.encode_images

        def wait_and_encode(pixels):
            passes.append(len(pixels))
            assert gate.wait(60)
            return encode(pixels)

        monkeypatch.setattr(model, "encode_images", wait_and_encode)
        return gate, passes

    yield hold
    gate.set()


@pytest.fixture
def passes_of(monkeypatch):
    """List the questions of each pass, as lists of texts for each image; `before(rows)` is called first."""

    def record(client, before=lambda rows: None):
        pipe, passes = client.app.state.service.pipe, []
        forward = pipe.forward

        def record_and_forward(rows, **options):
            passes.append([[question.text for question in row.questions] for row in rows])
            before(passes[-1])
            return forward(rows, **options)

        monkeypatch.setattr(pipe, "forward", record_and_forward)
        return passes

    return record


def test_answers_are_the_items_of_the_pipeline(client):
    items = client.app.state.service.pipe(Image.open(io.BytesIO(png())), QUESTIONS)
    assert [set(item) for item in items] == [{"question", "answer", "score", "p_yes"}] * 3
    for response in (ask(client), client.post("/v1/answer", json={"image": base64_of(png()), "questions": QUESTIONS})):
        assert response.status_code == 200 and response.json()["answers"] == [close_to(item) for item in items]


def test_an_answer_with_a_problem_does_not_fail_the_others(client, monkeypatch):
    monkeypatch.setattr("traffic_vlm.question_traffic_vlm.MIN_SCORE", 1.0)
    items = ask(client, questions=["What color is the traffic light?", "Is there a car?"]).json()["answers"]
    assert items[0]["answer"] is None and "the likeliest of a color" in items[0]["problem"]
    assert items[1]["answer"] in ("yes", "no") and "problem" not in items[1]


def test_thresholds_and_a_region_are_those_of_the_settings(start, client, tmp_path):
    (tmp_path / "thresholds.json").write_text('{"default": {"threshold": 0.00001, "band": [0, 1]}}')
    part = Image.open(io.BytesIO(png())).crop((0, 0, 32, 48))
    plain = client.app.state.service.pipe(part, QUESTIONS)
    with start(thresholds=str(tmp_path / "thresholds.json"), region="0,0,0.5,1") as other:
        yes, words, _ = ask(other).json()["answers"]
    assert (yes["answer"], yes["not_sure"]) == ("yes", True) and "not_sure" not in plain[0].keys() | words.keys()
    assert yes["score"] == yes["p_yes"] == pytest.approx(plain[0]["p_yes"], abs=1e-5)


def test_a_second_request_uses_the_encoded_image_of_the_first_and_does_not_tell(client):
    first, before = ask(client, png(1)).json(), cached_images(client)
    second = ask(client, png(1)).json()
    assert cached_images(client) == before + 1 and first["image"] == second["image"]
    assert set(first) == set(second) == {"answers", "image", "seconds"}
    for one, two in zip(first["answers"], second["answers"]):
        assert one == close_to(two)
    other = ask(client, png(2), ["Is there a flamingo car?"]).json()
    assert other["image"] != first["image"] and other["answers"][0]["unknown_words"] == ["flamingo"]


@pytest.mark.parametrize("limit", [{"cached_images": 1}, {"cached_images": 0}, {"cache_seconds": 0}])
def test_the_cache_is_bounded_in_size_and_time(start, limit):
    with start(**limit) as client:
        assert [ask(client, png(seed)).status_code for seed in (1, 2, 1)] == [200, 200, 200]
        assert cached_images(client) == 0


def test_requests_that_arrive_together_are_answered_in_one_pass_each_with_its_own_answer(start, hold):
    with start(cached_images=0) as client, ThreadPoolExecutor(12) as pool:
        alone = {seed: ask(client, png(seed), [QUESTIONS[seed % 3]]).json()["answers"] for seed in range(12)}
        service = client.app.state.service
        gate, passes = hold(client)
        requests = {seed: pool.submit(ask, client, png(seed), [QUESTIONS[seed % 3]]) for seed in alone}
        wait_until(lambda: sum(passes) + len(service.queue) == 12)
        gate.set()
        for seed, [expected] in alone.items():
            [got] = requests[seed].result().json()["answers"]
            assert got == close_to(expected)
        assert sum(passes) == 12 and len(passes) <= 2


def test_a_request_that_fails_in_the_model_does_not_fail_the_others_of_its_pass(start, hold, passes_of):
    with start() as client, ThreadPoolExecutor(3) as pool:
        service, failing = client.app.state.service, ["Is there a bus?"]
        passes_of(client, before=lambda rows: 1 / (failing not in rows))
        gate, passes = hold(client)
        requests = [pool.submit(ask, client, png(0))]
        wait_until(lambda: passes)
        requests += [pool.submit(ask, client, png(1)), pool.submit(ask, client, png(2), failing)]
        wait_until(lambda: len(service.queue) == 2)
        gate.set()
        assert [one.result().status_code for one in requests[:2]] == [200, 200]
        assert isinstance(requests[2].exception(), ZeroDivisionError)  # the test client raises what a server logs


def test_a_burst_of_streams_does_not_delay_answers(start, hold, passes_of):
    with start() as client, ThreadPoolExecutor(8) as pool:
        service = client.app.state.service
        gate, encoded = hold(client)
        passes = passes_of(client)
        streams = [
            pool.submit(client.post, "/v1/generate", json={"questions": [AHEAD], "image": base64_of(png(seed))})
            for seed in range(6)
        ]
        wait_until(lambda: encoded and service.thread._work_queue.qsize() == 5)
        answer = pool.submit(ask, client, png(9), RAINING["questions"])
        wait_until(lambda: service.queue)
        gate.set()
        assert answer.result().status_code == 200 and [one.result().status_code for one in streams] == [200] * 6
        assert passes.index([RAINING["questions"]]) <= 1  # after the image that was being encoded, before most streams


def test_a_waiting_stream_holds_no_thread_that_others_need(start, passes_of):
    with start(seconds=10) as client, ThreadPoolExecutor(1) as pool:
        gate = threading.Event()
        passes = passes_of(client, before=lambda rows: gate.wait(60))

        async def leave_one_thread():
            anyio.to_thread.current_default_thread_limiter().total_tokens = 1

        client.portal.call(leave_one_thread)
        stream = pool.submit(client.post, "/v1/generate", json={"image": base64_of(png()), "questions": [AHEAD]})
        wait_until(lambda: passes)
        large = ask(client, png() + bytes(1_500_000), ["?"])  # a form above 1 MB is written to disk by a thread
        gate.set()
        assert large.status_code == 422 and "has no word" in large.json()["detail"]
        assert '"answer"' in stream.result().text


def test_a_stream_without_a_token_in_time_ends_with_the_cause(start, passes_of):
    with start(seconds=1) as client:
        gate = threading.Event()
        passes_of(client, before=lambda rows: gate.wait(60))
        events = client.post("/v1/generate", json={"image": base64_of(png()), "questions": [AHEAD]}).text
        gate.set()
        assert events == 'data: {"detail": "no token in 1 seconds"}\n\n'


def stream_events(client, questions: list[str]) -> list[tuple[int, dict]]:
    """The events of a stream, each with the index of its question."""
    body = {"image": base64_of(png()), "questions": questions}
    with client.stream("POST", "/v1/generate", json=body) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    return [(event.pop("index"), event) for event in events]


def test_words_are_streamed_and_equal_the_answer(client):
    [expected] = ask(client, questions=[AHEAD]).json()["answers"]
    events = stream_events(client, [AHEAD, AHEAD])
    assert [index for index, _ in events] == sorted(index for index, _ in events)
    for index in (0, 1):
        *pieces, last = [event for i, event in events if i == index]
        assert last == close_to(expected)
        assert len(pieces) > 1 and "".join(piece["text"] for piece in pieces).strip() == expected["answer"]


def test_a_stream_answers_yes_or_no_with_the_item_alone(client):
    questions = ["Is there a car?", AHEAD, "Is it wet? Answer yes or no."]
    expected = ask(client, questions=questions).json()["answers"]
    events = stream_events(client, questions)
    assert [event for index, event in events if index != 1] == [close_to(expected[0]), close_to(expected[2])]
    assert all(item["answer"] in ("yes", "no") and item["p_yes"] is not None for item in expected[::2])


def test_answers_in_words_count_in_a_pass(start, passes_of):
    with start(pass_tokens=100) as client:
        passes = passes_of(client)
        assert ask(client, questions=["Is the light red?"] * 8 + [AHEAD] * 8).status_code == 200
        assert [[len(row) for row in rows] for rows in passes] == [[8], [2], [2], [2], [2]]


@pytest.mark.parametrize(
    "body, message",
    [
        ({}, "questions: Field required"),
        (RAINING | {"x" * 200: 1}, f"unknown field '{'x' * 100}'; known are image, image_url"),
        (RAINING, "give one image"),
        (RAINING | {"image": "", "image_url": "http://a"}, "give one image"),
        (RAINING | {"image": "…"}, "image: "),
        (RAINING | {"image": "/etc/passwd/"}, "cannot be read as an image"),
        (RAINING | {"image": base64_of(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n")}, "it is text"),
        (RAINING | {"image": base64_of(png(size=(100, 100)))}, "at most 9,000 in all"),
        ({"image": base64_of(png()), "questions": []}, "questions: List should have at least 1 item"),
        ({"image": base64_of(png()), "questions": ["Is it raining?"] * 200}, "200 questions: at most 64"),
        ({"image": base64_of(png()), "questions": ["Is it wet?", " "]}, "question 2 is empty"),
        ({"image": base64_of(png()), "questions": ["🚗🚗"]}, "no word of the question"),
        ({"image": base64_of(png()), "questions": ["?"]}, "the question '?' has no word"),
        ({"image": base64_of(png()), "questions": ["Is it wet?", "..."]}, "the question '...' has no word"),
        ({"image": base64_of(png()), "questions": ["[SOS]"]}, "the question '[SOS]' has no word"),
        ({"image": base64_of(png()), "questions": ["Is it wet? Is it dry?"]}, "ask them one by one"),
        ({"image": base64_of(png()), "questions": ["Who am I?"]}, "'Who am I?': the model was not taught"),
        ({"image": base64_of(png()), "questions": ["\u200b"]}, "has no word"),
        ({"image": base64_of(png()), "questions": ["\ufdfa" * 2000]}, "36,000 letters (NFKC): at most 2,000"),
        ({"image": base64_of(png()), "questions": ["car " * 300]}, "with its answer, at most 128 are possible"),
        ({"image": base64_of(png()), "questions": "Is it raining?"}, "questions: Input should be a valid array"),
        (RAINING | {"image_url": "http://127.0.0.1/a.png"}, "does not fetch URLs"),
        (["Is it raining?"], "should be an object"),
    ],
)
def test_invalid_requests_are_refused_with_the_cause(client, body, message):
    response = client.post("/v1/answer", json=body)
    assert response.status_code == 422 and message in response.json()["detail"], response.text


def test_invalid_bodies_are_refused(client):
    def post(content, content_type):
        response = client.post("/v1/answer", content=content, headers={"content-type": content_type})
        assert response.json()["detail"]
        return response.status_code

    assert post(b"{", "application/json") == post(b"[" * 100_000, "application/json") == 422
    assert post(b"x", "text/plain") == 415
    assert post(b"x", "multipart/form-data") == 400
    for content_type in ("application/json", "multipart/form-data; boundary=a"):
        assert post(b"x" * 300_001, content_type) == 413
        assert post((b"x" * 100_000 for _ in range(4)), content_type) == 413  # without a content-length


def test_too_many_requests_get_503_with_retry_after(start, hold):
    with start(max_waiting=2) as client, ThreadPoolExecutor(2) as pool:
        service = client.app.state.service
        gate, _ = hold(client)
        requests = [pool.submit(ask, client) for _ in range(2)]
        wait_until(lambda: service.waiting == 2)
        refused = ask(client)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        gate.set()
        assert [one.result().status_code for one in requests] == [200, 200] and service.waiting == 0


def test_a_question_without_a_word_does_not_fail_the_others_of_its_pass(start, hold):
    with start() as client, ThreadPoolExecutor(3) as pool:
        gate, passes = hold(client)
        requests = [pool.submit(ask, client, png(0))]
        wait_until(lambda: passes)
        requests += [pool.submit(ask, client, png(1)), pool.submit(ask, client, png(2), ["?"])]
        assert requests[2].result(60).status_code == 422  # while the model is busy
        gate.set()
        assert [one.result().status_code for one in requests[:2]] == [200, 200]


def test_questions_are_checked_outside_of_the_event_loop(client, monkeypatch):
    threads = []
    service = client.app.state.service
    check = service.check
    monkeypatch.setattr(
        service, "check", lambda questions: threads.append(threading.current_thread()) or check(questions)
    )
    assert ask(client).status_code == 200
    assert client.post("/v1/answer", json=RAINING | {"image": base64_of(png())}).status_code == 200
    assert [thread in service.decoders._threads for thread in threads] == [True, True]


def test_a_pass_is_bounded_and_a_request_larger_than_it_takes_several(start, passes_of):
    questions = [f"Is there a car{' or a bus' * i}?" for i in range(24)]
    with start(pass_tokens=1_000_000) as client:
        expected = ask(client, questions=questions).json()["answers"]
    with start(pass_tokens=200) as client:
        passes, read = passes_of(client), client.app.state.service.pipe.read_question
        answers = ask(client, questions=questions).json()["answers"]
        sizes = [sum(len(read(one).input_ids) for row in rows for one in row) for rows in passes]
        assert len(sizes) > 5 and max(sizes) <= 200
        assert answers == [close_to(item) for item in expected]


@given(
    waiting=st.lists(st.lists(st.integers(3, 128), min_size=1, max_size=64), max_size=40),
    max_requests=st.integers(1, 20),
    max_tokens=st.integers(1, 2000),
)
def test_a_pass_costs_at_most_its_tokens_with_padding(waiting, max_requests, max_tokens):
    counts = fill_pass(waiting, max_requests, max_tokens)
    assert len(counts) <= max_requests and all(counts) and bool(counts) == bool(waiting)
    rows = [tokens[:count] for tokens, count in zip(waiting, counts)]
    assert all(sum(row) <= ROW_TOKENS for row in rows)
    if sum(counts) > 1:
        questions = [length for row in rows for length in row]
        assert len(rows) * max(map(sum, rows)) <= max_tokens and len(questions) * max(questions) <= max_tokens


LONG = f"Is there a car{' or a bus' * 30}?"


def test_a_short_request_waits_for_two_passes_at_most_and_long_ones_are_answered(start, hold, passes_of):
    with start() as client, ThreadPoolExecutor(12) as pool:
        service = client.app.state.service
        gate, encoded = hold(client)
        passes = passes_of(client)
        requests = [pool.submit(ask, client, png(seed), [LONG] * 40) for seed in range(8)]
        wait_until(lambda: encoded and len(service.queue) == 7)
        short = pool.submit(ask, client, png(9), ["Is it wet?"])
        wait_until(lambda: len(service.queue) == 8)
        gate.set()
        assert short.result().status_code == 200
        assert [one.result().status_code for one in requests] == [200] * 8
        first = next(i for i, rows in enumerate(passes) if ["Is it wet?"] in rows)
        assert first <= 2 and len(passes) > 20  # the first pass was running when the short request came


def test_requests_that_are_given_up_are_dropped_between_passes(start, passes_of):
    with start(seconds=1.0) as client, ThreadPoolExecutor(4) as pool:
        service = client.app.state.service
        passes = passes_of(client, before=lambda rows: time.sleep(0.3))
        requests = [pool.submit(ask, client, png(seed), [LONG] * 64) for seed in range(4)]
        assert [one.result().status_code for one in requests] == [504] * 4
        wait_until(lambda: not service.queue)
        count = len(passes)
        assert count < 12  # all questions would have taken 32
        time.sleep(0.5)
        assert len(passes) <= count + 1


def test_clients_with_slow_bodies_do_not_keep_others_out(start):
    httpx = pytest.importorskip("httpx")

    async def attack(app):
        def send_one_byte():
            messages = [{"type": "http.request", "body": b"{", "more_body": True}]

            async def receive():
                if not messages:
                    await asyncio.Event().wait()
                return messages.pop()

            return receive

        scope = {"type": "http", "method": "POST", "path": "/v1/answer", "query_string": b"", "http_version": "1.1"}
        scope |= {"headers": [(b"content-type", b"application/json")], "scheme": "http", "server": ("a", 80)}
        slow = [asyncio.create_task(app(dict(scope), send_one_byte(), None)) for _ in range(300)]
        async with asyncio.timeout(60):
            while app.state.service.body_bytes < 300:
                await asyncio.sleep(0.01)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:
            response = await client.post("/v1/answer", json=RAINING | {"image": base64_of(png())}, timeout=60)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        return response.status_code, app.state.service.body_bytes

    with start(max_waiting=4) as client:
        assert asyncio.run(attack(client.app)) == (200, 0)


def test_bodies_that_fill_the_memory_are_refused(start):
    with start(max_waiting=1, max_bytes=200_000) as client:
        service = client.app.state.service
        service.body_bytes = 199_999
        refused = ask(client)
        assert refused.status_code == 503 and "fill the memory" in refused.json()["detail"]
        service.body_bytes -= 199_999
        assert service.body_bytes == 0 and ask(client).status_code == 200


def test_the_root_leads_to_docs_that_load_nothing(client):
    page = client.get("/")
    assert page.status_code == 200 and page.url.path == "/docs"
    assert "POST /v1/answer" in page.text and "POST /v1/generate" in page.text and 'action="/v1/answer"' in page.text
    assert not re.findall(r"https?://|//[a-z]|<script|<link|\bsrc=|url\(", page.text)


def test_slow_requests_get_504_and_are_not_answered_later(start, hold):
    with start(seconds=3) as client, ThreadPoolExecutor(4) as pool:
        service = client.app.state.service
        wait_until(lambda: ask(client).status_code == 200)  # the first pass is slower than later ones
        gate, passes = hold(client)
        requests = [pool.submit(ask, client, png(5))]
        wait_until(lambda: passes)
        requests += [pool.submit(ask, client, png(seed)) for seed in (6, 7, 8)]
        for one in requests:
            assert one.result().status_code == 504 and "3 seconds" in one.result().json()["detail"]
        gate.set()
        assert ask(client, png(9)).status_code == 200
        assert passes == [1, 1] and service.waiting == 0 and not service.queue


def test_all_routes_require_the_key(start):
    with start(api_key="secret") as client:
        for headers in ({}, {"X-API-Key": "other"}, {"Authorization": "Bearer"}, {"X-API-Key": "é".encode()}):
            refused = ask(client, headers=headers)
            assert refused.status_code == 401 and "API key" in refused.json()["detail"]
        for path in ("/metrics", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"X-API-Key": "secret"}).status_code == 200
        for headers in ({"X-API-Key": "secret"}, {"Authorization": "Bearer secret"}):
            assert ask(client, headers=headers).status_code == 200


def test_metrics_count_known_paths_only(client):
    ask(client, png(77))
    client.get("/v1/invented")
    text = client.get("/metrics").text
    counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(counts['traffic_vlm_requests_total{path="/v1/answer",status="200"}']) >= 1
    assert float(counts['traffic_vlm_requests_total{path="other",status="404"}']) >= 1 and "invented" not in text
    assert float(counts["traffic_vlm_questions_total"]) >= 3 and float(counts["traffic_vlm_waiting"]) == 0
    assert float(counts['traffic_vlm_images_total{cached="false"}']) >= 1


# URLs


def test_private_reserved_and_embedded_addresses_are_not_public():
    assert is_public("8.8.8.8") and is_public("2001:4860:4860::8888")
    ipv4 = "127.0.0.1 10.0.0.1 192.168.1.1 169.254.169.254 0.0.0.0 100.64.0.1 224.0.0.1 240.0.0.1"
    ipv6 = "::1 fe80::1%eth0 fd00::1 ::ffff:127.0.0.1 2002:7f00:1:: 64:ff9b::7f00:1 ::7f00:1 ::ffff:0:7f00:1 fec0::1"
    assert [address for address in f"{ipv4} {ipv6} 64:ff9b:1::7f00:1 2001::1".split() if is_public(address)] == []


class Pages(BaseHTTPRequestHandler):
    requests: list = []

    def do_GET(self):
        self.requests.append(self.headers["Host"])
        if self.path == "/slow":  # a byte now and then: a timeout per read would never end
            with contextlib.suppress(OSError):
                for byte in b"HTTP/1.0 200 OK\r\nX: " + b"x" * 100:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.1)
            return
        pages = {"/a.png": (200, png()), "/long": (200, bytes(50_000)), "/to": (302, b"")}
        status, body = pages.get(self.path, (404, b""))
        self.send_response(status)
        self.send_header("Location", "/a.png")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def site():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def fetched(url: str, seconds: float = 5.0) -> bytes:
    return asyncio.run(fetch(url, 20_000, seconds))


def test_private_addresses_and_other_schemes_are_refused(site):
    port = site.rpartition(":")[2]
    hosts = ("127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]")
    for url in (f"http://{host}:{port}/a.png" for host in hosts):
        with pytest.raises(FetchError, match="is not on the public Internet"):
            fetched(url)
    for url in ("file:///etc/passwd", "ftp://a/b", "http://", "http://user:word@a/b", "//a", "http://a:99999/", ""):
        with pytest.raises(FetchError, match="the URL"):
            fetched(url)


def test_urls_are_fetched_within_limits(start, site, monkeypatch):
    monkeypatch.setattr(fetching, "is_public", lambda address: True)
    assert fetched(f"{site}/a.png") == png()
    refused = {"/long": "more than 20,000 bytes", "/to": "answered 302", "/missing": "answered 404"}
    for path, message in refused.items():
        with pytest.raises(FetchError, match=message):
            fetched(site + path)
    begin = time.monotonic()
    with pytest.raises(FetchError, match=r"took more than 0.5 seconds"):
        fetched(f"{site}/slow", 0.5)
    assert time.monotonic() - begin < 5
    with start(allow_urls=True) as client:
        answer = client.post("/v1/answer", json={"image_url": f"{site}/a.png", "questions": QUESTIONS})
        assert answer.status_code == 200 and answer.json()["image"] == ask(client).json()["image"]


def test_the_checked_address_is_the_one_that_is_connected_to(site, monkeypatch):
    port = int(site.rpartition(":")[2])
    url, addresses = f"http://pictures.example:{port}/a.png", ["127.0.0.1"]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", (addresses.pop(0), port))])
    monkeypatch.setattr(fetching, "is_public", lambda address: True)
    Pages.requests.clear()
    assert fetched(url) == png() and Pages.requests == [f"pictures.example:{port}"]
    # DNS rebinding: the name resolves to a public address, where nothing listens, and then to a private one.
    addresses += ["127.0.0.2", "127.0.0.1"]
    monkeypatch.setattr(fetching, "is_public", lambda address: address == "127.0.0.2")
    with pytest.raises(FetchError, match="cannot be fetched"):
        fetched(url)
    assert len(Pages.requests) == 1


# The OpenAPI schema


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_any_request_of_the_schema_gets_a_response_of_the_schema(client):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    budget = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    operations = list(schemathesis.openapi.from_asgi("/openapi.json", client.app).get_all_operations())
    assert len(operations) == 3

    def probe(case):
        # Excluded because random bytes are a valid upload, but no image.
        case.call_and_validate(session=client, excluded_checks=[positive_data_acceptance])

    for operation in operations:
        budget(given(case=operation.ok().as_strategy())(probe))()
