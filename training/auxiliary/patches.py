"""Patches: the image as a grid of equal parts, and the fraction of each that a box covers."""

import numpy as np


def interval_coverage(low: np.ndarray, high: np.ndarray, count: int) -> np.ndarray:
    """Fraction [N,count] of each of `count` equal parts of 0..1 that the intervals low..high, each [N], cover."""
    edges = np.arange(count + 1) / count
    overlap = np.minimum(edges[1:], high[:, None]) - np.maximum(edges[:-1], low[:, None])
    return overlap.clip(0) * count


def box_coverage(boxes: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Fraction [N,rows,columns] of each patch that boxes [N,4] (left, top, right, bottom in 0..1) cover.

    The patch of a box's center counts as covered, however small the box is: small objects would vanish otherwise.
    """
    rows = interval_coverage(boxes[:, 1], boxes[:, 3], grid[0])
    columns = interval_coverage(boxes[:, 0], boxes[:, 2], grid[1])
    covered = rows[:, :, None] * columns[:, None, :]
    row = ((boxes[:, 1] + boxes[:, 3]) / 2 * grid[0]).astype(int).clip(0, grid[0] - 1)
    column = ((boxes[:, 0] + boxes[:, 2]) / 2 * grid[1]).astype(int).clip(0, grid[1] - 1)
    covered[np.arange(len(boxes)), row, column] = 1
    return covered
