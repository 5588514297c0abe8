"""Coverage of patches: closed forms, and areas that resampling keeps."""

import numpy as np
import pytest

from traffic_vlm.data.patches import box_coverage, resampling


def test_coverage_is_the_fraction_of_each_patch():
    [covered] = box_coverage(np.array([[0.25, 0, 0.75, 0.5]]), (4, 4))
    assert covered[:2, 1:3].tolist() == [[1, 1], [1, 1]]
    assert covered.sum() == 4
    [covered] = box_coverage(np.array([[0.125, 0.125, 0.25, 0.375]]), (4, 4))
    assert covered[:2, 0].tolist() == [0.25, 1]  # the second patch holds the center, at its upper border


def test_the_patch_of_a_small_box_counts_as_covered():
    [covered] = box_coverage(np.array([[0.6, 0.6, 0.61, 0.61]]), (4, 4))
    assert covered[2, 2] == 1 and covered.sum() == 1


@pytest.mark.parametrize("grid", [(7, 7), (10, 10), (14, 14), (28, 20)])
def test_resampled_masks_keep_their_area(grid):
    mask = np.random.default_rng(0).random((14, 14))
    resampled = resampling(0, 1, grid[0], 14) @ mask @ resampling(0, 1, grid[1], 14).T
    assert resampled.shape == grid
    assert resampled.mean() == pytest.approx(mask.mean())


def test_a_window_of_whole_patches_is_that_part_of_the_mask():
    mask = np.random.default_rng(0).random((14, 14))
    rows, columns = resampling(2 / 14, 6 / 14, 4, 14), resampling(7 / 14, 14 / 14, 7, 14)
    np.testing.assert_allclose(rows @ mask @ columns.T, mask[2:6, 7:])
