"""Synthetic scenes: the same everywhere, true to their pixels, in perspective, and varied."""

import hashlib
import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from traffic_vlm.data import synthetic
from traffic_vlm.data import synthetic_things as make
from traffic_vlm.data.scene import CLASSES, COLORS, FACTS, LIGHT_STATES, SPEED_LIMITS, is_a
from traffic_vlm.data.synthetic_dice import Dice
from traffic_vlm.data.synthetic_drawing import Patch, Thing, place_parts
from traffic_vlm.data.synthetic_ground import CROSSWALK, STRIPES
from traffic_vlm.data.synthetic_layout import PRESENCE, make_plan
from traffic_vlm.data.synthetic_mesh import Builder, Camera
from traffic_vlm.data.synthetic_road import Plan, Road
from traffic_vlm.data.synthetic_vehicles import two_box
from traffic_vlm.data.synthetic_weather import Light, _hadamard, codec
from traffic_vlm.data.truths import View


NOON = Light(
    weather="clear", time="day", ambient=(0.66, 0.66, 0.67), sun=0.5, sun_direction=(0.48, 0.8, -0.36), haze=0.0,
    haze_color=(200, 215, 235), sky=((90, 140, 220), (200, 215, 235)), headlights=0.0, exposure=1.0,
    tint=(1.0, 1.0, 1.0), blur=0, noise=0, codec=0,
)  # fmt: skip
# Beginnings of the SHA-256 of an image's bytes and its truth.
STORED = {0: "9ce1eab48253243a", 1: "8b24ca2502e9718a", 2: "19e12684f179ab3f", 17: "0047929feaf389b2"}
ROAD_AHEAD = Road(((1.75, 1), (-1.75, -1)), -3.5, 3.5, 3.5, 0.0, 0.0, 0.0, None)


def digest(seed: int) -> str:
    image, scene = synthetic.render(seed)
    truth = [(o.label, o.box, o.area, o.visible, sorted(o.attributes.items()), o.cells) for o in scene.objects]
    text = repr((truth, sorted(scene.facts.items()), sorted(scene.exhaustive), scene.image_id))
    return hashlib.sha256(image.tobytes() + text.encode()).hexdigest()


def plain(*things: Thing, light: Light = NOON) -> Plan:
    """Things on an empty plain, seen from 1.5 m above the ground."""
    camera = Camera(0.0, 1.5, 0.0, 0.0, 0.0, (1.0, 1.0))
    return Plan(0, "rural", "driver", light, ROAD_AHEAD, camera, list(things), land=(120, 130, 90))


def car(z: float, x: float = 0.0, heading: float = 0.0, shape: str = "saloon", color: str = "red") -> Thing:
    paint = make.PAINT[color]
    rest = ((60, 60, 60), (52, 60, 70), (24, 24, 26), (120, 120, 120), (206, 212, 218), (146, 18, 22), (236, 236, 228))
    palette = (paint, *rest, (38, 39, 42), (255, 190, 60))
    return Thing("car", (two_box(shape),), palette, (x, 0.0, z), heading, attributes={"color": color})


def board(wide: float, y: float, z: float) -> Thing:
    """A red square whose lower side is `y` metres up in the middle of the picture."""
    b = Builder()
    b.flat([(-wide / 2, 0), (wide / 2, 0), (wide / 2, wide), (-wide / 2, wide)], 0)
    return Thing("barrier", (b.build(),), ((255, 0, 0),), (0.0, y, z), 0.0)


def pixels(plan: Plan) -> np.ndarray:
    """int16 [224, 224, 3]"""
    return np.asarray(synthetic.draw(plan, 224)[0]).astype(np.int16)


def instances(plan: Plan) -> list:
    return [item for item in synthetic.draw(plan, 224)[1].objects if item.is_instance]


@pytest.fixture(scope="module")
def scenes():
    return [synthetic.render(seed) for seed in range(300)]


# The same everywhere


def test_another_process_draws_the_same():
    code = "import sys; sys.path[:0] = ['tests']; from test_synthetic import digest; print(digest(3), digest(8))"
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "12345"}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [digest(3), digest(8)]


@pytest.mark.parametrize(("seed", "expected"), STORED.items())
def test_bytes_and_truth_have_not_drifted(seed, expected):
    # After a change that is meant to change pixels: python -c "from test_synthetic import *; print(digest(1))"
    assert digest(seed).startswith(expected)


def test_seeds_differ():
    assert len({digest(seed) for seed in range(-3, 10)}) == 13


def test_a_larger_image_shows_the_same_scene():
    small, large = synthetic.render(5, 224)[1], synthetic.render(5, 448)[1]
    assert large.width == 448 and large.facts == small.facts
    big = [item for item in small.objects if item.is_instance and item.size > 100]
    assert big
    for item in big:
        twins = [other for other in large.objects if other.label == item.label]
        assert any(np.allclose(np.array(twin.box) / 2, item.box, atol=3) for twin in twins)


# True to its pixels


def test_truth_is_consistent(scenes):
    for image, scene in scenes:
        assert image.mode == "RGB" and image.size == (224, 224) == (scene.width, scene.height)
        assert scene.source == "synthetic"
        for item in scene.objects:
            left, top, right, bottom = item.box
            assert 0 <= left < right <= 224 and 0 <= top < bottom <= 224
            assert 0 < item.area <= (right - left) * (bottom - top)
            assert 0 < item.visible <= 1
            assert item.label in synthetic.EXHAUSTIVE
            assert (item.cells is None) == item.is_instance
        for label, names in scene.attributed.items():
            assert all(names <= item.attributes.keys() for item in scene.objects if item.label == label)


def test_cells_add_up_to_the_area(scenes):
    for _, scene in scenes[:40]:
        stuff = [item for item in scene.objects if not item.is_instance]
        for item in stuff:
            assert abs(np.array(item.cells).sum() * 16 * 16 - item.area) < 20
        total = sum(item.area for item in stuff) + sum(item.area for item in scene.objects if item.is_instance)
        assert total <= 224 * 224 * 1.01


@pytest.mark.parametrize("seed", [0, 2, 4, 9])
def test_leaving_a_thing_out_changes_its_pixels_and_no_others(seed):
    plan = make_plan(seed)
    plan.light = replace(NOON, sun=0.0)
    plan.things = things = [replace(thing, shadow=False, lamps=()) for thing in plan.things]
    image, items = pixels(plan), instances(plan)
    changes, areas = 0, 0.0
    for index, thing in enumerate(things):
        if thing.label not in PRESENCE or (things[index + 1 : index + 2] and things[index + 1].carried):
            continue
        plan.things = things[:index] + things[index + 1 :]
        rest = [(item.label, item.box, item.area) for item in instances(plan)]
        gone = [item for item in items if (item.label, item.box, item.area) not in rest]  # and those that it covered
        changed = np.abs(image - pixels(plan)).max(axis=2) > 0
        own = [item for item in gone if item.label == thing.label]
        changes, areas = changes + int(changed.sum()), areas + sum(item.area for item in own)
        for left, top, right, bottom in (item.box for item in own):
            changed[int(top) : math.ceil(bottom), int(left) : math.ceil(right)] &= False
        assert not changed.any()
    assert 0.7 * areas < changes < 1.3 * areas  # borders of pixels; black on black


def test_area_and_box_of_a_known_square():
    [item] = instances(plain(board(2.0, 0.0, 10.0)))
    # 2 m at 10 m with a focal length of one image: a fifth of the image; its foot 1.5 m below the horizon
    left, top, right, bottom = item.box
    assert (right - left, bottom - top) == (pytest.approx(44.8, abs=1), pytest.approx(44.8, abs=1))
    assert bottom == pytest.approx(112 + 1.5 / 10 * 224, abs=1) and left == pytest.approx(112 - 22.4, abs=1)
    assert item.area == pytest.approx(44.8**2, rel=0.05) and item.visible == 1.0


def test_a_cut_thing_knows_how_much_of_it_is_seen():
    whole, cut = instances(plain(car(10, 0)))[0], instances(plain(car(10, 5.0)))[0]
    assert whole.visible == 1.0
    assert cut.box[2] == 224 and 0.3 < cut.visible < 0.8


# In perspective


@pytest.mark.parametrize("shape", ["saloon", "suv", "minibus"])
def test_farther_is_smaller_and_higher(shape):
    boxes = [instances(plain(car(z, 1.0, shape=shape)))[0].box for z in (8, 12, 18, 30, 50)]
    for near, far in itertools.pairwise(boxes):
        assert far[3] - far[1] < near[3] - near[1] and far[2] - far[0] < near[2] - near[0]
        assert far[3] < near[3]
        assert far[3] > 112  # below the horizon
    rear = 18 - 2.3  # the rear bumper: sizes go with 1/depth
    assert (boxes[2][3] - 112) * rear == pytest.approx(1.5 * 224, rel=0.06)


def test_a_higher_camera_sees_things_lower():
    plan = plain(car(15))
    low = instances(plan)[0].box
    plan.camera = replace(plan.camera, height=4.0)
    assert instances(plan)[0].box[1] > low[1]


def test_the_nearer_covers_the_farther_whatever_the_order():
    front, back = car(9, 0.0, color="blue"), car(16, 0.8, color="red")
    results = []
    for things in ((front, back), (back, front)):
        items = {item.attributes["color"]: item for item in instances(plain(*things))}
        assert items["blue"].visible == 1.0 and items["red"].visible < 0.8
        results.append(pixels(plain(*things)))
    assert (results[0] == results[1]).all()


def test_a_long_thing_does_not_cover_what_stands_before_its_side():
    """Its middle may be nearer than somebody who stands between it and the camera."""
    dice = Dice("bus")
    bus = make.vehicle(dice, NOON, "bus", "city", -3.0, 10.5, 0.0, False)
    walker = make.pedestrian(dice, NOON, 0.0, -1.2, 14.0)
    items = {item.label: item for item in instances(plain(bus, walker))}
    assert items["pedestrian"].visible > 0.95


def test_things_behind_the_camera_or_too_near_are_not_drawn():
    assert instances(plain(car(-10), car(1.0))) == []


def test_shadows_darken_the_ground_beside_a_car_on_a_clear_day():
    shadow = pixels(plain(car(9)))
    none = pixels(plain(replace(car(9), shadow=False)))
    darker = (none.sum(axis=2) - shadow.sum(axis=2)) > 40
    assert darker.sum() > 150


@pytest.mark.parametrize(
    ("setting", "high", "denied"), [("city", 0.1, False), ("city", 0, True), ("rural", 0.1, True)]
)
def test_a_building_is_not_denied_beside_the_roofs_of_a_skyline(setting, high, denied):
    plan = plain()
    plan.setting, plan.skyline = setting, [(0.0, high), (1.3, high)] if high else []
    view = View(synthetic.draw(plan, 224)[1])
    for key in (("presence", "building"), ("place", "building", "left")):
        assert view.find(key) == (("no", ()) if denied else None)
    assert view.find(("presence", "tree")) == ("no", ())


# Near and far


def metres(thing: Thing, camera: Camera) -> float:
    """From the camera to the nearest corner of a thing, along the ground."""
    points = np.concatenate([mesh.vertices for mesh in thing.meshes])
    world = place_parts([thing], [0], [len(points)], points)
    return float(np.hypot(world[:, 0] - camera.x, world[:, 2]).min())


def test_what_a_drivers_view_puts_near_or_far_is_there(monkeypatch):
    described, found, describe_thing = [], Counter(), synthetic.describe_thing

    def remember(plan, thing, *rest):
        item = describe_thing(plan, thing, *rest)
        described.append((item, metres(thing, plan.camera)))
        return item

    monkeypatch.setattr(synthetic, "describe_thing", remember)
    for seed in range(100, 220):
        described.clear()
        view = View(synthetic.render(seed)[1])
        for seen in view.groups["vehicle"].clear if view.driver and "vehicle" in view.groups else ():
            [distance] = [distance for item, distance in described if item is seen.item]
            assert not seen.at("near") or distance < 13  # 12 to a side between two corners
            assert not seen.at("far") or distance >= 14
            found.update(place for place in ("near", "far") if seen.at(place))
    assert found["near"] > 20 and found["far"] > 3


@pytest.mark.parametrize(
    ("camera", "z", "place"),
    [
        (Camera(0.0, 1.5, 0.0, 0.0, 0.0, (3.0, 3.0)), 24.0, "near"),  # a long lens
        (Camera(0.0, 4.0, 0.0, 0.0, 0.0, (1.0, 1.0)), 20.0, "near"),  # from a truck
        (Camera(0.0, 1.5, 0.0, 0.15, 0.0, (1.0, 1.0)), 10.5, "far"),  # looking down
    ],
)
def test_a_camera_that_misplaces_things_is_no_drivers_view(camera, z, place):
    plan = plain(car(z))
    plan.camera = camera
    scene = synthetic.draw(plan, 224)[1]
    seen = View(scene).groups["car"].clear[0]
    assert seen.at(place) and "view" not in scene.facts
    plan.view = "camera"
    assert synthetic.draw(plan, 224)[1].facts["view"] == "camera"


@pytest.mark.parametrize(("z", "place"), [(8.0, "near"), (18.5, "far")])
def test_a_usual_camera_keeps_its_view(z, place):
    view = View(synthetic.draw(plain(car(z)), 224)[1])
    assert view.driver and view.groups["car"].clear[0].at(place)


def test_a_thing_whose_foot_is_hidden_is_not_called_far():
    suv, key = car(18.5, shape="suv"), ("place", "car", "far")
    whole, cut = (View(synthetic.draw(plain(*things), 224)[1]) for things in ((suv,), (suv, board(3.0, -2.2, 12.0))))
    assert whole.find(key)[0] == "yes"
    assert cut.groups["car"].clear and cut.driver and cut.find(key) is None


# Colours and light


@pytest.mark.parametrize("color", COLORS)
@pytest.mark.parametrize("heading", [0.0, 0.9, math.pi])
def test_a_car_has_the_color_of_its_name(color, heading):
    plan = plain(replace(car(8, 0.0, heading, color=color), shadow=False))
    seen, empty = pixels(plan), pixels(plain())
    body = seen[np.abs(seen - empty).max(axis=2) > 12]  # [N, 3]
    paints = np.array([make.PAINT[name] for name in COLORS])
    # of each pixel the nearest paint under full light or in the shade; glass and tyres are black or gray
    shades = np.concatenate([np.minimum(paints * level, 255) for level in (1.1, 0.9, 0.7)])
    names = np.array(COLORS * 3)[((body[:, None] - shades[None]) ** 2).sum(axis=2).argmin(axis=1)]
    counts = Counter(names.tolist())
    if color not in ("black", "gray", "silver"):
        for dull in ("black", "gray", "silver"):
            counts.pop(dull, None)
    assert counts.most_common(1)[0][0] == color


def test_night_is_darker_and_fog_paler_far_away():
    night = replace(NOON, time="night", ambient=(0.3, 0.3, 0.3), sun=0.0, sky=((8, 10, 28), (30, 32, 56)))
    assert pixels(plain(car(10), light=night)).mean() < 0.5 * pixels(plain(car(10))).mean()
    fog = replace(NOON, weather="foggy", haze=0.05, sun=0.0)
    contrast = []
    for z in (8, 25, 60):
        with_car, without = pixels(plain(car(z), light=fog)), pixels(plain(light=fog))
        contrast.append(np.abs(with_car - without).max())
    assert contrast[0] > contrast[1] > contrast[2]


def test_a_thing_lost_in_fog_or_darkness_has_no_color_and_is_not_asked():
    fog = replace(NOON, weather="foggy", haze=0.05, sun=0.0)
    near, far = instances(plain(car(7, 0.0), car(45, 12.0), light=fog))
    assert near.attributes and near.visible == 1.0
    assert not far.attributes and far.visible < 0.3


@pytest.mark.parametrize("color", COLORS)
def test_thin_fog_takes_only_the_colors_without_a_hue(color):
    fog = replace(NOON, weather="foggy", haze=0.035, sun=0.0)
    things = instances(plain(car(6, -1.2, color=color), car(12, 1.5, color=color), light=fog))
    near, far = sorted(things, key=lambda item: -item.size)
    assert near.attributes == {"color": color} and far.visible > 0.7
    assert far.attributes == ({} if color in ("black", "gray", "silver", "white") else {"color": color})


def crossing(z: float, road: int = 100, paint: tuple[int, int, int] = (232, 232, 226), light: Light = NOON):
    """The crosswalk of an empty road, `z` metres ahead."""
    plan = plain(light=light)
    area = ((-3.0, z - 1.5), (3.0, z - 1.5), (3.0, z + 1.5), (-3.0, z + 1.5))
    stripes = tuple(
        ((x, z - 1.5), (x + 0.5, z - 1.5), (x + 0.5, z + 1.5), (x, z + 1.5)) for x in (-3, -2, -1, 0, 1, 2)
    )
    plan.patches = [Patch((area,), (road, road, road), CROSSWALK), Patch(stripes, paint, STRIPES)]
    [item] = instances(plan)
    return item


def test_a_faint_or_flat_crosswalk_is_in_doubt():
    night = replace(NOON, time="night", ambient=(0.05, 0.05, 0.05), sun=0.0)
    fog = replace(NOON, weather="foggy", haze=0.12, sun=0.0)
    assert crossing(8).visible == 1.0
    assert crossing(8, road=205, paint=(236, 196, 60)).visible == 1.0  # yellow on snow
    assert crossing(8, road=222).visible < 0.3
    assert crossing(8, light=night).visible < 0.3
    assert crossing(20, light=fog).visible < 0.3
    assert crossing(30).box[3] - crossing(30).box[1] < 4 and crossing(30).visible < 0.3


def lamp_state(state: str, y: float, *things: Thing) -> str | None:
    light = make.traffic_light(Dice("lamp"), NOON, 0.0, state, 0.0, y, 6.0, 1.4, False)
    items = {item.label: item for item in instances(plain(replace(light, carried=False, heading=0.0), *things))}
    assert items["traffic light"].visible > 0.3
    return items["traffic light"].attributes.get("state")


@pytest.mark.parametrize("state", LIGHT_STATES)
def test_the_state_of_a_light_is_told_only_if_its_lit_lamp_is_seen(state):
    assert lamp_state(state, 2.0) == state
    assert lamp_state(state, 4.6) == (state if state == "green" else None)  # the upper border cuts it in two
    hidden = board(0.4, 2.0 + {"red": 0.32, "yellow": 0.0, "green": -0.32}[state] * 1.4 - 0.2, 5.9)
    assert lamp_state(state, 2.0, hidden) is None
    assert all(lamp_state(other, 2.0, hidden) == other for other in LIGHT_STATES if other != state)


def test_no_state_of_a_lamp_behind_a_pole_or_beyond_the_border():
    for seed in (58, 193):
        lights = [item for item in synthetic.render(seed)[1].objects if item.label == "traffic light"]
        assert any(item.visible >= 0.3 for item in lights)
        assert all("state" not in item.attributes for item in lights if item.visible < 0.5)


@pytest.mark.parametrize("state", LIGHT_STATES)
def test_the_lit_lamp_is_the_brightest(state):
    light = make.traffic_light(Dice("lamp"), NOON, 0.0, state, 0.0, 2.0, 6.0, 1.4, False)
    image = pixels(plain(replace(light, carried=False, heading=0.0)))
    middle = 112 - (2.0 - 1.5) / 6 * 224
    rows = {name: round(middle - place * 1.4 / 6 * 224) for name, place in zip(LIGHT_STATES, (0.32, 0.0, -0.32))}
    bright = {name: int(image[row, 112].max()) for name, row in rows.items()}
    assert max(bright, key=bright.__getitem__) == state
    red, green, blue = image[rows[state], 112].tolist()
    assert {"red": red > 1.5 * green, "yellow": red > 180 and green > 150 > blue, "green": green > 1.5 * red}[state]


def test_a_value_is_given_only_when_it_can_be_read():
    for z, legible in ((5.0, True), (30.0, False)):
        sign = make.sign(Dice("sign"), 0.0, "speed limit sign", 0.0, 2.0, z, 1.0, "50")
        [item] = instances(plain(replace(sign, carried=False)))
        assert ("value" in item.attributes) == legible


def test_codec_keeps_flat_images_and_its_transform_inverts():
    blocks = np.arange(8 * 8 * 4, dtype=np.int32).reshape(8, 8, 4) % 97
    assert (_hadamard(_hadamard(blocks)) == 64 * blocks).all()
    flat = np.full((32, 32, 3), (90, 140, 30), dtype=np.uint8)
    assert np.abs(codec(flat, 2).astype(int) - flat).max() <= 2


# Varied


def test_every_class_appears_in_a_fair_share(scenes):
    shares = Counter(label for _, scene in scenes for label in {item.label for item in scene.objects})
    assert shares.keys() == synthetic.EXHAUSTIVE - {"vehicle", "person", "animal"}
    for label in PRESENCE:
        least = 0.03 if is_a(label, "animal") else 0.06
        assert least <= shares[label] / len(scenes) <= 0.7, label
    assert all(label in CLASSES for label in shares)


def test_facts_and_attributes_are_spread(scenes):
    facts = Counter(pair for _, scene in scenes for pair in scene.facts.items())
    for name, values in FACTS.items():
        for value in values:
            assert 0.08 <= facts[name, value] / len(scenes) <= 0.6, (name, value)
    values = Counter(
        pair
        for _, scene in scenes
        for item in scene.objects
        for pair in item.attributes.items()
        if item.visible >= 0.3
    )
    for name, names in (("color", COLORS), ("state", LIGHT_STATES)):
        total = sum(values[name, value] for value in names)
        assert all(0.4 / len(names) <= values[name, value] / total <= 2 / len(names) for value in names)
    assert sum(values["value", limit] > 0 for limit in SPEED_LIMITS) >= 10


def test_scenes_range_from_empty_to_crowded(scenes):
    vehicles = [
        sum(item.is_instance and is_a(item.label, "vehicle") and item.visible >= 0.3 for item in scene.objects)
        for _, scene in scenes
    ]
    assert sum(count == 0 for count in vehicles) > 10 and sum(count >= 8 for count in vehicles) > 10


# Showing, bad input


def test_contact_sheet(tmp_path):
    items = [(synthetic.render(seed)[0], [f"scene {seed}", "below it"]) for seed in range(5)]
    path = tmp_path / "new" / "sheet.png"
    synthetic.contact_sheet(items, path, columns=3)
    with Image.open(path) as sheet:
        assert sheet.width > 3 * 224 and sheet.height > 2 * 224
    with pytest.raises(ValueError, match="at least one"):
        synthetic.contact_sheet([], path)


def test_a_tiny_size_is_refused():
    with pytest.raises(ValueError, match="size=8"):
        synthetic.render(0, 8)
