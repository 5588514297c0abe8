"""The demo page: its answers, its errors, and its use in a browser."""

import os
import shutil
import socket
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
from PIL import Image

from tiny import ROOT, save_folder, tiny_model
from traffic_vlm.data.synthetic import render
from traffic_vlm.serving.answerer import Answer, Answerer


page_module = pytest.importorskip("traffic_vlm.serving.page", reason='needs the extra "demo" (gradio)')
QUESTIONS = "Is there a car?\nWhat color is the traffic light?\n\nIs there a <b>bus</b>?"


@pytest.fixture(scope="module")
def answerer(tmp_path_factory):
    """A tiny model that answers some questions by yes or no, and others in words."""
    return Answerer(save_folder(tiny_model(), tmp_path_factory.mktemp("model")), device="cpu")


@pytest.fixture(scope="module")
def page(answerer):
    return page_module.Page(answerer)


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "scene.png"
    render(6040)[0].save(path)
    return str(path)


def huge_png(path, width: int, height: int) -> str:
    """Write the beginning of a PNG file of this size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")))
    return str(path)


def test_answers_are_those_of_the_answerer_and_the_image_is_encoded_once(page, picture, monkeypatch):
    [expected] = page.answerer([picture], [page_module.split_questions(QUESTIONS)])
    encode, passes = page.answerer.encode, []
    monkeypatch.setattr(page.answerer, "encode", lambda pixels: passes.append(1) or encode(pixels))
    status, table, image = list(page.answer(picture, QUESTIONS, None))[-1]
    assert "image encoded in" in status and "all 3 questions in one pass" in status
    assert table.count("<tr>") == 4 and "&lt;b&gt;bus&lt;/b&gt;" in table and "<b>" not in table
    for answer in expected:
        assert f"<strong>{answer.answer}</strong>" in table
        assert answer.yes_probability is None or f"{answer.yes_probability:.2f}" in table
    status, _, again = list(page.answer(picture, "Is it raining?", image))[-1]
    assert "not encoded again" in status and again is image and passes == [1]


def test_answers_in_words_grow(page, picture, monkeypatch):
    monkeypatch.setattr(page.answerer, "classify", lambda encoded, rows: [[None for _ in row] for row in rows])
    steps = [table for _, table, _ in page.answer(picture, "What is ahead?", None)]
    assert "…" in steps[0] and " ms" not in steps[0]
    assert len(steps) >= 3 and " ms" in steps[-1]


def test_the_table_shows_finished_partial_and_missing_answers():
    rows = [("a?", Answer("a?", "yes", 0.9, 0.9), 0.01), ("b?", "a red", 0.2), ("c?", None, None)]
    table = page_module.table(rows)
    assert "not sure" not in table
    unsure = page_module.table([("a?", Answer("a?", "yes", 0.4, 0.4, not_sure=True), 0.01)])
    assert "<strong>yes</strong>, not sure</td>" in unsure
    assert '<meter value="0.90"' in table and "10.0 ms" in table and "<strong>a red</strong>" in table
    assert "<td>c?</td><td><strong>…</strong></td>" in table


def test_invalid_questions_are_refused_with_the_cause(page, picture):
    for text, messages in {
        " \n\n": ["at least one question"],
        "Is it wet?\n" * 200: ["200 questions", "64"],
        "\U0001f600 \U0001f697": ["no word"],
        "is there a car " * 40: ["128"],
    }.items():
        [(status, table, _)] = page.answer(picture, text, None)
        assert 'role="alert"' in status and all(message in status for message in messages) and table == ""


def test_unreadable_images_are_refused_with_the_cause(page, tmp_path):
    text = tmp_path / "frame.jpg"
    text.write_text("not an image")
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "green")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    for path, messages in {
        str(text): ["frame.jpg", "no image"],
        str(tmp_path / "moving.gif"): ["moving.gif", "animated"],
        huge_png(tmp_path / "large.png", 8000, 8000): ["8000 × 8000", "40,000,000"],
        huge_png(tmp_path / "huge.png", 20000, 20000): ["huge.png", "40,000,000"],
        None: ["Choose an image"],
        str(tmp_path / "old.jpg"): ["has been deleted", "Choose it again"],
    }.items():
        [(status, table, image)] = page.answer(path, "Is there a car?", None)
        assert 'role="alert"' in status and all(message in status for message in messages), status
        assert table == "" and image is None


def test_unknown_words_are_listed(page):
    assert page.list_unknown_words("Is there a car?\n") == page.list_unknown_words(" \n") == ""
    assert "flibbertigibbet" in page.list_unknown_words("Is there a car?\nIs there a flibbertigibbet?")


def test_the_attention_of_a_word(page, picture):
    image, _ = page.encode(picture, None)
    label = "car  (Is there a car?)"
    choice = dict(page.words(QUESTIONS))[label]
    assert choice == page.first_word(QUESTIONS)
    maps = page_module.attention_of_question(page.answerer.model, page.processor, image.encoded, "Is there a car?")
    expected = page_module.heat_over(image.picture, maps[int(choice.partition(":")[0])])
    assert page.overlay(choice, image) == expected and expected.size == image.picture.size
    # A choice does not depend on the other questions, and a question asked twice has its words once.
    assert dict(page.words(f"Is it raining?\n{QUESTIONS}"))[label] == choice
    assert page.words("Is there a car?\nIs there a car?") == page.words("Is there a car?")


def test_invalid_choices_of_a_word_have_no_attention(page, picture):
    image, _ = page.encode(picture, None)
    out_of_range = ("40:Is there a car?", f"{10**30}:Is there a car?", "-1:Is there a car?")
    for choice in (None, "", "2", "2:", "x:Is there a car?", *out_of_range, "1:" + "a " * 200):
        assert page.overlay(choice, image) is None, choice
    assert page.overlay(page.first_word(QUESTIONS), None) is None


def test_a_new_image_stops_the_answers_before_it_clears_them(answerer):
    """Otherwise the next answer of a running generator would appear beside the new image."""
    blocks = page_module.build_page(answerer, [ROOT / "docs/example.jpg"])
    events = blocks.config["dependencies"]
    ids = {part["props"].get("elem_id"): part["id"] for part in blocks.config["components"]}
    [asking] = [event["id"] for event in events if (ids["ask"], "click") in map(tuple, event["targets"])]
    changes = [event for event in events if (ids["image"], "change") in map(tuple, event["targets"])]
    stops = [i for i, event in enumerate(changes) if event["cancels"] == [asking]]
    clears = [i for i, event in enumerate(changes) if ids["answers"] in event["outputs"]]
    assert len(stops) == len(clears) == 1 and stops < clears  # the browser handles them in this order


@pytest.mark.slow
def test_help_starts_no_server():
    done = subprocess.run([sys.executable, str(ROOT / "app.py"), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--model" in done.stdout


def upload(url: str, picture: str):
    """Upload a picture as the page does; its path on the server."""
    httpx = pytest.importorskip("httpx")
    with open(picture, "rb") as file:
        response = httpx.post(f"{url}/gradio_api/upload", files={"files": file}, timeout=60)
    return Path(response.raise_for_status().json()[0])


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_uploads_are_deleted_after_a_time(answerer, picture, tmp_path, monkeypatch):
    assert page_module.DELETING[1] == 3600
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    monkeypatch.setattr(page_module, "DELETING", (0.5, 1))
    blocks = page_module.build_page(answerer, [])
    _, url, _ = page_module.launch(blocks, [], prevent_thread_lock=True, quiet=True)
    try:
        path = upload(url.rstrip("/"), picture)
        assert path.is_relative_to(tmp_path)
        wait_until(lambda: not path.exists())
    finally:
        blocks.close()


@pytest.mark.slow
def test_uploads_are_deleted_when_the_page_ends(picture, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = save_folder(tiny_model(), tmp_path / "model")
    environment = {"GRADIO_TEMP_DIR": str(tmp_path / "uploads"), "GRADIO_SERVER_PORT": str(port)}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "app.py"), "--model", str(folder)],
        env=os.environ | environment | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert any("Running on" in line for line in process.stdout)
        path = upload(f"http://127.0.0.1:{port}", picture)
        assert path.is_relative_to(tmp_path / "uploads") and path.exists()
        process.terminate()
        process.wait(60)
        assert list((tmp_path / "uploads").iterdir()) == []
    finally:
        process.kill()


@pytest.fixture(scope="module")
def site(answerer):
    examples = sorted((ROOT / "docs").glob("example*.jpg"))
    blocks = page_module.build_page(answerer, examples)
    _, url, _ = page_module.launch(blocks, examples, prevent_thread_lock=True, quiet=True)
    yield url
    blocks.close()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as manager:
        found = shutil.which("chromium") or shutil.which("google-chrome")
        try:
            browser = manager.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"needs Chromium: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_works_in_a_browser(site, browser, picture, tmp_path, width):
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if width < 500 else "light")
    tab.set_default_timeout(90_000)  # milliseconds: a busy machine renders slowly
    tab.goto(site)
    tab.locator("#image input[type=file]").set_input_files(picture)
    tab.locator("#questions textarea").fill("Is there a car?\nIs there a flibbertigibbet?")
    tab.locator("#unknown").get_by_text("flibbertigibbet").wait_for()
    tab.locator("#questions textarea").press("Shift+Enter")
    tab.locator("#answers td", has_text="Is there a car?").wait_for()
    tab.locator("#overlay img").wait_for()
    tab.screenshot(path=tmp_path / f"{width}.png", full_page=True)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.locator("#questions textarea").fill("Is it raining?")
    tab.locator("#ask").click()
    tab.locator("#status").get_by_text("not encoded again").wait_for()
    text = tmp_path / "frame.jpg"
    text.write_text("not an image")
    tab.reload()
    tab.locator("#image input[type=file]").set_input_files(text)
    tab.locator("#ask").click()
    tab.locator("#status").get_by_text("frame.jpg is no image").wait_for()
