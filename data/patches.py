"""Patches: the image as a grid of equal parts, and the fraction of each that a box or a mask covers."""

import numpy as np


GRID = 14  # patches per side of stored masks, which are resampled to the grid of the model


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


def resampling(low: float, high: float, count: int, old: int = GRID) -> np.ndarray:
    """Resampling matrix [count,old]: `old` equal bins on [0, 1] → `count` equal bins on [low, high].

    `resampling(top, bottom, rows, len(mask)) @ mask @ resampling(left, right, columns, len(mask[0])).T` is the mask
    [rows,columns] of a window of the image.
    """
    edges, starts = low + (high - low) * np.arange(count + 1) / count, np.arange(old) / old
    overlap = np.minimum(edges[1:, None], starts + 1 / old) - np.maximum(edges[:-1, None], starts)
    return overlap.clip(0) * count / (high - low)


def mask_coverage(filled: np.ndarray) -> np.ndarray:
    """Fraction [14,14] of each patch that a boolean mask [H,W] fills. A pixel counts for one patch only."""
    height, width = filled.shape
    patch = (np.arange(height) * GRID // height)[:, None] * GRID + np.arange(width) * GRID // width  # [H,W]
    sizes = np.bincount(patch.ravel(), minlength=GRID**2)
    covered = np.bincount(patch[filled], minlength=GRID**2)
    return (covered / np.maximum(sizes, 1)).reshape(GRID, GRID)
