"""The HTTP service: answers, limits, the cache, URLs, and whatever its own schema allows to be sent."""

import base64
import contextlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

from tiny import ROOT, save_folder, tiny_model


for name in ("fastapi", "httpx", "ray.serve", "prometheus_client"):
    pytest.importorskip(name)

from starlette.testclient import TestClient  # noqa: E402

from traffic_vlm.serving import fetching  # noqa: E402
from traffic_vlm.serving.answerer import Answerer  # noqa: E402
from traffic_vlm.serving.api import build_app  # noqa: E402
from traffic_vlm.serving.fetching import FetchError, fetch, is_public  # noqa: E402
from traffic_vlm.serving.service import ImageCache, Settings  # noqa: E402


FUZZ_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "40"))  # of each operation
QUESTIONS = ["Is there a car?", "What color is the traffic light?", "Is it raining?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_folder(tiny_model(), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def client(model):
    with TestClient(build_app(Settings(model, "cpu", max_bytes=300_000, max_pixels=9_000))) as client:
        yield client


def content(seed: int = 0, size=(64, 48)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


def ask(client, image: bytes | None = None, questions=QUESTIONS, **options):
    image = content() if image is None else image
    return client.post("/v1/answer", files={"image": ("a.png", image)}, data={"questions": questions}, **options)


def ask_json(client, **body):
    return client.post("/v1/answer", json=body)


def encode(image: bytes) -> str:
    return base64.b64encode(image).decode()


def test_answers_are_those_of_the_answerer(client, model):
    told = Answerer(model, "cpu")([Image.open(io.BytesIO(content()))], [QUESTIONS])[0]
    for answer in (ask(client), ask_json(client, image=encode(content()), questions=QUESTIONS)):
        assert answer.status_code == 200
        for got, expected in zip(answer.json()["answers"], told, strict=True):
            assert got["question"] == expected.question and got["answer"] == expected.answer
            assert got["probability"] == pytest.approx(expected.probability, abs=1e-4)
            assert got["yes_probability"] == pytest.approx(expected.yes_probability, abs=1e-4)


def test_an_image_asked_about_again_is_not_looked_at_again(client):
    answers = [ask(client, content(1)).json() for _ in range(2)]
    assert [answer["cached"] for answer in answers] == [False, True]
    for one, two in zip(answers[0]["answers"], answers[1]["answers"]):
        assert one["probability"] == pytest.approx(two["probability"], abs=1e-5)
    assert ask(client, content(2)).json()["image"] != answers[0]["image"]


def test_requests_that_come_together_are_answered_together_each_with_its_own(client, monkeypatch):
    alone = {seed: ask(client, content(seed), [QUESTIONS[seed % 3]]).json()["answers"] for seed in range(10, 22)}
    service = client.app.user_middleware[0].kwargs["service"]
    service.cache.kept.clear()
    gate, sizes, answer = threading.Event(), [], service._answer
    monkeypatch.setattr(
        service, "_answer", lambda items: sizes.append(len(items)) or (gate.wait(20) and answer(items))
    )
    with ThreadPoolExecutor(12) as pool:
        asked = {seed: pool.submit(ask, client, content(seed), [QUESTIONS[seed % 3]]) for seed in alone}
        while sum(sizes) + len(service.unanswered) < 12:
            time.sleep(0.01)
        gate.set()
        together = {seed: one.result().json() for seed, one in asked.items()}
    for seed, expected in alone.items():
        [got], [one] = together[seed]["answers"], expected
        assert got["answer"] == one["answer"] and got["probability"] == pytest.approx(one["probability"], abs=1e-4)
    assert sum(sizes) == 12 and len(sizes) <= 2  # what came while the model was busy went together


def test_words_come_as_a_stream_and_are_those_of_the_answer(client):
    [expected] = ask(client, questions=["What is ahead?"]).json()["answers"]
    body = {"image": encode(content()), "question": "What is ahead?"}
    with client.stream("POST", "/v1/generate", json=body) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
    assert set(events[-1]) == set(expected) and len(events) > 1
    assert all(events[-1]["answer"].startswith(event["text"].strip()) for event in events[:-1])


@pytest.mark.parametrize(
    "body, status, message",
    [
        ({}, 422, "questions: Field required"),
        ({"questions": ["Is it raining?"], "x" * 200: 1}, 422, f"a field '{'x' * 100}'; known are image, image_url"),
        ({"questions": ["Is it raining?"]}, 422, "give one image"),
        ({"image": "", "image_url": "http://a", "questions": ["Is it raining?"]}, 422, "give one image"),
        ({"image": "…", "questions": ["Is it raining?"]}, 422, "image: "),
        ({"image": encode(b"text"), "questions": ["Is it raining?"]}, 422, "is no image that can be read"),
        ({"image": "/etc/passwd/", "questions": ["Is it raining?"]}, 422, "is no image that can be read"),
        ({"image": encode(content(size=(100, 100))), "questions": ["Is it raining?"]}, 422, "at most 9,000 in all"),
        ({"image": encode(content()), "questions": []}, 422, "questions: List should have at least 1 item"),
        ({"image": encode(content()), "questions": ["Is it raining?"] * 200}, 422, "200 questions: at most 64"),
        ({"image": encode(content()), "questions": [" "]}, 422, "question"),
        ({"image": encode(content()), "questions": ["🚗🚗"]}, 422, "no word of the question"),
        ({"image": encode(content()), "questions": ["car " * 300]}, 422, "leaves no room for an answer"),
        ({"image": encode(content()), "questions": "Is it raining?"}, 422, "questions: Input should be a valid list"),
        ({"image": encode(content()), "questions": ["Is it raining?"], "extra": 1}, 422, "extra"),
        ({"image_url": "http://127.0.0.1/a.png", "questions": ["Is it raining?"]}, 422, "does not fetch URLs"),
    ],
)
def test_what_cannot_be_answered_is_said(client, body, status, message):
    answer = ask_json(client, **body)
    assert answer.status_code == status and message in answer.json()["detail"], answer.text


def test_other_bodies_are_refused(client):
    assert client.post("/v1/answer", content=b"{", headers={"content-type": "application/json"}).status_code == 422
    deep = b"[" * 100_000
    assert client.post("/v1/answer", content=deep, headers={"content-type": "application/json"}).status_code == 422
    assert client.post("/v1/answer", content=b"x").status_code == 415
    broken = client.post("/v1/answer", content=b"x", headers={"content-type": "multipart/form-data"})
    assert broken.status_code == 400
    no_object = client.post("/v1/answer", json=["Is it raining?"])
    assert no_object.status_code == 422 and "must be a JSON object" in no_object.json()["detail"]
    long = client.post("/v1/answer", content=b"x" * 300_001, headers={"content-type": "application/json"})
    assert long.status_code == 413 and "300,000 bytes" in long.json()["detail"]
    pieces = (b"x" * 100_000 for _ in range(4))  # without a content-length
    assert client.post("/v1/answer", content=pieces, headers={"content-type": "application/json"}).status_code == 413


def test_unknown_words_are_named(client):
    [answer] = ask(client, questions=["Is there a flamingo car?"]).json()["answers"]
    assert answer["unknown_words"] == ["flamingo"]


def test_a_full_house_answers_503_and_says_when_to_come_again(model):
    with TestClient(build_app(Settings(model, "cpu", max_waiting=2))) as client:
        service = client.app.user_middleware[0].kwargs["service"]
        gate, answer = threading.Event(), service._answer
        service._answer = lambda items: gate.wait(20) and answer(items)
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(ask, client) for _ in range(2)]
            while service.waiting < 2:
                time.sleep(0.01)
            refused = ask(client)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert client.get("/healthz").json() == {"status": "ok"}
            gate.set()
            assert [one.result().status_code for one in asked] == [200, 200]
        assert service.waiting == 0


def test_what_takes_too_long_is_given_up_and_not_answered_later(model):
    with TestClient(build_app(Settings(model, "cpu", seconds=3))) as client:
        service = client.app.user_middleware[0].kwargs["service"]
        while ask(client).status_code != 200:  # the first pass may take longer than later ones
            time.sleep(0.1)
        gate, keys, answer = threading.Event(), [], service._answer
        service._answer = lambda items: keys.extend(item.key for item in items) or (gate.wait(20) and answer(items))
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask, client, content(5))]
            while not keys:  # the model is busy with this one, the others wait
                time.sleep(0.01)
            asked += [pool.submit(ask, client, content(seed)) for seed in (6, 7, 8)]
            for one in asked:
                assert one.result().status_code == 504 and "3 seconds" in one.result().json()["detail"]
        gate.set()
        last = ask(client, content(9))
        assert last.status_code == 200 and service.waiting == 0 and not service.unanswered
        assert len(keys) == 2 and keys[1] == last.json()["image"]


def test_a_key_is_asked_for(model):
    with TestClient(build_app(Settings(model, "cpu", api_key="secret"))) as client:
        for headers in ({}, {"X-API-Key": "other"}, {"Authorization": "Bearer"}):
            refused = ask(client, headers=headers)
            assert refused.status_code == 401 and "API key" in refused.json()["detail"]
        assert client.get("/metrics").status_code == 401 and client.get("/healthz").status_code == 200
        for headers in ({"X-API-Key": "secret"}, {"Authorization": "Bearer secret"}):
            assert ask(client, headers=headers).status_code == 200


def test_metrics_count(client):
    ask(client, content(77))
    text = client.get("/metrics").text
    counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(counts['traffic_vlm_requests_total{path="/v1/answer",status="200"}']) >= 1
    assert float(counts["traffic_vlm_questions_total"]) >= 3 and float(counts["traffic_vlm_waiting"]) == 0
    assert float(counts['traffic_vlm_images_total{cached="false"}']) >= 1


def test_strangers_make_no_metrics(model):
    with TestClient(build_app(Settings(model, "cpu", api_key="secret", max_waiting=1))) as client:
        for number in range(5):
            assert client.get(f"/v1/{number}").status_code == 401
        text = client.get("/metrics", headers={"X-API-Key": "secret"}).text
        assert "/v1/0" not in text and 'path="other",status="401"' in text


def test_programs_in_pictures_are_not_run(client):
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    refused = ask(client, postscript)
    assert refused.status_code == 422 and "is no image that can be read" in refused.json()["detail"]


def test_the_cache_is_bounded_in_number_and_time():
    now = [0.0]
    cache = ImageCache(2, 10.0, lambda: now[0])
    for key in "ab":
        cache.put(key, key)
    assert cache.get("a") == "a"  # used later than b
    cache.put("c", "c")
    assert cache.get("b") is None and cache.get("a") == "a" and len(cache.kept) == 2
    now[0] = 11
    assert cache.get("a") is None and cache.get("c") is None and not cache.kept


# URLs


@pytest.mark.parametrize(
    "address, public",
    [
        ("8.8.8.8", True),
        ("2001:4860:4860::8888", True),
        *[(address, False) for address in ("127.0.0.1", "10.0.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0")],
        *[(address, False) for address in ("::1", "fe80::1%eth0", "fd00::1", "::ffff:127.0.0.1", "224.0.0.1")],
        *[(address, False) for address in ("100.64.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "240.0.0.1")],
        *[(address, False) for address in ("::7f00:1", "::ffff:0:7f00:1", "64:ff9b:1::7f00:1", "fec0::1", "2001::1")],
    ],
)
def test_public_addresses(address, public):
    assert is_public(address) is public


class Pages(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/slow":  # a byte now and then, for longer than anybody waits
            with contextlib.suppress(OSError):
                for byte in b"HTTP/1.0 200 OK\r\nX: " + b"x" * 100:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.1)
            return
        status, body = {"/a.png": (200, content()), "/long": (200, bytes(50_000)), "/to": (302, b"")}.get(
            self.path, (404, b"")
        )
        self.send_response(status)
        self.send_header("Location", "http://127.0.0.1/")
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


def test_private_addresses_are_refused(site):
    for url in (f"{site}/a.png", site.replace("127.0.0.1", "localhost"), "http://[::1]/", "http://2130706433/"):
        with pytest.raises(FetchError, match="is not on the public Internet"):
            fetch(url, 1000, 5.0)
    for url in ("file:///etc/passwd", "ftp://a/b", "http://", "http://user:word@a/b", "//a", "http://a:99999/", ""):
        with pytest.raises(FetchError, match="the URL"):
            fetch(url, 1000, 5.0)


def test_urls_are_fetched_within_limits(model, site, monkeypatch):
    monkeypatch.setattr(fetching, "is_public", lambda address: True)
    assert fetch(f"{site}/a.png", 20_000, 5.0) == content()
    for path, message in {
        "/long": "more than 20,000 bytes",
        "/to": "answered 302",
        "/missing": "answered 404",
    }.items():
        with pytest.raises(FetchError, match=message):
            fetch(site + path, 20_000, 5.0)
    begin = time.monotonic()
    with pytest.raises(FetchError, match=r"cannot be fetched|took more than 0.5 seconds"):
        fetch(f"{site}/slow", 20_000, 0.5)
    assert time.monotonic() - begin < 5
    with TestClient(build_app(Settings(model, "cpu", allow_urls=True))) as client:
        answer = ask_json(client, image_url=f"{site}/a.png", questions=QUESTIONS)
        assert answer.status_code == 200 and answer.json()["image"] == ask(client).json()["image"]


def test_a_name_is_looked_up_once(site, monkeypatch):
    """Who answers with a public address first and a private one later gets to neither."""
    port = int(site.rpartition(":")[2])
    answers = iter(["93.184.216.34", "127.0.0.1"])
    monkeypatch.setattr(
        fetching.socket, "getaddrinfo", lambda *arguments, **options: [(2, 1, 6, "", (next(answers), port))]
    )
    reached = []
    monkeypatch.setattr(
        fetching.socket,
        "create_connection",
        lambda address, *rest: reached.append(address) or (_ for _ in ()).throw(OSError),
    )
    with pytest.raises(FetchError, match="cannot be fetched"):
        fetch(f"http://rebinding.example:{port}/a.png", 1000, 5.0)
    assert reached == [("93.184.216.34", port)]


# Its own schema, and Ray Serve


@pytest.mark.filterwarnings("ignore")
def test_whatever_is_sent_by_its_own_schema_is_answered_as_promised(client):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    schema = schemathesis.openapi.from_asgi("/openapi.json", client.app)
    statuses = {}
    budget = settings(
        max_examples=FUZZ_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
    )

    def probe(case):
        answer = case.call(session=client)
        statuses.setdefault(case.operation.label, set()).add(answer.status_code)
        # A status and a body that the schema promises, and no server error; random bytes are no image, though.
        case.validate_response(answer, excluded_checks=[positive_data_acceptance])

    for found in schema.get_all_operations():
        budget(given(case=found.ok().as_strategy())(probe))()
    assert set(statuses) == {"POST /v1/answer", "POST /v1/generate", "GET /healthz", "GET /metrics"}
    assert all(status < 500 for found in statuses.values() for status in found)


def test_options_and_settings_have_the_same_defaults(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["serve.py"])
    options = vars(runpy.run_path(str(ROOT / "scripts/serve.py"))["parse"]())
    fields = {name: field.default for name, field in Settings.__dataclass_fields__.items()}
    shared = {name for name in fields if name in options} - {"model", "threads"}
    assert len(shared) >= 10
    assert {name: options[name] for name in shared} == {name: fields[name] for name in shared}


def test_more_replicas_than_the_machine_holds_are_refused(model):
    command = [sys.executable, str(ROOT / "scripts/serve.py"), "--model", model, "--replicas", "999"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--replicas 999: there is room for " in done.stderr


def test_a_start_that_is_refused_leaves_the_service_of_the_cluster_alone(model, monkeypatch, capsys):
    import ray
    from ray import serve

    done = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2}}])
    for owner, name in ((ray, "shutdown"), (serve, "start"), (serve, "run"), (serve, "delete"), (serve, "shutdown")):
        monkeypatch.setattr(owner, name, lambda *_, what=f"{owner.__name__}.{name}", **__: done.append(what))
    monkeypatch.setattr(sys, "argv", ["serve.py", "--model", str(model), "--address", "auto", "--replicas", "9"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "scripts/serve.py"), run_name="__main__")
    assert end.value.code == 2 and "--replicas 9: there is room for 1" in capsys.readouterr().err
    assert done == ["ray.shutdown"]


def test_the_command_serves(model):
    import socket

    import httpx

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        str(ROOT / "scripts/serve.py"),
        "--model",
        model,
        "--port",
        str(port),
        "--device",
        "cpu",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert "serving on" in server.stdout.readline(), server.communicate()[1]
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{url}/healthz").json() == {"status": "ok"}
        assert httpx.get(f"{url}/openapi.json").json()["info"]["title"] == "Traffic VLM"
        files = {"image": ("a.png", content())}
        answer = httpx.post(f"{url}/v1/answer", files=files, data={"questions": QUESTIONS}, timeout=60)
        assert answer.status_code == 200 and len(answer.json()["answers"]) == 3
        with httpx.stream("POST", f"{url}/v1/generate", files=files, data={"question": "What is ahead?"}) as stream:
            assert sum(line.startswith("data: ") for line in stream.iter_lines()) > 1
        server.terminate()
        assert server.wait(60) == 0
    finally:
        server.kill()
