"""Annotations of a drawing, counted from the object number that each pixel carries."""

from dataclasses import dataclass

import cv2
import numpy as np

from ..ground_truth import GROUNDED, NOTHING, PATCHES, VisibleObject
from ..patches import GRID
from ..scene import SCENE_ATTRIBUTES, SYNTHETIC, Scene, SceneObject, given_to_all
from .backdrop import Crosswalk
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
LEGIBLE = {2: 16.0, 3: 21.0}  # digits of a speed limit: min width of its sign in pixels of a 224-pixel image
# Light that reaches the camera from a thing, below which it is hard to see, and the factor of `visible` then.
DARK, UNSEEN = 0.17, 0.25
FOG = 0.5  # fraction of a thing's light lost to haze from which its color is unknown,
THIN_FOG = 0.25  # and the same for a thing without a hue, as haze turns black to gray and gray to white
HUELESS = frozenset({"black", "gray", "silver", "white"})
LAMP_SEEN = 0.5  # min visible fraction of a traffic light's lit lamp, for its state to be known
# From this visible fraction, and height in pixels of a 224-pixel image, a pose and small lights can be seen.
POSE_VISIBLE, POSE_HEIGHT = 0.6, 18.0
TRAITS = ("parked car", "child", "umbrella", "helmet")
TRAIT_PATCHES = 1.5  # min area of a thing whose traits can be seen
LANES_AT = (9.0, 13.0, 18.0, 24.0)  # meters ahead; all lanes must be in the picture at one of these
BEND = 0.006  # 1/m; a weaker bend is hard to see
# A crosswalk is clearly visible from this contrast of its stripes (levels), and this height (image sizes).
FAINT, FLAT = 15, 4 / 224
# A thing whose row in the image reads as near must be nearer than the first, one that reads as far beyond the second.
NEAR_WITHIN, FAR_BEYOND = 12.0, 14.0  # meters


@dataclass
class Drawing:
    """A drawn plan.

    Attributes:
        plan: what was drawn.
        ids: object numbers, uint8 [canvas size, canvas size].
        numbers: of each thing.
        crosswalks: all of them.
        stage: all things.
        image: the photograph, uint8 [size, size, 3].
    """

    plan: Plan
    ids: np.ndarray
    numbers: list[int]
    crosswalks: list[Crosswalk]
    stage: Stage
    image: np.ndarray


def describe(drawing: Drawing) -> Scene:
    """The scene of a drawing: all annotations."""
    plan, size = drawing.plan, len(drawing.image)
    objects = describe_stuff(drawing.ids[::SCALE, ::SCALE])
    objects += [item for crosswalk in drawing.crosswalks if (item := describe_crosswalk(drawing, crosswalk))]
    misplaced = False
    shown: dict[str, list[SceneObject]] = {name: [] for name in TRAITS}  # the objects with each trait
    for index, thing in enumerate(plan.things):
        if thing.category not in STUFF and (item := describe_thing(drawing, index)):
            objects.append(item)
            misplaced = misplaced or is_misplaced(drawing, index, item)
            for trait in thing.traits:
                shown[trait].append(item)
    scene_attributes = {"weather": plan.light.weather, "time of day": plan.light.time, **describe_road(plan)}
    if plan.light.time == "night" and plan.light.weather in ("clear", "cloudy"):
        del scene_attributes["weather"]  # not visible
    if plan.view and not misplaced:
        scene_attributes["view"] = plan.view
    attributed = given_to_all({category: frozenset(names) for category, names in ATTRIBUTES.items()}, objects)
    large = TRAIT_PATCHES / PATCHES * size * size
    presence = {
        name: bool(items)
        for name, items in shown.items()
        if not items or any(item.size >= large and item.visible >= POSE_VISIBLE for item in items)
    }
    if plan.view and plan.light.weather != "snowy":
        presence["lane line"] = plan.marked
    # Far roofs look like buildings, but are not annotated.
    exhaustive = EXHAUSTIVE - {"building"} if plan.setting == "city" and plan.skyline else EXHAUSTIVE
    return Scene(
        *(size, size, tuple(objects), scene_attributes, exhaustive, attributed, SYNTHETIC, str(plan.seed)), presence
    )


def describe_road(plan: Plan) -> dict[str, str]:
    """Scene attributes "lane count" and "road shape", as far as the image shows them."""
    road, camera = plan.road, plan.camera
    found: dict[str, str] = {}
    if not plan.view or plan.light.weather == "snowy" or plan.light.hidden(40.0) > FOG:
        return found
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


def describe_stuff(ids: np.ndarray) -> list[SceneObject]:
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


def describe_crosswalk(drawing: Drawing, crosswalk: Crosswalk) -> SceneObject | None:
    """The annotation of a crosswalk, None if nothing of it is visible."""
    stripes = drawing.ids == crosswalk.number + 1
    mask = stripes | (drawing.ids == crosswalk.number)
    count = int(np.count_nonzero(mask))
    if not count:
        return None
    box = bounding_box(mask, SCALE)
    visible = min(1.0, count / crosswalk.area) if crosswalk.area else 0.5
    paint = drawing.image[stripes[::SCALE, ::SCALE]]  # [N, 3]
    road = drawing.image[(mask & ~stripes)[::SCALE, ::SCALE]]
    contrast = np.abs(paint.mean(axis=0) - road.mean(axis=0)).max() if paint.size and road.size else 0.0
    if box[3] - box[1] < FLAT * len(drawing.image) or contrast < FAINT:
        visible *= UNSEEN
    return SceneObject("crosswalk", box, count / SCALE**2, round(visible, 4))


def describe_thing(drawing: Drawing, index: int) -> SceneObject | None:
    """The annotation of one thing, None if nothing of it is visible."""
    thing, light, size = drawing.plan.things[index], drawing.plan.light, len(drawing.image)
    area, (rows, columns) = drawing.stage.silhouette(index)
    mask = drawing.ids[rows, columns] == drawing.numbers[index]
    count = int(np.count_nonzero(mask))
    if not count:
        return None
    box = bounding_box(mask, SCALE, columns.start, rows.start)
    depth = drawing.plan.camera.look(*thing.place)[2]
    hidden = float(light.hidden(depth))
    bright = light.ambient[1] + light.headlight(depth) + light.sun / 2
    visible = round(min(1.0, count / max(area, count)), 4)
    if bright * (1 - hidden) < DARK and (not thing.bright or hidden > 0.8):
        visible = round(visible * UNSEEN, 4)
    attributes = dict(thing.attributes)
    if "color" in attributes and (hidden > (THIN_FOG if attributes["color"] in HUELESS else FOG) or bright < 0.5):
        del attributes["color"]
    if visible < POSE_VISIBLE or hidden > FOG or box[3] - box[1] < POSE_HEIGHT * size / 224:
        for name in {"status", "facing", "brake lights"} & attributes.keys():
            del attributes[name]
    if "state" in attributes and not any(shows_lamp(drawing, index, lamp) for lamp in thing.lamps):
        del attributes["state"]
    if "value" in attributes:
        min_width = LEGIBLE[max(len(attributes["value"]), 2)]
        width, height = box[2] - box[0], box[3] - box[1]
        too_small = height < min_width or width < min_width * 0.75
        if too_small or visible < 0.85 or hidden > 0.6 or bright < 0.25:
            del attributes["value"]
    return SceneObject(thing.category, box, count / SCALE**2, visible, attributes)


def shows_lamp(drawing: Drawing, index: int, lamp: Lamp) -> bool:
    """Whether enough of a traffic light's lit lamp is visible."""
    thing, camera, size = drawing.plan.things[index], drawing.plan.camera, len(drawing.ids)
    u, v, depth = camera.look(*thing.world(lamp.place))
    radius = LENS * thing.scale[1] / depth
    left, right = round((u - radius * camera.focal[0]) * size), round((u + radius * camera.focal[0]) * size) + 1
    top, bottom = round((v - radius * camera.focal[1]) * size), round((v + radius * camera.focal[1]) * size) + 1
    part = drawing.ids[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
    return int(np.count_nonzero(part == drawing.numbers[index])) >= LAMP_SEEN * (right - left) * (bottom - top)


def is_misplaced(drawing: Drawing, index: int, item: SceneObject) -> bool:
    """Whether the row of a thing in a driver's view suggests a wrong distance, because of the lens or the height."""
    plan, size = drawing.plan, len(drawing.image)
    if plan.view != "driver" or item.category not in GROUNDED or item.size * PATCHES < NOTHING * size * size:
        return False
    seen = VisibleObject(item, Scene(size, size), 0.0)
    if not seen.at("near") and not seen.at("far"):
        return False
    below = (plan.camera.x, 0.0)
    footprints = (corners.astype(np.float32) for corners in drawing.stage.footprints[index])
    meters = min(max(-cv2.pointPolygonTest(corners, below, True), 0.0) for corners in footprints)
    return meters > NEAR_WITHIN if seen.at("near") else meters < FAR_BEYOND
