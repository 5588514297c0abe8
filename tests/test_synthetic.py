"""Synthetic scenes: repeatable, annotated exactly as drawn, in perspective, and varied."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from traffic_vlm.data.scene import ATTRIBUTES, CLASSES, LIGHT_STATES, SCENE_ATTRIBUTES, SPEED_LIMITS
from traffic_vlm.data.synthetic import draw, make_plan, render
from traffic_vlm.data.synthetic.camera import Camera
from traffic_vlm.data.synthetic.dice import PAINT, load
from traffic_vlm.data.synthetic.figures import make_pedestrian
from traffic_vlm.data.synthetic.labels import EXHAUSTIVE, label_road
from traffic_vlm.data.synthetic.light import Light
from traffic_vlm.data.synthetic.mesh import Builder
from traffic_vlm.data.synthetic.plan import Plan, Thing
from traffic_vlm.data.synthetic.road import Road
from traffic_vlm.data.synthetic.roadside import make_sign, make_traffic_light
from traffic_vlm.data.synthetic.vehicles import make_vehicle, visible_from
from traffic_vlm.data.truth import GroundTruth


SUN, SKY, ZENITH = (0.48, 0.8, -0.36), (200, 215, 235), (90, 140, 220)
NOON = Light("clear", "day", (0.66, 0.66, 0.67), 0.5, SUN, haze=0.0, haze_color=SKY, zenith=ZENITH)
FOG = replace(NOON, weather="foggy", haze=0.05, sun=0.0)
NIGHT = replace(NOON, time="night", ambient=(0.3, 0.3, 0.3), sun=0.0, zenith=(8, 10, 28), haze_color=(30, 32, 56))
CAMERA = Camera(0.0, 1.5, 0.0, 0.0, (1.0, 1.0))
PRESENCE = load("scenes.yaml")["presence"]
DULL = ("black", "gray", "silver")  # also the colors of glass, tires and shade


def plain(*things: Thing, light: Light = NOON, camera: Camera = CAMERA) -> Plan:
    """Things on an empty plain, seen from 1.5 m above the ground."""
    road = Road(((1.75, 1), (-1.75, -1)), -3.5, 3.5, 3.5)
    return Plan(0, "rural", "driver", light, road, camera, things=list(things), land=(120, 130, 90))


def car(z: float, x: float = 0.0, heading: float = 0.0, shape: str = "saloon", color: str = "red") -> Thing:
    """A parked car of known color and size."""
    thing = make_vehicle(plain(), x, z, "car", shape, heading, False)
    palette = thing.palette | {"body": PAINT[color]}
    return replace(thing, palette=palette, attributes={"color": color}, scale=(1.0, 1.0, 1.0))


def board(size: float, y: float, z: float) -> Thing:
    """A red square whose lower side is `y` meters up in the middle of the picture."""
    builder = Builder()
    builder.plate("red", (-size / 2, size / 2), (0.0, size))
    return Thing("barrier", (builder.build(),), {"red": (255, 0, 0)}, (0.0, y, z), 0.0)


def pixels(plan: Plan) -> np.ndarray:
    """int16 [224, 224, 3]"""
    return np.asarray(draw(plan, 224)[0]).astype(np.int16)


def instances(plan: Plan) -> list:
    return [item for item in draw(plan, 224)[1].objects if item.is_instance]


@pytest.fixture(scope="module")
def scenes():
    return [render(seed) for seed in range(300)]


# Annotations


def test_a_seed_gives_one_image_and_scene():
    pairs = [render(seed) for seed in (3, 3, 4)]
    assert pairs[0][0].tobytes() == pairs[1][0].tobytes() != pairs[2][0].tobytes()
    assert pairs[0][1] == pairs[1][1] != pairs[2][1]


def test_annotations_are_consistent(scenes):
    for image, scene in scenes:
        assert image.mode == "RGB" and image.size == (224, 224) == (scene.width, scene.height)
        for item in scene.objects:
            left, top, right, bottom = item.box
            assert 0 <= left < right <= 224 and 0 <= top < bottom <= 224
            assert 0 < item.area <= (right - left) * (bottom - top) and 0 < item.visible <= 1
            assert item.category in EXHAUSTIVE and (item.coverage is None) == item.is_instance
            assert item.is_instance or abs(np.array(item.coverage).sum() * 16 * 16 - item.area) < 20
        assert sum(item.area for item in scene.objects) <= 224 * 224 * 1.01
        for category, names in scene.attributed.items():
            assert all(names <= item.attributes.keys() for item in scene.objects if item.category == category)


@pytest.mark.parametrize("seed", [0, 3, 4])
def test_leaving_a_thing_out_changes_its_pixels_and_no_others(seed):
    plan = make_plan(seed)
    plan.light = replace(NOON, sun=0.0)
    plan.things = things = [replace(thing, shadow=False, lamps=()) for thing in plan.things]
    image, items = pixels(plan), instances(plan)
    changes, areas = 0, 0.0
    for index, thing in enumerate(things):
        if thing.category not in PRESENCE or (things[index + 1 : index + 2] and things[index + 1].carried):
            continue
        plan.things = things[:index] + things[index + 1 :]
        rest = [(item.category, item.box, item.area) for item in instances(plan)]
        gone = [item for item in items if (item.category, item.box, item.area) not in rest]
        own = [item for item in gone if item.category == thing.category]  # and those of its class that it covered
        changed = np.abs(image - pixels(plan)).max(axis=2) > 0
        changes, areas = changes + int(changed.sum()), areas + sum(item.area for item in own)
        for left, top, right, bottom in (item.box for item in own):
            changed[int(top) : math.ceil(bottom), int(left) : math.ceil(right)] = False
        assert not changed.any()
    assert 0.7 * areas < changes < 1.3 * areas  # pixels on borders; black on black


@pytest.mark.parametrize("z", [5.0, 10.0, 20.0, 40.0])
def test_box_and_area_of_a_known_square(z):
    """It is 2 m high and stands on the ground, 1.5 m below the camera; its focal length is the size of the image."""
    [item] = instances(plain(board(2.0, 0.0, z)))
    side, foot = 224 * 2 / z, 112 + 224 * 1.5 / z
    assert item.box == pytest.approx((112 - side / 2, foot - side, 112 + side / 2, foot), abs=1)
    assert item.area == pytest.approx(side**2, rel=0.05, abs=1.2 * side) and item.visible == 1.0


def test_a_turned_camera_has_its_axis_in_the_middle():
    """It looks at the ground 8 m away; another point is 2 m to the right of there."""
    camera = Camera(1.0, 8 * math.tan(0.2), 0.1, 0.2, (0.9, 1.2))
    x, z = 1.0 + 8 * math.sin(0.1), 8 * math.cos(0.1)
    depth = 8 / math.cos(0.2)
    assert camera.look(x, 0.0, z) == pytest.approx((0.5, 0.5, depth))
    column = 0.5 + 0.9 * 2 / depth
    assert camera.look(x + 2 * math.cos(0.1), 0.0, z - 2 * math.sin(0.1)) == pytest.approx((column, 0.5, depth))
    assert camera.horizon(1000) == round(500 - 1000 * 1.2 * math.tan(0.2))


def test_what_is_cut_by_the_border_or_covered_is_less_visible():
    [cut] = instances(plain(car(10, 5.0)))
    assert cut.box[2] == 224 and 0.3 < cut.visible < 0.8
    assert instances(plain(car(-10), car(1.0))) == []  # behind the camera, and too near
    front, back = car(9, 0.0, color="blue"), car(16, 0.8, color="red")
    plans = [plain(front, back), plain(back, front)]
    for plan in plans:
        items = {item.attributes["color"]: item for item in instances(plan)}
        assert items["blue"].visible == 1.0 and items["red"].visible < 0.8
    assert (pixels(plans[0]) == pixels(plans[1])).all()
    bus = make_vehicle(plain(), -3.0, 10.5, "bus", "city", 0.0, False)  # nearer by its center, not beside the person
    items = {item.category: item for item in instances(plain(bus, make_pedestrian(plain(), -1.2, 14.0)))}
    assert items["pedestrian"].visible > 0.95


@pytest.mark.parametrize(
    ("camera", "z", "place", "known"),
    [
        (CAMERA, 8.0, "near", True),
        (CAMERA, 18.5, "far", True),
        (replace(CAMERA, focal=(3.0, 3.0)), 24.0, "near", False),  # a long lens
        (replace(CAMERA, height=4.0), 20.0, "near", False),  # from a truck
        (replace(CAMERA, pitch=0.15), 10.5, "far", False),  # looking down
    ],
)
def test_no_driver_view_where_near_and_far_would_be_wrong(camera, z, place, known):
    plan = plain(car(z), camera=camera)
    scene = draw(plan, 224)[1]
    assert GroundTruth(scene).groups["car"].clear[0].at(place)
    assert scene.scene_attributes.get("view") == ("driver" if known else None)
    assert draw(replace(plan, view="camera"), 224)[1].scene_attributes["view"] == "camera"


# Colors and light


@pytest.mark.parametrize("color", ATTRIBUTES["color"])
def test_a_car_has_the_color_of_its_name(color):
    paints = np.array([PAINT[name] for name in ATTRIBUTES["color"]])
    # The nearest paint of each pixel under full light or in the shade.
    shades = np.concatenate([np.minimum(paints * level, 255) for level in (1.1, 0.9, 0.7)])
    for heading in (0.0, 0.9, math.pi):
        seen = pixels(plain(replace(car(8, 0.0, heading, color=color), shadow=False)))
        body = seen[np.abs(seen - pixels(plain())).max(axis=2) > 12]  # [N, 3]
        names = np.array(ATTRIBUTES["color"] * 3)[((body[:, None] - shades[None]) ** 2).sum(axis=2).argmin(axis=1)]
        counts = Counter(name for name in names.tolist() if color in DULL or name not in DULL)
        assert counts.most_common(1)[0][0] == color


@pytest.mark.parametrize(
    ("heading", "brake", "lit", "seen"),
    [
        (0.0, True, False, {"facing": "away from us", "brake lights": "on"}),  # it may be about to stop
        (0.0, True, True, {"facing": "away from us"}),  # lit tail lights hide the brake lights
        (math.pi, True, False, {"status": "moving", "facing": "toward us"}),
        (math.pi / 2, False, False, {"status": "moving", "facing": "to the side"}),
    ],
)
def test_what_is_seen_of_a_moving_vehicle(heading, brake, lit, seen):
    assert visible_from(plain(), 0.0, 8.0, heading, moving=True, brake=brake, lit=lit) == seen


@pytest.mark.parametrize(
    ("change", "lanes", "shape"),
    [
        ({}, "2", "straight"),
        ({"bend": 0.01}, "2", "right"),
        ({"bend": 0.002}, "2", None),
        ({"junction": (30.0, 4.0)}, "2", None),
        ({"left": -40.0}, None, "straight"),  # a part is out of view
    ],
)
def test_lanes_and_shape_of_the_road(change, lanes, shape):
    road = replace(Road(((-1.6, -1), (1.6, 1)), -3.5, 3.5, 3.2), **change)
    plan = replace(plain(), road=road, marked=True)
    found = label_road(plan)
    assert (found.get("lane count"), found.get("road shape")) == (lanes, shape)
    assert label_road(replace(plan, marked=False)).get("lane count") is None
    assert label_road(replace(plan, light=FOG)) == {}


def test_sun_casts_shadows_night_is_darker_and_fog_hides_more_with_distance():
    shadow, none = pixels(plain(car(9))), pixels(plain(replace(car(9), shadow=False)))
    assert (none.sum(axis=2) - shadow.sum(axis=2) > 40).sum() > 150
    assert pixels(plain(car(10), light=NIGHT)).mean() < 0.5 * pixels(plain(car(10))).mean()
    contrast = [np.abs(pixels(plain(car(z), light=FOG)) - pixels(plain(light=FOG))).max() for z in (8, 25, 60)]
    assert contrast[0] > contrast[1] > contrast[2]


@pytest.mark.parametrize(("color", "known"), [("red", True), ("gray", False)])
def test_fog_makes_colors_unknown_first_those_without_a_hue(color, known):
    near, far = instances(plain(car(7, 0.0, color=color), car(45, 12.0, color=color), light=FOG))
    assert near.visible == 1.0 and not far.attributes and far.visible < 0.3
    [middle] = instances(plain(car(12, 1.5, color=color), light=replace(FOG, haze=0.035)))
    assert middle.visible > 0.7 and middle.attributes == ({"color": color} if known else {})


# Lights and signs


def traffic_light(state: str, y: float) -> Thing:
    thing = make_traffic_light(plain(), state, 0.0, y, 6.0, 1.4, False)
    return replace(thing, carried=False, heading=0.0)


@pytest.mark.parametrize("state", LIGHT_STATES)
def test_the_lit_lamp_is_the_brightest_and_tells_the_state_only_if_visible(state):
    def known(lit: str, y: float, *things: Thing) -> str | None:
        items = {item.category: item for item in instances(plain(traffic_light(lit, y), *things))}
        return items["traffic light"].attributes.get("state")

    assert known(state, 2.0) == state
    assert known(state, 4.6) == (state if state == "green" else None)  # the upper border cuts it in two
    heights = {"red": 2.448, "yellow": 2.0, "green": 1.552}
    hidden = board(0.4, heights[state] - 0.2, 5.9)
    assert [known(other, 2.0, hidden) for other in LIGHT_STATES] == [o if o != state else None for o in LIGHT_STATES]
    image = pixels(plain(traffic_light(state, 2.0)))
    lamps = {name: image[round(112 - (y - 1.5) / 6 * 224), 112] for name, y in heights.items()}
    assert max(lamps, key=lambda name: lamps[name].max()) == state
    red, green, blue = lamps[state].tolist()
    assert {"red": red > 1.5 * green, "yellow": red > 180 and green > 150 > blue, "green": green > 1.5 * red}[state]


def speed_limit(z: float, value: str) -> Thing:
    return replace(make_sign(plain(), "speed limit sign", 0.0, 1.5, z, 1.0, value), carried=False, heading=0.0)


def test_values_of_signs_are_legible_when_near_and_look_different():
    known = [instances(plain(speed_limit(z, "50")))[0].attributes for z in (5.0, 30.0)]
    assert known == [{"value": "50"}, {}]
    signs = [speed_limit(4.0, value) for value in SPEED_LIMITS]
    images = [pixels(plain(replace(one, palette=one.palette | {"field": (248, 248, 246)}))) for one in signs]
    for one, other in itertools.combinations(images, 2):
        assert (np.abs(one - other).max(axis=2) > 60).sum() > 40


# Variety


def test_every_class_and_value_appears(scenes):
    counts = Counter(category for _, scene in scenes for category in {item.category for item in scene.objects})
    assert counts.keys() == EXHAUSTIVE - {"vehicle", "person", "animal"} <= CLASSES.keys()
    objects = [item.attributes for _, scene in scenes for item in scene.objects if item.visible >= 0.3]
    shares = {}
    for name in ("color", "state", "value", "status", "facing", "brake lights"):
        shares[name] = Counter(attributes[name] for attributes in objects if name in attributes)
        assert shares[name].keys() == set(ATTRIBUTES[name]), name
    for name in ("weather", "time of day", "view", "road shape"):
        shares[name] = Counter(scene.scene_attributes.get(name) for _, scene in scenes)
        assert shares[name].keys() >= {*SCENE_ATTRIBUTES[name]} - {"other"}, name
    for name in ("parked car", "helmet", "lane line"):
        assert {scene.presence.get(name) for _, scene in scenes} >= {True, False}
