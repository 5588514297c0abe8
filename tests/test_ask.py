"""The Answerer, overlays and scripts/ask.py: agreement with the model, tables, JSON, and bad input."""

import json
import os
import runpy
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont
from transformers.utils import logging

from tiny import ROOT, save_folder, tiny_model, yes_no_model
from traffic_vlm.answering import first_words
from traffic_vlm.data.synthetic import render
from traffic_vlm.question_form_traffic_vlm import is_yes_no_question
from traffic_vlm.serving import answerer as answerer_module
from traffic_vlm.serving.answerer import Answer, Answerer
from traffic_vlm.serving.overlay import asked_word, draw_overlay, heat_over, map_strength, wrap
from traffic_vlm.serving.pictures import Region
from traffic_vlm.taught_traffic_vlm import TaughtWords


QUESTIONS = ["Is there a car?", "What color is the traffic light?", "Please describe the scene.", "Is it raining?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that answers some questions with yes or no and others with words."""
    return save_folder(tiny_model(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def answerer(folder):
    return Answerer(folder, device="cpu")


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "scene.png"
    render(6040)[0].save(path)
    return path


def test_a_region_is_asked_about_alone(folder, answerer, picture):
    cut = Answerer(folder, device="cpu", region=Region.from_text("0.25,0,0.5,0.5"))
    whole = Image.open(picture)
    width, height = whole.size
    part = whole.crop((width // 4, 0, width // 4 * 3, height // 2))
    assert np.array_equal(np.asarray(cut.open(picture)), np.asarray(part.convert("RGB")))
    assert cut([picture], [QUESTIONS]) == answerer([part], [QUESTIONS]) != answerer([picture], [QUESTIONS])


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


def test_yes_and_no_are_those_of_score_yes_no(answerer, picture, monkeypatch):
    original = answerer.model.compute_logits
    bias = 1e4 * torch.nn.functional.one_hot(torch.tensor(4), 500)  # the first token of every answer is [YES]
    monkeypatch.setattr(answerer.model, "compute_logits", lambda states: original(states) + bias)
    yes_no = [QUESTIONS[0], QUESTIONS[3]]
    answers = answerer([picture, Image.new("RGB", (50, 40))], [yes_no, yes_no[:1]])
    assert [len(row) for row in answers] == [2, 1]
    assert {answer.answer for row in answers for answer in row} == {"yes"}
    assert all(answer.probability == answer.yes_probability for row in answers for answer in row)
    inputs = answerer.processor(
        images=[picture, Image.new("RGB", (50, 40))], text=[yes_no, yes_no[:1]], packed=True, return_tensors="pt"
    )
    for row, scores in zip(answers, answerer.model.score_yes_no(**inputs)):
        assert [answer.yes_probability for answer in row] == pytest.approx(scores.tolist(), abs=1e-5)
    [[answer]] = answerer([picture], [["How busy is it?"]])  # "yes" is no answer, though the model prefers it
    assert answer.yes_probability is None
    assert answer.answer.split()[0] not in ("yes", "no")
    assert answer.probability < 1e-6


def test_the_words_of_a_question_can_decide_alone(answerer, picture, monkeypatch):
    """As for a video, where a question must not have P(yes) for some frames and words for others."""
    original = answerer.model.compute_logits
    bias = 1e4 * torch.nn.functional.one_hot(torch.tensor(40), 500)  # no answer begins with yes or no
    monkeypatch.setattr(answerer.model, "compute_logits", lambda states: original(states) + bias)
    encoded, passes = answerer.encode(answerer.read([picture] * 2)), []
    handle = answerer.model.model.text_model.register_forward_hook(lambda *_: passes.append(1))
    rows = answerer.ask(encoded, [QUESTIONS[::3]] * 2, always_yes_no=True)
    handle.remove()
    assert len(passes) == 1 and all(answer.answer in ("yes", "no") for row in rows for answer in row)
    for asked, options in ((QUESTIONS[0], {}), (QUESTIONS[1], {"always_yes_no": True})):
        [[answer], _] = answerer.ask(encoded, [[asked]] * 2, **options)
        assert answer.yes_probability is None


def test_words_are_those_of_generate(answerer, picture):
    [answers] = answerer([picture], [QUESTIONS])
    for question, answer in zip(QUESTIONS, answers):
        inputs = answerer.processor(images=picture, text=question, return_tensors="pt")
        options = {} if is_yes_no_question(question) else {"begin_suppress_tokens": [4, 5]}  # [YES], [NO]
        output = answerer.model.generate(**inputs, max_new_tokens=32, do_sample=False, **options)
        length = inputs["input_ids"].shape[1]
        log_p = answerer.model(output, inputs["pixel_values"]).logits[:, length - 1 : -1].log_softmax(-1)
        output = output[:, length:]
        [text] = answerer.processor.batch_decode(output, skip_special_tokens=True)
        if answer.yes_probability is None:
            assert answer.answer == text
            mean = log_p.gather(-1, output[..., None]).mean().exp()  # of a word and the end
            assert answer.probability == pytest.approx(float(mean), abs=1e-5)
        else:
            [probability] = answerer.model.score_yes_no(**inputs)
            assert answer.yes_probability == pytest.approx(float(probability), abs=1e-4)
            assert answer.answer == ("yes" if probability >= 0.5 else "no") == text.split()[0]
    assert any(answer.yes_probability is None for answer in answers)


def test_nothing_there_is_shown_in_words_and_untaught_words_are_named(answerer, picture, monkeypatch):
    monkeypatch.setattr(answerer_module, "generate_answers", lambda *args: [("none", 0.9)])
    monkeypatch.setattr(answerer.processor, "taught_words", TaughtWords({}))
    answerer.check_question.cache_clear()
    [answer] = answerer._generate(None, [(0, "What color is the bus?")])
    answerer.check_question.cache_clear()
    assert (answer.answer, answer.shown, answer.to_dict()["answer"]) == ("none", "none seen", "none seen")
    assert answer.to_text() == "none seen, 0.90"
    assert answer.untaught_words == ("color", "bus") == tuple(answer.to_dict()["untaught_words"])


def test_first_words_are_computed_once_for_all_images(answerer, monkeypatch):
    """And each image keeps its own: as many as it has questions."""
    pixels = answerer.read([Image.new("RGB", (50, 40), color) for color in ("red", "green", "blue")])
    encoded, rows, calls = answerer.encode(pixels), [QUESTIONS[:1], QUESTIONS, QUESTIONS[2:]], []
    alone = [first_words(answerer.model, answerer.processor, encoded[i], [row])[0] for i, row in enumerate(rows)]
    compute = answerer.model.yes_probability
    monkeypatch.setattr(answerer.model, "yes_probability", lambda logits: calls.append(len(logits)) or compute(logits))
    together = first_words(answerer.model, answerer.processor, encoded, rows)
    assert calls == [7] and [len(row) for row in together] == [1, 4, 2]
    for row, expected in zip(together, alone):
        assert [one.is_yes_no for one in row] == [one.is_yes_no for one in expected]
        assert [one.logit_margin for one in row] == pytest.approx([one.logit_margin for one in expected], abs=1e-4)


def test_one_encoding_serves_all_questions(answerer, picture):
    batches = []
    tower = answerer.model.model.vision_tower
    handle = tower.register_forward_hook(lambda module, args, output: batches.append(len(args[0])))
    encoded = answerer.encode(answerer.read([picture]))
    for question in QUESTIONS:
        answerer.ask(encoded, [[question]])
    handle.remove()
    assert batches == [1]


def test_unknown_words_are_named_and_a_question_without_known_words_is_refused(answerer, picture):
    [[answer]] = answerer([picture], [["Is there a zebra?"]])
    assert answer.unknown_words == ("zebra",)
    with pytest.raises(ValueError, match="no word of the question 'zebra qux\\?'"):
        answerer([picture], [["zebra qux?"]])


def test_the_asked_word_is_the_first_noun(processor):
    assert asked_word(processor, "Is there a bus left of the car?")[1] == "bus"
    assert asked_word(processor, "What color is the traffic light?")[1] == "light"
    assert asked_word(processor, "Is it raining?")[1] not in ("?", "[SOS]")


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
        map_strength(Answer("?", text, probability, p_yes))
        for text, probability, p_yes in [
            ("yes", 0.9, 0.9), ("yes", 0.5, 0.5), ("no", 0.75, 0.25), ("no", 1.0, 0.0),
            ("red", 1.0, None), ("none", 0.9, None), ("0", 1.0, None), ("none", 0.4, None),
        ]
    ]  # fmt: skip
    assert strengths == pytest.approx([1, 1, 0.5, 0, 1, 0.2, 0, 1])
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


def test_an_overlay_has_an_image_for_each_question(answerer, picture):
    encoded = answerer.encode(answerer.read([picture]))
    [answers] = answerer.ask(encoded, [QUESTIONS])
    sheet = draw_overlay(answerer.model, answerer.processor, picture, encoded, answers)
    assert 3 * 300 > sheet.width > 2 * 300 and sheet.height > 2 * 300  # four questions: two rows of two


def ask(folder, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts/ask.py"), "--model", str(folder), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def loud():
    """The script silences the library; later tests may check its messages."""
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)
    logging.enable_progress_bar()


@pytest.mark.slow
def test_the_script_prints_tables_and_json_and_draws(folder, picture, tmp_path):
    other = picture.with_name("other.jpg")
    Image.new("RGB", (64, 48), "green").save(other)
    table = ask(folder, picture, *QUESTIONS, "--overlay", tmp_path / "out.png")
    assert table.returncode == 0, table.stderr
    assert all(question in table.stdout for question in QUESTIONS)
    assert Image.open(tmp_path / "out.png").width > 300
    both = ask(folder, picture.parent / "*.[jp][pn]g", QUESTIONS[0], "--json")
    assert both.returncode == 0, both.stderr
    lines = [json.loads(line) for line in both.stdout.splitlines()]
    assert [line["image"] for line in lines] == [str(other), str(picture)]
    assert lines[0]["answers"][0]["question"] == QUESTIONS[0]
    other.unlink()


@pytest.fixture
def run_script(folder, monkeypatch, capsys, loud):
    """Runs the script in this process, as starting another takes seconds; returns status, output and errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ask.py", "--model", str(folder), *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "scripts/ask.py"), run_name="__main__")
        return end.value.code, *capsys.readouterr()

    return run


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


def test_thresholds_decide_and_mark_answers(picture, tmp_path, monkeypatch, capsys, loud):
    folder = save_folder(yes_no_model(), tmp_path / "model")
    [[answer]] = Answerer(folder, device="cpu")([picture], [QUESTIONS[:1]])
    point = {"threshold": answer.yes_probability, "band": [0, 1]}
    (tmp_path / "thresholds.json").write_text(json.dumps({"default": point}))
    command = ["ask.py", str(picture), answer.question, "--model", str(folder), "--thresholds"]
    for options in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", [*command, str(tmp_path / "thresholds.json"), *options])
        with pytest.raises(SystemExit):
            runpy.run_path(str(ROOT / "scripts/ask.py"), run_name="__main__")
    table, line = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert f"  yes, {answer.yes_probability:.2f}, not sure" in table
    [found] = json.loads(line)["answers"]
    assert (found["answer"], found["not_sure"]) == ("yes", True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jpg", "Is there a car?"], "missing.jpg: no such image"),
        (["scene.png", "missing.jpg", "Is there a car?"], "missing.jpg: no such image"),
        (["scene.png", "second.png"], "there is no question"),
        (["Is there a car?", "street"], "there is no image: neither a file nor a folder is called 'Is there a car?'"),
        (["text.jpg", "Is there a car?"], "text.jpg"),
        (["scene.png", "zebra qux?"], "no word of the question"),
        (["scene.png", " "], "has no word"),
        (["scene.png", "car " * 200], "at most 128"),
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
def test_bad_input_is_an_error(folder, picture, tmp_path, monkeypatch, capsys, loud, arguments, message):
    shutil.copy(picture, tmp_path)
    shutil.copy(picture, tmp_path / "second.png")
    (tmp_path / "text.jpg").write_text("not an image")
    (tmp_path / "full/out.png").mkdir(parents=True)
    shutil.copytree(folder, tmp_path / "torn")
    os.truncate(tmp_path / "torn/model.safetensors", 1000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ask.py", "--model", str(folder), *arguments])
    with pytest.raises(SystemExit) as end:  # in this process: starting another takes seconds
        runpy.run_path(str(ROOT / "scripts/ask.py"), run_name="__main__")
    assert end.value.code in (1, 2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.png").exists() and not list(tmp_path.glob("**/.*"))


def test_long_questions_do_not_cut_the_answers_to_others(answerer, picture):
    long = "Is there a car" + " or a car" * 40 + "?"
    [[alone]] = answerer([picture], [["What is ahead?"]])
    for questions in (["What is ahead?", long], [long, "What is ahead?", long]):
        [answers] = answerer([picture], [questions])
        assert [answer.question for answer in answers] == questions
        assert all(answer.yes_probability is None for answer in answers)  # all are in words
        assert answers[questions.index("What is ahead?")].answer == alone.answer


def test_a_question_must_leave_room_for_its_answer(answerer, picture):
    limit = answerer.model.config.get_text_config().max_position_embeddings
    longest = "car " * (limit - 3)  # two special tokens, and one for the answer
    assert answerer([picture], [[longest]])
    with pytest.raises(ValueError, match=f"{limit} tokens leaves no room for an answer: both have at most {limit}"):
        answerer([picture], [[longest + "car"]])
