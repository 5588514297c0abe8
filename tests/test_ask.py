"""Overlays and scripts/ask.py: tables, JSON, thresholds, regions, and bad input."""

import json
import os
import runpy
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont
from transformers.utils import logging

from tiny import ROOT, save_folder, tiny_model
from traffic_vlm.data.synthetic import render
from traffic_vlm.images_traffic_vlm import Region
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline
from traffic_vlm.serving.options import ModelOptions
from traffic_vlm.serving.overlay import asked_word, draw_overlay, heat_over, map_strength, wrap


QUESTIONS = ["Is there a car?", "What is ahead?", "Please describe the scene.", "Is it raining?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_folder(tiny_model(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pipe(folder):
    return ModelOptions(str(folder), "cpu").load()


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "scene.png"
    render(6040)[0].save(path)
    return path


@pytest.mark.parametrize(
    "text, box",
    [
        ("0,0,1,1", (0, 0, 50, 40)),
        ("0.7,0,0.3,1", (35, 0, 50, 40)),  # 0.7 + 0.3 is a little less than 1 in binary
        ("0.5,0.25,0.001,0.5", (25, 10, 26, 30)),  # never empty
        ("0.9999999,0,0.0000001,1", (49, 0, 50, 40)),
    ],
)
def test_the_box_of_a_region_lies_in_the_image(text, box):
    assert Region.from_text(text).box(50, 40) == box


@pytest.mark.parametrize(
    "text", ["0,0,1.1,1", "0.5,0,0.6,1", "-0.1,0,0.5,1", "0,0,0,1", "0,0,nan,1", "0,0,1", "a,b,c,d"]
)
def test_a_region_outside_of_the_image_is_refused(text):
    with pytest.raises(ValueError, match=r"region .*fractions"):
        Region.from_text(text)


def test_the_asked_word_is_the_first_noun(pipe):
    assert asked_word(pipe, "Is there a bus left of the car?")[1] == "bus"
    assert asked_word(pipe, "What color is the traffic light?")[1] == "light"
    assert asked_word(pipe, "Is it raining?")[1] not in ("?", "[SOS]")


def test_heat_is_drawn_where_attention_is():
    plain = Image.new("RGB", (140, 140), (0, 0, 255))
    even = torch.full((14, 14), 1 / 196)
    assert heat_over(plain, even).tobytes() == plain.tobytes()
    point = torch.zeros(14, 14)
    point[2, 11] = 1.0
    warm = heat_over(plain, point)
    assert warm.getpixel((115, 25))[0] > 100 > warm.getpixel((25, 115))[0]


def test_maps_fade_where_nothing_is_there_to_be_seen():
    strengths = [
        map_strength({"question": question, "answer": text, "score": score, "p_yes": p_yes})
        for question, text, score, p_yes in [
            ("Is it?", "yes", 0.9, 0.9), ("Is it?", "yes", 0.5, 0.5), ("Is it?", "no", 0.75, 0.25),
            ("Is it?", "no", 1.0, 0.0), ("Is there no bus?", "yes", 0.9, 0.9),
            ("What?", "red", 1.0, None), ("What?", "none", 0.9, None), ("What?", "0", 1.0, None),
        ]
    ]  # fmt: skip
    assert strengths == pytest.approx([1, 1, 0.5, 0, 0.2, 1, 0.2, 0])
    plain = Image.new("RGB", (140, 140), (0, 0, 255))
    point = torch.zeros(14, 14)
    point[2, 11] = 1.0
    reds = [heat_over(plain, point, strength).getpixel((115, 25))[0] for strength in (0, 0.5, 1)]
    assert reds[0] == 0 < reds[1] < reds[2]


def test_captions_of_an_overlay_are_wrapped():
    font = ImageFont.load_default(14)
    text = "Is there a pedestrian on the left side of the image, behind the car and next to the bus? " + "w" * 100
    lines = wrap(text, font, 336)
    assert len(lines) > 2 and all(font.getlength(line) <= 336 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "") and lines[0].endswith("image,")
    assert wrap("Is there\na bus?", font, 336) == ["Is there a bus?"]


def test_an_overlay_has_an_image_for_each_question(pipe, picture):
    encoded = pipe.encode(picture)
    sheet = draw_overlay(pipe, Image.open(picture), encoded, pipe(encoded, QUESTIONS))
    assert 3 * 300 > sheet.width > 2 * 300 and sheet.height > 2 * 300  # four questions: two rows of two


@pytest.fixture
def loud():
    """The script silences the library; later tests may check its messages."""
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)
    logging.enable_progress_bar()


@pytest.fixture
def run_script(folder, monkeypatch, capsys, loud):
    """Runs the script in this process, as starting another takes seconds; returns status, output and errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ask.py", "--model", str(folder), *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "scripts/ask.py"), run_name="__main__")
        return end.value.code, *capsys.readouterr()

    return run


def test_the_script_prints_tables_and_json(pipe, picture, run_script):
    items = pipe(picture, QUESTIONS)
    status, output, errors = run_script(picture, *QUESTIONS, "--json")
    assert status == 0, errors
    line = json.loads(output)
    assert line["image"] == str(picture)
    for item, expected in zip(line["answers"], items, strict=True):
        assert item == {name: pytest.approx(value) for name, value in expected.items()}
    status, output, errors = run_script(picture, *QUESTIONS)
    assert status == 0 and output.splitlines()[0] == str(picture)
    for row, item in zip(output.splitlines()[1:], items, strict=True):
        assert row.split(item["question"])[1].strip().startswith(f"{item['answer']}, {item['score']:.2f}")


def test_none_is_none_seen_only_in_the_table(run_script, monkeypatch):
    items = [{"question": QUESTIONS[1], "answer": "none", "score": 0.9, "p_yes": None}]
    monkeypatch.setattr(TrafficVLMPipeline, "forward", lambda *args, **options: [items])
    image = ROOT / "docs/example.jpg"
    assert run_script(image, QUESTIONS[1])[1].endswith("What is ahead?  none seen, 0.90\n")
    assert json.loads(run_script(image, QUESTIONS[1], "--json")[1])["answers"] == items


def test_a_bad_question_does_not_prevent_the_answers_to_others(picture, tmp_path, run_script):
    bad = {
        "zebra qux?": "the model knows no word of the question",
        " ": "has no word",
        "car " * 200: "at most 128 are possible",
        "Is there a car? Is it snowing?": "contains 2 questions: ask them one by one",
    }
    asked = [*bad, "Is there a zebra?"]
    arguments = [word for question in asked for word in ("--ask", question)]
    status, output, errors = run_script(picture, *arguments, "--overlay", tmp_path / "out.png")
    rows = output.splitlines()[1:]
    assert status == 1 and len(rows) == len(asked), errors
    for row, message in zip(rows, bad.values()):
        assert message in row
    assert rows[-1].endswith("(unknown, so ignored: zebra)") and ("yes, " in rows[-1] or "no, " in rows[-1])
    assert 300 < Image.open(tmp_path / "out.png").width < 400  # of the one that was answered
    status, output, _ = run_script(picture, *arguments, "--json")
    items = json.loads(output)["answers"]
    assert status == 1 and ["problem" in item for item in items] == [True] * len(bad) + [False]
    assert items[-1]["unknown_words"] == ["zebra"]


def test_a_region_is_asked_about_alone(pipe, picture, run_script):
    whole = Image.open(picture)
    part = whole.crop((whole.width // 4, 0, whole.width // 4 * 3, whole.height // 2))
    status, output, errors = run_script(picture, QUESTIONS[0], "--region", "0.25,0,0.5,0.5", "--json")
    assert status == 0, errors
    assert json.loads(output)["answers"][0]["p_yes"] == pytest.approx(pipe(part, QUESTIONS[0])[0]["p_yes"])


def test_images_and_questions_can_be_in_any_order(picture, tmp_path, monkeypatch, run_script):
    """A path that exists or ends like an image is an image, wherever it stands; --ask is always a question."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jpg", "b.JPG", "frames/c.png", "night"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.open(picture).save(name, "PNG")
    car, bus = "Is there a car?", "Is there a bus?"
    for words, images, questions in [
        (["a.jpg", "b.JPG", car], ["a.jpg", "b.JPG"], [car]),
        (["a.jpg", car, "frames", "night", "*.JPG", bus], ["a.jpg", "frames/c.png", "night", "b.JPG"], [car, bus]),
        (["a.jpg", "b.JPG", "--ask", car, "--ask", "night"], ["a.jpg", "b.JPG"], [car, "night"]),
        (["--ask", bus, "a.jpg", car, "--device", "cpu", "b.JPG"], ["a.jpg", "b.JPG"], [car, bus]),
        ([car, "a.jpg", bus], ["a.jpg"], [car, bus]),
    ]:
        status, output, errors = run_script(*words, "--json")
        lines = [json.loads(line) for line in output.splitlines()]
        found = [(line["image"], [answer["question"] for answer in line["answers"]]) for line in lines]
        assert (status, found) == (0, [(image, questions) for image in images]), errors


def test_guessed_pixels_are_a_warning(tmp_path, run_script):
    Image.fromarray(np.full((48, 64), 4000, np.uint16)).save(tmp_path / "12_bit.png")
    with pytest.warns(UserWarning, match=r"read as 0\.\.4095") as caught:
        status, _, errors = run_script(tmp_path / "12_bit.png", "Is there a car?")
    assert status == 0 and len(caught) == 1, errors


def test_each_image_has_its_overlay(picture, tmp_path, run_script):
    (tmp_path / "more").mkdir()
    for path in (tmp_path / "scene.png", tmp_path / "more/scene.jpg"):
        Image.new("RGB", (64, 48), "green").save(path)
    arguments = (tmp_path / "scene.png", tmp_path / "more", QUESTIONS[0], "--overlay", tmp_path / "seen.png")
    status, _, errors = run_script(*arguments)
    assert status == 0, errors
    assert sorted(path.name for path in tmp_path.glob("seen*")) == ["seen_1_scene.png", "seen_2_scene.png"]
    assert all(Image.open(path).width > 300 for path in tmp_path.glob("seen*"))
    status, _, errors = run_script(arguments[0], tmp_path / "seen_1_scene.png", *arguments[2:])
    assert status == 2 and "seen_1_scene.png is an image that is asked about" in errors


def test_thresholds_decide_and_mark_answers(pipe, picture, tmp_path, run_script):
    [item] = pipe(picture, QUESTIONS[0])
    thresholds = tmp_path / "thresholds.json"
    thresholds.write_text(json.dumps({"default": {"threshold": item["p_yes"], "band": [0, 1]}}))
    status, output, _ = run_script(picture, QUESTIONS[0], "--thresholds", thresholds)
    assert status == 0 and f"  yes, {item['p_yes']:.2f}, not sure" in output
    [found] = json.loads(run_script(picture, QUESTIONS[0], "--thresholds", thresholds, "--json")[1])["answers"]
    assert (found["answer"], found["not_sure"], found["score"]) == ("yes", True, found["p_yes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jpg", "Is there a car?"], "missing.jpg: no such image"),
        (["scene.png", "missing.jpg", "Is there a car?"], "missing.jpg: no such image"),
        (["scene.png", "second.png"], "there is no question"),
        (["Is there a car?", "street"], "there is no image: neither a file nor a folder is called 'Is there a car?'"),
        (["text.jpg", "Is there a car?"], "text.jpg"),
        (["scene.png", "Is there a car?", "--model", "nowhere"], "nowhere: no such folder"),
        (["scene.png", "Is there a car?", "--model", "runs/nowhere"], "runs/nowhere: no such folder, and it cannot"),
        (["*.png", "Is there a car?", "--overlay", "out/all.png"], "there is no folder out"),
        (["scene.png", "Is there a car?", "--overlay", "nowhere/out.png"], "there is no folder nowhere"),
        (["scene.png", "Is there a car?", "--overlay", "full/out.png"], "Is a directory"),
        (["scene.png", "Is there a car?", "--overlay", "./scene.png"], "is an image that is asked about"),
        (["scene.png", "Is there a car?", "--overlay", "out.jpg"], "must be a PNG file, got 'out.jpg'"),
        (["scene.png", "Is there a car?", "--device", "abacus"], "abacus"),
        (["scene.png", "Is there a car?", "--device", "xpu"], "xpu"),
        (["scene.png", "Is there a car?", "--model", "torn"], "torn: the weights cannot be read"),
        (
            ["scene.png", "Is there a car?", "--thresholds", "nowhere.json"],
            "nowhere.json: cannot be read: No such file",
        ),
    ],
)
def test_bad_input_is_an_error(folder, picture, tmp_path, monkeypatch, run_script, arguments, message):
    shutil.copy(picture, tmp_path)
    shutil.copy(picture, tmp_path / "second.png")
    (tmp_path / "text.jpg").write_text("not an image")
    (tmp_path / "full/out.png").mkdir(parents=True)
    shutil.copytree(folder, tmp_path / "torn")
    os.truncate(tmp_path / "torn/model.safetensors", 1000)
    monkeypatch.chdir(tmp_path)
    status, _, errors = run_script(*arguments)
    assert status in (1, 2) and message in errors
    assert not (tmp_path / "out.png").exists() and not list(tmp_path.glob("**/.*"))
