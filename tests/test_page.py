"""The demo page: its answers, its errors, its use in a browser, and how it ends."""

from pathlib import Path

import pytest
from PIL import Image

from tiny import (
    ROOT,
    any_size_model,
    count_calls,
    free_port,
    locating_model,
    save_folder,
    start_process,
    tiny_model,
)
from traffic_vlm.common.answers import answer_text, map_strength
from traffic_vlm.data.synthetic import render
from traffic_vlm.images_traffic_vlm import Region
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline
from traffic_vlm.serving.overlay import attention_of_question, draw_objects, heat_over


page_module = pytest.importorskip("traffic_vlm.serving.page", reason='needs the extra "demo" (gradio)')
QUESTIONS = ["Is there a car?", "What is ahead?", "Is there a <b>bus</b>?"]


@pytest.fixture(scope="module")
def page(processor):
    return page_module.Page(TrafficVLMPipeline(tiny_model(), processor=processor, device="cpu", min_score=0))


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "scene.png"
    render(6040)[0].save(path)
    return str(path)


def an_item(answer, score, p_yes=None, question="a?", **more):
    return {"question": question, "answer": answer, "score": score, "p_yes": p_yes, **more}


def choose_upload(pipe):
    """(function that the page calls for an upload, its inputs)."""
    functions = page_module.build_page(pipe).fns.values()
    [found] = [one for one in functions if getattr(one.fn, "__name__", "") == "choose"]
    return found.fn, found.inputs


def test_answers_are_those_of_the_pipeline_and_the_image_is_encoded_once(page, photo):
    expected = page.pipe(photo, QUESTIONS)
    passes = count_calls(page.pipe.model.model.vision_tower)
    picture = page.encode(photo)
    for _ in range(2):
        items = page.pipe(picture.encoded, QUESTIONS)
        for item, answered in zip(items, expected, strict=True):
            assert item == {name: pytest.approx(value, abs=1e-5) for name, value in answered.items()}
    assert passes == [1]


def test_the_size_is_a_choice_of_the_page(processor, photo):
    pipe = TrafficVLMPipeline(any_size_model(), processor=processor, device="cpu")
    choose, inputs = choose_upload(pipe)
    assert [one.elem_id for one in inputs] == ["image", "size", "objects"]
    assert [side for _, side in inputs[1].choices] == [256, 384, 512]
    assert not inputs[2].visible  # there is no center head
    for side, expected in ((None, 256), (384, 384)):
        assert choose({"path": photo}, side, [])[1].encoded.image_size == (expected, expected)


def test_boxes_of_chosen_classes_are_drawn_on_the_image(processor, photo):
    pipe = TrafficVLMPipeline(locating_model(), processor=processor, device="cpu")
    choose, inputs = choose_upload(pipe)
    assert inputs[2].visible and [label for label, _ in inputs[2].choices] == ["bus", "car"]
    shown, picture, description, *_ = choose({"path": photo}, None, [])
    assert description == pipe.describe(picture.encoded)["caption"]
    boxed = choose({"path": photo}, None, ["car"])[0]
    assert shown == picture.shown and boxed == draw_objects(pipe, shown, picture.encoded, ["car"])[0] != shown


def test_a_region_is_asked_about_and_shown(processor, photo):
    whole = Image.open(photo).convert("RGB")
    part = whole.crop((0, 0, whole.width // 2, whole.height))
    pipe = TrafficVLMPipeline(tiny_model(), processor=processor, device="cpu", min_score=0, region=(0, 0, 0.5, 1))
    page = page_module.Page(pipe, Region(0, 0, 0.5, 1))
    picture = page.encode(photo)
    items = page.pipe(picture.encoded, ["Is there a car?"])
    assert items == pipe(part, "Is there a car?", region=(0, 0, 1, 1))
    part.thumbnail(page_module.SHOWN_SIZE)
    assert picture.shown == part


UNKNOWN = {"unknown_words": ["<zebra>"], "untaught_words": ["umbrella"]}


@pytest.mark.parametrize(
    "item, shown",
    [
        (an_item("yes", 0.9, 0.9), "<strong>yes</strong><br><meter"),
        (an_item("none", 0.9), "<strong>none seen</strong>"),
        (an_item("no", 0.51, 0.49), "<em>no</em>, not sure"),
        (an_item("yes", 0.51, 0.51, not_sure=False), "<strong>yes</strong>"),  # thresholds decide
        (an_item("yes", 0.9, 0.9, not_sure=True), "<em>yes</em>, not sure"),
        (an_item("yes", 0.99, 0.99, **UNKNOWN), "<em>yes</em>, not sure"),
        (an_item("yes", 0.99, 0.99, **UNKNOWN), "ignored: &lt;zebra&gt;</small>"),
        (an_item("yes", 0.99, 0.99, **UNKNOWN), "guessed: umbrella</small></td><td>"),
        (an_item("yes", 0.99, 0.99, question="<b>?"), "<td>&lt;b&gt;?</td>"),
        (an_item(None, None, problem="<no> word"), "<small>&lt;no&gt; word</small>"),
    ],
)
def test_a_row_of_the_table(item, shown):
    table = page_module.table([item, item])
    assert table.count(shown) == 2 and table.count("<tr>") == 3


def test_questions_are_lines():
    assert page_module.split_questions(" Is it wet?\n\nIs it dry? ") == ["Is it wet?", "Is it dry?"]
    for text, count in {" \n\n": 0, "Is it wet?\n" * 70: 70}.items():
        with pytest.raises(ValueError, match=f"Write 1 to 64 questions, one per line: these are {count}"):
            page_module.split_questions(text)


def test_questions_that_the_pages_offer_are_answered(processor):
    offered = [*processor.rules.examples.values(), *page_module.QUESTIONS.splitlines()]
    for question in offered:
        read = processor.rules.read(question, processor.prompt, 128, processor.taught_words)
        assert not (read.problem or read.unknown_words or read.untaught_words), question


def test_the_attention_of_a_word(page, photo):
    picture = page.encode(photo)
    items = page.pipe(picture.encoded, QUESTIONS)
    choice = dict(page.words(items))["car · Is there a car?"]
    maps = attention_of_question(page.pipe, picture.encoded, "Is there a car?")
    overlay, caption = page.overlay(choice, picture)
    assert overlay == heat_over(picture.shown, maps[int(choice.partition(":")[0])], map_strength(items[0], False))
    assert "where “car” attends" in caption and answer_text(items[0]) in caption
    assert page.overlay(None, picture) == page.overlay(choice, None) == (None, "")


def test_words_of_maps_are_content_words_and_a_question_is_about_the_first(page):
    yes = an_item("yes", 0.7, 0.7, "Is a red car on the left?")
    choices = page.words([yes, an_item("a car", 0.9, question="What is there?"), yes])
    words = [label.partition(" · ")[0] for label, _ in choices]
    assert words[:3] == ["car", "red", "left"]
    assert sorted(words[3:]) == ["is", "there", "what"]  # all words, where there is no content word
    assert page.words([an_item(None, None, problem="no word")]) == []


@pytest.mark.slow
def test_the_page_ends_in_order(photo, tmp_path):
    httpx = pytest.importorskip("httpx")
    port = free_port()
    environment = {"GRADIO_TEMP_DIR": str(tmp_path / "uploads"), "GRADIO_SERVER_PORT": str(port)}
    app = start_process(
        "../app.py",
        *("--model", save_folder(tiny_model(), tmp_path / "model")),
        env=environment | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert any("public link" in line for line in app.stdout)  # the last line
        with open(photo, "rb") as file:
            response = httpx.post(f"http://127.0.0.1:{port}/gradio_api/upload", files={"files": file}, timeout=60)
        upload = Path(response.raise_for_status().json()[0])
        assert upload.is_relative_to(tmp_path / "uploads") and upload.exists()
        app.terminate()
        assert app.wait(timeout=60) == 0 and not upload.exists()
    finally:
        app.kill()


@pytest.mark.slow
def test_the_page_in_a_browser(page, browser, photo, tmp_path, monkeypatch):
    """Writes pictures of the page, to look at, into runs/pictures."""
    blocks = page_module.build_page(page.pipe)
    site = page_module.launch(blocks, quiet=True, prevent_thread_lock=True)
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.set_default_timeout(90_000)  # milliseconds: a busy machine renders slowly
    tab.goto(site)
    file, questions = tab.locator("#image input[type=file]"), tab.locator("#questions textarea")
    notice, rows = tab.get_by_test_id("toast-body"), tab.locator("#answers tr")

    tab.locator("#ask").click()
    notice.get_by_text("Choose an image first").wait_for()
    (tmp_path / "frame.jpg").write_text("not an image")
    file.set_input_files(tmp_path / "frame.jpg")
    notice.get_by_text("frame.jpg cannot be read as an image").wait_for()
    Image.open(photo).convert("RGB").save(tmp_path / "photo.tif")  # which browsers do not show
    file.set_input_files(tmp_path / "photo.tif")
    tab.wait_for_function("document.querySelector('#image img')?.naturalWidth > 0")
    tab.reload()  # without the notices

    tab.locator(".gallery-item").first.click()
    tab.wait_for_function("document.querySelector('#description').innerText.trim()")
    questions.fill("Is there a car?\nIs there a flibbertigibbet bus?\nWhat is ahead?")
    questions.press("Shift+Enter")
    tab.locator("#answers td", has_text="ignored: flibbertigibbet").wait_for()
    tab.locator("#overlay img").wait_for()
    assert rows.count() == 4
    caption = tab.locator("#caption textarea").input_value()
    tab.locator("#word input").click()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Enter")
    tab.wait_for_function("old => document.querySelector('#caption textarea').value != old", arg=caption)
    for width in (1280, 390):
        tab.set_viewport_size({"width": width, "height": 900})
        tab.screenshot(path=ROOT / "runs" / "pictures" / f"page-{width}.png", full_page=True)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.locator(".gallery-item").nth(1).click()
    rows.first.wait_for(state="detached")  # answers about another image
    blocks.close()
