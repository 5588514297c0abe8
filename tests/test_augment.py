"""Augmentation: the answers of a scene still hold for its changed image, and what cannot be seen becomes unknown."""

import colorsys
from dataclasses import replace

import numpy as np
import pytest

from traffic_vlm.data import augment as module
from traffic_vlm.data.augment import HIDDEN, HIDING, augment, change_light, crop
from traffic_vlm.data.scene import SYNTHETIC, Scene, SceneObject


def colored() -> tuple[np.ndarray, Scene]:
    """A red and a blue box, labeled as cars, in an image of half the width of its scene."""
    image = np.full((224, 112, 3), 120, np.uint8)
    image[90:140, 10:40], image[90:140, 75:105] = (220, 30, 30), (30, 30, 220)
    boxes = {"red": (20.0, 90.0, 80.0, 140.0), "blue": (150.0, 90.0, 210.0, 140.0)}
    cars = tuple(SceneObject("car", box, attributes={"color": name}) for name, box in boxes.items())
    return image, Scene(224, 224, cars, exhaustive=frozenset({"car"}), attributed={"car": frozenset({"color"})})


def test_boxes_still_hold_their_colors():
    rng, seen = np.random.default_rng(0), set()
    for _ in range(60):
        image, scene = augment(*colored(), rng)
        x, y = image.shape[1] / scene.width, image.shape[0] / scene.height
        assert x == pytest.approx(0.5, abs=0.02) and y == pytest.approx(1, abs=0.02)
        for item in scene.objects:
            left, top, right, bottom = item.box
            if item.visible < 0.5 or right - left < 12 or not item.attributes:
                continue
            inside = image[int(top * y) + 4 : int(bottom * y) - 4, int(left * x) + 3 : int(right * x) - 2]
            red, _, blue = inside.mean((0, 1))
            assert (red > blue) == (item.attributes["color"] == "red")
            seen.add((item.attributes["color"], (left + right) / 2 < scene.width / 2))
    assert len(seen) == 4  # both colors on both sides


def fraction(condition, scene, crops=True, times=400):
    image, rng = np.zeros((60, 60, 3), np.uint8), np.random.default_rng(0)
    return sum(condition(augment(image, scene, rng, crops)[1]) for _ in range(times)) / times


def test_rendered_scenes_are_cropped_less_often_and_numbers_mirrored_less_often():
    def is_cropped(scene):
        return (scene.width, scene.height) != (60, 60)

    def is_mirrored(scene):
        return scene.objects[0].box[0] > 20

    assert 0.42 < fraction(is_cropped, Scene(60, 60)) < 0.58
    assert 0.22 < fraction(is_cropped, Scene(60, 60, source=SYNTHETIC)) < 0.38
    sign = SceneObject("speed limit sign", (0, 25, 20, 35))
    assert 0.42 < fraction(is_mirrored, Scene(60, 60, (sign,)), crops=False) < 0.58
    number = replace(sign, attributes={"value": "50"})
    assert 0.12 < fraction(is_mirrored, Scene(60, 60, (number,)), crops=False) < 0.28


def test_a_crop_is_the_part_of_the_image_that_its_scene_describes():
    image, scene = colored()
    part, known = crop(image, scene, (0, 80, 100, 150))
    assert part.shape == (70, 50, 3) and (known.width, known.height) == (100, 70)
    assert [item.box for item in known.objects] == [(20, 10, 80, 60)]
    assert (part[15:55, 12:38] == (220, 30, 30)).all()


SHADES = {
    **{"white": (235, 235, 235), "silver": (190, 192, 195), "gray": (125, 125, 125), "black": (28, 28, 30)},
    **{"red": (200, 30, 30), "orange": (235, 125, 30), "yellow": (235, 205, 40), "brown": (110, 70, 40)},
    **{"green": (40, 130, 60), "blue": (40, 70, 190)},
}


@pytest.mark.parametrize(("name", "shade"), SHADES.items(), ids=SHADES)
def test_colors_keep_their_names_under_other_light(name, shade):
    image, rng = np.full((16, 16, 3), shade, np.uint8), np.random.default_rng(1)
    hue, saturation, _ = colorsys.rgb_to_hsv(*np.array(shade) / 255)
    for _ in range(100):
        seen = change_light(image, rng).astype(float).mean((0, 1))
        assert min(SHADES, key=lambda other: ((np.array(SHADES[other]) - seen) ** 2).sum()) == name
        assert np.abs(seen - shade).max() < 0.16 * 255
        if saturation > 0.5:
            turn = abs(colorsys.rgb_to_hsv(*seen / 255)[0] - hue)
            assert min(turn, 1 - turn) < 10 / 360


DARK = {"color", "weather", "time of day", "road surface"}
UNSEEN = {
    "darkness": DARK,
    "exposure": DARK,
    "gray": {"color", "state", "weather", "red light"},
    "haze": {"color", "weather", "glare"},
    "rain": {"weather", "road surface"},
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_a_change_hides_is_unknown(name, monkeypatch):
    monkeypatch.setattr(module, "HIDDEN", {name: (1.0, HIDDEN[name][1])})
    image, scene = colored()
    light = SceneObject("traffic light", (100, 10, 110, 40), attributes={"state": "red"})
    attributes = {"weather": "clear", "time of day": "day", "road surface": "dry", "lane count": "3"}
    presence = {"red light": True, "glare": True, "animal": False}
    scene = replace(scene, objects=(*scene.objects, light), scene_attributes=attributes, presence=presence)
    seen, known = augment(image, scene, np.random.default_rng(0), crops=False)
    assert not np.array_equal(seen, image)
    left = {*known.scene_attributes, *known.presence, *(name for item in known.objects for name in item.attributes)}
    before = {*attributes, *presence, "color", "state"}
    assert left == before - UNSEEN[name]
    assert known.attributed == ({} if "color" in UNSEEN[name] else scene.attributed)


def test_strong_changes_are_visible_and_repeatable():
    image = np.random.default_rng(1).integers(0, 255, (64, 96, 3), np.uint8)
    for name, change in HIDING.items():
        changed = change(image, np.random.default_rng(3))
        assert changed.shape == image.shape and changed.dtype == np.uint8
        assert np.abs(changed.astype(float) - image).mean() > 2, name
        assert np.array_equal(changed, change(image, np.random.default_rng(3)))
    for seed in range(20):
        once, again = (augment(image, Scene(96, 64), np.random.default_rng(seed))[0] for _ in range(2))
        assert np.array_equal(once, again)
