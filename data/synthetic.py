"""Synthetic traffic scenes: an image and what can truly be said about it, from a seed.

    seed → plan (what stands where, in metres) → canvas (colours and object numbers) → photograph and truth

The plan comes from `synthetic_layout`, the canvas from `synthetic_drawing`. Numbers under every pixel tell what can be
seen of each object; the photograph then gets rain, snow, glow, noise and blur, which hide faint crosswalks and nothing
else in the truth.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from PIL import Image, ImageDraw

from .scene import Scene, SceneObject
from .synthetic_dice import Dice
from .synthetic_drawing import (
    BUILDING,
    FENCE,
    FIRST,
    OTHER,
    POLE,
    ROAD,
    SCALE,
    SIDEWALK,
    SKY,
    TERRAIN,
    TREE,
    Faces,
    Lamp,
    Patch,
    Thing,
    cast_shadows,
    draw_ground,
    gather,
    light_ground,
    paint,
    painting_order,
    prepare,
    silhouette,
)
from .synthetic_ground import CROSSWALK, STRIPES
from .synthetic_layout import PRESENCE, Plan, make_plan
from .synthetic_mesh import Camera, turn
from .synthetic_street import LENS
from .synthetic_weather import add_glow, photograph, rain, sky, snow, wet
from .truths import GROUNDED, NOTHING, PATCHES, Seen


STUFF = {
    "sky": SKY,
    "road": ROAD,
    "sidewalk": SIDEWALK,
    "building": BUILDING,
    "tree": TREE,
    "pole": POLE,
    "fence": FENCE,
}
EXHAUSTIVE = frozenset({*PRESENCE, *STUFF, "vehicle", "person", "rider", "animal", "crosswalk"})
CELLS = 14
LEGIBLE = {2: 16.0, 3: 21.0}  # digits of a speed limit: smallest width of its sign in pixels of a 224-pixel image
# Light that comes through from a thing, below which the dark or the fog hides it, and what then is left of it.
DARK, UNSEEN = 0.17, 0.25
FOG = 0.5  # share of a thing's light lost to the haze from which its colour is anybody's guess,
THIN_FOG = 0.25  # and of a thing without a hue, as the haze turns black to gray and gray to white
HUELESS = frozenset({"black", "gray", "silver", "white"})
LAMP_SEEN = 0.5  # of a traffic light's lit lamp, to tell its state
# Crosswalks: levels of a colour between their stripes and the road, and height in image sizes, to be surely seen.
FAINT, FLAT = 15, 4 / 224
# Metres: a thing that the picture puts near must not be farther than the first, nor a far one nearer than the second.
NEAR_WITHIN, FAR_BEYOND = 12.0, 14.0
# How rough each kind of surface looks, in strengths of noise.
ROUGHNESS = {SKY: 0, TERRAIN: 12, ROAD: 6, SIDEWALK: 5, BUILDING: 4, TREE: 14, POLE: 1, FENCE: 3, OTHER: 5}


def render(seed: int, size: int = 224) -> tuple[Image.Image, Scene]:
    """Draws the scene of a seed.

    Args:
        seed: any integer; the same one gives the same bytes and the same truth everywhere.
        size: width and height of the image in pixels.

    Returns:
        An RGB image and its scene, whose boxes and areas are in pixels of the image, to halves and quarters.
    """
    if size < 16:
        raise ValueError(f"size={size} is below 16 pixels")
    return draw(make_plan(seed), size)


def draw(plan: Plan, size: int) -> tuple[Image.Image, Scene]:
    """Draws a plan."""
    dice = Dice(f"photograph {plan.seed}")
    wide = size * SCALE
    canvas, crossings = draw_backdrop(plan, wide, dice)
    units = gather(plan.things, plan.camera)
    units = [units[i] for i in painting_order(units, plan.camera)] if units else []
    numbers = number_things(plan.things, FIRST + len(crossings))
    cast_shadows(canvas, plan.things, units, plan.camera, plan.light)
    faces = prepare(plan.things, units, plan.camera, plan.light, wide) if units else None
    if faces:
        paint(canvas, faces, numbers)
    if plan.hood:
        draw_hood(canvas, plan.hood)
    ids = canvas[..., 3].copy()
    image = develop(canvas, ids, plan, numbers, dice)
    return Image.fromarray(image), describe(plan, ids, faces, numbers, crossings, image)


@dataclass(frozen=True)
class Crossing:
    """A crosswalk on the canvas: its number, its area there with nothing in the way (0: unknown), and its stripes."""

    number: int
    whole: int
    stripes: Patch


def draw_backdrop(plan: Plan, wide: int, dice: Dice) -> tuple[np.ndarray, list[Crossing]]:
    """Sky, hills and ground on a canvas of `wide` pixels; and its crosswalks."""
    camera, light = plan.camera, plan.light
    small = sky(wide // SCALE, camera.horizon(), light, dice)
    small = cv2.merge([*cv2.split(small), np.full(small.shape[:2], SKY, dtype=np.uint8)])
    canvas = cv2.resize(small, (wide, wide), interpolation=cv2.INTER_NEAREST)
    level = (0.5 - camera.horizon()) / camera.focal[1]
    horizon = camera.pixels(np.array([(-3.0, level, 1.0), (3.0, level, 1.0)]), wide)
    if plan.skyline:
        points = [(x, 0.0, 0.0) for x, _ in plan.skyline]
        base = np.array(points)
        base[:, 0] = (base[:, 0] - 0.65) * 1.2 / camera.focal[0] * max(1.0, camera.focal[0])
        base[:, 1] = level + np.array([y for _, y in plan.skyline])
        base[:, 2] = 1.0
        outline = np.concatenate([camera.pixels(base, wide), horizon[::-1]])
        hidden = light.hidden(220.0)
        lit = light.shine(plan.skyline_color, 0.5)
        color = [round(c + (h - c) * min(1.0, 0.25 + hidden)) for c, h in zip(lit, light.haze_color)]
        cv2.fillPoly(canvas, [outline], (*color, OTHER), cv2.LINE_8, 4)
    below = np.array([[16 * wide * 2, 16 * wide * 9], [-16 * wide, 16 * wide * 9]], dtype=np.int32)
    ground = light.shine(plan.land)
    cv2.fillPoly(canvas, [np.concatenate([horizon, below])], (*ground, TERRAIN), cv2.LINE_8, 4)
    numbered: list[tuple[Patch, int]] = []
    crossings: list[Crossing] = []
    for index, patch in enumerate(plan.patches):
        if patch.kind == CROSSWALK:  # its stripes come next
            whole = patch_area(patch, plan, wide)
            crossings.append(Crossing(FIRST + len(crossings), whole, plan.patches[index + 1]))
        numbered.append((patch, crossings[-1].number if patch.kind in (CROSSWALK, STRIPES) else patch.kind))
    draw_ground(canvas, numbered, camera, light)
    light_ground(canvas, camera, light)
    return canvas, crossings


def patch_area(patch: Patch, plan: Plan, wide: int) -> int:
    """Canvas pixels of a patch with nothing in the way and no border; 0 when part of it is behind the camera."""
    flat = np.array([(x, 0.0, z) for x, z in patch.polygons[0]])
    view = plan.camera.view(flat)
    if view[:, 2].min() < 0.1:
        return 0
    return round(cv2.contourArea(plan.camera.pixels(view, wide)) / 256)


def number_things(things: Sequence[Thing], first: int) -> list[int]:
    """What each thing writes under its pixels: a number of its own, or that of its kind."""
    numbers = []
    for thing in things:
        if thing.label is None:
            numbers.append(OTHER)
        elif thing.label in STUFF:
            numbers.append(STUFF[thing.label])
        else:
            numbers.append(min(first, 255))
            first += 1
    return numbers


def draw_hood(canvas: np.ndarray, color: tuple[int, int, int]) -> None:
    """The bonnet of the own vehicle at the lower border."""
    wide = canvas.shape[0]
    share = ((-0.05, 1.05), (0.02, 0.97), (0.15, 0.935), (0.5, 0.92), (0.85, 0.935), (0.98, 0.97), (1.05, 1.05))
    points = np.array([(round(x * wide * 16), round(y * wide * 16)) for x, y in share], dtype=np.int32)
    cv2.fillPoly(canvas, [points], (*color, OTHER), cv2.LINE_8, 4)


def lamp_place(thing: Thing, lamp: Lamp) -> tuple[float, float, float]:
    """World x, y and z of a lamp in metres."""
    sine, cosine = turn(thing.heading)
    right, ahead = lamp.place[0] * thing.scale[0], lamp.place[2] * thing.scale[2]
    x = thing.place[0] + right * cosine + ahead * sine
    return x, thing.place[1] + lamp.place[1] * thing.scale[1], thing.place[2] + ahead * cosine - right * sine


def visible_lamps(plan: Plan, ids: np.ndarray, numbers: list[int], size: int) -> list[tuple[int, int, int, tuple]]:
    """Lamps that nothing hides and that shine this way: (column, row, radius, colour) in image pixels."""
    camera, found = plan.camera, []
    for thing, number in zip(plan.things, numbers):
        for lamp in thing.lamps:
            x, y, z = lamp_place(thing, lamp)
            sine, cosine = turn(thing.heading)
            if lamp.front * (sine * (camera.x - x) - cosine * z) < 0:  # shines away from the camera
                continue
            u, v, depth = camera.look(x, y, z)
            column, row = int(u * size), int(v * size)
            if depth < 1 or not (0 <= column < size and 0 <= row < size) or ids[row * SCALE, column * SCALE] != number:
                continue
            radius = min(lamp.radius * camera.focal[1] * size / depth, size / 6)
            if radius >= 1:
                found.append((column, row, int(radius), lamp.color))
    return found


def develop(canvas: np.ndarray, ids: np.ndarray, plan: Plan, numbers: list[int], dice: Dice) -> np.ndarray:
    """Canvas → photograph, uint8 [size, size, 3]."""
    size = canvas.shape[0] // SCALE
    light = plan.light
    image = cv2.cvtColor(cv2.resize(canvas, (size, size), interpolation=cv2.INTER_AREA), cv2.COLOR_BGRA2BGR)
    below = ids[::SCALE, ::SCALE]
    if light.weather == "rainy":
        image = wet(image, below == ROAD)
    lamps = visible_lamps(plan, ids, numbers, size)
    if lamps:
        image = add_glow(image, lamps)
    if light.weather == "rainy":
        image = rain(image, light, dice)
    elif light.weather == "snowy":
        image = snow(image, light, dice)
    rough = np.full(256, 2, dtype=np.int16)
    for number, strength in ROUGHNESS.items():
        rough[number] = strength
    return photograph(image, rough[below], light, dice)


# Truth


def describe(
    plan: Plan,
    ids: np.ndarray,
    faces: Faces | None,
    numbers: list[int],
    crossings: list[Crossing],
    image: np.ndarray,
) -> Scene:
    """What can be seen, counted in the numbers under the pixels."""
    size = ids.shape[0] // SCALE
    objects = stuff(ids, size)
    objects += [item for crossing in crossings if (item := describe_crosswalk(plan, crossing, ids, image))]
    misplaced = False
    for index, (thing, number) in enumerate(zip(plan.things, numbers)):
        if number >= FIRST and faces is not None and (item := describe_thing(plan, thing, index, number, ids, faces)):
            objects.append(item)
            misplaced = misplaced or is_misplaced(plan, thing, item, size)
    facts = {"weather": plan.light.weather, "time of day": plan.light.time}
    if plan.light.time == "night" and plan.light.weather in ("clear", "cloudy"):
        del facts["weather"]  # nobody can tell
    if plan.view and not misplaced:
        facts["view"] = plan.view
    attributed = {
        label: frozenset({name})
        for label, name in (("traffic light", "state"), *((v, "color") for v in ("car", "van", "bus", "truck")),
                            ("motorcycle", "color"), ("bicycle", "color"), ("speed limit sign", "value"))
        if all(name in item.attributes for item in objects if item.label == label)
    }  # fmt: skip
    # Far roofs are drawn as no building, but look like one.
    exhaustive = EXHAUSTIVE - {"building"} if plan.setting == "city" and plan.skyline else EXHAUSTIVE
    return Scene(size, size, tuple(objects), facts, exhaustive, attributed, "synthetic", str(plan.seed))


def bounds(mask: np.ndarray, left: int = 0, top: int = 0) -> tuple[float, float, float, float]:
    """Box in image pixels of a canvas mask that begins at (left, top)."""
    columns, rows = np.flatnonzero(mask.any(axis=0)), np.flatnonzero(mask.any(axis=1))
    return (
        (left + int(columns[0])) / SCALE,
        (top + int(rows[0])) / SCALE,
        (left + int(columns[-1]) + 1) / SCALE,
        (top + int(rows[-1]) + 1) / SCALE,
    )


def stuff(ids: np.ndarray, size: int) -> list[SceneObject]:
    """Sky, road and the like, with the share of each cell that they fill; counted in every other canvas pixel."""
    places = np.arange(size, dtype=np.int32) * CELLS // size
    below = ids[::SCALE, ::SCALE]
    index = (places[:, None] * CELLS + places[None, :]) * FIRST + np.minimum(below, FIRST - 1)
    cells = np.bincount(index.ravel(), minlength=CELLS * CELLS * FIRST).reshape(CELLS, CELLS, FIRST)
    per_cell = cells.sum(axis=2)
    counts = cells.sum(axis=(0, 1)).tolist()
    objects = []
    for label, number in STUFF.items():
        if counts[number]:
            filled = np.round(cells[..., number] / per_cell, 3).tolist()
            left, top, right, bottom = (edge * SCALE for edge in bounds(below == number))
            grid = tuple(tuple(row) for row in filled)
            item = SceneObject(label, (left, top, right, bottom), counts[number], cells=grid, is_instance=False)
            objects.append(item)
    return objects


def describe_crosswalk(plan: Plan, crossing: Crossing, ids: np.ndarray, image: np.ndarray) -> SceneObject | None:
    """The truth of a crosswalk, None if nothing of it can be seen."""
    mask = ids == crossing.number
    count = cv2.countNonZero(mask.view(np.uint8))
    if not count:
        return None
    box = bounds(mask)
    visible = min(1.0, count / crossing.whole) if crossing.whole else 0.5
    if box[3] - box[1] < FLAT * image.shape[0] or paint_contrast(plan, crossing.stripes, mask, image) < FAINT:
        visible *= UNSEEN
    return SceneObject("crosswalk", box, count / SCALE**2, round(visible, 4))


def paint_contrast(plan: Plan, stripes: Patch, mask: np.ndarray, image: np.ndarray) -> float:
    """Levels of red, green or blue by which stripes differ in the photograph from the rest of a mask on the canvas."""
    drawn = np.zeros((*mask.shape, 4), dtype=np.uint8)
    draw_ground(drawn, [(stripes, 1)], plan.camera, plan.light)
    seen, painted = mask[::SCALE, ::SCALE], drawn[::SCALE, ::SCALE, 3] > 0
    paint, road = image[seen & painted], image[seen & ~painted]  # [N, 3]
    return float(np.abs(paint.mean(axis=0) - road.mean(axis=0)).max()) if paint.size and road.size else 0.0


def describe_thing(
    plan: Plan, thing: Thing, index: int, number: int, ids: np.ndarray, faces: Faces
) -> SceneObject | None:
    """The truth of one thing, None if nothing of it can be seen."""
    wide = ids.shape[0]
    whole, (left, top, right, bottom) = silhouette(faces, index)
    left, top = min(max(left, 0), wide - 1), min(max(top, 0), wide - 1)
    mask = ids[top : max(bottom, top) + 1, left : max(right, left) + 1] == number
    count = cv2.countNonZero(mask.view(np.uint8))
    if not count:
        return None
    box = bounds(mask, left, top)
    depth = plan.camera.look(*thing.place)[2]
    light = plan.light
    hidden = light.hidden(depth)
    bright = light.ambient[1] + light.headlight(depth) + light.sun / 2
    attributes = dict(thing.attributes)
    if "color" in attributes and (hidden > (THIN_FOG if attributes["color"] in HUELESS else FOG) or bright < 0.5):
        del attributes["color"]
    if "state" in attributes and not any(shows_lamp(plan, thing, lamp, number, ids) for lamp in thing.lamps):
        del attributes["state"]
    visible = round(min(1.0, count / max(whole, count)), 4)
    if bright * (1 - hidden) < DARK and (not thing.bright or hidden > 0.8):
        visible = round(visible * UNSEEN, 4)
    if "value" in attributes:
        least = LEGIBLE[len(attributes["value"].rjust(2))]
        tall, across = box[3] - box[1], box[2] - box[0]
        if tall < least or across < least * 0.75 or visible < 0.85 or hidden > 0.6 or bright < 0.25:
            del attributes["value"]
    return SceneObject(thing.label or "", box, count / SCALE**2, visible, attributes)


def shows_lamp(plan: Plan, thing: Thing, lamp: Lamp, number: int, ids: np.ndarray) -> bool:
    """Whether enough of a traffic light's lit lamp is in the picture with nothing before it."""
    wide, focal = ids.shape[0], plan.camera.focal
    u, v, depth = plan.camera.look(*lamp_place(thing, lamp))
    radius = LENS * thing.scale[1] / depth
    left, right = round((u - radius * focal[0]) * wide), round((u + radius * focal[0]) * wide) + 1
    top, bottom = round((v - radius * focal[1]) * wide), round((v + radius * focal[1]) * wide) + 1
    part = ids[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] == number
    return cv2.countNonZero(part.view(np.uint8)) >= LAMP_SEEN * (right - left) * (bottom - top)


def is_misplaced(plan: Plan, thing: Thing, item: SceneObject, size: int) -> bool:
    """Whether its place in a driver's view tells a wrong distance, as with a long lens or a high or tilted camera."""
    if plan.view != "driver" or item.label not in GROUNDED or item.size * PATCHES < NOTHING * size * size:
        return False
    seen = Seen(item, Scene(size, size), 0.0)
    if not seen.at("near") and not seen.at("far"):
        return False
    metres = distance(thing, plan.camera)
    return metres > NEAR_WITHIN if seen.at("near") else metres < FAR_BEYOND


def distance(thing: Thing, camera: Camera) -> float:
    """Metres along the ground from below the camera to the nearest point of what a thing stands on."""
    sine, cosine = turn(thing.heading)
    x, z = camera.x - thing.place[0], -thing.place[2]
    gaps = []
    for place, scale, low, high in (
        (x * cosine - z * sine, thing.scale[0], 0, 1),
        (x * sine + z * cosine, thing.scale[2], 2, 3),
    ):
        ends = [mesh.footprint[end] * scale for mesh in thing.meshes for end in (low, high)]
        gaps.append(max(min(ends) - place, place - max(ends), 0.0))
    return math.sqrt(gaps[0] * gaps[0] + gaps[1] * gaps[1])


# Showing


def contact_sheet(
    items: Sequence[tuple[Image.Image, list[str]]], path: str | os.PathLike[str], columns: int = 6
) -> None:
    """Writes images with lines of text below each as one PNG, its folder made if missing."""
    if not items:
        raise ValueError("a contact sheet needs at least one image")
    wide, tall = items[0][0].size
    high = tall + 6 + 11 * max(len(lines) for _, lines in items)
    rows = -(-len(items) // columns)
    sheet = Image.new("RGB", (columns * (wide + 6) + 6, rows * high + 6), "white")
    pen = ImageDraw.Draw(sheet)
    for index, (image, lines) in enumerate(items):
        x, y = 6 + index % columns * (wide + 6), 6 + index // columns * high
        sheet.paste(image, (x, y))
        for row, line in enumerate(lines):
            pen.text((x, y + tall + 1 + 11 * row), line, fill="black", font_size=10)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    sheet.save(path)
