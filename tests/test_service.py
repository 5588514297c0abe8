"""The HTTP service: answers, limits and the cache."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from tiny import any_size_model, close_to, count_calls, locating_model, picture, png, save_folder


for name in ("cachetools", "fastapi", "httpx"):
    pytest.importorskip(name)

from starlette.testclient import TestClient  # noqa: E402

from traffic_vlm.serving.service import ServeOptions, build_app  # noqa: E402


QUESTIONS = ["Is there a car?", "What is ahead?", "Is it raining?"]
RAINING = QUESTIONS[2]


@pytest.fixture(scope="module")
def start(saved_model):
    """A function that starts a service with these settings, to be closed by `with`."""
    fixed = {"model": saved_model, "device": "cpu", "threads": 1, "min_score": 0}
    return lambda api_key=None, **fields: TestClient(build_app(ServeOptions(**fixed | fields), api_key))


@pytest.fixture(scope="module")
def client(start):
    with start(max_bytes=300_000, max_pixels=9_000) as client:
        yield client


def base64_of(image: bytes) -> str:
    return base64.b64encode(image).decode()


def ask(client, image: bytes | None = None, questions=QUESTIONS, **options):
    files = {"image": ("a.png", png() if image is None else image)}
    return client.post("/v1/answer", files=files, data={"questions": questions}, **options)


def count_images(client) -> list[int]:
    """A list that grows by one element with each image that the model encodes."""
    return count_calls(client.app.state.service.pipe.model.model.vision_tower)


# Answers


def test_answers_are_the_items_of_the_pipeline(client):
    """Also of a question that has a problem."""
    questions = [*QUESTIONS, "Is there an Elephant?"]
    items = client.app.state.service.pipe(picture(), questions)
    assert [set(item) for item in items[:3]] == [{"question", "answer", "score", "p_yes"}] * 3
    assert items[3]["answer"] is None and "the model does not know 'Elephant'" in items[3]["problem"]
    texts = base64_of(png()), f"data:image/png;base64,{base64_of(png())}"
    responses = [client.post("/v1/answer", json={"image": text, "questions": questions}) for text in texts]
    for response in [*responses, ask(client, questions=questions)]:
        assert response.status_code == 200 and response.json()["answers"] == [close_to(item) for item in items]


def test_warnings_about_an_image_are_in_each_response(client):
    stream = io.BytesIO()
    Image.fromarray(np.arange(81, dtype=np.uint16).reshape(9, 9) * 99).save(stream, "png")
    for _ in range(2):  # the second time from the cache
        response = ask(client, stream.getvalue()).json()
        assert response["warnings"] == ["uint16 pixels are scaled from their own range to black and white"]
    assert "warnings" not in ask(client).json()


def test_thresholds_and_a_region_are_those_of_the_settings(start, client, tmp_path):
    (tmp_path / "thresholds.json").write_text('{"default": {"threshold": 0.00001, "band": [0, 1]}}')
    [plain] = client.app.state.service.pipe(picture().crop((0, 0, 32, 48)), QUESTIONS[0])
    with start(thresholds=str(tmp_path / "thresholds.json"), region="0,0,0.5,1") as other:
        [item] = ask(other, questions=QUESTIONS[:1]).json()["answers"]
    assert item["p_yes"] == pytest.approx(plain["p_yes"], abs=1e-5)
    assert (item["answer"], item["not_sure"]) == ("yes", True)


def test_the_size_of_the_image_is_a_field_of_a_request(start, tmp_path):
    with start(model=str(save_folder(any_size_model(), tmp_path)), image_size="224,320") as client:
        pipe, body = client.app.state.service.pipe, {"image": base64_of(png()), "questions": QUESTIONS}
        for size in (None, 320, 224):
            options = {} if size is None else {"image_size": size}
            items = pipe(pipe.encode(picture(), image_size=size or (224, 320)), QUESTIONS)
            response = client.post("/v1/answer", json=body | options)
            assert response.json()["answers"] == [close_to(item) for item in items]
        refused = client.post("/v1/answer", json=body | {"image_size": 100})
        assert refused.json()["detail"].startswith("image_size must be")


def test_an_image_is_encoded_once_while_it_is_in_the_cache(start):
    for size, encoded in ((2, 2), (1, 3)):
        with start(cached_images=size) as client:
            seen = count_images(client)
            answers = [ask(client, png(seed)).json()["answers"] for seed in (1, 2, 1)]
            assert len(seen) == encoded and answers[0] == [close_to(item) for item in answers[2]] != answers[1]


def test_objects_are_those_of_the_pipeline_and_an_image_is_encoded_once_for_all_requests(start, tmp_path, client):
    with start(model=str(save_folder(locating_model(), tmp_path)), region="0.5,0,0.5,1") as other:
        pipe, image = other.app.state.service.pipe, {"image": base64_of(png())}
        every, buses = (pipe.locate(picture(), labels) for labels in (["bus", "car"], "bus"))
        assert len(every) > len(buses) > 0
        seen = count_images(other)
        assert ask(other).status_code == 200
        assert other.post("/v1/locate", json=image).json() == {"objects": every}
        for labels, found in ((["bus", "car"], every), (["bus"], buses), ("bus", buses)):
            assert other.post("/v1/locate", json=image | {"labels": labels}).json() == {"objects": found}
            response = other.post("/v1/locate", files={"image": png()}, data={"labels": labels})
            assert response.json() == {"objects": found}
        assert len(seen) == 1
        refused = other.post("/v1/locate", json=image | {"labels": ["bus", "zebra"]})
        assert (refused.status_code, refused.json()["detail"]) == (422, "locate knows: bus, car; got 'zebra'")
    refused = client.post("/v1/locate", json=image)
    assert refused.status_code == 422 and "no center head" in refused.json()["detail"]


def test_a_description_is_that_of_the_pipeline(client):
    described = client.app.state.service.pipe.describe(picture(7))
    for form in ({"json": {"image": base64_of(png(7))}}, {"files": {"image": png(7)}}):
        response = client.post("/v1/describe", **form).json()
        assert response["caption"] == described["caption"]
        assert response["facts"] == [close_to(fact) for fact in described["facts"]]


# Bad input


BAD_REQUESTS = {
    "no image": ({"image": None}, "image: Input should be a valid bytes"),
    "no base64": ({"image": "…"}, "image: "),
    "text as image": ({"image": base64_of(b"Is it raining?")}, "cannot be read as an image. Readable are AVIF, "),
    "truncated image": ({"image": base64_of(png()[:100])}, "the image cannot be decoded: it is damaged"),
    "large image": ({"image": base64_of(png(size=(100, 100)))}, "100 × 100 pixels; at most 9,000 in all"),
    "200 questions": ({"questions": [RAINING] * 200}, "questions: List should have at most 64 items"),
}


@pytest.mark.parametrize("changes, message", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_bad_request_is_refused_with_the_cause(client, changes, message):
    body = {"image": base64_of(png()), "questions": [RAINING]} | changes
    response = client.post("/v1/answer", json=body)
    assert response.status_code == 422 and message in response.json()["detail"], response.text


def test_a_bad_body_is_refused(client):
    def post(content, content_type, **headers):
        response = client.post("/v1/answer", content=content, headers={"content-type": content_type, **headers})
        assert response.json()["detail"]
        return response.status_code

    assert post(b"{", "application/json") == post(b"x" * 300_000, "application/json") == 422
    assert "image: Field required" in client.post("/v1/answer", data={"questions": [RAINING]}, files={"a": b"x"}).text
    assert post(b"x", "text/plain") == post(b"x", "application/json", **{"content-encoding": "gzip"}) == 422
    for content_type in ("application/json", "multipart/form-data; boundary=a"):
        assert post(b"x" * 300_001, content_type) == 413
        assert post((b"x" * 100_000 for _ in range(4)), content_type) == 413  # without a content-length


# Other routes


def test_answers_require_the_key(start):
    with start(api_key="secret") as client:
        for headers in ({}, {"X-API-Key": "other"}, {"Authorization": "Bearer"}, {"X-API-Key": "é".encode()}):
            refused = ask(client, headers=headers)
            assert refused.status_code == 401 and "API key" in refused.json()["detail"]
        for headers in ({"X-API-Key": "secret"}, {"Authorization": "Bearer secret"}):
            assert ask(client, headers=headers).status_code == 200
        assert [client.get(path).status_code for path in ("/healthz", "/docs", "/openapi.json")] == [200] * 3


def test_pages_of_named_origins_can_ask(start):
    with start(allow_origin=["https://a.test/"]) as client:
        for origin, allowed in (("https://a.test", "https://a.test"), ("https://b.test", None)):
            assert ask(client, headers={"origin": origin}).headers.get("access-control-allow-origin") == allowed
