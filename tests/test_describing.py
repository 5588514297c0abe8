"""Captions: the grammar on facts written by hand, and the answers of the pipeline that they say."""

import pytest

from tiny import count_calls, locating_model, picture, yes_no_model
from traffic_vlm.describing_traffic_vlm import QUESTIONS, Caption
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline


ROAD, DRIVER, CAR = "Is there a road?", "Is this the view of a driver?", "Is there a car?"
MORE = ["Is there more than one car?", "Are there more than 2 cars?", "Are there more than 3 cars?"]
STREET = [ROAD, "Is this a city street?"]
CARS = [("car", 0.4), ("car", 0.5), ("car", 0.6)]
PICTURE = picture()


@pytest.mark.parametrize(
    ("yes", "objects", "text"),
    [
        ([], [], "Nothing is sure."),
        ([ROAD], [], "A road."),
        (
            [*STREET, DRIVER, "Is the road busy?", "Is it day?", "Is the road wet?", CAR, *MORE[:2], "Is there a bus?",
             "Is there a traffic light?", "Is the traffic light red?"],
            [*CARS, ("bus", 1.0)],
            "A busy city street by day; the road is wet. Three cars ahead, a bus on the right, a red light.",
        ),
        (
            [ROAD, "Is this an intersection?", "Is there light traffic?", "Is it night?", "Is it rainy?"],
            CARS,  # a car is not sure
            "An intersection with light traffic at night in rain.",
        ),
        ([ROAD, "Is the road empty?", CAR], [("car", 0.1)], "A road without moving traffic. A car on the left."),
        ([CAR, MORE[0], "Is there an animal?"], [("car", 0.5)], "Cars, an animal."),  # more than are located
        ([CAR, *MORE], CARS, "Cars in the middle."),  # more than three
        ([CAR, "Is there a bus?"], [*CARS * 2, ("car", 0.9), ("bus", 0.1), ("bus", 0.9)] + [("bus", 0.5)] * 2,
         "Many cars, several buses."),
        (["Is it dusk?", "Is there a person?", "Is there more than one person?", "Is there road construction?"],
         [("person", 0.7), ("person", 0.8)], "A scene at dusk. Two people on the right, road construction."),
    ],
)  # fmt: skip
def test_sentences(yes, objects, text):
    assert {*yes} <= {*QUESTIONS}
    no = {question: 0.1 if "more than" in question else 0.3 for question in QUESTIONS}
    caption = Caption(no | dict.fromkeys(yes, 0.9), objects)
    assert caption.text == text
    assert {*caption.said} <= {*yes}


def test_numbers_are_sure():
    p_yes = {CAR: 0.9, MORE[0]: 0.9, MORE[1]: 0.6, MORE[2]: 0.19}
    assert Caption(p_yes, CARS).text == "Three cars in the middle."
    assert Caption(p_yes | {MORE[2]: 0.3}, CARS).text == "Cars in the middle."
    assert Caption(p_yes | {MORE[1]: 0.1}, CARS).text == "Cars in the middle."  # the answers do not agree


def test_of_values_that_exclude_each_other_only_the_likeliest_is_said():
    p_yes = {ROAD: 0.99, "Is it day?": 0.85, "Is it dusk?": 0.9, "Is the road dry?": 0.79, "Is it cloudy?": 0.8}
    assert Caption(p_yes).text == "A road at dusk under a cloudy sky."
    assert Caption(p_yes, sure=0.95).text == "A road."


def test_a_picture_without_a_road_has_no_place_traffic_or_surface():
    p_yes = dict.fromkeys(QUESTIONS, 0.9) | {MORE[0]: 0.4, ROAD: 0.1}
    assert Caption(p_yes | {ROAD: 0.5}).text.startswith("A scene by day in clear weather. A car")
    caption = Caption(p_yes)
    assert caption.text.startswith("No road is in view. A car")
    assert caption.said[-1] == ROAD and not any("road" in question for question in caption.said[:-2])


@pytest.mark.parametrize("sure", [0.5, 0.8])
def test_facts_are_the_answers_of_the_pipeline(processor, sure):
    vqa = TrafficVLMPipeline(model=yes_no_model(seed=5), processor=processor, device="cpu")
    calls = count_calls(vqa.model.model.vision_tower)
    found = vqa.describe(PICTURE, sure)
    assert len(calls) == 1
    assert found == vqa.describe(vqa.encode(PICTURE), sure)
    assert found["facts"]
    for fact in found["facts"]:
        [item] = vqa(PICTURE, fact["question"])
        assert item["p_yes"] == pytest.approx(fact["p_yes"], abs=1e-4)


def test_sides_are_those_of_located_objects(processor):
    vqa = TrafficVLMPipeline(model=locating_model(), processor=processor, device="cpu")
    items = vqa(PICTURE, [*QUESTIONS])  # some are refused
    p_yes = {item["question"]: item["p_yes"] for item in items if "problem" not in item}
    centers = [(found["label"], found["point"][0] / PICTURE.width) for found in vqa.locate(PICTURE)]
    assert centers
    assert vqa.describe(PICTURE, 0.5)["caption"] == Caption(p_yes, centers, 0.5).text


def test_bad_input(processor):
    vqa = TrafficVLMPipeline(model=yes_no_model(), processor=processor, device="cpu")
    with pytest.raises(ValueError, match=r"sure must be in 0.5..1, got 0.2"):
        vqa.describe(PICTURE, sure=0.2)
    with pytest.raises(ValueError, match="describe takes one image, got 2"):
        vqa.describe([PICTURE, PICTURE])
