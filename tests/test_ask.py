"""scripts/ask.py against the pipeline: tables, JSON, overlays, thresholds, regions and bad files; overlays by hand."""

import json
import shutil

import pytest
import torch
from PIL import Image

from tiny import locating_model, save_folder
from traffic_vlm.common.answers import map_strength
from traffic_vlm.data.synthetic import render
from traffic_vlm.serving.options import ModelOptions
from traffic_vlm.serving.overlay import heat_over


CAR, BUS = "Is there a car?", "Is there a bus?"
QUESTIONS = [CAR, "What color is the traffic light?", "How many cars are there?", "Is it raining?"]


@pytest.fixture(scope="module")
def pipe(saved_model):
    return ModelOptions(saved_model, "cpu", min_score=0).load()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder that the script starts in, with scene.png."""
    monkeypatch.chdir(tmp_path)
    render(6040)[0].save("scene.png")
    return tmp_path


@pytest.fixture
def ask(saved_model, folder, run_script, capsys):
    """Runs scripts/ask.py with a tiny model; returns what it printed to standard output and to standard error."""

    def run(*arguments: object, status: int = 0) -> tuple[str, str]:
        run_script("ask.py", "--model", saved_model, "--min_score", 0, *arguments, status=status)
        return capsys.readouterr()

    return run


# The parts


@pytest.mark.parametrize(
    ("is_negated", "answer", "score", "p_yes", "strength"),
    [
        (False, "yes", 0.5, 0.5, 1),
        (False, "no", 0.75, 0.25, 0.5),
        (True, "yes", 0.9, 0.9, 0.2),
        (False, "none", 0.9, None, 0.2),
        (False, "0", 1.0, None, 0),
    ],
)
def test_maps_fade_where_nothing_is_there_to_be_seen(is_negated, answer, score, p_yes, strength):
    item = {"answer": answer, "score": score, "p_yes": p_yes}
    assert map_strength(item, is_negated) == pytest.approx(strength)


def test_heat_is_drawn_where_the_map_is_high():
    plain, point = Image.new("RGB", (140, 140), (0, 0, 255)), torch.zeros(14, 14)
    point[2, 11] = 1.0
    reds = [heat_over(plain, point, strength).getpixel((115, 25))[0] for strength in (0, 0.5, 1)]
    assert reds[0] == 0 < reds[1] < reds[2] > heat_over(plain, point).getpixel((25, 115))[0]


# The script


def test_tables_and_json_have_the_answers_of_the_pipeline(pipe, ask):
    items = pipe("scene.png", QUESTIONS)
    line = json.loads(ask("scene.png", *QUESTIONS, "--json")[0])
    image, *rows = ask("scene.png", *QUESTIONS)[0].splitlines()
    assert line["image"] == image == "scene.png"
    for found, row, item in zip(line["answers"], rows, items, strict=True):
        assert found == {name: pytest.approx(value) for name, value in item.items()}
        assert row.split(item["question"])[1].strip().startswith(f"{item['answer']}, {item['score']:.2f}")


def test_a_bad_question_does_not_prevent_the_answers_to_others(ask):
    arguments = ("scene.png", "--ask", "zebra qux?", "--ask", "Is there a car near a zebra?")
    _, bad, good = ask(*arguments, "--overlay", "out.png", status=1)[0].splitlines()
    assert "the model knows no word of the question" in bad
    assert good.endswith("(unknown, so ignored: zebra)") and ("yes, " in good or "no, " in good)
    assert 300 < Image.open("out.png").width < 400  # of the one that was answered
    bad, good = json.loads(ask(*arguments, "--json", status=1)[0])["answers"]
    assert "problem" in bad and "problem" not in good and good["unknown_words"] == ["zebra"]


def test_images_and_questions_can_be_in_any_order(folder, ask):
    """A path that exists or ends like an image is an image, wherever it stands; --ask is always a question."""
    words = ["--ask", "night", "a.jpg", CAR, "frames", "night", "b.JPG", BUS]
    (folder / "frames").mkdir()
    for name in ("a.jpg", "b.JPG", "frames/c.png", "night"):
        shutil.copy("scene.png", name)
    lines = [json.loads(line) for line in ask(*words, "--json")[0].splitlines()]
    found = [(line["image"], [answer["question"] for answer in line["answers"]]) for line in lines]
    assert found == [(image, [CAR, BUS, "night"]) for image in ("a.jpg", "frames/c.png", "night", "b.JPG")]


def test_each_image_has_its_overlay(folder, ask):
    (folder / "more").mkdir()
    Image.new("RGB", (64, 48), "green").save("more/scene.jpg")
    ask("scene.png", "more", *QUESTIONS, "--overlay", "seen.png")
    assert sorted(path.name for path in folder.glob("seen*")) == ["seen_1_scene.png", "seen_2_scene.png"]
    for path in folder.glob("seen*"):
        width, height = Image.open(path).size
        assert 900 > width > 600 < height  # four questions: two rows of two


def test_a_region_and_thresholds_are_those_of_the_pipeline(pipe, folder, ask):
    whole = Image.open("scene.png")
    [item] = pipe(whole.crop((whole.width // 4, 0, whole.width // 4 * 3, whole.height)), CAR)
    band = {"threshold": item["p_yes"] - 1e-4, "band": [0, 1]}
    (folder / "thresholds.json").write_text(json.dumps({"default": band}))
    options = ("scene.png", CAR, "--region", "0.25,0,0.5,1", "--thresholds", "thresholds.json")
    assert f"  yes, {item['p_yes']:.2f}, not sure" in ask(*options)[0]
    [found] = json.loads(ask(*options, "--json", "--overlay", "part.png")[0])["answers"]
    assert (found["answer"], found["not_sure"]) == ("yes", True)
    assert found["score"] == found["p_yes"] == pytest.approx(item["p_yes"], abs=1e-5)
    ask("scene.png", CAR, "--overlay", "whole.png")
    assert Image.open("part.png").height > Image.open("whole.png").height  # half as wide as the square image


def test_objects_are_located_with_and_without_questions(folder, ask):
    options = ("--model", save_folder(locating_model(), folder / "locating"), "--region", "0.25,0,0.5,1")
    objects = ModelOptions(str(folder / "locating"), "cpu", region="0.25,0,0.5,1").load().locate("scene.png", "bus")
    assert objects
    line = json.loads(ask("scene.png", "--locate", "bus", "--json", *options)[0])
    assert line == {"image": "scene.png", "answers": [], "objects": objects}
    rows = ask("scene.png", CAR, "--locate", "bus", "--overlay", "both.png", *options)[0].splitlines()
    first = objects[0]
    assert CAR in rows[1] and len(rows) == 2 + len(objects)
    assert rows[2] == f"  bus  {first['score']:.2f}  box {','.join(f'{side:.0f}' for side in first['box'])}"
    ask("scene.png", "--locate", "all", "--overlay", "boxes.png", *options)
    assert [Image.open(name).width for name in ("both.png", "boxes.png")] == [2 * 346, 906]


def test_a_class_that_is_not_located_is_named_once_before_any_image(folder, ask):
    assert ask("scene.png", "scene.png", "--locate", "bus", status=2) == (
        "",
        "locate knows: nothing, as this model has no center head; got 'bus'\n",
    )


def test_captions_are_those_of_the_pipeline(pipe, ask):
    caption = pipe.describe("scene.png")["caption"]
    assert ask("scene.png", "--describe")[0].splitlines() == ["scene.png", caption]
    assert ask("--describe", "scene.png", CAR)[0].splitlines()[:2] == ["scene.png", caption]
    line = json.loads(ask("scene.png", "--describe", "--json")[0])
    assert line == {"image": "scene.png", "answers": [], "caption": caption}


def test_an_image_that_cannot_be_read_is_named(folder, ask):
    (folder / "text.jpg").write_text("not an image")
    assert "text.jpg" in ask("text.jpg", "--ask", CAR, status=1)[1]
