"""The page: what it answers, what it refuses and how it says so; and, where there is a browser, how it is used."""

import shutil
import struct
import zlib

import pytest
from PIL import Image

from tiny import ROOT, save_folder, tiny_model
from traffic_vlm.data.synthetic import render
from traffic_vlm.serving.answerer import Answer, Answerer


page_module = pytest.importorskip("traffic_vlm.serving.page", reason='needs the extra "demo" (gradio)')
QUESTIONS = "Is there a car?\nWhat color is the traffic light?\n\nIs there a <b>bus</b>?"


@pytest.fixture(scope="module")
def answerer(tmp_path_factory):
    """A tiny model that says yes or no to some questions and words to others."""
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
    """The beginning of a PNG file that promises so many pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")))
    return str(path)


def test_answers_and_the_image_is_looked_at_once(page, picture, monkeypatch):
    looks = []
    encode = page.answerer.model.encode_images
    monkeypatch.setattr(page.answerer.model, "encode_images", lambda pixels: looks.append(1) or encode(pixels))
    steps = list(page.answer(picture, QUESTIONS, None))
    status, table, seen = steps[-1]
    assert "looked at the image once" in status and "all 3 questions in one pass" in status
    assert table.count("<tr>") == 4 and "Is there a car?" in table
    assert "&lt;b&gt;bus&lt;/b&gt;" in table and "<b>" not in table
    again = list(page.answer(picture, "Is it raining?", seen))
    assert "not looked at again" in again[-1][0] and again[-1][2] is seen
    assert len(looks) == 1


def test_the_answers_are_those_of_the_answerer(page, picture):
    questions = page_module.split_questions(QUESTIONS)
    [expected] = page.answerer([picture], [questions])
    table = list(page.answer(picture, QUESTIONS, None))[-1][1]
    for answer in expected:
        assert f"<strong>{answer.answer}</strong>" in table
        if answer.yes_probability is not None:
            assert f"{answer.yes_probability:.2f}" in table


def test_answers_in_words_grow(page, picture, monkeypatch):
    monkeypatch.setattr(page.answerer, "decide", lambda encoded, rows: [[None for _ in row] for row in rows])
    steps = [table for _, table, _ in page.answer(picture, "What is ahead?", None)]
    assert "…" in steps[0] and "ms" not in steps[0].split("<tbody>")[1]
    assert len(steps) >= 3 and "ms" in steps[-1]


def test_the_table_shows_what_there_is():
    rows = [("a?", Answer("a?", "yes", 0.9, 0.9), 0.01), ("b?", "a red", 0.2), ("c?", None, None)]
    table = page_module.table(rows)
    assert "width:90%" in table and "10.0 ms" in table and "<strong>a red</strong>" in table
    last = '<td>c?</td><td><strong>…</strong></td><td></td><td class="number"></td>'
    assert table.endswith(f"<tr>{last}</tr></tbody></table>")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ["at least one question"]),
        (" \n\n", ["at least one question"]),
        ("Is it wet?\n" * 200, ["200 questions", "64"]),
        ("\U0001f600 \U0001f697", ["no word"]),
        ("is there a car " * 40, ["128"]),
    ],
)
def test_questions_that_cannot_be_answered(page, picture, text, named):
    [(status, table, _)] = page.answer(picture, text, None)
    assert 'role="alert"' in status and all(name in status for name in named)
    assert table == ""


def test_images_that_cannot_be_read(page, tmp_path):
    text = tmp_path / "frame.jpg"
    text.write_text("not an image")
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "green")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    wrong = {
        str(text): ["frame.jpg", "no image"],
        str(tmp_path / "moving.gif"): ["moving.gif", "is animated"],
        huge_png(tmp_path / "large.png", 8000, 8000): ["8000 × 8000", "40,000,000"],
        huge_png(tmp_path / "huge.png", 20000, 20000): ["huge.png", "40,000,000"],
        None: ["Choose an image"],
    }
    for path, named in wrong.items():
        [(status, table, seen)] = page.answer(path, "Is there a car?", None)
        assert 'role="alert"' in status and all(name in status for name in named), status
        assert table == "" and seen is None


def test_unknown_words_are_named(page):
    assert page.name_unknown_words("Is there a car?") == ""
    assert "flibbertigibbet" in page.name_unknown_words("Is there a car?\nIs there a flibbertigibbet?")


def test_attention_of_a_chosen_word(page, picture):
    seen, _ = page.look(picture, None)
    words = page.words(QUESTIONS)
    assert ("car  (Is there a car?)", page.first_word(QUESTIONS)) in words
    over = page.overlay(page.first_word(QUESTIONS), seen)
    assert over.size == seen.picture.size
    out_of_range, too_long = ("40:Is there a car?", "-1:Is there a car?"), "1:" + "a " * 200
    for wrong in (None, "", "2", "2:", "x:Is there a car?", *out_of_range, too_long):
        assert page.overlay(wrong, seen) is None, wrong
    assert page.overlay(page.first_word(QUESTIONS), None) is None


def test_a_chosen_word_is_that_of_its_question_whatever_the_text_has_become(page, picture):
    seen, _ = page.look(picture, None)
    shown = "car  (Is there a car?)"
    chosen = dict(page.words(QUESTIONS))[shown]
    # The same value wherever the question stands, and none of the new questions has it.
    assert dict(page.words(f"Is it raining?\n{QUESTIONS}"))[shown] == chosen
    assert chosen not in dict(page.words("Is it raining?\nIs there a bus?")).values()
    column, question = chosen.split(":")
    answerer = page.answerer
    maps = page_module.attention_of_question(answerer.model, answerer.processor, seen.encoded, "Is there a car?")
    assert question == "Is there a car?"
    assert page.overlay(chosen, seen) == page_module.heat_over(seen.picture, maps[int(column)])


def test_a_question_asked_twice_has_its_words_once(page):
    values = [value for _, value in page.words("Is there a car?\nIs there a car?")]
    assert len(values) == len(set(values)) == len(page.words("Is there a car?"))


def test_another_image_stops_the_answers_before_it_clears_them(answerer):
    """Of a generator that goes on, the next answers would stand beside the new image."""
    blocks = page_module.build_page(answerer, [ROOT / "docs/example.jpg"])
    events = blocks.config["dependencies"]
    named = {part["props"].get("elem_id"): part["id"] for part in blocks.config["components"]}
    [asking] = [event["id"] for event in events if (named["ask"], "click") in map(tuple, event["targets"])]
    changes = [event for event in events if (named["image"], "change") in map(tuple, event["targets"])]
    stops = [number for number, event in enumerate(changes) if event["cancels"] == [asking]]
    clears = [number for number, event in enumerate(changes) if named["answers"] in event["outputs"]]
    assert len(stops) == len(clears) == 1 and stops < clears  # the browser handles them in this order


def chromium():
    """A browser driven by Playwright, or a reason why there is none."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ModuleNotFoundError:
        pytest.skip("needs playwright")
    manager = sync_playwright().start()
    try:
        found = shutil.which("chromium") or shutil.which("google-chrome")
        return manager, manager.chromium.launch(executable_path=found, args=["--no-sandbox"])
    except Error as error:
        manager.stop()
        pytest.skip(f"needs Chromium: {str(error).splitlines()[0]}")


@pytest.fixture(scope="module")
def site(answerer):
    examples = sorted((ROOT / "docs").glob("example*.jpg"))
    blocks = page_module.build_page(answerer, examples)
    _, url, _ = page_module.launch(blocks, examples, prevent_thread_lock=True, quiet=True)
    yield url
    blocks.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser(site, picture, tmp_path, width, request):
    manager, browser = chromium()
    request.addfinalizer(manager.stop)
    request.addfinalizer(browser.close)
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
    tab.locator("#status").get_by_text("not looked at again").wait_for()
    text = tmp_path / "frame.jpg"
    text.write_text("not an image")
    tab.reload()
    tab.locator("#image input[type=file]").set_input_files(text)
    tab.locator("#ask").click()
    tab.locator("#status").get_by_text("frame.jpg is no image").wait_for()
