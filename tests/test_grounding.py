"""Grounding targets: patches of the objects that a question names, for hand-made boxes and masks."""

import numpy as np
import pytest

from traffic_vlm.data.questions import Question
from traffic_vlm.data.scene import Scene, SceneObject
from traffic_vlm.training.auxiliary.grounding import box_patches, object_patches, word_patches


GRID = (4, 4)


def test_patches_of_a_word_do_not_depend_on_the_answer():
    red, far = SceneObject("car", (20, 20, 40, 40)), SceneObject("car", (0, 0, 10, 10))
    hidden = SceneObject("car", (0, 30, 10, 40), visible=0.1)
    scene = Scene(40, 40, (red, far, hidden))
    both, one = [0, 10, 11, 14, 15], [10, 11, 14, 15]
    expected = {
        Question("Is there a car?", "yes", "presence", "car", "presence/car", (red.box, far.box)): both,
        Question("Is there a car ahead?", "no", "place", "car", "place/car/center"): both,
        Question("Is there a car on the right?", "yes", "place", "car", "place/car/right", (red.box,)): both,
        Question("How many cars are there?", "2", "count", "car", "count/car/what"): both,
        # Words that limit a noun come after it, except for colors.
        Question("Is there a red car?", "yes", "color", "car", "color/car/any/red", (red.box,)): one,
        Question("Is there a blue car?", "no", "color", "car", "color/car/any/blue"): both,
        Question("Is there a bus?", "no", "presence", "bus", "presence/bus"): None,
        Question("Is it raining?", "no", "weather", "weather", "weather/weather/is/rainy"): None,
    }
    found = word_patches([*expected], scene, object_patches(scene, GRID))
    found = [(index, name, [*patches.nonzero()[0]]) for index, name, patches in found]
    assert found == [(index, "car", patches) for index, patches in enumerate(expected.values()) if patches]


def test_patches_of_a_word_are_those_of_the_mask_not_of_its_box():
    coverage = tuple(tuple(float(i == j) for j in range(4)) for i in range(4))  # a diagonal, whose box is the image
    scene = Scene(40, 40, (SceneObject("road", (0, 0, 40, 40), coverage=coverage, is_instance=False),))
    question = Question("Is there a road?", "yes", "presence", "road", "presence/road", ((0, 0, 40, 40),))
    [(_, _, found)] = word_patches([question], scene, object_patches(scene, GRID))
    assert (found.reshape(GRID) == np.eye(4, dtype=bool)).all()


@pytest.mark.parametrize(
    ("box", "covered"),
    [
        ((10, 0, 30, 20), {(0, 1): 1, (0, 2): 1, (1, 1): 1, (1, 2): 1}),
        ((5, 5, 10, 15), {(0, 0): 0.25, (1, 0): 1}),  # the second patch holds the center
        ((24, 24, 24.4, 24.4), {(2, 2): 1}),  # however small: it would vanish otherwise
    ],
)
def test_coverage_is_the_fraction_of_each_patch_but_1_at_the_center(box, covered):
    [found] = box_patches([box], Scene(40, 40), GRID)
    assert {place: value for place, value in np.ndenumerate(found) if value} == covered
