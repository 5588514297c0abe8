"""Draws a plan: first the canvas, then the photograph and its annotations."""

import cv2
import numpy as np
from PIL import Image

from ..scene import Scene
from .backdrop import draw_backdrop
from .camera import SCALE
from .dice import Dice
from .labels import Drawing, describe
from .layout import make_plan
from .photo import add_glow, photograph, rain, snow, wet
from .plan import BUILDING, FENCE, FIRST, OTHER, POLE, ROAD, SIDEWALK, SKY, STUFF, TERRAIN, TREE, Plan, Thing
from .stage import Stage


# Strength of the texture of each surface, 2 for all others.
ROUGHNESS = {SKY: 0, TERRAIN: 12, ROAD: 6, SIDEWALK: 5, BUILDING: 4, TREE: 14, POLE: 1, FENCE: 3, OTHER: 5}
# Outline of the hood of the camera's vehicle, (column, row) in image sizes.
HOOD = ((-0.05, 1.05), (0.02, 0.97), (0.15, 0.935), (0.5, 0.92), (0.85, 0.935), (0.98, 0.97), (1.05, 1.05))


def render(seed: int, size: int = 224) -> tuple[Image.Image, Scene]:
    """The image and the annotations of a seed.

    Args:
        seed: any integer; on one machine the same seed gives the same image and the same annotations.
        size: width and height of the image in pixels.

    Returns:
        An RGB image and its scene, whose boxes and areas are in pixels of the image.

    Raises:
        ValueError: `size` is below 16 pixels.
    """
    if size < 16:
        raise ValueError(f"size must be at least 16 pixels, got {size}")
    return draw(make_plan(seed), size)


def draw(plan: Plan, size: int) -> tuple[Image.Image, Scene]:
    """The image and the annotations of a plan, for a width and height of `size` pixels."""
    dice = Dice(f"photograph {plan.seed}")
    canvas, crosswalks = draw_backdrop(plan, size * SCALE, dice)
    numbers = number_things(plan.things, FIRST + 2 * len(crosswalks))
    stage = Stage(plan, len(canvas))
    stage.cast_shadows(canvas)
    stage.paint(canvas, numbers)
    if plan.hood:
        points = np.rint(np.array(HOOD) * (16 * len(canvas))).astype(np.int32)
        cv2.fillPoly(canvas, [points], (*plan.hood, OTHER), cv2.LINE_8, 4)
    ids = canvas[..., 3].copy()
    image = develop(canvas, ids[::SCALE, ::SCALE], plan, numbers, dice)
    return Image.fromarray(image), describe(Drawing(plan, ids, numbers, crosswalks, stage, image))


def number_things(things: list[Thing], first: int) -> list[int]:
    """The number of each thing on the canvas: counted from `first`, or that of its class if it has no instances."""
    numbers = []
    for thing in things:
        numbers.append(STUFF.get(thing.category, min(first, 255)))
        first += thing.category not in STUFF
    return numbers


def develop(canvas: np.ndarray, ids: np.ndarray, plan: Plan, numbers: list[int], dice: Dice) -> np.ndarray:
    """The photograph of a canvas, uint8 [size, size, 3]; `ids` are the object numbers, [size, size]."""
    light = plan.light
    image = cv2.cvtColor(cv2.resize(canvas, ids.shape, interpolation=cv2.INTER_AREA), cv2.COLOR_RGBA2RGB)
    if light.weather == "rainy":
        image = wet(image, ids == ROAD)
    add_glows(image, ids, plan, numbers)
    if light.weather == "rainy":
        image = rain(image, light, dice)
    elif light.weather == "snowy":
        image = snow(image, light, dice)
    rough = np.full(256, 2, dtype=np.float32)
    rough[list(ROUGHNESS)] = list(ROUGHNESS.values())
    return photograph(image, rough[ids], light, dice)


def add_glows(image: np.ndarray, ids: np.ndarray, plan: Plan, numbers: list[int]) -> None:
    """Add the glow of all lamps that are visible and shine towards the camera."""
    camera, size = plan.camera, len(image)
    for thing, number in zip(plan.things, numbers):
        for lamp in thing.lamps:
            x, y, z = thing.world(lamp.place)
            ahead = np.sin(thing.heading) * (camera.x - x) - np.cos(thing.heading) * z
            u, v, depth = camera.look(x, y, z)
            column, row = int(u * size), int(v * size)
            if lamp.front * ahead < 0 or depth < 1 or not (0 <= column < size and 0 <= row < size):
                continue
            radius = int(min(lamp.radius * camera.focal[1] * size / depth, size / 6))
            if radius >= 1 and ids[row, column] == number:
                add_glow(image, column, row, radius, lamp.color)
