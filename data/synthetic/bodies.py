"""Parts of vehicles, people and animals, made of the simple parts of a mesh."""

import itertools
from collections.abc import Sequence

from .camera import Point2
from .mesh import Builder, circle


class BodyBuilder(Builder):
    """A builder that knows whole cars, buses, wheels and legs. `shapes/*.yaml` may name all of its parts."""

    # Vehicles. `half` is half a vehicle's width, `axles` are z in meters.

    def car(
        self,
        *,
        length: float,
        half: float,
        hood: float,
        roof: float,
        cabin: Sequence[float],
        nose: float = 0.2,
        narrowing: float = 0.70,
        rear_window: float = 0.85,
        panes: int = 3,
        glazed: float = 0.95,
    ) -> None:
        """A car or van: a low body with a narrower cabin on it.

        Args:
            length, half, hood, roof: sizes and heights in meters.
            cabin: z of the cabin's front foot, roof front, roof back and back foot.
            nose: how far the front end is below the hood, meters.
            narrowing: width of the roof, as a fraction of the body's.
            rear_window: its lower edge, as a fraction of the back of the cabin from the top.
            panes: number of panes on each side.
            glazed: fraction of each side up to which they reach.
        """
        front, back, low = length / 2, -length / 2, 0.28
        foot, roof_front, roof_back, back_foot = cabin
        axles, radius = (front - 0.85, back + 0.85), 0.33 if roof < 1.7 else 0.37
        nose_y = hood - nose
        tail_y = hood - (0.06 if back_foot - back > 0.3 else 0.0)
        waist, top, base = half * 0.94, half * narrowing, hood - 0.02
        profile = [(back, low), (front, low), (front, nose_y), (front - 0.12, nose_y + 0.1)]
        profile += [(foot, hood), (back_foot, hood), (back + 0.06, tail_y), (back, tail_y - 0.12)]
        self.tires(half, axles, radius)
        self.prism("body", profile, [half, half, half * 0.97, half * 0.93, waist, waist, waist, half * 0.97])
        self.ends(half, front + 0.01, back - 0.01, low, nose_y)
        outline = [(foot, base), (roof_front, roof), (roof_back, roof), (back_foot, base)]
        self.prism("body", outline, [waist, top, top, waist])
        for z, low_z, bottom, toward in ((roof_front, foot, 0.94, 1), (roof_back, back_foot, rear_window, -1)):
            window = [(-top, roof, z), (top, roof, z), (waist, base, low_z), (-waist, base, low_z)]
            self.pane("glass", window, (0.08, 0.1, 0.92, bottom), (0, 0.3, toward))
        side = [(top, roof, roof_front), (top, roof, roof_back), (waist, base, back_foot), (waist, base, foot)]
        width = glazed / panes
        for self.side in (-1, 1):  # afterwards it is 1 again
            self.pane("glass", side, (0.04, 0.12, width, 0.92), (1, 0.3, 0), panes, width)
            self.box("trim", (waist, waist + 0.18), (base + 0.02, base + 0.16), (foot - 0.35, foot - 0.25))
        self.wheels(half + 0.01, axles, radius)

    def bus(self, *, length: float, roof: float, floors: Sequence[Point2]) -> None:
        """A bus: a box with doors on the right and a band of windows on every floor, between two heights."""
        half, low, front = 1.25, 0.35, length / 2
        axles = (front - 2.4, 2.6 - front)
        self.tires(half, axles, 0.48)
        self.prism("body", [(-front, low), (front, low), (front, roof), (-front, roof)], [half, half, 1.21, 1.21])
        for self.side in (-1, 1):
            self.wall("shade", 1.26, (low, 0.6), (-front, front))
            for bottom, top in floors:
                quad = [(1.26, top, front), (1.26, top, -front), (1.26, bottom, -front), (1.26, bottom, front)]
                self.pane("glass", quad, (0.02, 0, 0.146, 1), (1, 0, 0), 7, 0.138)
        for z in (front * 0.76, front * 0.76 + 0.55, -1.0, -0.45):
            self.wall("glass", 1.27, (0.45, 2.2), (z, z + 0.5))
        for bottom, top in floors:
            self.plate("glass", (-1.13, 1.13), (bottom - 0.15, top), front + 0.01, 1)
            self.plate("glass", (-0.82, 0.82), (bottom, top), -front - 0.01, -1)
        self.plate("trim", (-0.75, 0.75), (roof - 0.45, roof - 0.08), front + 0.02, 1)
        self.plate("display", (-0.5, 0.5), (roof - 0.36, roof - 0.16), front + 0.02, 1)
        self.ends(half, front + 0.02, -front - 0.02, low, 1.05)
        self.wheels(half + 0.02, axles, 0.48)

    def tank(self, color: str, y: float, radii: Point2, z: Point2) -> None:
        """A lying cylinder around x = 0 with half width and half height; behind, a hatch in the color "shade"."""
        outline = [(radii[0] * s, y + radii[1] * c) for s, c in circle(10)]
        for (ax, ay), (bx, by) in itertools.pairwise([*outline, outline[0]]):
            wall = [(ax, ay, z[0]), (bx, by, z[0]), (bx, by, z[1]), (ax, ay, z[1])]
            self.face(color, wall, (ax + bx, ay + by - 2 * y, 0))
        self.flat(color, outline, 1, z[1])
        self.flat(color, outline, -1, z[0])
        self.flat("shade", [(x / 2, (y + height) / 2) for x, height in outline], -1, z[0] - 0.01)

    def tires(self, half: float, axles: Sequence[float], radius: float) -> None:
        """Tires as seen from the front and the back, to be painted before the body."""
        for z, side, toward in itertools.product(axles, (-1, 1), (-1, 1)):
            edges = (side * half * 0.98, side * (half - 0.24))
            self.plate("tire", edges, (0, 0.6), z + toward * radius * 0.8, toward)

    def wheels(self, half: float, axles: Sequence[float], radius: float) -> None:
        """Wheels on the sides, to be painted after the body."""
        for z, x in itertools.product(axles, (-half, half)):
            for color, r in (("tire", radius), ("hub", radius * 0.58)):
                self.face(color, [(x, radius + r * c, z + r * s) for s, c in circle(12)], (x, 0, 0))

    def ends(self, half: float, front: float, back: float, low: float, high: float) -> None:
        """Lamps, license plates, grille and bumpers on flat ends at z = `front` and `back`, from `low` to `high`."""

        def part(color: str, left: float, right: float, bottom: float, top: float, z: float) -> None:
            heights = low + bottom * (high - low), low + top * (high - low)
            self.plate(color, (left * half, right * half), heights, z, 1 if z == front else -1)

        part("trim", -0.52, 0.52, 0.4, 0.8, front)
        for side in (-1, 1):
            part("head", side * 0.95, side * 0.58, 0.48, 0.86, front)
            part("tail", side * 0.95, side * 0.66, 0.48, 0.86, back)
        for z in (front, back):
            part("trim", -0.97, 0.97, 0.0, 0.22, z)
            part("plate", -0.28, 0.28, 0.22, 0.4, z)

    # Figures and signs

    def cap(self, color: str, x: float, y: float, radius: float) -> None:
        """The upper half of a head: hair or a helmet."""
        self.flat(color, [(x + radius * s, y + 0.03 + radius * 0.92 * max(c, -0.15)) for s, c in circle(14)])

    def ring(self, color: str, x: float, y: float, radius: float, width: float) -> None:
        """A circle of strokes, through which one can see."""
        rim = [(x + radius * s, y + radius * c) for s, c in circle(14)]
        for start, end in itertools.pairwise([*rim, rim[0]]):
            self.limb(color, start, end, width)

    def legs(self, xs: Sequence[float], top: float, widths: Point2, swing: float) -> None:
        """Four legs of an animal from their x at the body: the far two in the color "mark", the near two in "coat"."""
        for x, way, color in zip(xs, (1, -1, -1, 1), ("mark", "mark", "coat", "coat")):
            knee, foot = (x + way * swing * 0.4, top * 0.5), (x + way * swing, 0.04)
            self.limb(color, (x, top), knee, *widths)
            self.limb(color, knee, foot, widths[1], widths[1] * 0.8)
            self.limb("dark", foot, (foot[0] + 0.04, 0.03), widths[1], widths[1] * 0.8)

    def text(self, color: str, half_width: float, half_height: float, text: str) -> None:
        """A text around (0, 0) that faces -z."""
        x, y = half_width, half_height
        self.face(color, [(-x, y, 0), (x, y, 0), (x, -y, 0), (-x, -y, 0)], (0, 0, -1), text)
