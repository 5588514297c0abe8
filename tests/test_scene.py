"""Scenes: mirroring, cropping and JSON keep them consistent, and invalid fields are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traffic_vlm.data.scene import Scene, SceneObject, read_classes


def grid(mask: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """Coverage of 14 × 14 patches by a mask of 140 × 280 pixels."""
    return tuple(map(tuple, mask.reshape(14, 10, 14, 20).mean((1, 3)).tolist()))


def example() -> Scene:
    mask = np.zeros((140, 280))
    mask[20:90, 40:200] = 1
    return Scene(
        280,
        140,
        objects=(
            SceneObject("car", (10.0, 20.0, 50.0, 60.0), attributes={"color": "red"}),
            SceneObject("bus", (200.0, 0.0, 280.0, 100.0), area=6000.0, visible=0.5),
            SceneObject("tree", (40.0, 20.0, 200.0, 90.0), area=mask.sum(), coverage=grid(mask), is_instance=False),
        ),
        scene_attributes={"weather": "rainy"},
        exhaustive=frozenset({"car", "bus", "vehicle"}),
        attributed={"car": frozenset({"color"})},
        source="test",
        image_id="7",
    )


def test_json_gives_an_equal_scene_in_one_line():
    assert Scene.from_json(example().to_json()) == example()
    assert "\n" not in example().to_json()


def test_mirroring_moves_boxes_and_masks_to_the_other_side():
    mirrored = example().flipped()
    assert mirrored.flipped() == example()
    assert mirrored.objects[0].box == (230.0, 20.0, 270.0, 60.0)
    assert mirrored.objects[2].coverage[5] == example().objects[2].coverage[5][::-1]


def test_mirroring_makes_values_of_signs_unknown():
    sign = SceneObject("speed limit sign", (20.0, 20.0, 40.0, 40.0), attributes={"value": "60"})
    light = SceneObject("traffic light", (50.0, 0.0, 60.0, 30.0), attributes={"state": "red"})
    attributed = {"speed limit sign": frozenset({"value"}), "traffic light": frozenset({"state"})}
    mirrored = Scene(100, 100, (sign, light), attributed=attributed).flipped()
    assert [item.attributes for item in mirrored.objects] == [{}, {"state": "red"}]
    assert mirrored.attributed == {"traffic light": frozenset({"state"})}


def test_a_road_to_the_left_turns_right_in_the_mirror_and_may_be_cut_off():
    scene = Scene(100, 100, (), {"road shape": "left", "lane count": "2", "weather": "clear"})
    assert scene.flipped().scene_attributes == scene.scene_attributes | {"road shape": "right"}
    assert scene.cropped(0, 0, 90, 100).scene_attributes == {"weather": "clear"}


def test_cropping_makes_attributes_that_may_be_cut_off_unknown():
    light = SceneObject("traffic light", (20.0, 0.0, 30.0, 30.0), attributes={"state": "red"})
    sign = SceneObject("speed limit sign", (40.0, 50.0, 60.0, 70.0), attributes={"value": "50"})
    attributed = {"traffic light": frozenset({"state"}), "traffic sign": frozenset({"value"})}
    scene = Scene(100, 100, (light, sign), {"view": "driver", "weather": "clear"}, attributed=attributed)
    cut = scene.cropped(0, 10, 100, 100)
    assert [item.attributes for item in cut.objects] == [{}, {"value": "50"}]  # the red lamp is outside
    assert cut.attributed == {"traffic sign": frozenset({"value"})}
    assert scene.cropped(40, 0, 100, 100).attributed == attributed  # true of the remaining lights
    assert cut.scene_attributes == {"weather": "clear"}  # near and far cannot be derived from a position in the window
    assert scene.cropped(0, 0, 100, 100) == scene


def test_cropping_cuts_boxes_and_reduces_their_visibility():
    scene = example().cropped(30, 0, 240, 140)
    car, bus, _ = scene.objects
    assert (car.box, car.visible) == ((0, 20.0, 20.0, 60.0), 0.5)
    assert (bus.box, bus.visible, bus.area) == ((170.0, 0, 210, 100.0), 0.25, 3000.0)
    assert (scene.width, scene.height, scene.scene_attributes) == (210, 140, {"weather": "rainy"})
    assert example().cropped(0, 100, 280, 140).objects == ()
    whole = example().cropped(0, 0, 280, 140)
    assert whole.objects[:2] == example().objects[:2]
    np.testing.assert_allclose(whole.objects[2].coverage, example().objects[2].coverage, atol=1e-4)


@given(st.tuples(*[st.integers(0, 100)] * 2), st.tuples(st.integers(1, 180), st.integers(1, 40)))
@settings(max_examples=50, deadline=None)
def test_patches_of_a_window_are_the_coverage_of_its_mask(corner, size):
    mask = np.zeros((140, 280))
    mask[20:90, 40:200] = 1  # aligned with the patches of the image, so that their coverage is exact
    left, top = corner
    right, bottom = left + size[0], top + size[1]
    part = mask[top:bottom, left:right]
    trees = [item for item in example().cropped(left, top, right, bottom).objects if item.category == "tree"]
    assert bool(trees) == bool(part.any())
    if trees:
        assert trees[0].area == pytest.approx(part.sum(), rel=0.01, abs=1)
        rows = np.repeat(np.repeat(part, 14, axis=0), 14, axis=1)  # divides into 14 × 14 patches of whole pixels
        expected = rows.reshape(14, size[1], 14, size[0]).mean((1, 3))
        np.testing.assert_allclose(trees[0].coverage, expected, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: SceneObject("zeppelin", (0, 0, 1, 1)), "unknown class 'zeppelin'"),
        (lambda: SceneObject("car", (5, 0, 5, 1)), r"'car' must have left < right .*\(5, 0, 5, 1\)"),
        (lambda: SceneObject("car", (0, 0, 1, 1), attributes={"color": "loud"}), "color='loud' of 'car' is unknown"),
        (lambda: Scene(0, 10), "0 × 10"),
        (lambda: Scene(10, 10, (SceneObject("car", (0, 0, 11, 5)),)), r"\(0, 0, 11, 5\) .* leaves its image"),
        (lambda: Scene(10, 10, scene_attributes={"weather": "hot"}), "weather='hot' is unknown"),
        (lambda: Scene(10, 10, exhaustive=frozenset({"ufo"})), r"exhaustive classes \['ufo'\]"),
        (lambda: Scene(10, 10, presence={"ufo": True}), r"presence of unknown classes \['ufo'\]"),
        (lambda: example().cropped(0, 0, 300, 10), "300.* leaves the image of 280 × 140"),
        (lambda: example().cropped(10, 0, 10, 10), "empty"),
        (lambda: read_classes({"tram": "trams"}), "'tram' must be .*, got trams"),
        (lambda: read_classes({"tram": ["tram", "trams", "vehicel"]}), "vehicel"),
    ],
)
def test_invalid_fields_are_refused(make, named):
    with pytest.raises(ValueError, match=named):
        make()
