"""Coverage of patches: closed forms, and areas that resampling preserves."""

import numpy as np
import pytest

from traffic_vlm.data.scene import resampling
from traffic_vlm.training.auxiliary.patches import box_coverage


@pytest.mark.parametrize(
    ("box", "covered"),
    [
        ((0.25, 0, 0.75, 0.5), {(0, 1): 1, (0, 2): 1, (1, 1): 1, (1, 2): 1}),
        ((0.125, 0.125, 0.25, 0.375), {(0, 0): 0.25, (1, 0): 1}),  # the second patch holds the center
        ((0.6, 0.6, 0.61, 0.61), {(2, 2): 1}),  # however small: it would vanish otherwise
    ],
)
def test_coverage_is_the_fraction_of_each_patch_but_1_at_the_center(box, covered):
    [found] = box_coverage(np.array([box]), (4, 4))
    assert {place: value for place, value in np.ndenumerate(found) if value} == covered


@pytest.mark.parametrize("grid", [(7, 7), (10, 10), (14, 14), (28, 20)])
def test_resampling_keeps_the_area_and_a_window_is_a_part(grid):
    mask = np.random.default_rng(0).random((14, 14))
    assert (resampling(0, 1, grid[0]) @ mask @ resampling(0, 1, grid[1]).T).mean() == pytest.approx(mask.mean())
    window = resampling(2 / 14, 6 / 14, 4) @ mask @ resampling(7 / 14, 1, 7).T
    np.testing.assert_allclose(window, mask[2:6, 7:])
