"""Scenes: mirroring, cropping and JSON keep them consistent, and invalid fields are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traffic_vlm.data.scene import Scene, SceneObject


MASK = np.zeros((140, 280))
MASK[20:90, 40:200] = 1  # aligned with the patches of the image, so that their coverage is exact
MASK[20:50, 40:120] = 0  # a corner of its box


def patches(mask: np.ndarray) -> np.ndarray:
    """Coverage [14,14] of the patches of a mask, each pixel of which is divided into 14 × 14."""
    pixels = np.repeat(np.repeat(mask, 14, axis=0), 14, axis=1)
    return pixels.reshape(14, len(mask), 14, len(mask[0])).mean((1, 3))


COVERAGE = tuple(map(tuple, patches(MASK).tolist()))
EXAMPLE = Scene(
    280,
    140,
    objects=(
        SceneObject("car", (10.0, 20.0, 50.0, 60.0), attributes={"color": "red"}),
        SceneObject("bus", (200.0, 0.0, 280.0, 100.0), area=6000.0, visible=0.5),
        SceneObject("tree", (40.0, 20.0, 200.0, 90.0), area=MASK.sum(), coverage=COVERAGE, is_instance=False),
    ),
    scene_attributes={"view": "driver", "weather": "rainy", "road shape": "left", "lane count": "2"},
    exhaustive=frozenset({"car", "bus", "vehicle"}),
    attributed={"car": frozenset({"color"})},
    source="test",
    image_id="7",
    presence={"crosswalk": True},
)
LIGHT = SceneObject("traffic light", (20.0, 0.0, 30.0, 30.0), attributes={"state": "red"})
SIGN = SceneObject("speed limit sign", (40.0, 50.0, 60.0, 70.0), attributes={"value": "50"})
STATE, VALUE = {"traffic light": frozenset({"state"})}, {"speed limit sign": frozenset({"value"})}
SIGNS = Scene(100, 100, (LIGHT, SIGN), attributed=STATE | VALUE)


def test_json_gives_an_equal_scene_in_one_line():
    assert Scene.from_json(EXAMPLE.to_json()) == EXAMPLE
    assert "\n" not in EXAMPLE.to_json()


def test_mirroring_swaps_the_sides_and_makes_values_of_signs_unknown():
    mirrored = EXAMPLE.flipped()
    assert mirrored.flipped() == EXAMPLE
    assert mirrored.objects[0].box == (230.0, 20.0, 270.0, 60.0)
    assert mirrored.objects[2].coverage[5] == COVERAGE[5][::-1]
    assert mirrored.scene_attributes == EXAMPLE.scene_attributes | {"road shape": "right"}
    signs = SIGNS.flipped()
    assert [item.attributes for item in signs.objects] == [{"state": "red"}, {}] and signs.attributed == STATE


def test_cropping_cuts_boxes_and_reduces_their_visibility():
    scene = EXAMPLE.cropped(30, 0, 240, 140)
    car, bus, _ = scene.objects
    assert (car.box, car.visible) == ((0, 20.0, 20.0, 60.0), 0.5)
    assert (bus.box, bus.visible, bus.area) == ((170.0, 0, 210, 100.0), 0.25, 3000.0)
    # Near, far and ahead depend on the position in the whole view of a driver.
    assert (scene.width, scene.height, scene.scene_attributes) == (210, 140, {"weather": "rainy"})
    assert scene.presence == EXAMPLE.presence and EXAMPLE.cropped(0, 0, 180, 140).presence == {}
    assert EXAMPLE.cropped(0, 100, 280, 140).objects == ()


def test_cropping_makes_attributes_that_may_be_cut_off_unknown():
    cut = SIGNS.cropped(0, 10, 100, 100)
    assert [item.attributes for item in cut.objects] == [{}, {"value": "50"}]  # the red lamp is outside
    assert cut.attributed == VALUE
    assert SIGNS.cropped(40, 0, 100, 100).attributed == STATE | VALUE  # true of the remaining lights
    assert SIGNS.cropped(0, 0, 100, 100) == SIGNS


@given(st.tuples(*[st.integers(0, 100)] * 2), st.tuples(st.integers(1, 180), st.integers(1, 40)))
@settings(max_examples=50, deadline=None)
def test_patches_of_a_window_are_the_coverage_of_its_mask(corner, size):
    left, top = corner
    right, bottom = left + size[0], top + size[1]
    part = MASK[top:bottom, left:right]
    trees = [item for item in EXAMPLE.cropped(left, top, right, bottom).objects if item.category == "tree"]
    assert bool(trees) == bool(part.any())
    if trees:
        assert trees[0].area == pytest.approx(part.sum(), rel=0.01, abs=1)
        np.testing.assert_allclose(trees[0].coverage, patches(part), atol=1e-3)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: SceneObject("zeppelin", (0, 0, 1, 1)), "unknown class 'zeppelin'"),
        (lambda: SceneObject("car", (5, 0, 5, 1)), r"'car' must have left < right .*\(5, 0, 5, 1\)"),
        (lambda: SceneObject("car", (0, 0, 1, 1), attributes={"color": "loud"}), "color='loud' of 'car' is unknown"),
        (lambda: Scene(0, 10), "0 × 10"),
        (lambda: Scene(10, 10, (SceneObject("car", (0, 0, 11, 5)),)), r"\(0, 0, 11, 5\) .* leaves its image"),
        (lambda: Scene(10, 10, scene_attributes={"weather": "hot"}), "weather='hot' is unknown; expected one of"),
    ],
)
def test_invalid_fields_are_refused(make, named):
    with pytest.raises(ValueError, match=named):
        make()
