"""The pipeline that answers: every form of input, one rule for answers, problems that stay with their question."""

import copy
import io
import math
import re

import datasets
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import Dataset

from tiny import ROOT, any_size_model, close, close_to, count_calls, tiny_model, tiny_processor, yes_no_model
from traffic_vlm.common.answers import answer_notes, answer_text
from traffic_vlm.common.loading import set_image_size
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline
from traffic_vlm.scoring_traffic_vlm import attention_maps


CAR, WET = "Is there a car?", "Is the road wet?"
COLOR, AHEAD = "What color is the traffic light?", "What is ahead?"
QUESTIONS = [CAR, COLOR, WET]
FIELDS = {"question", "answer", "score", "p_yes"}


@pytest.fixture(scope="module")
def vqa(processor):
    return TrafficVLMPipeline(model=tiny_model(), processor=processor, device="cpu", min_score=0)


@pytest.fixture(scope="module")
def pictures():
    pixels = np.random.default_rng(0).integers(0, 255, (3, 40, 60, 3), dtype=np.uint8)
    return [Image.fromarray(one) for one in pixels]


@pytest.fixture
def bias(vqa, monkeypatch):
    """A function that makes every answer begin with a token."""

    def add(token_id):
        original = type(vqa.model).compute_logits
        change = 1e4 * torch.nn.functional.one_hot(torch.tensor(token_id), 500)
        monkeypatch.setattr(vqa.model, "compute_logits", lambda states: original(vqa.model, states) + change)

    return add


def test_words_agree_with_yes_and_no(vqa, pictures):
    weather = {f"Is it {value}?": value for value in ("clear", "cloudy", "rainy", "snowy", "foggy")}
    seen = set()
    for threshold in (0.0, 0.495, 0.5, 0.505, 1.0):
        for items in vqa(pictures, ["What is the weather?", *weather], thresholds=threshold):
            affirmed = {weather[item["question"]] for item in items[1:] if item["answer"] == "yes"}
            assert items[0]["answer"] in (affirmed or weather.values())
            seen.add(len(affirmed))
    assert {0, 5} < seen


def test_a_copy_asks_its_own_model(vqa, pictures):
    copied = copy.deepcopy(vqa)
    assert copied.fast.model is copied.model is not vqa.model
    assert copied(pictures[0], QUESTIONS) == vqa(pictures[0], QUESTIONS)


# --- answers ---


def test_counts_agree_with_presence(vqa, pictures):
    """A count is 0 if "Is there a car?" is no; not a count of some cars, which may be 0 where there are others."""
    names = {"cars": "a car", "traffic lights": "a traffic light", "people": "a person", "animals": "an animal"}
    questions = [text for many, one in names.items() for text in (f"How many {many} are there?", f"Is there {one}?")]
    answers = set()
    for threshold in (0.0, 0.49, 0.5, 0.51, 1.0):
        for items in vqa(pictures, questions, thresholds=threshold):
            for count, presence in zip(items[::2], items[1::2]):
                assert (count["answer"] == "0") == (presence["answer"] == "no") and count["p_yes"] is None
                answers.add(count["answer"])
    assert "0" in answers and len(answers) > 1
    assert [one.text for _, one in vqa.read_question("Count the cars.").checks] == ["Is there a car"]
    assert vqa.read_question("Number of buses on the left?").checks == ()


def test_yes_and_no_are_those_of_score_yes_no(vqa, processor, pictures):
    questions = [[CAR, WET], [CAR]]
    rows = vqa(pictures[:2], questions)
    scores = vqa.model.score_yes_no(**processor(images=pictures[:2], text=questions, packed=True))
    for items, expected in zip(rows, scores):
        close(torch.tensor([item["p_yes"] for item in items]), expected)
        for item in items:
            assert set(item) == FIELDS
            assert item["answer"] == ("yes" if item["p_yes"] >= 0.5 else "no")
            assert item["score"] == max(item["p_yes"], 1 - item["p_yes"])


def test_words_are_those_of_generate_with_their_mean_probability(vqa, processor, pictures):
    values = processor.tokenizer.convert_tokens_to_ids(["red", "yellow", "green", "none"])
    inputs = processor(images=pictures[0], text=COLOR, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    options = {"prefix_allowed_tokens_fn": lambda row, ids: values if len(ids) == length else [3]}  # [EOS]
    output = vqa.model.generate(**inputs, **options, max_new_tokens=32, do_sample=False)
    log_p = vqa.model(output, inputs["pixel_values"]).logits[:, length - 1 : -1].log_softmax(-1)
    [text] = processor.batch_decode(output[:, length:], skip_special_tokens=True)
    [item] = vqa(pictures[0], COLOR)
    assert (item["answer"], item["p_yes"]) == (text, None)
    assert item["score"] == pytest.approx(log_p.gather(-1, output[:, length:, None]).mean().exp().item(), abs=1e-5)


def test_the_form_of_a_question_decides_between_yes_no_and_words(vqa, bias, pictures):
    bias(40)  # the model would rather begin with a word
    assert vqa(pictures[0], "Yes or no: is there a car?")[0]["answer"] in ("yes", "no")
    bias(4)  # [YES]
    assert vqa(pictures[0], "How busy is it?")[0]["answer"] in ("empty", "light", "busy", "jam")


def test_an_unlikely_answer_is_a_problem(vqa, pictures):
    [item] = vqa(pictures[0], COLOR)
    [unlikely] = vqa(pictures[0], COLOR, min_score=item["score"] + 0.01)
    assert unlikely["answer"] is None and unlikely["score"] is None
    assert f"the likeliest of a color of a traffic light, {item['answer']!r}, has a score of" in unlikely["problem"]


def test_long_questions_do_not_cut_the_answers_to_others(vqa, pictures):
    long = "What is ahead" + " of the car" * 35 + "?"
    [alone] = vqa(pictures[0], AHEAD)
    assert vqa(pictures[0], [AHEAD, long])[0] == alone


def test_own_questions_have_answers_of_any_kind(pictures):
    processor = tiny_processor(own_questions=True)
    vqa = TrafficVLMPipeline(model=tiny_model(), processor=processor, device="cpu", min_score=0)
    [item] = vqa(pictures[0], "Who is driving?")
    assert item["answer"] and "problem" not in item
    vqa = TrafficVLMPipeline(model=yes_no_model(), processor=processor, device="cpu", min_score=0)
    assert vqa(pictures[0], "Who is driving?")[0]["answer"] is None  # never yes or no, which it would rather say


@pytest.mark.parametrize(
    ("question", "problem"),
    [
        ("", "has no word"),
        ("\ud800", "has no word"),
        ("Is there a car? Is it snowing?", "contains 2 questions"),
        ("Is it not wet?", "does not understand 'not'"),
        ("qwerty zxcv", "knows no word of the question 'qwerty zxcv'"),
        ("Who is driving?", "not taught questions like this"),
        ("Is there a car " + "and a bus " * 60, "has 186 tokens; with its answer, at most 128 tokens are possible"),
        ("car " * 100_000, "has 400,000 characters; with its answer"),
        ("a" * 7000, "has 7,000 characters; with its answer, at most 128 tokens are possible"),  # one word
    ],
)
def test_a_problem_of_one_question_does_not_affect_the_others(vqa, pictures, question, problem):
    [before, item, after] = vqa(pictures[0], [CAR, question, WET])
    assert (item["question"], item["answer"], item["score"], item["p_yes"]) == (question, None, None, None)
    assert problem in item["problem"] and len(item["problem"]) < 400
    assert [before, after] == vqa(pictures[0], [CAR, WET])


def test_words_that_only_qualify_are_named(vqa, pictures):
    [item, plain] = vqa(pictures[0], ["Is there a Purple car near the kerb?", CAR])
    assert item["unknown_words"] == ["Purple"] and item["untaught_words"] == ["kerb"] and item["answer"]  # as typed
    assert answer_notes(item) == ["unknown, so ignored: Purple", "not taught, or not reliably, so guessed: kerb"]
    assert set(plain) == FIELDS and answer_notes(plain) == []


REFUSALS = yaml.safe_load((ROOT / "tests" / "data" / "refusals.yaml").read_text())


@pytest.mark.parametrize("question", REFUSALS["refused"])
def test_what_is_unknown_or_untaught_has_no_answer(vqa, pictures, question):
    word = REFUSALS["refused"][question]
    [item] = vqa(pictures[0], question)
    assert (item["answer"], item["score"], item["p_yes"]) == (None, None, None)
    assert repr(word) in item["problem"] and len(item["problem"]) < 200
    [guess] = vqa(pictures[0], question, answer_untaught=True)
    assert guess["answer"] and "problem" not in guess


@pytest.mark.parametrize("question", REFUSALS["answered"])
def test_what_is_known_and_taught_is_answered(vqa, question):
    read = vqa.read_question(question)
    assert read.problem is None
    assert [*read.unknown_words, *read.untaught_words] == REFUSALS["answered"][question]


def test_words_taught_by_a_training_are_asked_about():
    processor = tiny_processor()
    vqa = TrafficVLMPipeline(model=tiny_model(), processor=processor, device="cpu", answer_untaught=False)
    processor.taught = ["car", "color", "red", "sign"]

    def problems(*questions):
        return [vqa.read_question(question).problem for question in questions]

    questions = ("Is there an umbrella?", "Is the car white?", "Is the car red?", "Is there a zebra?")
    assert all(problems(*questions))
    processor.tokenizer = processor.tokenizer.with_words(["zebra"])
    assert "not taught 'zebra'" in problems(*questions)[3]
    processor.taught += ["umbrella", "white", "zebra"]
    assert not any(problems(*questions))
    [sign] = problems("What color is the sign?")
    assert "colors of lights and vehicles, not that of 'sign'" in sign
    processor.own_questions = True  # they may have taught the colors of anything
    assert problems("What color is the sign?") == [None]
    processor.taught = None  # nothing is known
    accident, elephant = problems("Was there an accident?", "Is there an elephant?")
    assert accident is None and "'elephant'" in elephant


def test_most_questions_of_other_people_are_answered(vqa):
    """A rule that refuses everything would pass the tests of refusals."""
    questions = (ROOT / "tests" / "data" / "questions.txt").read_text().splitlines()
    refused = [text for text in questions if "would be a guess" in (vqa.read_question(text).problem or "")]
    assert 0.2 < len(refused) / len(questions) < 0.3


def test_answers_for_people():
    item = {"question": COLOR, "answer": "none", "score": 0.9, "p_yes": None}
    assert answer_text(item) == "none seen, 0.90"
    assert answer_text(item | {"answer": "red", "not_sure": True}) == "red, 0.90, not sure"
    assert answer_text(item | {"answer": None, "problem": "it is too long"}) == "it is too long"


# --- forms of input ---


def test_every_form_of_input_gives_the_same_answers(vqa, pictures, tmp_path):
    image, path = pictures[0], tmp_path / "a [1].png"
    expected = vqa(image, QUESTIONS)
    image.save(path)
    content = path.read_bytes()
    files = [content, bytearray(content), io.BytesIO(content), {"bytes": content, "path": None}]
    for given in (path, str(path), np.asarray(image), *files, vqa.encode(image)):
        assert vqa(image=given, question=QUESTIONS) == vqa({"image": given, "question": QUESTIONS}) == expected
        assert vqa([given], QUESTIONS) == list(vqa(iter([given]), QUESTIONS)) == [expected]
    for given in files:
        assert vqa(vqa.encode(given), QUESTIONS) == vqa(vqa.encode([given]), QUESTIONS) == expected
    assert vqa(image, CAR) == vqa(image, [CAR]) == [close_to(expected[0])]


def test_several_images_with_the_same_or_their_own_questions(vqa, pictures):
    alone = [vqa(picture, QUESTIONS) for picture in pictures]
    for batch_size in (1, 2):
        assert vqa(pictures, QUESTIONS, batch_size=batch_size) == [[*map(close_to, items)] for items in alone]
    encoded, (array,) = vqa.encode(pictures), [np.stack(list(map(np.asarray, pictures)))]
    expected = [[close_to(items[0])] for items in alone]
    assert vqa(array, CAR) == vqa(encoded, CAR) == expected
    assert vqa([pictures[0], encoded[1], pictures[2]], CAR, batch_size=3) == expected
    own = [[CAR], QUESTIONS, [WET, CAR]]
    rows = vqa(pictures, own, batch_size=3)
    assert [[item["question"] for item in row] for row in rows] == own
    assert rows[2] == [close_to(alone[2][2]), close_to(alone[2][0])]


def test_iterators_and_datasets_are_read_as_they_are_consumed(vqa, pictures):
    expected, read = [vqa(picture, CAR) for picture in pictures], []

    def frames():
        for picture in pictures * 3:
            read.append(picture)
            yield picture

    answers = vqa(frames(), CAR, batch_size=2)
    assert next(answers) == [*map(close_to, expected[0])] and len(read) <= 4
    assert len(list(answers)) == 8

    class Frames(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return {"image": pictures[index], "question": CAR}

    assert list(vqa(Frames())) == expected
    rows = datasets.Dataset.from_dict({"image": pictures}, datasets.Features({"image": datasets.Image(decode=False)}))
    assert list(vqa(rows, CAR)) == vqa(rows["image"], CAR) == expected


def test_one_pass_answers_all_questions(vqa, pictures):
    calls, passes = count_calls(vqa.model.model.vision_tower), count_calls(vqa.model.model.text_model.layers[0])
    asked = [f"Is there a {thing} near a ship?" for thing in ("car", "bus", "dog")]
    vqa(pictures[0], asked)
    assert (len(calls), len(passes)) == (1, 1)


# --- options ---


def test_a_region_is_asked_about_alone(vqa, pictures):
    expected = vqa(pictures[0].crop((15, 0, 45, 20)), CAR)
    assert vqa(pictures[0], CAR, region=(0.25, 0, 0.5, 0.5)) == expected != vqa(pictures[0], CAR)
    assert vqa(vqa.encode(pictures[0], region="0.25,0,0.5,0.5"), CAR) == expected


def test_thresholds_decide(vqa, pictures):
    [item] = vqa(pictures[0], CAR)
    [no] = vqa(pictures[0], CAR, thresholds=min(1.0, item["p_yes"] + 1e-6))
    [yes] = vqa(pictures[0], CAR, thresholds=item["p_yes"])
    assert (no["answer"], yes["answer"]) == ("no", "yes") and no["p_yes"] == yes["p_yes"] == item["p_yes"]
    assert no["score"] == 1 - no["p_yes"]


def test_margins_are_given_on_request(vqa, pictures):
    car, no_car, color = vqa(pictures[0], ["Is there any car?", "Is there no car?", COLOR], margins=True)
    assert no_car["margin"] == pytest.approx(-car["margin"]) and color["answer"] and "margin" in color


# --- bad input ---

PICTURE = Image.new("RGB", (60, 40))


@pytest.mark.parametrize(
    ("image", "question", "options", "error", "message"),
    [
        (None, CAR, {}, ValueError, "no image was given"),
        (PICTURE, None, {}, ValueError, "no question was given"),
        (PICTURE, [CAR, 3], {}, TypeError, "a question must be a string, got int: 3"),
        ([PICTURE] * 3, [[CAR], [WET]], {}, ValueError, "2 lists of questions for 3 images"),
        ([PICTURE, "/no/such.jpg"], CAR, {}, ValueError, "image 1: cannot read the image '/no/such.jpg'"),
        (b"\x89PNG" * 10_000, CAR, {}, ValueError, "cannot read the image of 40,000 bytes: cannot identify"),
        ({"picture": PICTURE}, CAR, {}, ValueError, "got ['picture']"),
        (PICTURE, CAR, {"region": (0.5, 0, 0.6, 1)}, ValueError, "region (0.5, 0, 0.6, 1): x, y"),
        ("encoded", CAR, {"region": (0, 0, 0.5, 0.5)}, ValueError, "pass it to `encode`"),
        (PICTURE, CAR, {"thresholds": 1.5}, ValueError, "thresholds must be in 0..1, got 1.5"),
        (PICTURE, CAR, {"batch_size": 0}, ValueError, "batch_size must be"),
    ],
)
def test_bad_input_is_an_error_that_names_the_value(vqa, image, question, options, error, message):
    if isinstance(image, str) and image == "encoded":
        image = vqa.encode(PICTURE)
    with pytest.raises(error) as caught:
        vqa(image, question, **options)
    assert message in str(caught.value) and len(str(caught.value)) <= 200


def test_a_model_that_cannot_answer_is_an_error(vqa, pictures, monkeypatch):
    vqa.model.train()
    try:
        with pytest.raises(ValueError, match="training mode"):
            vqa(pictures[0], CAR)
    finally:
        vqa.model.eval()
    monkeypatch.setattr(vqa.model, "compute_logits", lambda states: torch.full((*states.shape[:-1], 500), torch.nan))
    for question, match in ((CAR, "Is there a car"), (AHEAD, "What is ahead")):
        with pytest.raises(FloatingPointError, match=match):
            vqa(pictures[0], question)


# --- the size of images ---


@pytest.fixture(scope="module")
def dial(processor):
    return TrafficVLMPipeline(model=any_size_model(), processor=processor, device="cpu", min_score=0)


@pytest.mark.parametrize(("size", "shape"), [(256, (256, 256)), (320, (320, 320)), ((224, 352), (224, 352))])
def test_the_size_of_images_is_a_dial(dial, size, shape):
    encoded = dial.encode(PICTURE, image_size=size)
    assert encoded.image_size == shape
    items = dial(PICTURE, CAR, image_size=size)
    assert dial(encoded, CAR) == items == dial(encoded, CAR, image_size=shape)
    own = TrafficVLMPipeline(model=any_size_model(), processor=dial.processor, min_score=0, image_size=size)
    assert own(PICTURE, CAR) == own(own.encode(PICTURE), CAR) == items and own.encode(PICTURE).image_size == shape
    ids = torch.tensor([dial.read_question(CAR).input_ids])
    rows, columns = (side // (16 if shape == (256, 256) else 32) for side in shape)  # above 256 pixels it pools
    assert attention_maps(dial.model, ids, encoded_images=encoded).shape == (*ids.shape, rows, columns)
    model, processor = any_size_model(), tiny_processor()
    set_image_size(model, processor, shape)  # as the commands do
    assert TrafficVLMPipeline(model=model, processor=processor, min_score=0)(PICTURE, CAR) == items


@pytest.mark.parametrize("size", [100, 0, -32, "256", (224,) * 3, 256.0, [256, 100]])
def test_a_size_that_is_no_multiple_of_32_is_refused(dial, size):
    for ask in (dial, lambda image, question, **options: dial.encode(image, **options)):
        with pytest.raises(ValueError, match=r"image_size must be a multiple of 32 .* got " + re.escape(repr(size))):
            ask(PICTURE, CAR, image_size=size)


def test_sizes_of_encoded_images_do_not_mix(dial):
    small, large = dial.encode(PICTURE), dial.encode(PICTURE, image_size=320)
    for ask in (lambda image, **options: dial(image, CAR, **options), dial.describe):
        with pytest.raises(ValueError, match=r"encoded at \(320, 320\) pixels"):
            ask(large, image_size=256)
    with pytest.raises(ValueError, match="a region cannot be cut out of an encoded image"):
        dial.describe(large, region=(0, 0, 0.5, 1))
    with pytest.raises(ValueError, match=r"of one size, got \(256, 256\) and \(320, 320\)"):
        type(small).join([small, large])


def test_each_size_has_its_temperature(dial):
    dial.model.config.size_temperatures = {"512": 10.0}
    try:
        margins = {size: dial(PICTURE, CAR, image_size=size, margins=True)[0] for size in (256, 352, 384, 640)}
    finally:
        dial.model.config.size_temperatures = {}
    for size, item in margins.items():
        scale = 10.0 if size >= 384 else dial.model.config.yes_no_temperature
        assert item["p_yes"] == pytest.approx(1 / (1 + math.exp(-item["margin"] / scale)), abs=1e-5)


def test_another_default_size_keeps_the_temperature_of_the_former_one():
    model = any_size_model()
    model.config.size_temperatures = {"320": 9.0}
    set_image_size(model, tiny_processor(), (320, 320))
    assert [model.config.temperature_at((side, side)) for side in (256, 320)] == [1.0, 9.0]
