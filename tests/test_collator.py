"""Batches: augmentation keeps the ground truth, questions are balanced, images and questions are packed."""

import colorsys
import random
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from traffic_vlm.data.collator import TrafficCollator, augment, change_light
from traffic_vlm.data.dataset import SyntheticRows, synthetic_rows
from traffic_vlm.data.questions import Balancer
from traffic_vlm.data.scene import Scene, SceneObject
from traffic_vlm.training.collator import SupervisedCollator


def colored(left: str, right: str) -> tuple[Image.Image, Scene]:
    """A red and a blue box, labeled as cars."""
    shades = {"red": (220, 30, 30), "blue": (30, 30, 220)}
    image = Image.new("RGB", (224, 224), (120, 120, 120))
    image.paste(shades[left], (20, 90, 80, 140))
    image.paste(shades[right], (150, 90, 210, 140))
    boxes = ((20.0, 90.0, 80.0, 140.0), (150.0, 90.0, 210.0, 140.0))
    cars = [SceneObject("car", box, attributes={"color": name}) for box, name in zip(boxes, (left, right))]
    return image, Scene(224, 224, tuple(cars), exhaustive=frozenset({"car"}), attributed={"car": frozenset({"color"})})


def test_augmented_boxes_still_hold_their_colors():
    rng, seen = random.Random(0), set()
    for _ in range(60):
        image, scene = augment(*colored("red", "blue"), rng)
        assert image.size == (scene.width, scene.height)
        pixels = np.asarray(image).astype(int)
        for item in scene.objects:
            left, top, right, bottom = (round(value) for value in item.box)
            if item.visible < 0.5 or right - left < 12 or not item.attributes:
                continue
            red, _, blue = pixels[top + 4 : bottom - 4, left + 4 : right - 4].mean((0, 1))
            assert (red > blue) == (item.attributes["color"] == "red")
            seen.add((item.attributes["color"], (left + right) / 2 < scene.width / 2))
    assert len(seen) == 4  # both colors on both sides


SHADES = {
    "white": (235, 235, 235),
    "silver": (190, 192, 195),
    "gray": (125, 125, 125),
    "black": (28, 28, 30),
    "red": (200, 30, 30),
    "orange": (235, 125, 30),
    "yellow": (235, 205, 40),
    "brown": (110, 70, 40),
    "green": (40, 130, 60),
    "blue": (40, 70, 190),
}


@pytest.mark.parametrize(("name", "shade"), SHADES.items())
def test_colors_keep_their_names_under_other_light(name, shade):
    image, rng = Image.new("RGB", (16, 16), shade), random.Random(1)
    hue, saturation, _ = colorsys.rgb_to_hsv(*np.array(shade) / 255)
    for _ in range(100):
        seen = np.asarray(change_light(image, rng)).astype(float).mean((0, 1))
        assert min(SHADES, key=lambda other: ((np.array(SHADES[other]) - seen) ** 2).sum()) == name
        assert np.abs(seen - shade).max() < 0.1 * 255
        if saturation > 0.5:
            turn = abs(colorsys.rgb_to_hsv(*seen / 255)[0] - hue)
            assert min(turn, 1 - turn) < 10 / 360


def test_colors_and_weather_are_unknown_in_darkened_images():
    image, scene = colored("red", "blue")
    scene, rng, dark = replace(scene, facts={"weather": "clear", "time of day": "day"}), random.Random(0), 0
    for _ in range(100):
        seen, known = augment(image, scene, rng, cropped=0.0)
        assert [item.box for item in known.objects] in (
            [item.box for item in each.objects] for each in (scene, scene.flipped())
        )
        if known.facts:
            assert np.asarray(seen).mean() > 0.8 * np.asarray(image).mean()
            assert known.facts == scene.facts and all(item.attributes for item in known.objects)
        else:
            assert np.asarray(seen).mean() < 0.8 * np.asarray(image).mean()
            assert not known.attributed and not any(item.attributes for item in known.objects)
            dark += 1
    assert 2 < dark < 25


def test_batches_are_packed_and_labeled(processor):
    rows = [SyntheticRows(first_seed=7)[i] for i in range(3)]
    for training in (True, False):
        collate = TrafficCollator(processor, questions_per_image=6, training=training)
        batch = collate(rows if training else synthetic_rows(0, 3))
        assert batch["pixel_values"].shape == (3, 3, 224, 224)
        assert (batch["question_ends"] >= 0).sum(-1).max() <= 6
        assert ((batch["labels"] != -100).sum(-1) > 0).all()
        assert batch["labels"].shape == batch["segment_ids"].shape == batch["input_ids"].shape
    again = TrafficCollator(processor, questions_per_image=6)(rows)
    other = TrafficCollator(processor, questions_per_image=6, seed=1)(rows)
    assert torch.equal(again["input_ids"], TrafficCollator(processor, questions_per_image=6)(rows)["input_ids"])
    assert not torch.equal(again["pixel_values"], other["pixel_values"])


def test_images_with_stored_questions_are_not_mirrored(processor):
    image = Image.new("RGB", (40, 40), (200, 0, 0))
    image.paste((0, 0, 200), (20, 0, 40, 40))
    row = {"image": image, "questions": ["Is there a car on the left?"], "answers": ["yes"], "scene": None}
    for seed in range(8):
        [pixels] = TrafficCollator(processor, seed=seed)([row])["pixel_values"]
        assert pixels[0, :, :100].mean() > pixels[0, :, 124:].mean()


def test_a_batch_without_questions_is_an_error(processor):
    row = {"image": Image.new("RGB", (40, 40)), "scene": Scene(40, 40).to_json()}
    with pytest.raises(ValueError, match="any of the 1 images"):
        TrafficCollator(processor)([row])


def unbalanced(count: int) -> list[dict]:
    """Rows with always the same true answer: the balancer soon rejects every question."""
    scene = Scene(40, 40, (SceneObject("car", (0.0, 0.0, 40.0, 40.0)),)).to_json()
    return [{"image": Image.new("RGB", (40, 40)), "scene": scene} for _ in range(count)]


@pytest.mark.parametrize("stored", [False, True])
def test_a_batch_keeps_questions_when_the_balancer_rejects_all(processor, stored):
    collate = TrafficCollator(processor, questions_per_image=4)
    for row in unbalanced(30):
        row |= {"questions": ["Is it day?"], "answers": ["yes"]} if stored else {}
        assert ((collate([row])["labels"] != -100).sum(-1) > 0).all()


@pytest.mark.parametrize("rewordings", [0, 1])
def test_yes_and_no_are_balanced_within_each_source(processor, rewordings):
    """Cars are frequent in one source and rare in the other: the source must not predict the answer."""
    car = SceneObject("car", (10.0, 10.0, 30.0, 30.0))
    rng, answers = random.Random(0), {"city": Counter(), "path": Counter()}
    kinds = ("presence", "weather")
    collate = SupervisedCollator(processor, questions_per_image=4, kinds=kinds, rewordings=rewordings)
    for _ in range(400):
        source = rng.choice(["city", "path"])
        objects = (car,) if rng.random() < {"city": 0.9, "path": 0.1}[source] else ()
        facts = {"weather": "clear"} if objects else {}
        scene = Scene(40, 40, objects, facts, exhaustive=frozenset({"car"}), source=source)
        asked = collate._asked_anew({"image": Image.new("RGB", (40, 40)), "scene": scene.to_json()}, rng)
        answers[source].update(question.answer for question in asked.questions if question.label == "car")
    for counts in answers.values():
        assert counts.total() > 30
        assert abs(counts["yes"] - counts["no"]) <= Balancer().slack


def test_training_and_inference_see_the_same_pixels(processor):
    deep = Image.fromarray(np.full((40, 40), 20000, np.uint16))  # 16 bits
    row = {"image": deep, "scene": None, "questions": ["Is there a car?"], "answers": ["no"]}
    seen = TrafficCollator(processor, training=False)([row])["pixel_values"]
    assert torch.equal(seen, processor(images=deep, return_tensors="pt")["pixel_values"])


def test_a_crop_without_any_known_answer_is_not_used(processor):
    """One sign in a corner: most windows show only a part of it."""
    sign = SceneObject("stop sign", (0.0, 0.0, 12.0, 12.0))
    row = {"image": Image.new("RGB", (100, 100)), "scene": Scene(100, 100, (sign,)).to_json()}
    for seed in range(20):
        balancers = defaultdict(lambda: Balancer(slack=99))
        batch = TrafficCollator(processor, seed=seed, balancers=balancers, rng=random.Random(seed))([row, row])
        assert len(batch["pixel_values"]) == 2


def test_evaluation_asks_the_same_questions_in_any_order(processor):
    rows = [SyntheticRows()[i] for i in range(3)]
    collate = TrafficCollator(processor, questions_per_image=4, training=False)
    first, again, alone = collate(rows), collate(rows[::-1]), collate(rows[1:2])
    assert torch.equal(first["input_ids"], collate(rows)["input_ids"])
    assert torch.equal(first["pixel_values"].flip(0), again["pixel_values"])
    length = alone["input_ids"].shape[1]
    assert torch.equal(first["input_ids"][1, -length:], alone["input_ids"][0])
    assert (first["question_ends"] >= 0).sum() == 12
