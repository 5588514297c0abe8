"""Draws a plan: first the canvas, then the photograph and its annotations."""

import numpy as np
from PIL import Image

from ..scene import Scene
from .labels import describe
from .layout import make_plan
from .photo import develop
from .plan import Plan
from .stage import Stage


def render(seed: int, size: int = 224) -> tuple[Image.Image, Scene]:
    """The image and the annotations of a seed.

    Args:
        seed: any integer; on one machine the same seed gives the same image and the same annotations.
        size: width and height of the image in pixels.

    Returns:
        An RGB image and its scene, whose boxes and areas are in pixels of the image.

    Raises:
        ValueError: `size` is below 16 pixels.
    """
    if size < 16:
        raise ValueError(f"size must be at least 16 pixels, got {size}")
    return draw(make_plan(seed), size)


def draw(plan: Plan, size: int) -> tuple[Image.Image, Scene]:
    """The image and the annotations of a plan, for a width and height of `size` pixels."""
    rng = np.random.default_rng(plan.seed % 2**64)
    stage = Stage(plan, size, rng)
    image = develop(stage, rng)
    return Image.fromarray(image), describe(stage, image)
