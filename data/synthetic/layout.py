"""Plans a scene from a seed: light, road, camera, and where things stand and move."""

from collections import Counter

from .dice import Dice, load
from .figures import place_animal, place_pedestrian
from .ground import add_skyline, lay_ground
from .light import make_light
from .plan import Plan
from .road import make_camera, make_road
from .roadside import place_barriers, place_cones, place_fences, place_sign, place_street_lamps, place_traffic_lights
from .scenery import place_buildings, place_trees
from .vehicles import place_cycle, place_vehicle


TRIES = 10  # spots tried for each thing
SIGNS = ("stop sign", "yield sign", "speed limit sign", "crosswalk sign", "traffic sign")
# In this order: later classes take the places that earlier ones leave.
PLACERS = {
    **dict.fromkeys(SIGNS, place_sign),
    **dict.fromkeys(("bus", "truck", "van", "trailer", "car"), place_vehicle),
    **dict.fromkeys(("motorcycle", "bicycle"), place_cycle),
    "pedestrian": place_pedestrian,
    **dict.fromkeys(("dog", "cow", "horse", "deer"), place_animal),
}


def make_plan(seed: int) -> Plan:
    """The plan of a seed."""
    dice = Dice(f"scene {seed}")
    setting = dice.choice(load("scenes.yaml")["settings"])
    view = "driver" if dice.chance(0.52) else "camera"
    light = make_light(dice, view == "driver", setting != "rural")
    road = make_road(dice, setting)
    plan = Plan(seed, setting, view, light, road, make_camera(dice, road, view), dice)
    lay_ground(plan)
    add_skyline(plan)
    counts = draw_counts(dice, setting)
    place_traffic_lights(plan, counts["traffic light"])
    place_cones(plan, counts["cone"])
    place_barriers(plan, counts["barrier"])
    for category, place in PLACERS.items():
        for _ in range(counts[category]):
            any(place(plan, category) for _ in range(TRIES))
    place_buildings(plan)
    place_trees(plan)
    place_street_lamps(plan)
    place_fences(plan)
    return plan


def draw_counts(dice: Dice, setting: str) -> Counter[str]:
    """The number of things of each class to place."""
    tables, counts = load("scenes.yaml"), Counter[str]()
    density, crowd = dice.choice(tables["densities"]), dice.choice(tables["crowds"])
    for category, probability in tables["presence"].items():
        if category in ("cow", "horse", "deer") and setting in ("city", "highway"):
            probability *= 0.4
        if category == "traffic light" or category in SIGNS:  # stand at empty streets, too
            counts[category] = (1 + dice.chance(0.15)) * dice.chance(probability)
        elif dice.chance(probability * (1 if density else 0.15)):
            count = dice.randint(2, 11) if category == crowd else dice.choice((1, 1, 1, 2, 2, 3, 4))
            counts[category] = max(1, round(count * density))
    return counts
