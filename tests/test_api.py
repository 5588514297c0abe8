"""The HTTP API: answers, streams, limits, the cache, fairness among callers, and its description."""

import base64
import io
import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tiny import save_folder, tiny_model


for name in ("cachetools", "fastapi", "fastapi_offline", "httpx", "prometheus_client"):
    pytest.importorskip(name)

from starlette.testclient import TestClient  # noqa: E402

from traffic_vlm.processing_traffic_vlm import ROW_TOKENS  # noqa: E402
from traffic_vlm.serving.api import build_app  # noqa: E402
from traffic_vlm.serving.service import Settings, fill_pass  # noqa: E402


EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "20"))  # of each operation
QUESTIONS = ["Is there a car?", "What is ahead?", "Is it raining?"]
AHEAD, RAINING = "What is ahead?", "Is it raining?"
LONG = f"Is there a car{' or a bus' * 30}?"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_folder(tiny_model(), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def start(model):
    """A function that starts a service with these settings, to be closed by `with`."""
    return lambda api_key=None, **fields: TestClient(
        build_app(Settings(model, "cpu", threads=1, min_score=0, **fields), api_key)
    )


@pytest.fixture(scope="module")
def client(start):
    with start(max_bytes=300_000, max_pixels=9_000) as client:
        yield client


def png(seed: int = 0, size=(64, 48)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


def base64_of(image: bytes) -> str:
    return base64.b64encode(image).decode()


def ask(client, image: bytes | None = None, questions=QUESTIONS, path="/v1/answer", **options):
    files = {"image": ("a.png", png() if image is None else image)}
    return client.post(path, files=files, data={"questions": questions}, **options)


def metric(client, name: str, **labels) -> float:
    return client.app.state.metrics.registry.get_sample_value(f"traffic_vlm_{name}", labels) or 0.0


def close_to(item: dict) -> dict:
    """An item whose numbers may differ as they do in other passes."""
    numbers = {name: pytest.approx(value, abs=1e-4) for name, value in item.items() if isinstance(value, float)}
    return item | numbers


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def watch(monkeypatch):
    """A function that watches the model of a service.

    It returns `images`, the number of images of each call of the vision tower; `passes`, the questions of each pass as
    lists of texts for each image; and `gate`: while it is cleared, the model waits. `before(rows)` precedes a pass.
    """
    gate = threading.Event()
    gate.set()

    def watch(client, before=lambda rows: None):
        pipe = client.app.state.service.pipe
        seen = SimpleNamespace(images=[], passes=[], gate=gate)
        encode, forward = pipe.model.encode_images, pipe.forward

        def encode_images(pixels):
            seen.images.append(len(pixels))
            assert gate.wait(60)
            return encode(pixels)

        def record(rows, **options):
            seen.passes.append([[question.text for question in row.questions] for row in rows])
            before(seen.passes[-1])
            return forward(rows, **options)

        monkeypatch.setattr(pipe.model, "encode_images", encode_images)
        monkeypatch.setattr(pipe, "forward", record)
        return seen

    yield watch
    gate.set()


# Answers


def test_answers_are_the_items_of_the_pipeline(client):
    items = client.app.state.service.pipe(Image.open(io.BytesIO(png())), QUESTIONS)
    assert [set(item) for item in items] == [{"question", "answer", "score", "p_yes"}] * 3
    text = base64_of(png())
    forms = (text, f"data:image/png;base64,{text}", "\r\n".join(text[i : i + 76] for i in range(0, len(text), 76)))
    responses = [client.post("/v1/answer", json={"image": form, "questions": QUESTIONS}) for form in forms]
    # A text field of a form can hold base64, too.
    responses += [ask(client), client.post("/v1/answer", files={"image": (None, text)}, data={"questions": QUESTIONS})]
    for response in responses:
        assert response.status_code == 200 and response.json()["answers"] == [close_to(item) for item in items]


def test_thresholds_and_a_region_are_those_of_the_settings(start, client, tmp_path):
    (tmp_path / "thresholds.json").write_text('{"default": {"threshold": 0.00001, "band": [0, 1]}}')
    part = Image.open(io.BytesIO(png())).crop((0, 0, 32, 48))
    plain = client.app.state.service.pipe(part, QUESTIONS)
    with start(thresholds=str(tmp_path / "thresholds.json"), region="0,0,0.5,1") as other:
        yes, words, _ = ask(other).json()["answers"]
    assert (yes["answer"], yes["not_sure"]) == ("yes", True) and "not_sure" not in plain[0].keys() | words.keys()
    assert yes["score"] == yes["p_yes"] == pytest.approx(plain[0]["p_yes"], abs=1e-5)


def test_a_stream_has_the_words_of_an_answer_and_then_its_item(client):
    questions = [AHEAD, "Is there a car?", AHEAD, "Is it wet? Answer yes or no."]
    expected = ask(client, questions=questions).json()["answers"]
    response = ask(client, questions=questions, path="/v1/generate")
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line]
    assert [event["index"] for event in events] == sorted(event["index"] for event in events)
    for i, item in enumerate(expected):
        *pieces, last = [event for event in events if event["index"] == i]
        assert last == close_to(item) | {"index": i}
        words = "".join(piece["text"] for piece in pieces).strip()
        assert words == (item["answer"] if questions[i] == AHEAD else "")


def test_an_image_is_encoded_once_and_the_response_does_not_tell(client):
    first, before = ask(client, png(1)).json(), metric(client, "images_total", cached="true")
    second = ask(client, png(1)).json()
    assert metric(client, "images_total", cached="true") == before + 1 and first["image"] == second["image"]
    assert set(first) == set(second) == {"answers", "image", "seconds"}
    assert first["answers"] == [close_to(item) for item in second["answers"]]
    other = ask(client, png(2), ["Is there a flamingo car?"]).json()
    assert other["image"] != first["image"] and other["answers"][0]["unknown_words"] == ["flamingo"]


def test_the_cache_is_bounded_in_size_and_time(start):
    for limit in ({"cached_images": 1}, {"cached_images": 0}, {"cache_seconds": 0}):
        with start(**limit) as client:
            assert [ask(client, png(seed)).status_code for seed in (1, 2, 1)] == [200, 200, 200]
            assert metric(client, "images_total", cached="true") == 0


# Bad input


BAD_REQUESTS = {
    "no questions": ({"questions": None}, "questions: Input should be a valid array"),
    "no image": ({"image": None}, "image: Input should be a valid bytes"),
    "no base64": ({"image": "…"}, "image: "),
    "empty image": ({"image": ""}, "cannot be read as an image"),
    "text as image": ({"image": base64_of(b"Is it raining?")}, "cannot be read as an image. Readable are AVIF, "),
    "truncated image": ({"image": base64_of(png()[:100])}, "is damaged"),
    "large image": ({"image": base64_of(png(size=(100, 100)))}, "100 × 100 pixels; at most 9,000 in all"),
    "empty list": ({"questions": []}, "questions: List should have at least 1 item"),
    "200 questions": ({"questions": [RAINING] * 200}, "200 questions: at most 64"),
    "far too long": ({"questions": ["car " * 600]}, "questions.0: String should have at most 2000 characters"),
    "no boolean": ({"answer_untaught": "perhaps"}, "answer_untaught: Input should be a valid boolean"),
}


@pytest.mark.parametrize("changes, message", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_bad_request_is_refused_with_the_cause(client, changes, message):
    body = {"image": base64_of(png()), "questions": [RAINING]} | changes
    for path in ("/v1/answer", "/v1/generate"):
        response = client.post(path, json=body)
        assert response.status_code == 422 and message in response.json()["detail"], response.text


def test_a_question_without_an_answer_has_a_problem(client):
    questions = {
        RAINING: None,
        " ": "the question '' has no word",
        "Who am I?": "the model was not taught",
        "car " * 300: "with its answer, at most 128 tokens are possible",
        "Is it wet? Is it dark?": "ask them one by one",
        "Is there an Elephant?": "the model does not know 'Elephant'",
    }
    answers = ask(client, questions=list(questions)).json()["answers"]
    for item, problem in zip(answers, questions.values(), strict=True):
        assert item["answer"] if problem is None else problem in item["problem"] and item["answer"] is None
    body = {"image": base64_of(png()), "questions": ["Is there an Elephant?"], "answer_untaught": True}
    assert client.post("/v1/answer", json=body).json()["answers"][0]["answer"]
    form = {"questions": body["questions"], "answer_untaught": "true"}
    assert client.post("/v1/answer", data=form, files={"image": png()}).json()["answers"][0]["answer"]


def test_a_bad_body_is_refused(client):
    def post(content, content_type):
        response = client.post("/v1/answer", content=content, headers={"content-type": content_type})
        assert response.json()["detail"]
        return response.status_code

    assert post(b"{", "application/json") == post(b"[" * 100_000, "application/json") == 422
    assert post(b"[1]", "application/json") == 422
    assert "image: Field required" in client.post("/v1/answer", data={"questions": [RAINING]}, files={"a": b"x"}).text
    assert post(b"x", "text/plain") == 415
    assert post(b"x", "multipart/form-data") == 400
    for content_type in ("application/json", "multipart/form-data; boundary=a"):
        assert post(b"x" * 300_001, content_type) == 413
        assert post((b"x" * 100_000 for _ in range(4)), content_type) == 413  # without a content-length


# Many callers


def test_requests_that_arrive_together_are_answered_in_one_pass_each_with_its_own_answer(start, watch):
    with start(cached_images=0) as client, ThreadPoolExecutor(12) as pool:
        alone = {seed: ask(client, png(seed), [QUESTIONS[seed % 3]]).json()["answers"] for seed in range(12)}
        seen = watch(client)
        seen.gate.clear()
        requests = {seed: pool.submit(ask, client, png(seed), [QUESTIONS[seed % 3]]) for seed in alone}
        wait_until(lambda: len(client.app.state.service.queue) == 12)
        seen.gate.set()
        for seed, [expected] in alone.items():
            assert requests[seed].result().json()["answers"] == [close_to(expected)]
        assert sum(seen.images) == 12 and len(seen.images) <= 2


def test_a_failing_or_bad_request_does_not_fail_the_others(start, watch):
    with start() as client, ThreadPoolExecutor(4) as pool:
        failing = ["Is there a bus?"]
        seen = watch(client, before=lambda rows: 1 / (failing not in rows))
        seen.gate.clear()
        requests = [pool.submit(ask, client, png(0))]
        wait_until(lambda: seen.images)
        requests += [pool.submit(ask, client, png(1)), pool.submit(ask, client, png(2), failing)]
        assert ask(client, b"?").status_code == 422  # while the model is busy
        wait_until(lambda: len(client.app.state.service.queue) == 3)
        seen.gate.set()
        assert [one.result().status_code for one in requests[:2]] == [200, 200]
        assert isinstance(requests[2].exception(), ZeroDivisionError)  # the test client raises what a server logs
        assert ask(client).status_code == 200


@given(
    waiting=st.lists(st.lists(st.integers(3, 128), min_size=1, max_size=64), max_size=40),
    max_queries=st.integers(1, 20),
    max_tokens=st.integers(1, 2000),
)
def test_a_pass_costs_at_most_its_tokens_with_padding(waiting, max_queries, max_tokens):
    counts = fill_pass(waiting, max_queries, max_tokens)
    assert len(counts) <= max_queries and all(counts) and bool(counts) == bool(waiting)
    rows = [lengths[:count] for lengths, count in zip(waiting, counts)]
    assert all(sum(row) <= ROW_TOKENS for row in rows)
    if sum(counts) > 1:
        questions = [length for row in rows for length in row]
        assert len(rows) * max(map(sum, rows)) <= max_tokens and len(questions) * max(questions) <= max_tokens


def test_a_short_request_waits_for_two_passes_at_most_and_long_ones_are_answered(start, watch):
    with start() as client, ThreadPoolExecutor(12) as pool:
        queue, seen = client.app.state.service.queue, watch(client)
        seen.gate.clear()
        requests = [pool.submit(ask, client, png(seed), [LONG] * 40) for seed in range(8)]
        wait_until(lambda: seen.images and len(queue) == 8)
        short = pool.submit(ask, client, png(9), [RAINING])
        wait_until(lambda: len(queue) == 9)
        seen.gate.set()
        assert [one.result().status_code for one in [short, *requests]] == [200] * 9
        first = next(i for i, rows in enumerate(seen.passes) if [RAINING] in rows)
        assert first <= 2 and len(seen.passes) > 20  # the first pass was running when the short request came


def test_a_stream_without_a_word_in_time_ends_with_the_cause(start, watch):
    gate = threading.Event()
    with start(seconds=1) as client:
        watch(client, before=lambda rows: gate.wait(60))
        events = ask(client, questions=[AHEAD], path="/v1/generate").text
        gate.set()
        assert events == 'data: {"detail": "no token in 1 seconds"}\n\n'


def test_a_stream_that_fails_ends_with_the_cause(start, watch):
    def fail(rows):
        raise RuntimeError("out of memory")

    with start() as client:
        watch(client, before=fail)
        with pytest.raises(RuntimeError, match="out of memory"):  # for the log of the server
            ask(client, questions=[AHEAD], path="/v1/generate")
        seen = ask(TestClient(client.app, raise_server_exceptions=False), questions=[AHEAD], path="/v1/generate")
        assert seen.text == 'data: {"detail": "an internal error has ended the answers"}\n\n'


def test_too_many_requests_get_503_with_retry_after(start, watch):
    with start(max_waiting=2) as client, ThreadPoolExecutor(2) as pool:
        seen = watch(client)
        seen.gate.clear()
        requests = [pool.submit(ask, client) for _ in range(2)]
        wait_until(lambda: metric(client, "waiting") == 2)
        refused = ask(client)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        seen.gate.set()
        assert [one.result().status_code for one in requests] == [200, 200] and metric(client, "waiting") == 0


def test_slow_requests_get_504_and_are_dropped(start, watch):
    with start(seconds=3) as client, ThreadPoolExecutor(4) as pool:
        seen = watch(client)
        assert ask(client).status_code == 200  # the first pass is slower than later ones
        seen.gate.clear()
        requests = [pool.submit(ask, client, png(seed), [LONG] * 64) for seed in range(1, 5)]
        for one in requests:
            assert one.result().status_code == 504 and "3 seconds" in one.result().json()["detail"]
        seen.gate.set()
        assert ask(client, png(9)).status_code == 200
        assert len(seen.passes) <= 3  # all questions would have taken 32
        assert metric(client, "waiting") == 0 and not client.app.state.service.queue


# Other routes


def test_answers_and_metrics_require_the_key(start):
    with start(api_key="secret") as client:
        for headers in ({}, {"X-API-Key": "other"}, {"Authorization": "Bearer"}, {"X-API-Key": "é".encode()}):
            for refused in (ask(client, headers=headers), client.get("/metrics", headers=headers)):
                assert refused.status_code == 401 and "API key" in refused.json()["detail"]
        for headers in ({"X-API-Key": "secret"}, {"Authorization": "Bearer secret"}):
            assert ask(client, headers=headers).status_code == 200
            assert client.get("/metrics", headers=headers).status_code == 200
        assert [client.get(path).status_code for path in ("/healthz", "/docs", "/openapi.json")] == [200] * 3


def test_metrics_count_known_paths_only(client):
    ask(client, png(77))
    client.get("/v1/invented")
    text = client.get("/metrics").text
    counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(counts['traffic_vlm_requests_total{path="/v1/answer",status="200"}']) >= 1
    assert float(counts['traffic_vlm_requests_total{path="other",status="404"}']) >= 1 and "invented" not in text
    assert float(counts["traffic_vlm_questions_total"]) >= 3 and float(counts["traffic_vlm_waiting"]) == 0
    assert float(counts['traffic_vlm_images_total{cached="false"}']) >= 1


def test_the_docs_page_loads_nothing_from_outside(client):
    page = client.get("/")
    linked = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert linked and not any("//" in path for path in linked)
    assert re.search(r'"validatorUrl": null', page.text)  # a website, which would get the address of this server
    assert all(client.get(path).status_code == 200 for path in linked)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_any_request_of_the_schema_gets_a_response_of_the_schema(client):
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    budget = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    operations = list(schemathesis.openapi.from_asgi("/openapi.json", client.app).get_all_operations())
    assert len(operations) == 3

    def probe(case):
        # Excluded because random bytes are a valid upload, but no image.
        case.call_and_validate(session=client, excluded_checks=[positive_data_acceptance])

    for operation in operations:
        budget(given(case=operation.ok().as_strategy())(probe))()
