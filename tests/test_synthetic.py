"""Synthetic scenes: repeatable, annotated exactly as drawn, in perspective, and varied."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from traffic_vlm.data.ground_truth import View
from traffic_vlm.data.scene import (
    ATTRIBUTES,
    CLASSES,
    COLORS,
    LIGHT_STATES,
    SCENE_ATTRIBUTES,
    SPEED_LIMITS,
    is_a,
)
from traffic_vlm.data.synthetic import draw, make_plan, render
from traffic_vlm.data.synthetic.camera import Camera
from traffic_vlm.data.synthetic.colors import PAINT
from traffic_vlm.data.synthetic.figures import make_pedestrian
from traffic_vlm.data.synthetic.labels import EXHAUSTIVE, describe_road
from traffic_vlm.data.synthetic.layout import PRESENCE
from traffic_vlm.data.synthetic.light import Light
from traffic_vlm.data.synthetic.mesh import Builder
from traffic_vlm.data.synthetic.plan import CROSSWALK, STRIPES, Patch, Plan, Thing
from traffic_vlm.data.synthetic.road import Road
from traffic_vlm.data.synthetic.roadside import make_sign, make_traffic_light
from traffic_vlm.data.synthetic.vehicles import make_vehicle, visible_from


NOON = Light(
    weather="clear",
    time="day",
    ambient=(0.66, 0.66, 0.67),
    sun=0.5,
    sun_direction=(0.48, 0.8, -0.36),
    haze=0.0,
    haze_color=(200, 215, 235),
    zenith=(90, 140, 220),
)
FOG = replace(NOON, weather="foggy", haze=0.05, sun=0.0)
CAMERA = Camera(0.0, 1.5, 0.0, 0.0, 0.0, (1.0, 1.0))


def plain(*things: Thing, light: Light = NOON, camera: Camera = CAMERA) -> Plan:
    """Things on an empty plain, seen from 1.5 m above the ground."""
    road = Road(((1.75, 1), (-1.75, -1)), -3.5, 3.5, 3.5)
    return Plan(0, "rural", "driver", light, road, camera, things=list(things), land=(120, 130, 90))


def car(z: float, x: float = 0.0, heading: float = 0.0, shape: str = "saloon", color: str = "red") -> Thing:
    thing = make_vehicle(plain(), "car", shape, x, z, heading, False)
    palette = thing.palette | {"body": PAINT[color]}
    return replace(thing, palette=palette, attributes={"color": color}, scale=(1.0, 1.0, 1.0))


def board(size: float, y: float, z: float) -> Thing:
    """A red square whose lower side is `y` meters up in the middle of the picture."""
    b = Builder()
    b.plate("red", (-size / 2, size / 2), (0.0, size))
    return Thing("barrier", (b.build(),), {"red": (255, 0, 0)}, (0.0, y, z), 0.0)


def pixels(plan: Plan) -> np.ndarray:
    """int16 [224, 224, 3]"""
    return np.asarray(draw(plan, 224)[0]).astype(np.int16)


def instances(plan: Plan) -> list:
    return [item for item in draw(plan, 224)[1].objects if item.is_instance]


@pytest.fixture(scope="module")
def scenes():
    return [render(seed) for seed in range(250)]


# Annotations


def test_a_seed_gives_one_image_and_scene():
    pairs = [render(seed) for seed in (3, 3, 4)]
    assert pairs[0][0].tobytes() == pairs[1][0].tobytes() != pairs[2][0].tobytes()
    assert pairs[0][1] == pairs[1][1] != pairs[2][1]


def test_a_size_below_16_pixels_is_refused():
    with pytest.raises(ValueError, match="size must be at least 16 pixels, got 8"):
        render(0, 8)


def test_a_larger_image_shows_the_same_scene():
    small, large = render(5)[1], render(5, 448)[1]
    assert large.width == 448 and large.scene_attributes == small.scene_attributes
    for item in (item for item in small.objects if item.is_instance and item.size > 100):
        twins = [other for other in large.objects if other.category == item.category]
        assert any(np.allclose(np.array(twin.box) / 2, item.box, atol=3) for twin in twins)


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


@pytest.mark.parametrize("seed", [0, 2, 4, 9])
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
        gone = [
            item for item in items if (item.category, item.box, item.area) not in rest
        ]  # and those that it covered
        changed = np.abs(image - pixels(plan)).max(axis=2) > 0
        own = [item for item in gone if item.category == thing.category]
        changes, areas = changes + int(changed.sum()), areas + sum(item.area for item in own)
        for left, top, right, bottom in (item.box for item in own):
            changed[int(top) : math.ceil(bottom), int(left) : math.ceil(right)] = False
        assert not changed.any()
    assert 0.7 * areas < changes < 1.3 * areas  # pixels on borders; black on black


def test_area_and_box_of_a_known_square():
    [item] = instances(plain(board(2.0, 0.0, 10.0)))
    # 2 m at 10 m with a focal length of one image: a fifth of the image; its foot 1.5 m below the horizon
    assert item.box == pytest.approx((89.6, 100.8, 134.4, 145.6), abs=1)
    assert item.area == pytest.approx(44.8**2, rel=0.05) and item.visible == 1.0


def test_visible_is_the_part_inside_the_image():
    whole, cut = instances(plain(car(10, 0)))[0], instances(plain(car(10, 5.0)))[0]
    assert whole.visible == 1.0
    assert cut.box[2] == 224 and 0.3 < cut.visible < 0.8


# Perspective


@pytest.mark.parametrize("shape", ["saloon", "hatchback", "suv"])
def test_farther_is_smaller_and_higher(shape):
    boxes = [instances(plain(car(z, 1.0, shape=shape)))[0].box for z in (8, 12, 18, 30, 50)]
    for near, far in itertools.pairwise(boxes):
        assert far[3] - far[1] < near[3] - near[1] and far[2] - far[0] < near[2] - near[0]
        assert 112 < far[3] < near[3]


def test_the_nearer_covers_the_farther_in_any_order():
    front, back = car(9, 0.0, color="blue"), car(16, 0.8, color="red")
    results = []
    for things in ((front, back), (back, front)):
        items = {item.attributes["color"]: item for item in instances(plain(*things))}
        assert items["blue"].visible == 1.0 and items["red"].visible < 0.8
        results.append(pixels(plain(*things)))
    assert (results[0] == results[1]).all()


def test_a_long_bus_does_not_cover_a_pedestrian_in_front_of_its_side():
    bus = make_vehicle(plain(), "bus", "city", -3.0, 10.5, 0.0, False)  # its center is nearer than the pedestrian
    items = {item.category: item for item in instances(plain(bus, make_pedestrian(plain(), -1.2, 14.0)))}
    assert items["pedestrian"].visible > 0.95


def test_things_behind_the_camera_or_too_near_are_not_drawn():
    assert instances(plain(car(-10), car(1.0))) == []


def test_a_car_casts_a_shadow_on_a_clear_day():
    shadow, none = pixels(plain(car(9))), pixels(plain(replace(car(9), shadow=False)))
    assert (none.sum(axis=2) - shadow.sum(axis=2) > 40).sum() > 150


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
    assert View(scene).groups["car"].clear[0].at(place) and scene.scene_attributes.get("view") == (
        "driver" if known else None
    )
    plan.view = "camera"
    assert draw(plan, 224)[1].scene_attributes["view"] == "camera"


@pytest.mark.parametrize(
    ("setting", "height", "known"), [("city", 0.1, False), ("city", 0, True), ("rural", 0.1, True)]
)
def test_the_roofs_of_a_skyline_make_buildings_unknown(setting, height, known):
    plan = plain()
    plan.setting, plan.skyline = setting, [(0.0, height), (1.3, height)] if height else []
    assert ("building" in draw(plan, 224)[1].exhaustive) == known


# Colors and light


@pytest.mark.parametrize("color", COLORS)
@pytest.mark.parametrize("heading", [0.0, 0.9, math.pi])
def test_a_car_has_the_color_of_its_name(color, heading):
    seen = pixels(plain(replace(car(8, 0.0, heading, color=color), shadow=False)))
    body = seen[np.abs(seen - pixels(plain())).max(axis=2) > 12]  # [N, 3]
    paints = np.array([PAINT[name] for name in COLORS])
    # The nearest paint of each pixel under full light or in the shade; glass and tires are black or gray.
    shades = np.concatenate([np.minimum(paints * level, 255) for level in (1.1, 0.9, 0.7)])
    names = np.array(COLORS * 3)[((body[:, None] - shades[None]) ** 2).sum(axis=2).argmin(axis=1)]
    counts = Counter(names.tolist())
    if color not in ("black", "gray", "silver"):
        for dull in ("black", "gray", "silver"):
            counts.pop(dull, None)
    assert counts.most_common(1)[0][0] == color


@pytest.mark.parametrize(
    ("heading", "facing", "lights"),
    [(0.0, "away from us", "on"), (math.pi, "toward us", None), (math.pi / 2, "to the side", None), (0.7, None, "on")],
)
def test_pose_and_lights_of_a_vehicle(heading, facing, lights):
    found = visible_from(plain(), 0.0, 8.0, heading, moving=True, brake=True, lit=False)
    status = "moving" if facing == "toward us" else None  # else its brake lights are seen: it may be about to stop
    known = {"status": status, "facing": facing, "brake lights": lights}
    if facing == "to the side":
        found.pop("status", None)  # its back is neither seen nor hidden
    assert found == {name: value for name, value in known.items() if value}
    parked = visible_from(plain(), 0.0, 8.0, heading, moving=False, brake=False, lit=False)
    assert parked["status"] == "parked" and parked.get("brake lights") == ("off" if lights else None)
    assert "brake lights" not in visible_from(plain(), 0.0, 8.0, heading, moving=True, brake=True, lit=True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {"lane count": "2", "road shape": "straight"}),
        ({"bend": 0.01}, {"lane count": "2", "road shape": "right"}),
        ({"bend": -0.01}, {"lane count": "2", "road shape": "left"}),
        ({"bend": 0.002}, {"lane count": "2"}),
        ({"junction": (30.0, 4.0)}, {"lane count": "2"}),
        ({"left": -40.0}, {"road shape": "straight"}),  # a part is out of view
    ],
)
def test_lanes_and_shape_of_the_road(change, expected):
    road = replace(Road(((-1.6, -1), (1.6, 1)), -3.5, 3.5, 3.2), **change)
    plan = replace(plain(), road=road, view="driver", marked=True)
    assert describe_road(plan) == expected
    assert describe_road(replace(plan, marked=False)).keys() <= {"road shape"}
    assert describe_road(replace(plan, light=FOG)) == describe_road(replace(plan, view=None)) == {}


def test_poses_lanes_and_traits_are_spread(scenes):
    items = [item for _, scene in scenes for item in scene.objects]
    attributes = Counter(pair for item in items for pair in item.attributes.items())
    for name in ("status", "facing"):
        assert all(attributes[name, value] >= 2 for value in ATTRIBUTES[name]), name
    assert all(attributes["brake lights", value] for value in ("on", "off"))
    presence = Counter(pair for _, scene in scenes for pair in scene.presence.items())
    for name in ("parked car", "helmet", "lane line"):
        assert presence[name, True] and presence[name, False], name
    roads = Counter(pair for _, scene in scenes for pair in scene.scene_attributes.items())
    assert all(roads["road shape", value] for value in SCENE_ATTRIBUTES["road shape"])


def test_night_is_darker_and_fog_hides_more_with_distance():
    night = replace(NOON, time="night", ambient=(0.3, 0.3, 0.3), sun=0.0, zenith=(8, 10, 28), haze_color=(30, 32, 56))
    assert pixels(plain(car(10), light=night)).mean() < 0.5 * pixels(plain(car(10))).mean()
    contrast = [np.abs(pixels(plain(car(z), light=FOG)) - pixels(plain(light=FOG))).max() for z in (8, 25, 60)]
    assert contrast[0] > contrast[1] > contrast[2]


@pytest.mark.parametrize("color", COLORS)
def test_fog_makes_colors_unknown_first_those_without_a_hue(color):
    near, far = instances(plain(car(7, 0.0, color=color), car(45, 12.0, color=color), light=FOG))
    assert near.visible == 1.0 and not far.attributes and far.visible < 0.3
    thin = replace(FOG, haze=0.035)
    near, far = sorted(
        instances(plain(car(6, -1.2, color=color), car(12, 1.5, color=color), light=thin)), key=lambda i: -i.size
    )
    assert near.attributes == {"color": color} and far.visible > 0.7
    assert far.attributes == ({} if color in ("black", "gray", "silver", "white") else {"color": color})


def crosswalk(z: float, road: int = 100, paint: tuple[int, int, int] = (232, 232, 226), light: Light = NOON):
    """The crosswalk of an empty road, `z` meters ahead."""
    plan = plain(light=light)
    stripes = [plan.road.quad(x, x + 0.5, z - 1.5, z + 1.5) for x in range(-3, 3)]
    area = Patch([plan.road.quad(-3, 3, z - 1.5, z + 1.5)], (road, road, road), CROSSWALK)
    plan.patches = [area, Patch(stripes, paint, STRIPES)]
    [item] = instances(plan)
    return item


def test_a_faint_or_flat_crosswalk_is_hardly_visible():
    night = replace(NOON, time="night", ambient=(0.05, 0.05, 0.05), sun=0.0)
    assert crosswalk(8).visible == 1.0
    assert crosswalk(8, road=205, paint=(236, 196, 60)).visible == 1.0  # yellow on snow
    assert crosswalk(8, road=222).visible < 0.3
    assert crosswalk(8, light=night).visible < 0.3
    assert crosswalk(20, light=replace(FOG, haze=0.12)).visible < 0.3
    assert crosswalk(30).box[3] - crosswalk(30).box[1] < 4 and crosswalk(30).visible < 0.3


def traffic_light(state: str, y: float) -> Thing:
    thing = make_traffic_light(plain(), state, 0.0, y, 6.0, 1.4, False)
    return replace(thing, carried=False, heading=0.0)


@pytest.mark.parametrize("state", LIGHT_STATES)
def test_the_state_of_a_light_is_known_only_if_its_lit_lamp_is_visible(state):
    def known(lit: str, y: float, *things: Thing) -> str | None:
        items = {item.category: item for item in instances(plain(traffic_light(lit, y), *things))}
        return items["traffic light"].attributes.get("state")

    assert known(state, 2.0) == state
    assert known(state, 4.6) == (state if state == "green" else None)  # the upper border cuts it in two
    hidden = board(0.4, 2.0 + {"red": 0.32, "yellow": 0.0, "green": -0.32}[state] * 1.4 - 0.2, 5.9)
    assert [known(other, 2.0, hidden) for other in LIGHT_STATES] == [o if o != state else None for o in LIGHT_STATES]


@pytest.mark.parametrize("state", LIGHT_STATES)
def test_the_lit_lamp_is_the_brightest(state):
    image = pixels(plain(traffic_light(state, 2.0)))
    rows = {name: round(112 - (0.5 + place * 1.4) / 6 * 224) for name, place in zip(LIGHT_STATES, (0.32, 0.0, -0.32))}
    assert max(rows, key=lambda name: image[rows[name], 112].max()) == state
    red, green, blue = image[rows[state], 112].tolist()
    assert {"red": red > 1.5 * green, "yellow": red > 180 and green > 150 > blue, "green": green > 1.5 * red}[state]


@pytest.mark.parametrize(("z", "legible"), [(5.0, True), (30.0, False)])
def test_the_value_of_a_sign_is_known_only_if_it_is_legible(z, legible):
    sign = replace(make_sign(plain(), "speed limit sign", 0.0, 2.0, z, 1.0, "50"), carried=False)
    [item] = instances(plain(sign))
    assert ("value" in item.attributes) == legible


def test_each_speed_limit_looks_different():
    signs = {}
    for value in SPEED_LIMITS:
        sign = replace(make_sign(plain(), "speed limit sign", 0.0, 1.5, 4.0, 1.0, value), carried=False, heading=0.0)
        signs[value] = pixels(plain(replace(sign, palette=sign.palette | {"field": (248, 248, 246)})))
    for one, other in itertools.combinations(SPEED_LIMITS, 2):
        assert (np.abs(signs[one] - signs[other]).max(axis=2) > 60).sum() > 40, (one, other)


# Variety


def test_every_class_appears_in_a_fair_share_of_the_scenes(scenes):
    counts = Counter(category for _, scene in scenes for category in {item.category for item in scene.objects})
    assert counts.keys() == EXHAUSTIVE - {"vehicle", "person", "animal"} <= CLASSES.keys()
    for category in PRESENCE:
        assert (0.03 if is_a(category, "animal") else 0.06) <= counts[category] / len(scenes) <= 0.7, category


def test_facts_and_attributes_are_spread(scenes):
    scene_attributes = Counter(pair for _, scene in scenes for pair in scene.scene_attributes.items())
    drawn = ("weather", "time of day")
    values = [(name, value) for name in drawn for value in SCENE_ATTRIBUTES[name]]
    for name, value in [*values, ("view", "driver"), ("view", "camera")]:
        assert 0.08 <= scene_attributes[name, value] / len(scenes) <= 0.6, (name, value)
    items = [item for _, scene in scenes for item in scene.objects if item.visible >= 0.3]
    values = Counter(pair for item in items for pair in item.attributes.items())
    for name, names in (("color", COLORS), ("state", LIGHT_STATES)):
        total = sum(values[name, value] for value in names)
        assert all(0.4 / len(names) <= values[name, value] / total <= 2 / len(names) for value in names)
    assert sum(values["value", limit] > 0 for limit in SPEED_LIMITS) >= 10


def test_scenes_range_from_empty_to_crowded(scenes):
    vehicles = [
        sum(is_a(item.category, "vehicle") and item.visible >= 0.3 for item in scene.objects) for _, scene in scenes
    ]
    assert vehicles.count(0) > 8 and sum(count >= 8 for count in vehicles) > 8
