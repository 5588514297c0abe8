"""Plans a scene from a seed: light, road, camera, and where things stand and move."""

import math
from dataclasses import replace

from .dice import Dice, load
from .figures import place_animals, place_pedestrians
from .ground import skyline
from .light import make_light
from .plan import Plan, Thing
from .road import make_camera, make_road
from .roadside import place_barriers, place_cones, place_fences, place_signs, place_street_lamps, place_traffic_lights
from .scenery import place_buildings, place_trees
from .site import Site
from .vehicles import place_cycles, place_vehicles


# In this order: later ones take the places that earlier ones leave.
PLACERS = (
    place_traffic_lights,
    place_signs,
    place_cones,
    place_barriers,
    place_vehicles,
    place_cycles,
    place_pedestrians,
    place_animals,
    place_buildings,
    place_trees,
    place_street_lamps,
    place_fences,
)
DULL = ("pole", "fence", "tree", "building", "rider")  # no close-up is of these; a rider is shown with the cycle


def make_plan(seed: int) -> Plan:
    """The plan of a seed."""
    dice = Dice(f"scene {seed}")
    setting = dice.pick(load("scenes.yaml")["settings"])
    view = "driver" if dice.chance(0.52) else "camera"
    close_up = dice.chance(0.22)
    light = make_light(dice, view == "driver", setting != "rural")
    road = make_road(dice, setting)
    plan = Plan(seed, setting, view, light, road, make_camera(dice, road, view), dice)
    site = Site(plan)
    plan.skyline = skyline(dice, setting)
    plan.skyline_color = (112, 112, 116) if setting == "city" else (92, 112, 88)
    if light.weather == "snowy":
        plan.skyline_color = (170, 178, 186)
    if view == "driver" and not close_up and dice.chance(0.16):
        plan.hood = dice.color("hood")
    for place in PLACERS:
        place(site)
    if close_up:
        zoom_in(plan)
    return plan


def zoom_in(plan: Plan) -> None:
    """Turn the camera to a thing, mostly a light or sign, and zoom in on it."""
    dice, camera = plan.dice, plan.camera
    things = [thing for thing in plan.things if thing.category == "traffic light" or thing.category.endswith("sign")]
    if not things or dice.chance(0.2):
        things = [thing for thing in plan.things if thing.category not in DULL] or things
    things = [thing for thing in things if not is_hidden(plan, thing)]
    if not things:
        return
    plan.view = None
    thing = dice.pick(things)
    x, y, z = thing.place
    mesh = thing.meshes[0]
    middle = y + (mesh.low[1] + mesh.high[1]) * thing.scale[1] / 2
    width = (mesh.high[0] - mesh.low[0]) * abs(thing.scale[0])
    size = max(width, (mesh.high[1] - mesh.low[1]) * thing.scale[1], 0.5)
    distance = math.hypot(x - camera.x, z)
    focal = max(min(dice.uniform(0.22, 0.7) * distance / size, 9.0), 0.9)
    yaw = camera.bearing(x, z) + dice.uniform(-0.25, 0.25) / focal
    pitch = math.atan2(camera.height - middle, distance) + dice.uniform(-0.25, 0.25) / focal
    lens = (focal * camera.focal[0] / camera.focal[1], focal)
    plan.camera = replace(camera, yaw=yaw, pitch=pitch, roll=dice.uniform(-0.05, 0.05), focal=lens)


def is_hidden(plan: Plan, thing: Thing) -> bool:
    """Whether a big thing is in front of another one."""
    camera, half_widths = plan.camera, load("scenes.yaml")["half widths"]
    x, _, z = thing.place
    distance, bearing = math.hypot(x - camera.x, z), camera.bearing(x, z)
    for other in plan.things:
        if other.category in half_widths and other is not thing:
            ox, _, oz = other.place
            nearer = math.hypot(ox - camera.x, oz)
            reach = half_widths[other.category] / nearer
            if nearer < distance and abs(camera.bearing(ox, oz) - bearing) < reach:
                return True
    return False
