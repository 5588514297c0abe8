"""Things of the synthetic scenes: a mesh with colours, a size, lamps and attributes, ready to be placed."""

import math
from dataclasses import replace

from . import synthetic_figures as figures
from . import synthetic_street as street
from . import synthetic_vehicles as vehicles
from .scene import COLORS
from .synthetic_dice import Dice
from .synthetic_drawing import Lamp, Thing
from .synthetic_mesh import Mesh
from .synthetic_weather import Color, Light, each


PAINT: dict[str, Color] = {
    "white": (240, 240, 238),
    "black": (26, 26, 29),
    "gray": (104, 106, 109),
    "silver": (184, 188, 193),
    "red": (200, 26, 30),
    "blue": (28, 76, 190),
    "green": (24, 124, 56),
    "yellow": (244, 206, 30),
    "orange": (242, 118, 18),
    "brown": (104, 62, 34),
}
CLOTHES: tuple[Color, ...] = (
    (40, 44, 54), (70, 72, 78), (200, 200, 196), (150, 34, 38), (38, 66, 130), (60, 100, 70), (190, 150, 60),
    (120, 80, 120), (222, 120, 60), (96, 70, 50), (120, 150, 180), (30, 30, 32), (230, 226, 214), (214, 90, 120),
    (90, 94, 60), (44, 110, 120),
)  # fmt: skip
WALLS: tuple[Color, ...] = (
    (196, 184, 164), (170, 110, 88), (150, 84, 66), (206, 202, 194), (140, 140, 142), (180, 160, 130),
    (118, 108, 104), (214, 196, 150), (160, 174, 182), (228, 222, 210),
)  # fmt: skip
BLOCKS: tuple[tuple[Color, Color, Color], ...] = (
    ((176, 174, 168), (230, 160, 40), (90, 90, 90)),
    ((206, 36, 34), (240, 240, 238), (90, 90, 90)),
    ((240, 240, 236), (206, 36, 34), (90, 90, 90)),
    ((236, 120, 30), (240, 240, 236), (90, 90, 90)),
)
TROUSERS: tuple[Color, ...] = ((40, 46, 66), (58, 70, 100), (30, 30, 34), (90, 84, 74), (130, 116, 92), (66, 66, 68))
SKINS: tuple[Color, ...] = ((238, 200, 172), (222, 178, 146), (176, 126, 92), (134, 92, 66), (92, 62, 46))
HAIRS: tuple[Color, ...] = ((34, 28, 26), (70, 48, 34), (120, 86, 50), (190, 160, 100), (150, 150, 150))
COATS: dict[str, tuple[tuple[Color, Color, Color], ...]] = {
    "dog": (
        ((150, 104, 60), (110, 72, 40), (30, 26, 24)),
        ((46, 42, 40), (90, 66, 46), (20, 18, 18)),
        ((226, 216, 200), (180, 140, 100), (30, 26, 24)),
        ((196, 160, 104), (150, 112, 66), (36, 28, 24)),
    ),
    "cow": (
        ((232, 228, 220), (214, 168, 150), (40, 36, 36)),
        ((140, 84, 50), (196, 150, 120), (104, 60, 36)),
        ((226, 220, 208), (206, 160, 140), (130, 74, 44)),
        ((60, 52, 48), (150, 120, 104), (40, 34, 32)),
    ),
    "horse": (
        ((132, 78, 44), (104, 60, 34), (36, 28, 26)),
        ((66, 46, 36), (48, 34, 28), (24, 20, 20)),
        ((222, 218, 210), (180, 174, 168), (150, 146, 142)),
        ((176, 116, 60), (140, 90, 46), (214, 190, 150)),
    ),
    "deer": (((164, 112, 66), (222, 200, 170), (52, 40, 34)), ((138, 96, 62), (206, 184, 154), (44, 36, 32))),
}
WARM, RED_GLOW, AMBER = (255, 236, 190), (255, 50, 36), (255, 190, 60)
STATE_COLORS: dict[str, Color] = {"red": (255, 44, 34), "yellow": (255, 206, 44), "green": (40, 240, 130)}
DARK_LAMPS: tuple[Color, ...] = ((74, 22, 20), (78, 62, 18), (16, 62, 40))


def vary(dice: Dice, color: Color, by: int = 8) -> Color:
    """A colour near another one."""
    return each(color, lambda c: min(max(c + dice.count(-by, by), 0), 255))


def vehicle_shape(dice: Dice, label: str) -> str:
    """A shape of a car, van, bus or truck."""
    shapes = {
        "car": vehicles.CAR_SHAPES,
        "van": vehicles.VAN_SHAPES,
        "bus": vehicles.BUS_SHAPES,
        "truck": vehicles.TRUCK_SHAPES,
    }
    return dice.pick(shapes[label])


def vehicle(
    dice: Dice, light: Light, label: str, shape: str, x: float, z: float, heading: float, moving: bool
) -> Thing:
    """A car, van, bus or truck of a random colour at a place in metres."""
    color = dice.pick(COLORS)
    body = vary(dice, PAINT[color], 6)
    meshes: tuple = vehicles.truck(shape) if label == "truck" else (
        vehicles.bus(shape) if label == "bus" else vehicles.two_box(shape),
    )  # fmt: skip
    dim = light.time != "day"
    lit = moving and (dim or (light.weather != "clear" and dice.chance(0.6)) or dice.chance(0.15))
    brake = moving and dice.chance(0.35)
    glass = dice.pick(((52, 60, 70), (38, 44, 52), (76, 88, 98)))
    if label == "bus" and light.time == "night" and moving:
        glass = (188, 174, 126)
    palette = [
        body,
        each(body, lambda c: c * 3 // 4) if color != "black" else (54, 54, 56),
        glass,
        (24, 24, 26),
        dice.pick(((150, 152, 156), (96, 98, 102), (60, 62, 64))),
        (255, 250, 230) if lit else (206, 212, 218),
        (255, 48, 34) if brake else (226, 30, 28) if lit else (146, 18, 22),
        dice.pick(((236, 236, 228), (240, 214, 90), (236, 236, 228))),
        (38, 39, 42),
        (255, 190, 60),
    ]
    bright = [vehicles.HEAD] if lit else []
    if brake or lit:
        bright.append(vehicles.TAIL)
    if label == "bus" and light.time == "night" and moving:
        bright += [vehicles.GLASS, vehicles.LIGHT]
    lamps = []
    if lit:
        half, front, height = meshes[0].footprint[1] * 0.75, meshes[0].footprint[3], 0.75
        glow = (0.9 if light.time == "night" else 0.35) * (1.5 if light.weather in ("rainy", "foggy") else 1.0)
        back = meshes[-1].footprint[2]
        for side in (-half, half):
            lamps.append(Lamp((side, height, front), WARM, glow, 1))
            lamps.append(Lamp((side, height, back), RED_GLOW, glow * (0.7 if brake else 0.4), -1))
    grow = dice.between(0.94, 1.08)
    return Thing(
        label,
        meshes,
        tuple(palette),
        (x, 0.0, z),
        heading,
        (grow * dice.between(0.97, 1.03), grow * dice.between(0.96, 1.05), grow),
        tuple(bright),
        {"color": color},
        tuple(lamps),
    )


def _person_palette(dice: Dice) -> tuple[Color, ...]:
    top = vary(dice, dice.pick(CLOTHES))
    legs = vary(dice, dice.pick(TROUSERS + CLOTHES[:6]))
    return (
        dice.pick(SKINS),
        dice.pick(HAIRS),
        top,
        legs,
        dice.pick(((30, 28, 28), (220, 218, 214), (90, 60, 40))),
        dice.pick(CLOTHES),
    )


def toward(camera_x: float, x: float, z: float) -> float:
    """Heading of the line of sight from the camera to a place."""
    return math.atan2(x - camera_x, z)


def pedestrian(dice: Dice, light: Light, camera_x: float, x: float, z: float) -> Thing:
    """Somebody on foot, a child in one of six cases; always turned flat to the camera."""
    facing = dice.pick(("side", "side", "front", "back"))
    child = dice.chance(0.16)
    height = dice.between(0.55, 0.78) if child else dice.between(0.9, 1.1)
    umbrella = light.weather == "rainy" and dice.chance(0.5) and not child
    mesh = figures.pedestrian(facing, dice.count(0, 5), dice.count(0, 9), umbrella)
    wide = height * dice.between(0.92, 1.2) * (1.12 if child else 1.0)
    mirror = -1.0 if dice.chance(0.5) else 1.0
    return Thing(
        "pedestrian", (mesh,), _person_palette(dice), (x, 0.0, z), toward(camera_x, x, z), (mirror * wide, height, 1.0)
    )


def cycle(
    dice: Dice, light: Light, camera_x: float, label: str, x: float, z: float, heading: float, ridden: bool
) -> list[Thing]:
    """A motorcycle or bicycle, and its rider: seen from its side where it stands across, else from its end."""
    color = dice.pick(COLORS)
    sight = toward(camera_x, x, z)
    across, along = math.sin(heading - sight), math.cos(heading - sight)
    side_view = abs(across) > 0.6
    facing = "side" if side_view else "back" if along > 0 else "front"
    motor = label == "motorcycle"
    mesh = cycle_mesh(motor, side_view, dice.chance(0.4))
    body = vary(dice, PAINT[color], 6)
    lit = ridden and light.time != "day" and motor
    palette = (
        body, body, (60, 66, 72), (26, 26, 28), (140, 142, 146), (255, 250, 230),
        RED_GLOW if facing == "back" else (255, 250, 220) if lit and facing == "front" else (190, 190, 186),
        (236, 236, 228), (48, 48, 52), AMBER,
    )  # fmt: skip
    wide = round(across, 6) if side_view else 1.0
    grow = dice.between(0.95, 1.12)
    lamps: tuple[Lamp, ...] = ()
    if lit and facing != "side":
        glow = WARM if facing == "front" else RED_GLOW
        lamps = (Lamp((0.0, 0.75, 0.0), glow, 0.7 if facing == "front" else 0.35),)
    scale = (wide * grow, grow, 1.0)
    bright = (vehicles.TAIL,) if lit and facing != "side" else ()
    thing = Thing(label, (mesh,), palette, (x, 0.0, z), sight, scale, bright, {"color": color}, lamps)
    if not ridden:
        return [thing]
    mesh = figures.rider(side_view, facing, motor)
    skin, hair, top, legs, shoes, _ = _person_palette(dice)
    helmet = vary(dice, dice.pick(tuple(PAINT.values()))) if motor or dice.chance(0.4) else hair
    rider = Thing("rider", (mesh,), (skin, hair, top, legs, shoes, helmet), (x, 0.0, z), sight, scale, carried=True)
    return [thing, rider]


def cycle_mesh(motor: bool, side_view: bool, scooter: bool) -> Mesh:
    """The mesh of a motorcycle or bicycle."""
    return vehicles.motorcycle(side_view, scooter) if motor else vehicles.bicycle(side_view)


def animal(dice: Dice, camera_x: float, kind: str, x: float, z: float) -> Thing:
    """An animal from its side."""
    grow = dice.between(0.85, 1.1) * (1.25 if kind == "dog" else 1.0)
    mirror = -1.0 if dice.chance(0.5) else 1.0
    wide = mirror * grow * dice.between(0.8, 1.0)
    mesh = figures.animal(kind, dice.count(0, 2))
    return Thing(kind, (mesh,), dice.pick(COATS[kind]), (x, 0.0, z), toward(camera_x, x, z), (wide, grow, 1.0))


def traffic_light(
    dice: Dice, light: Light, camera_x: float, state: str, x: float, y: float, z: float, tall: float, sideways: bool
) -> Thing:
    """A traffic light whose middle is `y` metres up, `tall` metres high."""
    on = ("red", "yellow", "green").index(state)
    lamps = list(DARK_LAMPS)
    lamps[on] = STATE_COLORS[state]
    case = dice.pick(((28, 30, 32), (40, 44, 42), (34, 48, 40), (212, 164, 30), (64, 66, 68)))
    palette = (case, (16, 17, 18), *lamps)
    place = 0.32 * (1 - on)
    center = (-place, 0.0, -0.03) if sideways else (0.0, place, -0.03)
    glow = Lamp(center, STATE_COLORS[state], tall * {"day": 0.22, "dusk": 0.35, "night": 0.55}[light.time])
    mesh = street.traffic_light(sideways, dice.chance(0.35))
    heading = toward(camera_x, x, z) * 0.8 + dice.between(-0.15, 0.15)
    return Thing(
        "traffic light",
        (mesh,),
        palette,
        (x, y, z),
        heading,
        (tall, tall, tall),
        (2 + on,),
        {"state": state},
        (glow,),
        True,
    )


SIGN_COLORS: dict[str, tuple[Color, Color, Color]] = {
    "stop sign": ((196, 22, 32), (244, 244, 244), (246, 246, 246)),
    "yield sign": ((246, 246, 244), (206, 28, 34), (20, 20, 20)),
    "warning": ((246, 246, 244), (206, 28, 34), (24, 24, 26)),
    "speed limit sign": ((248, 248, 246), (210, 24, 32), (18, 18, 20)),
    "crosswalk sign": ((20, 84, 178), (244, 246, 248), (18, 20, 24)),
    "board": ((20, 104, 66), (240, 242, 242), (240, 242, 242)),
    "ban": ((24, 78, 170), (206, 26, 34), (206, 26, 34)),
}


def sign(dice: Dice, camera_x: float, kind: str, x: float, y: float, z: float, wide: float, text: str = "") -> Thing:
    """A sign `wide` metres across whose middle is `y` metres up."""
    field, ring, ink = SIGN_COLORS[kind]
    if kind == "board":
        field = dice.pick((field, (24, 84, 170), (150, 96, 40)))
    if kind == "warning" and dice.chance(0.4):
        field = (246, 200, 40)
    palette = (vary(dice, field, 6), ring, ink, (136, 138, 140))
    heading = toward(camera_x, x, z) + dice.between(-0.3, 0.3)
    label = kind if kind.endswith("sign") else "traffic sign"
    attributes = {"value": text} if kind == "speed limit sign" else {}
    text = text or ("parking" if dice.chance(0.5) else "")
    mesh = street.sign(kind, text)
    return Thing(label, (mesh,), palette, (x, y, z), heading, (wide, wide, wide), (), attributes, carried=True)


def pole(
    dice: Dice, camera_x: float, x: float, z: float, height: float, arm: float = 0.0, lamp: bool = False
) -> Thing:
    """A pole, with an arm to its right (or left, if negative) that may carry a lamp."""
    gray = dice.pick(((120, 122, 124), (84, 86, 88), (150, 152, 150), (60, 66, 62)))
    mesh = street.pole(round(height, 1), round(abs(arm), 1), lamp)
    mirror = -1.0 if arm < 0 else 1.0
    return Thing("pole", (mesh,), (gray, (220, 220, 214)), (x, 0.0, z), toward(camera_x, x, z), (mirror, 1.0, 1.0))


def street_lamp(dice: Dice, light: Light, camera_x: float, x: float, z: float, arm: float, height: float) -> Thing:
    """A street lamp, lit at dusk and night."""
    thing = pole(dice, camera_x, x, z, height, arm, True)
    if light.time == "day":
        return thing
    color = (255, 226, 170) if light.ambient[0] >= light.ambient[2] else (236, 240, 255)
    lamp = Lamp((abs(arm), height - 0.1, 0.0), color, 1.6 if light.time == "night" else 0.7)
    return replace(thing, palette=(thing.palette[0], color), bright=(1,), lamps=(lamp,))


def cone(dice: Dice, camera_x: float, x: float, z: float) -> Thing:
    """A traffic cone."""
    grow = dice.between(1.0, 1.5)
    palette = (vary(dice, (250, 92, 24), 10), (246, 246, 244), dice.pick(((40, 40, 42), (236, 84, 24))))
    return Thing("cone", (street.cone(),), palette, (x, 0.0, z), toward(camera_x, x, z), (grow, grow, 1.0))


def barrier(dice: Dice, kind: str, x: float, z: float, heading: float) -> Thing:
    """A barrier: a striped board, or a block of concrete or plastic."""
    if kind == "board":
        palette: tuple[Color, ...] = ((206, 30, 34), (244, 244, 242), (90, 92, 94))
    else:
        palette = dice.pick(BLOCKS)
    return Thing("barrier", (street.barrier(kind),), palette, (x, 0.0, z), heading)


def building(
    dice: Dice, light: Light, house: bool, x: float, z: float, size: tuple[float, float, float], heading: float
) -> Thing:
    """A block or house of width, height and depth in metres."""
    wall = vary(dice, dice.pick(WALLS), 10)
    glass: list[Color] = [(70, 82, 96), (52, 60, 70), (110, 128, 144)]
    bright: tuple[int, ...] = ()
    if light.time != "day":
        glass = [dice.pick(((250, 214, 130), (240, 226, 180), (255, 196, 110))), (30, 34, 42), (40, 46, 58)]
        bright = (street.GLASS_A, street.SHOP) if light.time == "night" else (street.GLASS_A,)
    roof = (
        (236, 240, 244)
        if light.weather == "snowy"
        else dice.pick(((120, 60, 44), (84, 80, 80), (100, 70, 56), (70, 76, 84)))
    )
    shop = vary(dice, dice.pick(((150, 40, 40), (40, 80, 130), (40, 100, 70), (190, 150, 50), (70, 60, 56))))
    dark = each(wall, lambda c: c * 3 // 4)
    mesh = street.building(dice.count(12, 17) if house else dice.count(0, 11))
    return Thing(
        "building", (mesh,), (wall, dark, *glass, roof, shop), (x, 0.0, z), heading, size, bright, shadow=False
    )


def tree(dice: Dice, light: Light, camera_x: float, kind: str, x: float, z: float, height: float) -> Thing:
    """A tree of a height in metres."""
    trunk = dice.pick(((92, 70, 50), (110, 96, 80), (70, 58, 48)))
    leaf = vary(
        dice,
        dice.pick(((74, 112, 46), (60, 100, 50), (96, 124, 56), (50, 88, 52), (112, 128, 58), (150, 120, 46))),
        10,
    )
    if light.weather == "snowy" and kind != "bare":
        leaf = vary(dice, (150, 164, 160) if kind == "conifer" else (190, 198, 202), 10)
    palette = (trunk, each(leaf, lambda c: c * 7 // 10), leaf, each(leaf, lambda c: min(c * 5 // 4, 255)))
    wide = height * dice.between(0.85, 1.25) * (-1.0 if dice.chance(0.5) else 1.0)
    mesh = street.tree(kind, dice.count(0, 5))
    return Thing("tree", (mesh,), palette, (x, 0.0, z), toward(camera_x, x, z), (wide, height, 1.0))


def fence(dice: Dice, kind: str, x: float, z: float, heading: float) -> Thing:
    """Four metres of fence or wall along its own x."""
    colors = {"wall": ((168, 128, 106), (190, 180, 166)), "rails": ((120, 100, 78), (140, 118, 92))}
    palette = colors.get(kind, ((226, 224, 216), (214, 212, 206)))
    return Thing(
        "fence", (street.fence(kind),), tuple(vary(dice, c) for c in palette), (x, 0.0, z), heading, shadow=False
    )
