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

from tiny import ROOT, count_calls, save_folder, tiny_model
from traffic_vlm.data.question_types import question_type_of
from traffic_vlm.data.synthetic import render
from traffic_vlm.images_traffic_vlm import Region
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline
from traffic_vlm.question_traffic_vlm import answer_text
from traffic_vlm.serving.suggestions import suggest_questions


page_module = pytest.importorskip("traffic_vlm.serving.page", reason='needs the extra "demo" (gradio)')
QUESTIONS = "Is there a car?\nWhat is ahead?\n\nIs there a <b>bus</b>?"


@pytest.fixture(scope="module")
def pipe(processor):
    return TrafficVLMPipeline(tiny_model(), processor=processor, device="cpu")


@pytest.fixture(scope="module")
def page(pipe):
    return page_module.Page(pipe)


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


def an_item(answer, score, p_yes=None, question="a?", **more):
    return {"question": question, "answer": answer, "score": score, "p_yes": p_yes, **more}


def test_answers_are_those_of_the_pipeline_and_the_image_is_encoded_once(page, picture):
    expected = page.pipe(picture, page_module.split_questions(QUESTIONS))
    passes = count_calls(page.pipe.model.model.vision_tower)
    step = list(page.answer(picture, QUESTIONS, None))[-1]
    assert "Image encoded in" in step.status and "one pass: 3" in step.status
    table = page_module.table(step.items)
    assert table.count("<tr>") == 4 and "&lt;b&gt;bus&lt;/b&gt;" in table and "<b>" not in table
    for item, answered in zip(step.items, expected, strict=True):
        assert item == {name: pytest.approx(value, abs=1e-5) for name, value in answered.items()}
        assert f"</meter>{item['score']:.2f}" in table
    again = list(page.answer(picture, "Is it raining?", step.image))[-1]
    assert "not encoded again" in again.status and again.image is step.image and passes == [1]


def test_a_region_is_asked_about_and_shown(processor, picture):
    whole = Image.open(picture).convert("RGB")
    part = whole.crop((0, 0, whole.width // 2, whole.height))
    pipe = TrafficVLMPipeline(tiny_model(), processor=processor, device="cpu", region=(0, 0, 0.5, 1))
    page = page_module.Page(pipe, Region(0, 0, 0.5, 1))
    [item] = list(page.answer(picture, "Is there a car?", None))[-1].items
    assert item == pipe(part, "Is there a car?", region=(0, 0, 1, 1))[0]
    assert page.encode(picture, None)[0].picture == part


def test_answers_in_words_grow(page, picture):
    items = [step.items[0] for step in page.answer(picture, "What is ahead?", None)]
    *growing, last = [item["answer"] or "" for item in items]
    assert growing[0] == "" and len(growing) >= 3 and [item["score"] is None for item in items[-2:]] == [True, False]
    assert all(last.startswith(text.strip()) for text in growing)


def test_a_yes_no_question_is_not_answered_in_words(page, picture):
    [step] = page.answer(picture, "Is there a car?", None)
    assert step.items[0]["answer"] in ("yes", "no")


def test_the_table_shows_finished_partial_and_missing_answers():
    items = [an_item("yes", 0.9, 0.9), an_item("a red", None), an_item(None, None), an_item("none", 0.9)]
    yes, partial, missing, none = map(page_module.table_row, items)
    assert "<strong>yes</strong>" in yes and '<meter value="0.90"' in yes and "not sure" not in yes
    assert "<strong>a red</strong>" in partial and "<td><strong>…</strong></td>" in missing
    assert "<strong>none seen</strong>" in none
    assert page_module.table([]) == ""


@pytest.mark.parametrize("answer", ["yes", "no", "red"])
def test_a_probability_of_0_51_does_not_look_like_1_00(answer):
    def row(score: float, **more: bool) -> str:
        return page_module.table_row(an_item(answer, score, {"yes": score, "no": 1 - score}.get(answer), **more))

    sure, guess = row(1.0), row(0.51)
    assert f"<strong>{answer}</strong><div" in sure and '<meter value="1.00" aria' in sure
    assert f"<em>{answer}</em>, not sure" in guess and '<meter value="0.51" low="1"' in guess  # yellow
    assert "not sure" not in row(0.51, not_sure=False) and "not sure" in row(0.9, not_sure=True)  # thresholds


def test_unknown_and_untaught_words_are_in_the_row_of_their_answer():
    item = an_item("yes", 0.99, 0.99, unknown_words=["<zebra>"], untaught_words=["umbrella"])
    question, answer = page_module.table_row(item).split("</td><td>")
    assert "ignored: &lt;zebra&gt;<" in question and "guessed: umbrella<" in question
    assert "<em>yes</em>, not sure" in answer  # however high its probability is


def test_too_few_and_too_many_questions_are_refused_beside_them(page, picture):
    for text, messages in {" \n\n": ["at least one question"], "Is it wet?\n" * 200: ["200 questions", "64"]}.items():
        [step] = page.answer(picture, text, None)
        assert 'role="alert"' in step.questions_note and all(message in step.questions_note for message in messages)
        assert not step.items and not step.image_problem


def test_a_bad_question_does_not_stop_the_others(page, picture):
    bad = {"\U0001f600 \U0001f697": "no word", "is there a car " * 40: "128", "???": "has no word"}
    questions = [*bad, "Is there a car?"]
    step = list(page.answer(picture, "\n".join(questions), None))[-1]
    assert [item["question"] for item in step.items] == [question.strip() for question in questions]
    for item, message in zip(step.items, bad.values()):
        assert message in item["problem"] and message in page_module.table_row(item)
    assert step.answered == [step.items[-1]]
    [step] = page.answer(picture, "???", None)
    assert step.answered == [] and "one pass" not in step.status


def test_unreadable_images_are_refused_beside_them_with_the_cause(page, picture, tmp_path):
    text = tmp_path / "frame.jpg"
    text.write_text("not an image")
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "green")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    for path, messages in {
        str(text): ["frame.jpg", "cannot be read as an image: it is text"],
        str(tmp_path / "moving.gif"): ["moving.gif", "animated"],
        huge_png(tmp_path / "large.png", 8000, 8000): ["8000 × 8000", "40,000,000"],
        huge_png(tmp_path / "huge.png", 20000, 20000): ["huge.png", "40,000,000"],
        None: ["Choose an image"],
        str(tmp_path / "old.jpg"): ["has been deleted", "Choose it again"],
    }.items():
        [step] = page.answer(path, "Is there a car?", None)
        assert 'role="alert"' in step.image_problem and all(message in step.image_problem for message in messages)
        assert not step.items and step.image is None
        if path and Path(path).exists():  # said as soon as it is chosen
            assert page.image_problem(path) == step.image_problem
    assert page.image_problem(None) == page.image_problem(picture) == ""


def test_unknown_words_are_listed_beside_the_questions(page):
    assert page.note_on_questions("Is there a car?\n") == page.note_on_questions(" \n") == ""
    assert "flibbertigibbet" in page.note_on_questions("Is there a car?\nIs there a flibbertigibbet?")
    assert "64" in page.note_on_questions("Is it wet?\n" * 200)


def test_suggested_questions_have_taught_words_only(processor):
    suggested = suggest_questions(processor)
    assert {"presence", "place", "side", "count", "light state", "weather", "time of day"} <= set(suggested.values())
    assert list(suggested.values()) == sorted(suggested.values(), key=list(dict.fromkeys(suggested.values())).index)
    for question, question_type in suggested.items():
        assert processor.unknown_words(question) == processor.untaught_words(question) == [], question
        assert question_type_of(question) == question_type.replace(" ", "_"), question
    assert "Is there an umbrella?" not in suggested and "Is there a bus?" in suggested


def test_the_first_questions_have_taught_words_only(processor):
    assert processor.unknown_words(page_module.QUESTIONS) == processor.untaught_words(page_module.QUESTIONS) == []


def test_a_suggestion_becomes_another_line_once():
    assert page_module.add_question("Is it wet?", "Is it dry?\n\n") == ("Is it dry?\nIs it wet?", None)
    assert page_module.add_question("Is it wet?", "Is it wet?") == ("Is it wet?", None)
    assert page_module.add_question("Is it wet?", "") == ("Is it wet?", None)
    assert page_module.add_question(None, "Is it wet?") == ("Is it wet?", None)


def test_example_photographs_are_free_and_small():
    notice = (ROOT / "docs/NOTICE.md").read_text(encoding="utf-8")
    for name in page_module.EXAMPLES:
        assert f"`{name}`" in notice and (ROOT / "docs" / name).stat().st_size <= 60_000


def test_the_attention_of_a_word(page, picture):
    items = list(page.answer(picture, QUESTIONS, None))[-1].items
    image, _ = page.encode(picture, None)
    label = "car · Is there a car?"
    choice = dict(page.words(items))[label]
    maps = page_module.attention_of_question(page.pipe, image.encoded, "Is there a car?")
    [item] = page.pipe(picture, "Is there a car?")
    strength = page_module.map_strength(item)
    expected = page_module.heat_over(image.picture, maps[int(choice.partition(":")[0])], strength)
    found, caption = page.overlay(choice, image)
    assert found == expected and expected.size == image.picture.size
    assert "where “car” attends" in caption and answer_text(item) in caption and ("Faded" in caption) == (strength < 1)
    # A choice does not depend on the other questions, and a question asked twice has its words once.
    assert dict(page.words(items[::-1]))[label] == choice
    assert page.words(items[:1] * 2) == page.words(items[:1])


def test_words_of_maps_are_content_words(page):
    items = [an_item("yes", 1.0, question=text) for text in ("Is there a car on the left?", "What is there?")]
    labels = [label.partition(" · ")[0] for label, _ in page.words(items)]
    assert labels == ["car", "left", "what", "is", "there"]  # all words, where there is no other


def test_the_first_map_is_one_that_does_not_fade(page):
    no = an_item("no", 0.9, 0.1, "Is there a bus?")
    yes = an_item("yes", 0.7, 0.7, "Is there a car?")
    words = an_item("a car", 0.9, question="What is ahead?")
    assert page.first_word([no, yes, words]).endswith(":Is there a car?")
    assert page.first_word([no]).endswith(":Is there a bus?")


def test_invalid_choices_of_a_word_have_no_attention(page, picture):
    image, _ = page.encode(picture, None)
    out_of_range = ("40:Is there a car?", f"{10**30}:Is there a car?", "-1:Is there a car?", "1:Is there a car?")
    for choice in (None, "", "2", "2:", "x:Is there a car?", *out_of_range, "1:" + "a " * 200, "9" * 5000 + ":a car"):
        assert page.overlay(choice, image) == (None, ""), choice
    assert page.overlay("3:Is there a car?", None) == (None, "")


def test_a_new_image_stops_the_answers_before_it_clears_them(pipe):
    """Otherwise the next answer of a running generator would appear beside the new image."""
    blocks = page_module.build_page(pipe, [ROOT / "docs/example.jpg"])
    events = blocks.config["dependencies"]
    ids = {part["props"].get("elem_id"): part["id"] for part in blocks.config["components"]}
    [asking] = [event["id"] for event in events if (ids["ask"], "click") in map(tuple, event["targets"])]
    changes = [event for event in events if (ids["image"], "change") in map(tuple, event["targets"])]
    stops = [i for i, event in enumerate(changes) if event["cancels"] == [asking]]
    clears = [i for i, event in enumerate(changes) if ids["answers"] in event["outputs"]]
    assert len(stops) == len(clears) == 1 and stops < clears  # the browser handles them in this order
    assert [event["show_progress_on"] for event in events if event["id"] == asking] == [
        [ids["answers"]]
    ]  # one spinner


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
def test_uploads_are_deleted_after_a_time(pipe, picture, tmp_path, monkeypatch):
    assert page_module.DELETING[1] == 3600
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    monkeypatch.setattr(page_module, "DELETING", (0.5, 1))
    blocks = page_module.build_page(pipe, [])
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
def site(pipe):
    examples = [ROOT / "docs" / name for name in page_module.EXAMPLES]
    blocks = page_module.build_page(pipe, examples)
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
@pytest.mark.parametrize(
    "width, scheme", [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")], ids=lambda value: str(value)
)
def test_the_page_works_in_a_browser(site, browser, picture, tmp_path, width, scheme):
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab.set_default_timeout(90_000)  # milliseconds: a busy machine renders slowly
    tab.goto(site)
    tab.locator("#image input[type=file]").set_input_files(picture)
    tab.locator("#questions textarea").fill("Is there a car?\nIs there a flibbertigibbet?")
    tab.locator("#note").get_by_text("flibbertigibbet").wait_for()
    tab.locator("#questions textarea").press("Shift+Enter")
    tab.locator("#answers td", has_text="ignored: flibbertigibbet").wait_for()
    tab.locator("#overlay img").wait_for()
    tab.screenshot(path=tmp_path / f"{width}_{scheme}.png", full_page=True)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    borders = tab.evaluate(
        "[...document.querySelectorAll('#answers *')].map(e => getComputedStyle(e).borderRightWidth)"
    )
    assert set(borders) == {"0px"}  # no grid
    # Each number is on one line.
    heights = tab.evaluate("[...document.querySelectorAll('#answers .confidence')].map(e => e.clientHeight)")
    assert heights and max(heights) < 40
    tab.locator("#questions textarea").fill("Is it raining?")
    tab.locator("#ask").click()
    tab.locator("#status").get_by_text("not encoded again").wait_for()
    tab.close()


@pytest.mark.slow
def test_bad_images_are_explained_beside_them_in_a_browser(site, browser, picture, tmp_path):
    tab = browser.new_page()
    tab.set_default_timeout(90_000)
    tab.goto(site)
    text = tmp_path / "frame.jpg"
    text.write_text("not an image")
    tab.locator("#image input[type=file]").set_input_files(text)
    tab.locator("#image_problem").get_by_text("frame.jpg cannot be read as an image").wait_for()
    tab.locator("#ask").click()
    tab.locator("#image_problem").get_by_text("frame.jpg cannot be read as an image").wait_for()
    tab.locator(".gallery button, .gallery-item").first.click()
    tab.locator("#image_problem").get_by_text("frame.jpg").wait_for(state="detached")
    tab.locator("#ask").click()
    tab.locator("#overlay img").wait_for()
    tab.close()


@pytest.mark.slow
def test_the_page_works_by_keyboard_only(site, browser):
    tab = browser.new_page()
    tab.set_default_timeout(90_000)
    tab.goto(site)
    tab.locator("#ask").wait_for()

    def tab_to(selector: str) -> None:
        for _ in range(30):
            tab.keyboard.press("Tab")
            if tab.evaluate("selector => document.activeElement.matches(selector)", selector):
                return
        raise AssertionError(f"Tab does not reach {selector}")

    tab_to(".gallery button, .gallery-item")
    tab.keyboard.press("Enter")
    tab.locator("#image img").wait_for()
    tab_to("#suggestion input")
    tab.keyboard.type("yellow")  # as in "Is the traffic light yellow?"
    tab.keyboard.press("Enter")
    wait_until(lambda: "light yellow?" in tab.locator("#questions textarea").input_value())
    tab_to("#ask")
    tab.keyboard.press("Enter")
    tab.locator("#overlay img").wait_for()
    caption = tab.locator("#caption").inner_text()
    tab_to("#word input")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Enter")
    wait_until(lambda: tab.locator("#caption").inner_text() not in ("", caption))
    tab.close()
