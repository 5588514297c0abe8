"""Annotations of a drawn plan, counted from the object number that each pixel carries."""

from typing import NamedTuple

import cv2
import numpy as np

from ..scene import GRID, SCENE_ATTRIBUTES, SPEED_LIMITS, SYNTHETIC, Scene, SceneObject, given_to_all
from ..truth import GROUNDED, NOTHING, PATCHES, VisibleObject
from .camera import SCALE
from .dice import load
from .plan import STUFF, Lamp, Plan
from .roadside import LENS
from .stage import Stage


EXHAUSTIVE = frozenset({*load("scenes.yaml")["presence"], *STUFF, "vehicle", "person", "rider", "animal", "crosswalk"})
ATTRIBUTES = {
    **dict.fromkeys(("car", "van", "bus", "truck"), ("color", "status", "facing", "brake lights")),
    **dict.fromkeys(("motorcycle", "bicycle", "trailer"), ("color",)),
    "pedestrian": ("status",),
    "traffic light": ("state",),
    "speed limit sign": ("value",),
}
# A thing from which less light than DARK reaches the camera is hard to see: its `visible` is multiplied by UNSEEN.
DARK, UNSEEN = 0.17, 0.25
LAMP_SEEN = 0.5  # min visible fraction of a traffic light's lit lamp, for its state to be known
POSE_VISIBLE = 0.6  # min visible fraction of a thing whose pose, small lights and traits can be seen
TRAITS = ("parked car", "child", "umbrella", "helmet")
TRAIT_PATCHES = 1.5  # min area of a thing whose traits can be seen
LANES_AT = (9.0, 13.0, 18.0, 24.0)  # meters ahead; all lanes must be in the picture at one of these
THICK = 0.5  # with more than this fraction of the light from 40 m ahead lost to haze, the road is unknown
BEND = 0.006  # 1/m; a weaker bend is hard to see
# A crosswalk is clearly visible from this contrast of its stripes (levels), and this height (image sizes).
FAINT, FLAT = 15, 4 / 224
# Questions judge distances by rows of the image: what looks near there must be nearer than NEAR_WITHIN, what looks far
# must be farther than FAR_BEYOND.
NEAR_WITHIN, FAR_BEYOND = 12.0, 14.0  # meters


class Rule(NamedTuple):
    """The conditions under which an attribute of a thing can be told from the image.

    Attributes:
        visible: least fraction of the thing that nothing hides.
        hidden: greatest fraction of its light lost to haze.
        bright: least light that falls on it.
        tall: least height in pixels of a 224-pixel image.
        pixels: least height in pixels; least width is 3/4 of it.
    """

    visible: float = 0.0
    hidden: float = 1.0
    bright: float = 0.0
    tall: int = 0
    pixels: int = 0


# The rule of an attribute, or of one of its values.
RULES = {
    "color": Rule(hidden=0.5, bright=0.5),
    # Haze turns black to gray and gray to white.
    **dict.fromkeys(("black", "gray", "silver", "white"), Rule(hidden=0.25, bright=0.5)),
    **dict.fromkeys(("status", "facing", "brake lights"), Rule(POSE_VISIBLE, hidden=0.5, tall=18)),
    "state": Rule(),  # and its lamp must be visible
    "value": Rule(0.85, hidden=0.6, bright=0.25, pixels=16),
    **dict.fromkeys((value for value in SPEED_LIMITS if len(value) > 2), Rule(0.85, 0.6, 0.25, pixels=21)),
}


def label_scene(stage: Stage, image: np.ndarray) -> Scene:
    """The scene of a stage and its photograph [size, size, 3]: all annotations."""
    plan, size, light = stage.plan, stage.size, stage.plan.light
    crosswalks = (label_crosswalk(stage, number, image) for number in stage.crosswalks)
    indices = (index for index, thing in enumerate(plan.things) if thing.category not in STUFF)
    items = {index: item for index in indices if (item := label_thing(stage, index))}
    objects = (*label_stuff(stage.ids[::SCALE, ::SCALE]), *filter(None, crosswalks), *items.values())
    scene_attributes = {"weather": light.weather, "time of day": light.time, **label_road(plan)}
    if light.time == "night" and light.weather in ("clear", "cloudy"):
        del scene_attributes["weather"]  # not visible
    if not any(is_misplaced(stage, index, item) for index, item in items.items()):
        scene_attributes["view"] = plan.view
    attributed = given_to_all({category: frozenset(names) for category, names in ATTRIBUTES.items()}, objects)
    presence = label_presence(stage, items)
    return Scene(size, size, objects, scene_attributes, EXHAUSTIVE, attributed, SYNTHETIC, str(plan.seed), presence)


def label_presence(stage: Stage, items: dict[int, SceneObject]) -> dict[str, bool]:
    """{helmet, lane line and the like: whether the scene has one}, as far as the image shows it; `items` by thing."""
    plan, presence = stage.plan, {}
    large = TRAIT_PATCHES / PATCHES * stage.size**2
    for name in TRAITS:
        shown = [item for index, item in items.items() if name in plan.things[index].traits]
        if not shown or any(item.size >= large and item.visible >= POSE_VISIBLE for item in shown):
            presence[name] = bool(shown)
    if plan.light.weather != "snowy":
        presence["lane line"] = plan.marked
    return presence


def label_road(plan: Plan) -> dict[str, str]:
    """Scene attributes "lane count" and "road shape", as far as the image shows them."""
    road, camera = plan.road, plan.camera
    if plan.light.weather == "snowy" or plan.light.hidden(40.0) > THICK:
        return {}
    found = {}
    edges = ([camera.look(x, 0.0, z) for x, z in (road.at(road.left, z), road.at(road.right, z))] for z in LANES_AT)
    all_in_view = any(all(0 < column < 1 and 0 < row < 1 and depth > 0 for column, row, depth in two) for two in edges)
    if plan.marked and all_in_view and str(len(road.lanes)) in SCENE_ATTRIBUTES["lane count"]:
        found["lane count"] = str(len(road.lanes))
    if plan.view == "driver" and road.junction is None and (road.bend == 0 or abs(road.bend) >= BEND):
        found["road shape"] = "straight" if road.bend == 0 else "right" if road.bend > 0 else "left"
    return found


def bounding_box(mask: np.ndarray, scale: int, left: int = 0, top: int = 0) -> tuple[float, float, float, float]:
    """Box, in image pixels, of a mask that begins at (left, top) and has `scale` pixels per image pixel."""
    x, y, width, height = cv2.boundingRect(mask.view(np.uint8))
    return (left + x) / scale, (top + y) / scale, (left + x + width) / scale, (top + y + height) / scale


def label_stuff(ids: np.ndarray) -> list[SceneObject]:
    """Objects of sky, road and other classes without instances, with the fraction of each patch that they fill.

    Args:
        ids: object numbers, [size, size].
    """
    objects = []
    for category, number in STUFF.items():
        mask = ids == number
        if area := int(np.count_nonzero(mask)):
            filled = cv2.resize(mask.astype(np.float32), (GRID, GRID), interpolation=cv2.INTER_AREA)
            coverage = tuple(tuple(row) for row in np.round(filled.astype(float), 3).tolist())
            objects.append(SceneObject(category, bounding_box(mask, 1), area, coverage=coverage, is_instance=False))
    return objects


def label_crosswalk(stage: Stage, number: int, image: np.ndarray) -> SceneObject | None:
    """The annotation of a crosswalk, given by its object number; None if nothing of it is visible."""
    stripes = stage.ids == number + 1
    mask = stripes | (stage.ids == number)
    count = int(np.count_nonzero(mask))
    if not count:
        return None
    box = bounding_box(mask, SCALE)
    area = stage.crosswalks[number]
    visible = min(1.0, count / area) if area else 0.5
    paint, road = image[stripes[::SCALE, ::SCALE]], image[(mask & ~stripes)[::SCALE, ::SCALE]]  # [N, 3]
    contrast = np.abs(paint.mean(axis=0) - road.mean(axis=0)).max() if paint.size and road.size else 0.0
    if box[3] - box[1] < FLAT * stage.size or contrast < FAINT:
        visible *= UNSEEN
    return SceneObject("crosswalk", box, count / SCALE**2, max(round(visible, 4), 1e-4))


def label_thing(stage: Stage, index: int) -> SceneObject | None:
    """The annotation of one thing, None if nothing of it is visible."""
    thing, light = stage.plan.things[index], stage.plan.light
    area, (rows, columns) = stage.silhouette(index)
    mask = stage.ids[rows, columns] == stage.numbers[index]
    count = int(np.count_nonzero(mask))
    if not count:
        return None
    box = bounding_box(mask, SCALE, columns.start, rows.start)
    depth = stage.plan.camera.look(*thing.place)[2]
    hidden = float(light.hidden(depth))
    bright = light.ambient[1] + light.headlight(depth) + light.sun / 2
    visible = min(1.0, count / max(area, count))
    if bright * (1 - hidden) < DARK and (not thing.bright or hidden > 0.8):
        visible *= UNSEEN
    width, height = box[2] - box[0], box[3] - box[1]
    attributes = {}
    for name, value in thing.attributes.items():
        rule = RULES.get(value, RULES[name])
        large = height >= max(rule.tall * stage.size / 224, rule.pixels) and width >= 0.75 * rule.pixels
        known = large and visible >= rule.visible and hidden <= rule.hidden and bright >= rule.bright
        if known and (name != "state" or any(shows_lamp(stage, index, lamp) for lamp in thing.lamps)):
            attributes[name] = value
    return SceneObject(thing.category, box, count / SCALE**2, max(round(visible, 4), 1e-4), attributes)


def shows_lamp(stage: Stage, index: int, lamp: Lamp) -> bool:
    """Whether enough of a traffic light's lit lamp is visible."""
    thing, camera, size = stage.plan.things[index], stage.plan.camera, len(stage.ids)
    u, v, depth = camera.look(*thing.world(lamp.place))
    radius = LENS * thing.scale[1] / depth
    left, right = round((u - radius * camera.focal[0]) * size), round((u + radius * camera.focal[0]) * size) + 1
    top, bottom = round((v - radius * camera.focal[1]) * size), round((v + radius * camera.focal[1]) * size) + 1
    part = stage.ids[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
    return int(np.count_nonzero(part == stage.numbers[index])) >= LAMP_SEEN * (right - left) * (bottom - top)


def is_misplaced(stage: Stage, index: int, item: SceneObject) -> bool:
    """Whether a thing's row in a driver's view suggests a wrong distance, because of the camera's lens or height."""
    plan, size = stage.plan, stage.size
    if plan.view != "driver" or item.category not in GROUNDED or item.size * PATCHES < NOTHING * size * size:
        return False
    seen = VisibleObject(item, Scene(size, size), 0.0)
    if not seen.at("near") and not seen.at("far"):
        return False
    below = (plan.camera.x, 0.0)
    footprints = (corners.astype(np.float32) for corners in stage.footprints[index])
    meters = min(max(-cv2.pointPolygonTest(corners, below, True), 0.0) for corners in footprints)
    return meters > NEAR_WITHIN if seen.at("near") else meters < FAR_BEYOND
