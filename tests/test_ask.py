"""Overlays and scripts/ask.py: tables, JSON, thresholds, regions, and bad input."""

import json
import os
import shutil

import pytest
import torch
from PIL import Image

from tiny import save_folder, tiny_model
from traffic_vlm.data.synthetic import render
from traffic_vlm.images_traffic_vlm import Region
from traffic_vlm.question_traffic_vlm import map_strength
from traffic_vlm.serving.options import ModelOptions
from traffic_vlm.serving.overlay import asked_word, draw_overlay, heat_over


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


def test_a_region_lies_in_the_image():
    boxes = {"0,0,1,1": (0, 0, 50, 40), "0.5,0.25,0.001,0.5": (25, 10, 26, 30)}  # never empty
    boxes["0.7,0,0.3,1"] = (35, 0, 50, 40)  # 0.7 + 0.3 is a little less than 1 in binary
    assert {text: Region.from_text(text).box(50, 40) for text in boxes} == boxes
    for text in ("0,0,1.1,1", "0.5,0,0.6,1", "-0.1,0,0.5,1", "0,0,0,1", "0,0,nan,1", "0,0,1", "a,b,c,d"):
        with pytest.raises(ValueError, match=r"region .*fractions"):
            Region.from_text(text)


def test_the_asked_word_is_the_first_noun(pipe):
    assert asked_word(pipe, "Is there a bus left of the car?")[1] == "bus"
    assert asked_word(pipe, "What color is the traffic light?")[1] == "light"
    assert asked_word(pipe, "Is it raining?")[1] not in ("?", "[SOS]")


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
    plain, point = Image.new("RGB", (140, 140), (0, 0, 255)), torch.zeros(14, 14)
    point[2, 11] = 1.0
    reds = [heat_over(plain, point, strength).getpixel((115, 25))[0] for strength in (0, 0.5, 1)]
    assert reds[0] == 0 < reds[1] < reds[2] > heat_over(plain, point).getpixel((25, 115))[0]


def test_an_overlay_has_an_image_for_each_question(pipe, picture):
    encoded = pipe.encode(picture)
    sheet = draw_overlay(pipe, Image.open(picture), encoded, pipe(encoded, QUESTIONS))
    assert 3 * 300 > sheet.width > 2 * 300 and sheet.height > 2 * 300  # four questions: two rows of two


@pytest.fixture
def ask(folder, run_script, capsys):
    """Runs scripts/ask.py with a tiny model; returns what it printed to standard output and to standard error."""

    def run(*arguments: object, status: int = 0) -> tuple[str, str]:
        run_script("ask.py", "--model", folder, *arguments, status=status)
        return capsys.readouterr()

    return run


def test_the_script_prints_tables_and_json(pipe, picture, ask):
    items = pipe(picture, QUESTIONS)
    line = json.loads(ask(picture, *QUESTIONS, "--json")[0])
    assert line["image"] == str(picture)
    for item, expected in zip(line["answers"], items, strict=True):
        assert item == {name: pytest.approx(value) for name, value in expected.items()}
    image, *rows = ask(picture, *QUESTIONS)[0].splitlines()
    assert image == str(picture)
    for row, item in zip(rows, items, strict=True):
        assert row.split(item["question"])[1].strip().startswith(f"{item['answer']}, {item['score']:.2f}")


def test_a_bad_question_does_not_prevent_the_answers_to_others(picture, tmp_path, ask):
    arguments = ("--ask", "zebra qux?", "--ask", "Is there a zebra?")
    _, bad, good = ask(picture, *arguments, "--overlay", tmp_path / "out.png", status=1)[0].splitlines()
    assert "the model knows no word of the question" in bad
    assert good.endswith("(unknown, so ignored: zebra)") and ("yes, " in good or "no, " in good)
    assert 300 < Image.open(tmp_path / "out.png").width < 400  # of the one that was answered
    bad, good = json.loads(ask(picture, *arguments, "--json", status=1)[0])["answers"]
    assert "problem" in bad and "problem" not in good and good["unknown_words"] == ["zebra"]


def test_images_and_questions_can_be_in_any_order(picture, tmp_path, monkeypatch, ask):
    """A path that exists or ends like an image is an image, wherever it stands; --ask is always a question."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jpg", "b.JPG", "frames/c.png", "night"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.open(picture).save(name, "PNG")
    car, bus = "Is there a car?", "Is there a bus?"
    for words, images, questions in [
        (["a.jpg", car, "frames", "night", "*.JPG", bus], ["a.jpg", "frames/c.png", "night", "b.JPG"], [car, bus]),
        (["a.jpg", "b.JPG", "--ask", car, "--ask", "night"], ["a.jpg", "b.JPG"], [car, "night"]),
        (["--ask", bus, "a.jpg", car, "--device", "cpu", "b.JPG"], ["a.jpg", "b.JPG"], [car, bus]),
    ]:
        lines = [json.loads(line) for line in ask(*words, "--json")[0].splitlines()]
        found = [(line["image"], [answer["question"] for answer in line["answers"]]) for line in lines]
        assert found == [(image, questions) for image in images]


def test_each_image_has_its_overlay(picture, tmp_path, ask):
    (tmp_path / "more").mkdir()
    for path in (tmp_path / "scene.png", tmp_path / "more/scene.jpg"):
        Image.new("RGB", (64, 48), "green").save(path)
    arguments = (tmp_path / "scene.png", tmp_path / "more", QUESTIONS[0], "--overlay", tmp_path / "seen.png")
    ask(*arguments)
    assert sorted(path.name for path in tmp_path.glob("seen*")) == ["seen_1_scene.png", "seen_2_scene.png"]
    assert all(Image.open(path).width > 300 for path in tmp_path.glob("seen*"))
    _, errors = ask(arguments[0], tmp_path / "seen_1_scene.png", *arguments[2:], status=2)
    assert "seen_1_scene.png is an image that is asked about" in errors


def test_a_region_and_thresholds_are_those_of_the_pipeline(pipe, picture, tmp_path, ask):
    whole = Image.open(picture)
    part = whole.crop((whole.width // 4, 0, whole.width // 4 * 3, whole.height // 2))
    [item], path = pipe(part, QUESTIONS[0]), tmp_path / "thresholds.json"
    path.write_text(json.dumps({"default": {"threshold": item["p_yes"] - 1e-4, "band": [0, 1]}}))
    options = (picture, QUESTIONS[0], "--region", "0.25,0,0.5,0.5", "--thresholds", path)
    assert f"  yes, {item['p_yes']:.2f}, not sure" in ask(*options)[0]
    [found] = json.loads(ask(*options, "--json")[0])["answers"]
    assert (found["answer"], found["not_sure"]) == ("yes", True)
    assert found["score"] == found["p_yes"] == pytest.approx(item["p_yes"], abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["text.jpg"], 1, "text.jpg"),
        (["scene.png", "--overlay", "full/out.png"], 1, "Is a directory"),
        (["scene.png", "--model", "torn"], 2, "torn: the weights cannot be read"),
    ],
)
def test_bad_files_are_an_error(folder, picture, tmp_path, monkeypatch, ask, arguments, status, message):
    shutil.copy(picture, tmp_path)
    (tmp_path / "text.jpg").write_text("not an image")
    (tmp_path / "full/out.png").mkdir(parents=True)
    shutil.copytree(folder, tmp_path / "torn")
    os.truncate(tmp_path / "torn/model.safetensors", 1000)
    monkeypatch.chdir(tmp_path)
    assert message in ask(*arguments, "--ask", "Is there a car?", status=status)[1]
    assert not (tmp_path / "out.png").exists() and not list(tmp_path.glob("**/.*"))
