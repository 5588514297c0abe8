"""Synthetic traffic scenes: an image and its exact annotations, from a seed.

    seed → plan (what is where, in meters) → canvas (colors and object numbers) → photograph and annotations

| step | files |
|---|---|
| plan | `layout`: `light`, `road`, `ground`, and what `vehicles`, `figures`, `roadside`, `scenery` put on a `plan` |
| meshes | `mesh` builds `shapes/*.yaml`; `dice` draws from the palettes of `colors.yaml` |
| canvas | `backdrop` and `stage` paint each color together with the number of the visible object |
| annotations | `labels` counts these numbers |
| photograph | `photo` adds glow, snow, rain, noise and blur, which can hide a faint crosswalk, but nothing else |
"""

import numpy as np
from PIL import Image

from ..scene import Scene
from .labels import label_scene
from .layout import make_plan
from .photo import develop
from .plan import Plan
from .stage import Stage


__all__ = ["draw", "make_plan", "render"]


def render(seed: int, size: int = 224) -> tuple[Image.Image, Scene]:
    """The image and the annotations of a seed.

    Args:
        seed: any integer; on one machine the same seed gives the same image and the same annotations.
        size: width and height of the image in pixels.

    Returns:
        An RGB image and its scene, whose boxes and areas are in pixels of the image.
    """
    return draw(make_plan(seed), size)


def draw(plan: Plan, size: int) -> tuple[Image.Image, Scene]:
    """The image and the annotations of a plan, for a width and height of `size` pixels."""
    rng = np.random.default_rng(plan.seed % 2**64)
    stage = Stage(plan, size, rng)
    image = develop(stage, rng)
    return Image.fromarray(image), label_scene(stage, image)
