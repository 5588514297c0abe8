"""Synthetic traffic scenes: an image and its exact annotations, from a seed.

    seed → plan (what is where, in meters) → canvas (colors and object numbers) → photograph and annotations

`layout` makes the plan; `vehicles`, `figures` and `street` make the things in it; `backdrop` and `stage` paint it. The
number of the visible object is painted together with every color, and `labels` counts these numbers. `photo` then adds
rain, snow, glow, noise and blur, which may hide a faint crosswalk but change no other annotation.
"""

from .drawing import draw, render
from .layout import make_plan


__all__ = ["draw", "make_plan", "render"]
