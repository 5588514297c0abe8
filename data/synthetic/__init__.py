"""Synthetic traffic scenes: an image and its exact annotations, from a seed.

    seed → plan (what is where, in meters) → canvas (colors and object numbers) → photograph and annotations

| step | files |
|---|---|
| plan | `layout`: `light`, `road`, `ground`, and what `vehicles`, `figures`, `roadside`, `scenery` place on a `site` |
| meshes | `shapes` builds `shapes/*.yaml` with `mesh` and `bodies`; `dice` draws from the palettes of `colors.yaml` |
| canvas | `backdrop` and `stage` paint each color together with the number of the visible object |
| annotations | `labels` counts these numbers |
| photograph | `photo` adds rain, snow, glow, noise and blur, which can hide a faint crosswalk, but nothing else |
"""

from .drawing import draw, render
from .layout import make_plan


__all__ = ["draw", "make_plan", "render"]
