"""The page that runs in the browser gives the answers of Python, also offline, and says what is wrong."""

import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from PIL import Image

from tiny import ROOT, close, each_attention, random_ids, random_pixels, tiny_model


onnxruntime = pytest.importorskip("onnxruntime", reason='needs the extra "export"')
for name in ("onnx", "onnxscript"):
    pytest.importorskip(name)

from traffic_vlm.export.asking import Asking, as_typed  # noqa: E402
from traffic_vlm.export.libraries import LIBRARIES, fetch_libraries  # noqa: E402
from traffic_vlm.export.onnx import VisionGraph, describe, load  # noqa: E402
from traffic_vlm.export.web import ASK_OUTPUTS, AskGraph, export_page, page_data, pixels_graph, write_model  # noqa: E402
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline  # noqa: E402
from traffic_vlm.question_traffic_vlm import answer_notes, answer_text, map_strength  # noqa: E402
from traffic_vlm.serving.overlay import asked_word, mapped_words  # noqa: E402


QUESTIONS = [
    "Is there a car?",
    "Is there no bus?",
    "> 2 cars?",
    "Is there a zebra, a Zebra or an okapi?",
    "Can't you see the car(s)?",
    "Are there twenty-one cyclists & lorries?",
    "Is there an ambulance? Answer yes or no.",
    "Is it [EOS] wet？",
    "What color is the traffic light?",
    "How many cars are there?",
    "What is the speed limit?",
    "On which side is the car?",
    "What is ahead?",
    # problems
    "Who is driving?",
    "Is there a bus? Is it red?",
    "Isn't there a bus?",
    "zebra qux?",
    "(...)",
    "car " * 130,
]


def python_tokenizer(processor):
    """What traffic_vlm.js does with the JavaScript library."""
    tokenizer = processor.tokenizer.backend_tokenizer

    def tokenize(text):
        found = tokenizer.encode(text, add_special_tokens=False)
        words = [text[start:end].lower() for start, end in found.offsets]
        return json.dumps([*zip(found.ids, found.tokens, words)])

    return tokenize


def ask_inputs(model, keys, values, seed=0):
    """The inputs of the graph `ask`: a prompt about an image, and an empty cache."""
    text = model.config.get_text_config()
    heads, *widths = text.cache_shape
    past = [torch.zeros(text.num_hidden_layers, 1, heads, 0, width) for width in widths]
    inputs = dict(zip(("past_keys", "past_values"), past)) | {"image_keys": keys, "image_values": values}
    return {"input_ids": random_ids(1, 6, seed=seed)} | inputs


@torch.no_grad()
@each_attention
def test_the_graph_answers_and_attends_as_the_model_does(attention):
    model, pixels = tiny_model(text=attention, yes_no_temperature=1.7), random_pixels(1)
    model.set_attn_implementation("eager")
    inputs = ask_inputs(model, *VisionGraph(model)(pixels))
    found = dict(zip(ASK_OUTPUTS, AskGraph(model)(**inputs)))
    ids, text = inputs["input_ids"], model.config.get_text_config()
    logits = model(ids, pixels).logits[:, -1]
    close(found["p_yes"], model.yes_probability(logits))
    words = torch.arange(text.vocab_size) != text.pad_token_id
    close(found["log_probs"][:, words], logits[:, words].log_softmax(-1), 1e-4)
    close(found["maps"], model.attention_maps(ids, pixels).flatten(2))


@torch.no_grad()
def test_weights_in_fewer_bits_change_little(processor, tmp_path):
    model, pixels = tiny_model(), random_pixels(1)
    model.set_attn_implementation("eager")
    write_model(model, processor, tmp_path)
    vision, ask = (onnxruntime.InferenceSession(tmp_path / f"{name}.onnx") for name in ("vision", "ask"))
    images = VisionGraph(model)(pixels)
    for found, expected in zip(vision.run(None, {"pixel_values": pixels.numpy()}), images, strict=True):
        assert 0 < np.abs(found - expected.numpy()).mean() < 0.02 * expected.abs().mean()
    for seed in range(3):
        inputs = ask_inputs(model, *images, seed=seed)
        found = ask.run(ASK_OUTPUTS, {name: tensor.numpy() for name, tensor in inputs.items()})
        p_yes, log_probs, *others = AskGraph(model)(**inputs)
        assert found[0] == pytest.approx(p_yes.numpy(), abs=0.02)
        assert np.abs(np.exp(found[1]) - log_probs.exp().numpy()).max() < 0.02
        for values, expected in zip(found[2:], others, strict=True):
            assert np.abs(values - expected.numpy()).mean() < 0.05 * expected.abs().mean()


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize("size", [(37, 29), (256, 256), (1280, 720)])
def test_images_are_resized_as_pillow_does(model, processor, resample, size):
    about = describe(model, processor) | {"resample": resample, "mean": [0.5, 0.4, 0.3], "std": [0.5, 0.6, 0.7]}
    session = onnxruntime.InferenceSession(pixels_graph(about).SerializeToString())
    image = Image.open(ROOT / "docs/crossing.jpg").convert("RGB").resize(size)
    [found] = session.run(None, {"image": np.asarray(image.convert("RGBA"))})
    resized = np.asarray(image.resize((256, 256), resample), np.float32) / 255
    expected = (resized - np.float32(about["mean"])) / np.float32(about["std"])
    np.testing.assert_allclose(found[0], expected.transpose(2, 0, 1), atol=1.01 / 255 / 0.5)


def test_other_filters_are_refused(model, processor):
    with pytest.raises(ValueError, match="resample=1: the browser can resize by the filters"):
        pixels_graph(describe(model, processor) | {"resample": 1})


@pytest.fixture(scope="module")
def asking(model, processor):
    page, vocabulary = page_data(model, processor), processor.tokenizer.get_vocab()
    return Asking(json.dumps(page), python_tokenizer(processor), json.dumps(vocabulary))


@pytest.mark.parametrize("text", QUESTIONS)
def test_questions_are_read_as_by_the_pipeline(asking, model, processor, text):
    pipe = TrafficVLMPipeline(model, processor=processor, device="cpu")
    question = asking.read(text)
    assert question == pipe.read_question(text)
    if not question.problem:
        words = [tuple(pair) for pair in json.loads(asking.words(question))]
        assert words[0] == asked_word(pipe, text) and sorted(words) == sorted(mapped_words(pipe, text))


def test_words_are_reported_as_typed():
    assert [*as_typed("a Zebra or OKAPIS", ["zebra", "okapis"])] == ["Zebra", "OKAPIS"]
    assert [*as_typed("a ﬁsh", ["fish"])] == ["fish"]  # the text has a ligature


def test_answers_follow_the_kind_of_the_question(asking, processor):
    question = asking.read("What color is the traffic light?")
    vocabulary = processor.tokenizer.get_vocab()
    first = set(json.loads(asking.next_ids(question, "[]")))
    assert first == {vocabulary[word] for word in ("red", "yellow", "green", "none")}
    then = json.loads(asking.next_ids(question, json.dumps([vocabulary["red"]])))
    assert then == [vocabulary["[EOS]"]]
    item = json.loads(asking.in_words(question, "red", 0.9))
    assert (item["answer"], item["text"], item["p_yes"], item["strength"]) == ("red", "red, 0.90", None, 1)
    item = json.loads(asking.yes_or_no(asking.read("Is there no bus?"), 0.9))
    assert (item["answer"], item["p_yes"]) == ("no", pytest.approx(0.1))


def fake_npm(folder, script):
    """A folder to search for programs, with this shell script as npm."""
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod(0o755)
    return str(folder)


def test_a_missing_npm_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"which npm fetches: install Node\.js"):
        fetch_libraries(tmp_path)
    monkeypatch.setenv("PATH", fake_npm(tmp_path, "echo no connection >&2; exit 1"))
    with pytest.raises(ValueError, match=r"npm cannot fetch onnxruntime-web [\d.]+: no connection"):
        fetch_libraries(tmp_path)


def test_libraries_are_pinned_and_have_one_folder_each():
    folders = {f"{package}-{version}" for package, version, _ in LIBRARIES.values()}
    assert len(folders) == len({package for package, _, _ in LIBRARIES.values()})


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


class Site:
    """The exported page on a plain file server, which can be stopped."""

    def __init__(self, folder):
        self.folder, self.server = folder, None
        self.start(0)

    def start(self, port):
        self.server = ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, directory=self.folder))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The page of the weights of this repository."""
    folder = tmp_path_factory.mktemp("web") / "page"
    try:
        export_page(ROOT, folder)
    except ValueError as error:
        pytest.skip(str(error))
    site = Site(folder)
    yield site
    site.stop()


ASK = """async ([photograph, questions]) => {
    const { TrafficVLM } = await import("./traffic_vlm.js");
    globalThis.model ??= await TrafficVLM.load();
    const file = await (await fetch(photograph)).blob();
    const image = await model.encode(await createImageBitmap(file));
    const items = [];
    for (const question of questions) items.push(await model.ask(image, question));
    return items.map((item) => ({ ...item, words: item.words?.map(({ word, map }) => [word, Array.from(map)]) }));
}"""


@pytest.fixture(scope="module")
def vqa(processor):
    """The pipeline in float32, which the page is compared with."""
    return TrafficVLMPipeline(model=load(ROOT), processor=processor, device="cpu")


@pytest.fixture(scope="module")
def library(site, browser):
    """A tab of the site without the page itself."""
    tab = browser.new_page()
    tab.set_default_timeout(180_000)  # milliseconds: a busy machine is slow
    tab.goto(f"{site.url}/page.json")
    yield tab
    tab.close()


def near(item, tolerance=0.02):
    """An item, to compare with others: probabilities may differ by this."""
    numbers = {key: item[key] for key in ("score", "p_yes") if item[key] is not None}
    return item | {key: pytest.approx(value, abs=tolerance) for key, value in numbers.items()}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["crossing", "night", "truck"])
def test_answers_are_those_of_python(library, vqa, monkeypatch, name):
    monkeypatch.setattr("traffic_vlm.question_traffic_vlm.MIN_SCORE", 0.05)  # as in the page
    encoded = vqa.encode(ROOT / f"docs/{name}.jpg")
    found = library.evaluate(ASK, [f"examples/{name}.jpg", QUESTIONS])
    for item, expected in zip(found, vqa(encoded, QUESTIONS), strict=True):
        words, text, notes = item.pop("words", None), item.pop("text"), item.pop("notes")
        strength = item.pop("strength")
        assert item == near(expected)
        assert text == answer_text(item) and notes == answer_notes(item)
        assert strength == pytest.approx(map_strength(item) if item["answer"] else 0)
        if words:
            column, word = asked_word(vqa, expected["question"])
            ids = torch.tensor([vqa.read_question(expected["question"]).input_ids])
            weights = vqa.model.attention_maps(ids, encoded_images=encoded)[0, column].flatten()
            assert words[0][0] == word
            assert np.abs(np.array(words[0][1]) - weights.numpy()).sum() < 0.1


@pytest.mark.slow
@torch.no_grad()
def test_turned_and_transparent_pictures_are_seen_as_python_sees_them(site, library, vqa):
    scene = Image.open(ROOT / "docs/truck.jpg")
    turned = Image.Exif()
    turned[0x0112] = 6  # to be shown upright, it is rotated by 90 degrees
    scene.save(site.folder / "turned.jpg", exif=turned, quality=95)
    scene.putalpha(Image.linear_gradient("L").resize(scene.size).point(lambda value: 255 * (value > 90)))
    scene.save(site.folder / "transparent.png")
    questions = QUESTIONS[:3]
    for name in ("turned.jpg", "transparent.png"):
        found = library.evaluate(ASK, [name, questions])
        for item, expected in zip(found, vqa(site.folder / name, questions), strict=True):
            assert {key: item[key] for key in expected} == near(expected), name


def choose(tab, *paths):
    tab.locator("#file").set_input_files([str(path) for path in paths])


def wait_for_answers(tab, count):
    """The items that the page shows, when there are so many."""
    tab.wait_for_function("count => document.querySelectorAll('li[data-item]').length == count", arg=count)
    return [json.loads(row.get_attribute("data-item")) for row in tab.locator("#answers li").all()]


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(site, browser, tmp_path, width):
    """Writes pictures of the page, to look at, into runs/pictures."""
    context = browser.new_context(viewport={"width": width, "height": 900}, permissions=["camera"])
    tab = context.new_page()
    errors = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.set_default_timeout(180_000)
    tab.goto(site.url)
    tab.get_by_text(" MB …").wait_for()  # says what it loads
    items = wait_for_answers(tab, 5)
    assert all(item["answer"] for item in items)
    assert "Works offline" in tab.locator("#status").inner_text()
    caption = tab.locator("#caption")
    caption.get_by_text("Orange: where “car” looks").wait_for()

    tab.locator("#question").fill("Is there a Flibbertigibbet near the bus?")
    tab.keyboard.press("Enter")
    [item, *others] = wait_for_answers(tab, len(items) + 1)
    assert item["unknown_words"] == ["Flibbertigibbet"] and others == items  # others are not asked again
    tab.get_by_text("unknown, so ignored: Flibbertigibbet").wait_for()
    tab.locator("mark", has_text="pedestrian").click()
    caption.get_by_text("where “pedestrian” looks").wait_for()
    tab.screenshot(path=ROOT / "runs" / "pictures" / f"web-{width}.png", full_page=True)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width

    tab.locator("#suggested button").first.click()
    assert wait_for_answers(tab, len(items) + 2)[0]["question"] == "Is there a vehicle?"
    for _ in range(5):  # fewer, to be quick
        tab.locator(".remove").nth(1).click()
    tab.locator("#question").fill("  ")
    tab.locator("#ask").click()
    tab.locator("#question-problem", has_text="Write a question first").wait_for()
    tab.locator("#question").fill("Who is driving?")
    tab.locator("#ask").click()
    assert "was not taught questions like this one" in wait_for_answers(tab, 3)[0]["problem"]

    problem = tab.locator("#picture-problem")
    (tmp_path / "frame.jpg").write_text("not an image")
    choose(tab, tmp_path / "frame.jpg")
    problem.get_by_text("frame.jpg cannot be read as a picture").wait_for()
    Image.new("L", (10_000, 6_000)).save(tmp_path / "large.png")
    choose(tab, tmp_path / "large.png")
    problem.get_by_text("large.png has 60 megapixels; at most 40 are read").wait_for()
    assert len(wait_for_answers(tab, 3)) == 3  # the picture before stays, with its answers

    camera = tab.locator("#camera")
    camera.click()
    camera.get_by_text("Take picture").wait_for()
    camera.click()
    camera.get_by_text("Camera").wait_for()
    wait_for_answers(tab, 3)
    assert problem.inner_text() == "" and errors == []
    context.close()


@pytest.mark.slow
def test_the_page_works_when_the_server_is_gone(site, browser):
    context = browser.new_context()
    tab = context.new_page()
    tab.set_default_timeout(180_000)
    tab.goto(site.url)
    expected = wait_for_answers(tab, 5)
    assert tab.evaluate("crossOriginIsolated")  # so that it has threads
    port = site.server.server_port
    site.stop()
    try:
        tab.reload()
        assert wait_for_answers(tab, 5) == expected
        tab.locator("#examples button").nth(1).click()
        tab.wait_for_function("old => document.querySelector('li').dataset.item != old", arg=json.dumps(expected[0]))
        assert wait_for_answers(tab, 5) != expected
    finally:
        site.start(port)
        context.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("delete globalThis.WebAssembly", "this browser has no WebAssembly"),
        ("globalThis.fetch = async () => new Response('', {status: 404})", "page.json is missing on the server (404)"),
    ],
)
def test_the_page_says_why_it_cannot_start(site, browser, missing, message):
    tab = browser.new_page()
    tab.add_init_script(missing)
    tab.goto(site.url)
    tab.locator("#status", has_text=message).wait_for(timeout=60_000)
    tab.close()
