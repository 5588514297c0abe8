"""The pipeline that answers: every form of input, one rule for answers, problems that stay with their question."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset
from transformers import TextStreamer, pipeline

from tiny import ROOT, close, count_calls, new_process, random_pixels, save_folder, tiny_model, yes_no_model
from traffic_vlm.pipeline_traffic_vlm import (
    TrafficVLMPipeline,
    answer_notes,
    answer_text,
    yes_no_item,
    yes_or_no,
)
from traffic_vlm.question_form_traffic_vlm import question_form


CAR, WET = "Is there a car?", "Is the road wet?"
COLOR, AHEAD = "What color is the traffic light?", "What is ahead?"
QUESTIONS = [CAR, COLOR, WET, AHEAD]
FIELDS = {"question", "answer", "score", "p_yes"}


@pytest.fixture(scope="module")
def vqa(processor):
    return TrafficVLMPipeline(model=tiny_model(), processor=processor, device="cpu")


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


# --- answers ---


def test_yes_and_no_are_those_of_score_yes_no(vqa, processor, pictures):
    rows = vqa(pictures[:2], [[CAR, WET], [CAR]])
    inputs = processor(images=pictures[:2], text=[[CAR, WET], [CAR]], packed=True)
    for items, expected in zip(rows, vqa.model.score_yes_no(**inputs)):
        close(torch.tensor([item["p_yes"] for item in items]), expected)
        for item in items:
            assert set(item) == FIELDS
            assert item["answer"] == ("yes" if item["p_yes"] >= 0.5 else "no")
            assert item["score"] == max(item["p_yes"], 1 - item["p_yes"])


def test_a_yes_no_question_is_never_answered_in_words(vqa, bias, pictures):
    bias(40)  # the model would rather begin with a word
    for question in (CAR, "Is there a car? Please answer yes or no.", "Yes or no: is there a car?"):
        [item] = vqa(pictures[0], question)
        assert item["answer"] in ("yes", "no") and item["question"] == question


def test_a_question_in_words_never_gets_yes_or_no(vqa, bias, pictures):
    bias(4)  # [YES]
    [item] = vqa(pictures[0], "How busy is it?")
    assert item["answer"] in ("empty", "light", "busy", "jam") and item["p_yes"] is None


def test_words_are_those_of_generate_with_their_mean_probability(vqa, processor, pictures):
    values = processor.tokenizer.convert_tokens_to_ids(["red", "yellow", "green", "none"])
    inputs = processor(images=pictures[0], text=COLOR, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    options = {"prefix_allowed_tokens_fn": lambda row, ids: values if len(ids) == length else [3]}  # [EOS]
    output = vqa.model.generate(**inputs, **options, max_new_tokens=32, do_sample=False)
    log_p = vqa.model(output, inputs["pixel_values"]).logits[:, length - 1 : -1].log_softmax(-1)
    [text] = processor.batch_decode(output[:, length:], skip_special_tokens=True)
    [answer] = vqa._generate(vqa.encode(pictures[0]), [(0, vqa.read_question(COLOR))])
    assert answer == (text, pytest.approx(log_p.gather(-1, output[:, length:, None]).mean().exp().item(), abs=1e-5))


@pytest.mark.parametrize(
    ("question", "values"),
    [
        ("How many lanes does the road have?", set("123456")),
        (COLOR, {"red", "yellow", "green", "none"}),
        ("What time of day is it?", {"day", "night", "dusk"}),
    ],
)
def test_an_answer_is_of_the_kind_of_its_question(processor, pictures, question, values):
    for seed in range(5):
        vqa = TrafficVLMPipeline(model=tiny_model(seed), processor=processor, device="cpu")
        for [item] in vqa(pictures, question):
            assert item["answer"] in values and 0 < item["score"] < 1


def test_an_unlikely_answer_is_a_problem(vqa, pictures, monkeypatch):
    [item] = vqa(pictures[0], COLOR)
    monkeypatch.setattr("traffic_vlm.question_traffic_vlm.MIN_SCORE", item["score"] + 0.01)
    [unlikely] = vqa(pictures[0], COLOR)
    assert unlikely["answer"] is None and unlikely["score"] is None
    assert f"the likeliest of a color of a traffic light, {item['answer']!r}, has a score of" in unlikely["problem"]


def test_own_questions_have_answers_of_any_kind(pictures, processor, monkeypatch):
    monkeypatch.setattr(processor, "own_questions", True)
    vqa = TrafficVLMPipeline(model=tiny_model(), processor=processor, device="cpu")
    [item] = vqa(pictures[0], "Who is driving?")
    assert item["answer"] and "problem" not in item


def test_no_turns_the_answer_around(vqa, pictures):
    [plain, negated] = vqa(pictures[0], ["Is there any car?", "Is there no car?"])
    assert negated["p_yes"] == pytest.approx(1 - plain["p_yes"])
    assert negated["score"] == pytest.approx(plain["score"]) and negated["answer"] != plain["answer"]


def test_long_questions_do_not_cut_the_answers_to_others(vqa, pictures):
    long = "What is ahead" + " of the car" * 35 + "?"
    [alone] = vqa(pictures[0], AHEAD)
    assert vqa(pictures[0], [AHEAD, long])[0] == alone


# --- problems ---


@pytest.mark.parametrize(
    ("question", "problem"),
    [
        ("", "has no word"),
        ("?!", "has no word"),
        ("Is there a car? Is it snowing?", "contains 2 questions"),
        ("Is it not wet?", "does not understand 'not'"),
        ("qwerty zxcv", "knows no word of the question 'qwerty zxcv'"),
        ("Who is driving?", "not taught questions like this"),
        ("\ud800", "has no word"),
        ("Is there a car " + "and a bus " * 60, "at most 128 are possible"),
        ("car " * 100_000, "at most 128 are possible"),
    ],
)
def test_a_problem_of_one_question_does_not_affect_the_others(vqa, pictures, question, problem):
    [before, item, after] = vqa(pictures[0], [CAR, question, WET])
    assert (item["question"], item["answer"], item["score"], item["p_yes"]) == (question, None, None, None)
    assert problem in item["problem"] and len(item["problem"]) < 400
    assert [before, after] == vqa(pictures[0], [CAR, WET])
    assert vqa(pictures[0], question) == [item]


def test_words_that_are_unknown_or_untaught_are_named(pictures, processor, monkeypatch):
    monkeypatch.setattr(processor, "taught", {"photographs": ["car", "road"], "rendered": []})
    vqa = TrafficVLMPipeline(model=tiny_model(), processor=processor, device="cpu")
    [item, plain] = vqa(pictures[0], ["Is there a purple bus?", CAR])
    assert item["unknown_words"] == ["purple"] and item["untaught_words"] == ["bus"] and item["answer"]
    assert answer_notes(item) == ["unknown, so ignored: purple", "not taught, or not reliably, so guessed: bus"]
    assert set(plain) == FIELDS and answer_notes(plain) == []


def test_nothing_there_is_said_in_words_only_to_people():
    item = {"question": COLOR, "answer": "none", "score": 0.9, "p_yes": None}
    assert answer_text(item) == "none seen, 0.90"
    assert answer_text(item | {"answer": "red", "not_sure": True}) == "red, 0.90, not sure"
    assert answer_text(item | {"answer": None, "problem": "it is too long"}) == "it is too long"


# --- forms of input ---


def test_every_form_of_input_gives_the_same_answers(vqa, pictures, tmp_path):
    expected = vqa(pictures[0], QUESTIONS)
    pictures[0].save(tmp_path / "a [1].png")
    image = pictures[0]
    for given in (tmp_path / "a [1].png", str(tmp_path / "a [1].png"), np.asarray(image), vqa.encode(image)):
        assert vqa(given, QUESTIONS) == expected
        assert vqa(image=given, question=QUESTIONS) == vqa({"image": given, "question": QUESTIONS}) == expected
        assert vqa([given], QUESTIONS) == vqa([{"image": given, "question": QUESTIONS}]) == [expected]
    assert vqa(image, CAR) == vqa(image, [CAR]) == vqa(image, [[CAR]])


def test_several_images_with_the_same_or_their_own_questions(vqa, pictures):
    alone = [vqa(picture, QUESTIONS) for picture in pictures]
    for batch_size in (1, 2, 5):
        rows = vqa(pictures, QUESTIONS, batch_size=batch_size)
        for row, items in zip(rows, alone):
            for item, expected in zip(row, items):
                near = {name: pytest.approx(expected[name], abs=1e-4) for name in ("score", "p_yes")}
                assert item == {**expected, **{name: near[name] for name in near if expected[name] is not None}}
    own = [[CAR], QUESTIONS, [AHEAD, WET]]
    rows = vqa(pictures, own, batch_size=3)
    assert [[item["question"] for item in row] for row in rows] == own
    array = np.stack([np.asarray(picture) for picture in pictures])
    assert [len(row) for row in vqa(array, CAR)] == [len(row) for row in vqa(vqa.encode(pictures), CAR)] == [1, 1, 1]


def test_encoded_and_new_images_are_answered_together(vqa, pictures):
    calls = count_calls(vqa.model.model.vision_tower)
    encoded = vqa.encode(pictures[1])
    rows = vqa([pictures[0], encoded, pictures[2]], CAR, batch_size=3)
    assert len(calls) == 2  # one for `encode`, one for the two others
    for row, picture in zip(rows, pictures):
        assert row[0]["p_yes"] == pytest.approx(vqa(picture, CAR)[0]["p_yes"], abs=1e-5)


def test_iterators_and_datasets_are_read_as_they_are_consumed(vqa, pictures):
    read = []

    def frames():
        for picture in pictures * 10:
            read.append(picture)
            yield picture

    answers = vqa(frames(), CAR, batch_size=2)
    first = next(answers)
    assert first == vqa(pictures[0], CAR) and len(read) <= 4
    assert len(list(answers)) == 29

    class Frames(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return {"image": pictures[index], "question": [CAR, WET]}

    assert [len(row) for row in vqa(Frames())] == [2, 2, 2]
    rows = datasets.Dataset.from_dict({"image": [np.asarray(picture).tolist() for picture in pictures]})
    rows = rows.with_format("numpy")
    assert list(vqa(rows, CAR)) == vqa(rows["image"], CAR) == [vqa(picture, CAR) for picture in pictures]


def test_images_are_prepared_while_the_last_ones_are_answered(vqa, pictures, monkeypatch):
    """The model waits for the third image to be opened before it answers the first two: that would never end."""
    opened, prepare, forward = threading.Event(), vqa.preprocess, vqa._forward
    counter = iter(range(100))

    def open_one(row, **options):
        if next(counter) >= 2:
            opened.set()
        return prepare(row, **options)

    def answer(rows, **options):
        assert opened.wait(10)
        return forward(rows, **options)

    monkeypatch.setattr(vqa, "preprocess", open_one)
    monkeypatch.setattr(vqa, "_forward", answer)
    assert len(vqa(pictures, CAR, batch_size=2, num_workers=1)) == 3


def test_one_encoding_serves_all_questions(vqa, pictures):
    calls, passes = count_calls(vqa.model.model.vision_tower), count_calls(vqa.model.model.text_model.layers[0])
    vqa(pictures[0], [CAR, WET, "Is it night?"])
    assert (len(calls), len(passes)) == (1, 1)


def test_questions_are_tokenized_once(vqa, processor, pictures, monkeypatch):
    texts = []
    original = processor._tokenize
    monkeypatch.setattr(processor, "_tokenize", lambda questions: texts.extend(questions) or original(questions))
    vqa._questions.clear()
    vqa(pictures, QUESTIONS)
    vqa(pictures[0], QUESTIONS)
    assert len(texts) == len(QUESTIONS)


def test_answers_before_an_error_are_given(vqa, pictures):
    def frames():
        yield from [*pictures[:2], "/no/such.jpg"]

    def broken():
        yield pictures[0]
        raise OSError("the camera is lost")

    answers = vqa(frames(), CAR, batch_size=3)
    assert [next(answers)[0]["answer"] for _ in range(2)] == [vqa(one, CAR)[0]["answer"] for one in pictures[:2]]
    with pytest.raises(ValueError, match="image 2: cannot read"):
        next(answers)
    answers = vqa(broken(), CAR, batch_size=3)
    assert len(next(answers)) == 1
    with pytest.raises(OSError, match="the camera is lost"):
        next(answers)


def test_a_copy_answers_alike(processor, pictures):
    vqa = TrafficVLMPipeline(model=tiny_model(), processor=processor, device="cpu")
    expected = vqa(pictures[0], QUESTIONS)
    for copied in (pickle.loads(pickle.dumps(vqa)), deepcopy(vqa)):
        assert copied(pictures[0], QUESTIONS) == expected


def test_an_adapter_asks_about_its_own_encoded_images(processor, pictures):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    vqa = TrafficVLMPipeline(peft.get_peft_model(tiny_model(), config).eval(), processor=processor, device="cpu")
    assert vqa(vqa.encode(pictures[0]), CAR) == vqa(pictures[0], CAR)


def test_threads_can_ask_at_the_same_time(vqa, pictures):
    expected = [vqa(picture, QUESTIONS) for picture in pictures]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda picture: vqa(picture, QUESTIONS), pictures)) == expected


# --- options ---


def test_a_region_is_asked_about_alone(vqa, pictures):
    part = pictures[0].crop((15, 0, 45, 20))
    expected = vqa(part, QUESTIONS)
    assert vqa(pictures[0], QUESTIONS, region=(0.25, 0, 0.5, 0.5)) == expected != vqa(pictures[0], QUESTIONS)
    assert vqa(vqa.encode(pictures[0], region="0.25,0,0.5,0.5"), QUESTIONS) == expected
    with pytest.raises(ValueError, match="pass it to `encode`"):
        vqa(vqa.encode(pictures[0]), CAR, region=(0, 0, 0.5, 0.5))
    with pytest.raises(ValueError, match=r"region 0.5,0,0.6,1"):
        vqa(pictures[0], CAR, region=(0.5, 0, 0.6, 1))


def test_thresholds_decide(vqa, pictures):
    [item] = vqa(pictures[0], CAR)
    [no] = vqa(pictures[0], CAR, thresholds=min(1.0, item["p_yes"] + 1e-6))
    [yes] = vqa(pictures[0], CAR, thresholds=item["p_yes"])
    assert (no["answer"], yes["answer"]) == ("no", "yes") and no["p_yes"] == yes["p_yes"] == item["p_yes"]
    assert no["score"] == 1 - no["p_yes"]
    with pytest.raises(ValueError, match=r"thresholds must be in 0..1, got 1.5"):
        vqa(pictures[0], CAR, thresholds=1.5)
    with pytest.raises(TypeError, match=r"thresholds must be a number .* got \['0.8'\]"):
        vqa(pictures[0], CAR, thresholds=["0.8"])


def test_a_band_marks_answers_that_are_not_sure():
    class Band:
        threshold = 0.7

        def is_unsure(self, p):
            return 0.6 <= p <= 0.8

    plain, negated = question_form(CAR), question_form("Is there no car?")
    assert yes_or_no(plain, 0.65, Band()) == {"answer": "no", "score": 0.35, "p_yes": 0.65, "not_sure": True}
    assert yes_or_no(negated, 0.9, Band()) == {
        **{"answer": "no", "score": 0.9, "p_yes": pytest.approx(0.1), "not_sure": False}
    }


def test_generated_words_are_streamed(vqa, processor, pictures, capsys):
    processor.own_questions = True
    try:
        [item] = vqa(pictures[0], "Who is it?", streamer=TextStreamer(processor.tokenizer, skip_prompt=True))
    finally:
        processor.own_questions = False
    assert capsys.readouterr().out.split()[0] == item["answer"].split()[0]


def test_margins_and_words_can_be_chosen(vqa, pictures):
    car, no_car, color = vqa(pictures[0], [CAR, "Is there no car?", COLOR], margins=True, generate_words=False)
    temperature = vqa.model.config.yes_no_temperature
    for item in (car, no_car):
        assert torch.sigmoid(torch.tensor(item["margin"] / temperature)) == pytest.approx(item["p_yes"], abs=1e-6)
    assert color["answer"] is None and "problem" not in color and "margin" in color


# --- bad input ---


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, CAR), ValueError, "no image was given"),
        (([], CAR), ValueError, "the list is empty"),
        (("picture", None), ValueError, "no question was given"),
        (("picture", []), ValueError, "no question was given"),
        (("picture", 3), TypeError, "a question must be a string, got int: 3"),
        (("picture", [CAR, None]), TypeError, "got NoneType"),
        ((["picture"] * 3, [[CAR], [WET]]), ValueError, "2 lists of questions for 3 images"),
        ((["picture", None], CAR), ValueError, "image 1: no image was given"),
        ((["picture", "/no/such.jpg"], CAR), ValueError, "image 1: cannot read the image '/no/such.jpg'"),
        (("/no/such.jpg", CAR), ValueError, "cannot read the image '/no/such.jpg'"),
        ((b"\x89PNG", CAR), TypeError, "an image must be a PIL image, an array, a tensor or a path, got bytes"),
        ((["picture", 3.5], CAR), TypeError, "image 1: an image must be"),
        (({"image": "picture"}, None), ValueError, 'one "question" in all'),
        (({"picture": "picture"}, CAR), ValueError, "got ['picture']"),
    ],
)
def test_bad_input_is_an_error_that_names_the_value(vqa, pictures, arguments, error, message):
    def fill(value):
        if isinstance(value, list):
            return [fill(item) for item in value]
        return pictures[0] if isinstance(value, str) and value == "picture" else value

    with pytest.raises(error, match=None) as caught:
        vqa(fill(arguments[0]), arguments[1])
    assert message in str(caught.value)


def test_images_of_another_model_are_refused(vqa, processor, pictures):
    other = TrafficVLMPipeline(model=tiny_model(1), processor=processor, device="cpu").encode(pictures[0])
    with pytest.raises(ValueError, match="another model"):
        vqa(other, CAR)
    with pytest.raises(ValueError, match=r"image 1: .*another model"):
        vqa([pictures[0], other], CAR, batch_size=2)


def test_unknown_options_and_a_model_in_training_are_refused(vqa, pictures):
    for name in ("threshold", "images", "text"):
        with pytest.raises(TypeError, match=f"unexpected argument '{name}'"):
            vqa(pictures[0], CAR, **{name: 0.5})
    for options in ({"batch_size": 0}, {"batch_size": 1.5}, {"num_workers": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
            vqa(pictures, CAR, **options)
    vqa.model.train()
    try:
        with pytest.raises(ValueError, match="training mode"):
            vqa(pictures[0], CAR)
    finally:
        vqa.model.eval()


def test_logits_that_are_not_finite_are_an_error(vqa, pictures, monkeypatch):
    monkeypatch.setattr(vqa.model, "compute_logits", lambda states: torch.full((*states.shape[:-1], 500), torch.nan))
    with pytest.raises(FloatingPointError, match="Is there a car"):
        vqa(pictures[0], CAR)


# --- without a pipeline ---


def test_items_of_the_processor_are_those_of_the_pipeline(vqa, processor, pictures):
    [scores] = vqa.model.score_yes_no(**processor(images=pictures[:1], text=[[CAR, WET]], packed=True))
    [items] = processor.post_process_yes_no([scores], [[CAR, WET]])
    for item, expected in zip(items, vqa(pictures[0], [CAR, WET])):
        assert item == {
            **expected,
            "p_yes": pytest.approx(expected["p_yes"]),
            "score": pytest.approx(expected["score"]),
        }


@pytest.mark.parametrize(
    ("question", "problem"),
    [
        ("How busy is it?", "not a yes/no question"),
        ("Is there no car?", "'no'"),
        ("Is it wet? Is it dark?", "contains 2"),
    ],
)
def test_p_yes_means_nothing_for_other_questions(question, problem):
    item = yes_no_item(question, 0.9)
    assert item["answer"] is None and item["p_yes"] is None and problem in item["problem"]


# --- loading ---


def test_three_lines_load_and_answer_in_an_empty_folder(tmp_path, pictures, processor):
    """Also from a folder that `save_pretrained` wrote from the imported classes."""
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    processor.save_pretrained(folder)
    pictures[0].save(tmp_path / "scene.png")
    code = f"""
    from transformers import pipeline
    vqa = pipeline("visual-question-answering", model={str(folder)!r}, trust_remote_code=True)
    print(type(vqa).__module__.startswith("transformers_modules"), len(vqa("scene.png", ["Is there a car?"])))
    vqa.save_pretrained("again")
    again = pipeline("visual-question-answering", model="again", trust_remote_code=True)
    print(again("scene.png", "Is it wet?") == vqa("scene.png", "Is it wet?"))
    """
    assert new_process(code, tmp_path).split() == ["True", "1", "True"]


def test_an_installed_package_needs_no_remote_code(tmp_path, pictures):
    folder = save_folder(yes_no_model(), tmp_path / "model")
    pictures[0].save(tmp_path / "scene.png")
    code = f"""
    del sys.modules["traffic_vlm"]
    import traffic_vlm
    from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, pipeline
    folder = {str(folder)!r}
    for auto in (AutoConfig, AutoModel, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer):
        print(type(auto.from_pretrained(folder, trust_remote_code=False)).__module__)
    vqa = pipeline("visual-question-answering", model=folder, trust_remote_code=False)
    print(type(vqa).__module__, vqa("scene.png", "Is there a car?")[0]["answer"] in ("yes", "no"))
    """
    printed = new_process(code, tmp_path).split()
    assert all(name.startswith("traffic_vlm.") for name in printed[:-1]) and printed[-1] == "True"


def test_the_pipeline_of_the_library_builds_it(pictures):
    vqa = pipeline("visual-question-answering", model=str(ROOT), dtype=torch.float32)
    assert isinstance(vqa, TrafficVLMPipeline) and vqa.dtype == torch.float32
    assert [item["question"] for item in vqa(pictures[0], QUESTIONS)] == QUESTIONS
    assert vqa.encode(pictures[0]).key_values[0][0].shape[0] == 1
    assert random_pixels(1).shape[1:] == (3, 256, 256)
