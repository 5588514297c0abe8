"""Augmentation: the answers of a scene still hold for its changed image, and what cannot be seen becomes unknown."""

import colorsys
from dataclasses import replace

import numpy as np
import pytest

from traffic_vlm.data import augment as module
from traffic_vlm.data.augment import HIDDEN, augment, change_light
from traffic_vlm.data.scene import Scene, SceneObject


IMAGE = np.full((224, 112, 3), 120, np.uint8)  # a red and a blue box in an image of half the width of its scene
IMAGE[90:140, 10:40], IMAGE[90:140, 75:105] = (220, 30, 30), (30, 30, 220)
BOXES = {"red": (20.0, 90.0, 80.0, 140.0), "blue": (150.0, 90.0, 210.0, 140.0)}
CARS = tuple(SceneObject("car", box, attributes={"color": name}) for name, box in BOXES.items())
SCENE = Scene(224, 224, CARS, exhaustive=frozenset({"car"}), attributed={"car": frozenset({"color"})})


def test_boxes_move_with_the_pixels():
    rng, seen = np.random.default_rng(0), set()
    for _ in range(60):
        image, scene = augment(IMAGE, SCENE, rng)
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


def test_half_of_the_images_with_a_labeled_largest_vehicle_are_close_ups_of_it():
    wide = replace(SCENE, objects=(replace(CARS[0], is_largest=True), CARS[1]))
    rng, sides = np.random.default_rng(0), []
    for _ in range(200):
        _, scene = augment(IMAGE, wide, rng)
        [red] = [item for item in scene.objects if item.is_largest]
        assert (red.box[2] - red.box[0], red.box[3] - red.box[1]) == (60, 50)  # none of it is cut off
        sides.append(scene.width / 60)
    close_ups = [side for side in sides if side < 224 / 60]
    assert 70 < len(close_ups) < 130 and min(close_ups) >= 1.2 and max(close_ups) < 3.1


SHADES = {
    **{"white": (235, 235, 235), "silver": (190, 192, 195), "gray": (125, 125, 125), "black": (28, 28, 30)},
    **{"red": (200, 30, 30), "orange": (235, 125, 30), "yellow": (235, 205, 40), "brown": (110, 70, 40)},
    **{"green": (40, 130, 60), "blue": (40, 70, 190)},
}


@pytest.mark.parametrize(("name", "shade"), SHADES.items(), ids=SHADES)
def test_colors_keep_their_names_under_other_light(name, shade):
    image, rng = np.full((16, 16, 3), shade, np.uint8), np.random.default_rng(1)
    hue, saturation, _ = colorsys.rgb_to_hsv(*np.array(shade) / 255)
    for _ in range(60):
        seen = change_light(image, rng).astype(float).mean((0, 1))
        assert min(SHADES, key=lambda other: ((np.array(SHADES[other]) - seen) ** 2).sum()) == name
        if saturation > 0.5:
            turn = abs(colorsys.rgb_to_hsv(*seen / 255)[0] - hue)
            assert min(turn, 1 - turn) < 10 / 360


@pytest.mark.parametrize("change", HIDDEN)
def test_what_a_change_hides_is_unknown(change, monkeypatch):
    hidden = HIDDEN[change][1]
    monkeypatch.setattr(module, "HIDDEN", {change: (1.0, hidden)})
    light = SceneObject("traffic light", (100, 10, 110, 40), attributes={"state": "red"})
    attributes = {"weather": "clear", "time of day": "day", "road surface": "dry", "lane count": "3"}
    presence = {"red light": True, "glare": True, "animal": False}
    scene = replace(SCENE, objects=(*CARS, light), scene_attributes=attributes, presence=presence)
    seen, known = augment(IMAGE, scene, np.random.default_rng(0), crops=False)
    left = {*known.scene_attributes, *known.presence, *(name for item in known.objects for name in item.attributes)}
    assert left == {*attributes, *presence, "color", "state"} - {*hidden}
    assert known.attributed == ({} if "color" in hidden else SCENE.attributed)
    assert seen.shape == IMAGE.shape and seen.dtype == np.uint8
    assert np.abs(seen.astype(float) - IMAGE).mean() > 2  # the change itself
    assert np.array_equal(seen, augment(IMAGE, scene, np.random.default_rng(0), crops=False)[0])  # repeatable
