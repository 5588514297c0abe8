"""Templates: all paraphrases of a question, and the text of answers that list objects.

    question id "place/car/left" → "Is there a car on the left?", "Can you see any cars on the left side?", ...

A question id is `type/category/form/value`, of two to four parts; `ground_truth.py` finds its answer. All
paraphrases of an id have the same meaning, so that agreement between their answers can be measured. A template has
slots with one or several fillings; every combination is a paraphrase. The tokenizer knows all words.
"""

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from string import Formatter

from .scene import CLASSES


# Nouns without article and plural: "sky", not "a sky" or "skies".
MASS_NOUNS = {"sky", "road construction", "glare"}

IN = ("in the image", "in the scene", "in this picture")
PLACES: dict[str, tuple[str, ...]] = {
    "left": ("on the left", "on the left side", "on the left side of the image", "to the left"),
    "center": ("in the center", "in the middle of the image", "in the center of the scene"),
    "right": ("on the right", "on the right side", "on the right side of the image", "to the right"),
    "near": ("near us", "close to us", "near me", "near the camera", "near the ego car"),
    "far": ("far away", "in the distance", "far from us"),
    # Labels do not tell who crosses the road and who walks along it.
    "road": ("on the road", "in the road", "crossing the road", "crossing the street", "walking across the road"),
    "ahead": ("ahead", "ahead of us", "in front of me", "straight ahead", "to the front of the ego car"),
    "front left": ("to the front left of us", "to the front left of me", "to the front left of the ego car"),
    "front right": ("to the front right of us", "to the front right of me", "to the front right of the ego car"),
}
PREPOSITIONS = {"parking area": "in", "intersection": "at"}  # of road types; "on" a street
RELATIONS: dict[str, tuple[str, ...]] = {
    "left": ("left of", "to the left of", "on the left of"),
    "right": ("right of", "to the right of", "on the right of"),
    "behind": ("behind", "in back of"),
    "front": ("in front of",),
    "back left": ("to the back left of", "behind and to the left of"),
    "back right": ("to the back right of", "behind and to the right of"),
    "front left": ("to the front left of", "in front and to the left of"),
    "front right": ("to the front right of", "in front and to the right of"),
    "next to": ("next to",),
    "closer": ("closer than", "closer to us than"),
}
STATUSES = {
    "parked": ("parked", "stopped"),
    "moving": ("moving",),
    "walking": ("walking", "moving"),
    "standing": ("standing",),
}
RIDERS = {"bicycle": "cyclist", "motorcycle": "motorcycle rider"}
FACING = {
    "toward us": ("facing us", "facing toward us", "facing the camera"),
    "away from us": ("facing away from us", "facing away from the camera"),
    "to the side": ("facing to the side", "facing to one side"),
}
TRAVEL = {
    "toward us": ("coming toward us", "driving toward us", "coming our way", "moving in our direction"),
    "away from us": ("going away from us", "driving away from us", "moving away from us"),
    "to the side": ("driving to the side", "moving to the side", "driving to one side"),
}
TURNS = {
    "left": ("turn left", "turn to the left", "go left", "curve to the left"),
    "right": ("turn right", "turn to the right", "go right", "curve to the right"),
    "straight": ("go straight", "continue straight", "go straight ahead", "run straight"),
}

# {a}: "a car", {s}: "car", {p}: "cars", {av}: "a red car", {v}: a value, {q}: another plural, {b}: another singular,
# {b_a}: "a bus", another with its article, {as}: "a parked car", {ps}: "parked cars".
TEMPLATES: dict[tuple[str, str], tuple[str, ...]] = {
    ("presence", ""): (
        "Is there {a}?",
        "Is there {a} {in}?",
        "Is there any {s} here?",
        "Are there {p}?",
        "Are there any {p}?",
        "Are there any {p} {in}?",
        "Can you see {a}?",
        "Can you see {a} {in}?",
        "Can you see any {p}?",
        "Do you see {a}?",
        "Do you see any {p} {in}?",
        "Is {a} visible?",
        "Is {a} clearly visible?",
        "Are any {p} visible {in}?",
        "Does the image show {a}?",
        "Is there {a}, please?",
        "Can you see any {p}, please?",
        "Please say if there is {a}.",
        "Please answer: are there any {p}?",
        "Is any object {in} {a}?",
    ),
    ("presence", "parked car"): ("Is any car parked?", "Are any cars parked {in}?"),
    ("presence", "child"): ("Is any of the people a child?", "Is there a person who is a child?"),
    ("presence", "umbrella"): ("Is anyone holding an umbrella?", "Is there a person with an umbrella?"),
    ("presence", "helmet"): ("Is anyone wearing a helmet?", "Is any rider wearing a helmet?"),
    ("presence", "lane line"): (
        "Are the lanes marked?",
        "Is there a line between the lanes?",
        "Are there lines between the lanes {in}?",
        "Is the road marked with lane lines?",
    ),
    ("place", ""): (
        "Is there {a} {where}?",
        "Are there any {p} {where}?",
        "Are there {p} {where}?",
        "Can you see {a} {where}?",
        "Do you see any {p} {where}?",
        "Is {a} visible {where}?",
        "Is there {a} {where}, please?",
        "Please say if there is {a} {where}.",
        "Is any object {where} {a}?",
    ),
    ("place", "road"): ("Does any {s} cross the road?", "Do any {p} cross the street?"),
    ("relation", ""): (
        "Is there {a} {where} the {b}?",
        "Are there any {p} {where} the {b}?",
        "Can you see {a} {where} the {b}?",
        "Do you see any {p} {where} the {b}?",
        "Is any {s} {where} the {b}?",
        "Is there {a} {where} the {b}, please?",
        "Please say if there is {a} {where} the {b}.",
    ),
    ("light_state", "what"): (
        "What color is the traffic light?",
        "What color is the traffic light, please?",
        "What color is the light?",
        "What is the color of the traffic light?",
        "Which color is the traffic light?",
        "What does the traffic light show?",
        "What color does the traffic light show?",
        "What is the status of the traffic light?",
        "Is the traffic light red, yellow or green?",
        "Please say what color the traffic light is.",
    ),
    ("light_state", "what_all"): (
        "What color are the traffic lights?",
        "What color are the lights {in}?",
        "What do the traffic lights show?",
        "Please say what color the traffic lights are.",
    ),
    ("light_state", "is"): (
        "Is the traffic light {v}?",
        "Is the light {v}?",
        "Is the traffic light showing {v}?",
        "Does the traffic light show {v}?",
        "Is the color of the traffic light {v}?",
        "Is the traffic light {v} now?",
        "Is the traffic light {v}, please?",
        "Please say if the traffic light is {v}.",
    ),
    ("light_state", "are"): (
        "Are the traffic lights {v}?",
        "Are all the traffic lights {v}?",
        "Are the lights {v}?",
        "Do the traffic lights show {v}?",
        "Please say if the traffic lights are {v}.",
    ),
    ("light_state", "any"): (
        "Is there {av}?",
        "Is there {av} {in}?",
        "Is there a {v} light?",
        "Are there any {v} {p}?",
        "Can you see {av}?",
        "Do you see any {v} lights?",
        "Is any traffic light {v}?",
        "Please say if there is {av}.",
    ),
    ("sign_value", "what"): (
        "What is the speed limit?",
        "What is the speed limit here?",
        "What is the speed limit, please?",
        "What does the speed limit sign say?",
        "What is written on the speed limit sign?",
        "Which speed limit is shown?",
        "What number is on the speed limit sign?",
        "How fast may we drive here?",
        "How fast are we allowed to drive?",
        "What is the speed limit in kph?",
        "Please say what the speed limit is.",
    ),
    ("sign_value", "is"): (
        "Is the speed limit {v}?",
        "Is the speed limit here {v}?",
        "Is the speed limit {v} kph?",
        "Is {v} the speed limit?",
        "Does the speed limit sign say {v}?",
        "Does the speed limit sign show {v}?",
        "Please say if the speed limit is {v}.",
    ),
    ("sign_value", "which"): (
        "What traffic sign is there?",
        "Which traffic sign is there {in}?",
        "Which traffic sign can you see?",
        "Which traffic sign do you see?",
        "What type of traffic sign is there?",
        "Please say which traffic sign it is.",
    ),
    ("color", "what"): (
        "What color is the {s}?",
        "What color is the {s} {in}?",
        "What is the color of the {s}?",
        "Which color is the {s}?",
        "What color is the {s}, please?",
        "Please say what color the {s} is.",
    ),
    ("color", "what_all"): (
        "What color are the {p}?",
        "What color are the {p} {in}?",
        "What is the color of the {p}?",
        "Which color are the {p}?",
        "Please say what color the {p} are.",
    ),
    ("color", "is"): (
        "Is the {s} {v}?",
        "Is the {s} {in} {v}?",
        "Is the color of the {s} {v}?",
        "Is {v} the color of the {s}?",
        "Is the {s} {v}, please?",
        "Please say if the {s} is {v}.",
    ),
    ("color", "are"): (
        "Are the {p} {v}?",
        "Are all the {p} {v}?",
        "Are the {p} {in} {v}?",
        "Is {v} the color of the {p}?",
        "Please say if the {p} are {v}.",
    ),
    ("color", "any"): (
        "Is there {av}?",
        "Is there {av} {in}?",
        "Are there any {v} {p}?",
        "Are there {v} {p} {in}?",
        "Can you see {av}?",
        "Do you see any {v} {p}?",
        "Is any {s} {v}?",
        "Is {av} visible?",
        "Please say if there is {av}.",
    ),
    ("status", "what"): (
        "What is the status of the {s}?",
        "What is the current status of the {s}?",
        "What is the moving status of the {s}?",
        "What status does the {s} have?",
        "Please say what the status of the {s} is.",
    ),
    ("status", "is"): (
        "Is the {s} {status}?",
        "Is the {s} {status} now?",
        "Is the {s} {in} {status}?",
        "Is the {s} {status}, please?",
        "Please say if the {s} is {status}.",
    ),
    ("status", "is with rider"): (
        "Does the {s} have a rider?",
        "Is there a rider on the {s}?",
        "Is anyone riding the {s}?",
        "Is a person on the {s}?",
        "Please say if the {s} has a rider.",
    ),
    ("status", "is without rider"): (
        "Is the {s} without a rider?",
        "Is the {s} {in} without a rider?",
        "Please say if the {s} is without a rider.",
    ),
    ("status", "any"): (
        "Is there {as}?",
        "Is there {as} {in}?",
        "Are there any {ps}?",
        "Are there {ps} {in}?",
        "Are any {ps} visible?",
        "Can you see {as}?",
        "Do you see any {ps}?",
        "Please say if there is {as}.",
    ),
    ("status", "is moving"): ("Does the {s} move?", "Is the {s} on the move?"),
    ("status", "any moving"): ("Does any {s} move?", "Is any {s} on the move?", "Is there {a} that moves?"),
    ("status", "any with rider"): (
        "Is there a {rider}?",
        "Are there any {rider}s?",
        "Can you see a {rider} {in}?",
        "Is anyone riding {a}?",
        "Does any {s} have a rider?",
    ),
    ("facing", "what"): (
        "Which way is the {s} facing?",
        "Which direction is the {s} facing?",
        "In which direction is the {s} facing?",
        "Is the {s} facing toward us, away from us or to the side?",
        "Please say which way the {s} is facing.",
    ),
    ("facing", "is"): (
        "Is the {s} {facing}?",
        "Is the {s} {in} {facing}?",
        "Please say if the {s} is {facing}.",
    ),
    ("facing", "is toward us"): (
        "Can you see the front of the {s}?",
        "Is the front of the {s} visible?",
        "Is the {s} seen from the front?",
    ),
    ("facing", "is away from us"): (
        "Can you see the back of the {s}?",
        "Is the back of the {s} visible?",
        "Is the {s} seen from the back?",
    ),
    ("facing", "is to the side"): ("Is the {s} seen from the side?", "Do you see the {s} from the side?"),
    ("facing", "any"): (
        "Is any {s} {facing}?",
        "Is there {a} {facing}?",
        "Are there any {p} {facing}?",
        "Can you see {a} {facing}?",
        "Do you see any {p} {facing}?",
        "Please say if there is {a} {facing}.",
    ),
    ("facing", "any toward us"): (
        "Can you see the front of {a}?",
        "Is the front of any {s} visible?",
        "Is any {s} seen from the front?",
    ),
    ("facing", "any away from us"): (
        "Can you see the back of {a}?",
        "Is the back of any {s} visible?",
        "Is any {s} seen from the back?",
    ),
    ("facing", "any to the side"): ("Is any {s} seen from the side?", "Do you see {a} from the side?"),
    ("travel", "is"): (
        "Is the {s} {travel}?",
        "Is the {s} {in} {travel}?",
        "Please say if the {s} is {travel}.",
    ),
    ("travel", "any"): (
        "Is any {s} {travel}?",
        "Is there {a} {travel}?",
        "Are there any {p} {travel}?",
        "Can you see {a} {travel}?",
        "Do you see any {p} {travel}?",
        "Please say if there is {a} {travel}.",
    ),
    ("travel", "any toward us"): (
        "Is there an oncoming {s}?",
        "Are there any oncoming {p}?",
        "Is {a} approaching us?",
        "Is any {s} driving in the opposite direction?",
        "Is there {a} from the opposite direction?",
    ),
    ("brake_lights", "is"): (
        "Are the brake lights of the {s} {v}?",
        "Are the {s}'s brake lights {v}?",
        "Is the {s} braking?",
        "Does the {s} have its brake lights {v}?",
        "Please say if the brake lights of the {s} are {v}.",
    ),
    ("brake_lights", "any"): (
        "Are the brake lights of any {s} {v}?",
        "Does any {s} have its brake lights {v}?",
        "Is any {s} braking?",
        "Is there {a} with its brake lights {v}?",
        "Can you see {a} with its brake lights {v}?",
        "Do you see any {p} with their brake lights {v}?",
        "Please say if there is {a} with its brake lights {v}.",
    ),
    ("count", "what"): (
        "How many {p} are there?",
        "How many {p} are there {in}?",
        "How many {p} are {in}?",
        "How many {p} can you see?",
        "How many {p} do you see {in}?",
        "How many {p} are visible?",
        "What is the number of {p}?",
        "How many {p} are there, please?",
        "Please say how many {p} there are.",
        "Count the {p}.",
        "Please count the {p} {in}.",
    ),
    ("count", "over"): (
        "Are there more than {v} {p}?",
        "Are there more than {v} {p} {in}?",
        "Can you see more than {v} {p}?",
        "Are there at least {next} {p}?",
        "Are there {next} or more {p}?",
        "Please say if there are more than {v} {p}.",
    ),
    ("count", "over 1"): (
        "Is there more than one {s}?",
        "Is there more than one {s} {in}?",
        "Can you see more than one {s}?",
        "Are there at least 2 {p}?",
        "Are there 2 or more {p}?",
        "Please say if there is more than one {s}.",
    ),
    ("comparison", "more"): (
        "Are there more {p} than {q}?",
        "Are there more {p} than {q} {in}?",
        "Can you see more {p} than {q}?",
        "Do you see more {p} than {q}?",
        "Are more {p} visible than {q}?",
        "Please say if there are more {p} than {q}.",
    ),
    ("comparison", "fewer"): (
        "Are there fewer {p} than {q}?",
        "Are there fewer {p} than {q} {in}?",
        "Can you see fewer {p} than {q}?",
        "Do you see fewer {p} than {q}?",
        "Are fewer {p} visible than {q}?",
        "Please say if there are fewer {p} than {q}.",
    ),
    ("comparison", "same"): (
        "Are there as many {p} as {q}?",
        "Are there just as many {p} as {q} {in}?",
        "Do you see as many {p} as {q}?",
        "Is the number of {p} the same as the number of {q}?",
        "Is there the same number of {p} and {q}?",
        "Please say if there are as many {p} as {q}.",
    ),
    ("side", "what"): (
        "On which side is the {s}?",
        "Which side is the {s} on?",
        "Where is the {s}?",
        "Where is the {s} {in}?",
        "Where is the {s} located?",
        "Where can you see the {s}?",
        "Which side of the image is the {s} on?",
        "Is the {s} on the left, in the center or on the right?",
        "Where is the {s}, please?",
        "Please say where the {s} is.",
    ),
    ("side", "is"): (
        "Is the {s} {where}?",
        "Is the {s} located {where}?",
        "Does the {s} appear {where}?",
        "Is the {s} {where}, please?",
        "Please say if the {s} is {where}.",
    ),
    ("weather", "what"): (
        "What is the weather?",
        "What is the weather like?",
        "How is the weather?",
        "What is the weather {in}?",
        "What type of weather is it?",
        "What are the weather conditions?",
        "What does the weather look like?",
        "Is the weather clear, cloudy, rainy, snowy or foggy?",
        "What is the weather like, please?",
        "Please describe the weather.",
    ),
    ("weather", "is clear"): ("Is the sky clear?", "Is the weather clear now?"),
    ("weather", "is cloudy"): ("Is the sky cloudy?", "Is the sky cloudy {in}?"),
    ("weather", "is rainy"): (
        "Is there rain?",
        "Is there rain {in}?",
        "Can you see rain?",
        "Does the image show rain?",
    ),
    ("weather", "is foggy"): (
        "Is there fog?",
        "Is there any fog {in}?",
        "Can you see fog?",
        "Does the image show fog?",
    ),
    ("weather", "is"): (
        "Is it {v}?",
        "Is the weather {v}?",
        "Is the weather {v} {in}?",
        "Is it {v} here?",
        "Does the weather look {v}?",
        "Is it {v}, please?",
        "Please say if the weather is {v}.",
    ),
    ("time_of_day", "what"): (
        "What time of day is it?",
        "What time of day is it {in}?",
        "What is the time of day?",
        "Is it day, night or dusk?",
        "When was this image taken, by day, at night or at dusk?",
        "At what time of day was this image taken?",
        "What time of day is it, please?",
        "Please say what time of day it is.",
    ),
    ("time_of_day", "is night"): ("Is it dark?", "Is it dark {in}?", "Is it dark now?", "Please say if it is dark."),
    ("time_of_day", "is dusk"): ("Was this image taken at dusk or dawn?",),
    ("time_of_day", "is"): (
        "Is it {v}?",
        "Is it {v} {in}?",
        "Is it {v} now?",
        "Is this a {v} scene?",
        "Was this image taken {at}?",
        "Was this taken {at}, please?",
        "Please say if it is {v}.",
    ),
    ("road_surface", "what"): (
        "What is the road like?",
        "What is the road surface like?",
        "How is the road?",
        "What is the status of the road surface?",
        "Is the road dry, wet or snowy?",
        "Please describe the road surface.",
    ),
    ("road_surface", "is snowy"): (
        "Is there snow on the road?",
        "Is there any snow on the road?",
        "Can you see snow on the road?",
    ),
    ("road_surface", "is"): (
        "Is the road {v}?",
        "Is the street {v}?",
        "Is the road surface {v}?",
        "Does the road look {v}?",
        "Is the road {v}, please?",
        "Please say if the road is {v}.",
    ),
    ("traffic_density", "what"): (
        "How much traffic is there?",
        "How busy is it?",
        "How busy is the road?",
        "How heavy is the traffic?",
        "What is the traffic like?",
        "Please describe the traffic.",
    ),
    ("traffic_density", "is empty"): (
        "Is the road empty?",
        "Is the street empty?",
        "Is the road empty now?",
        "Is the road clear of traffic?",
        "Please say if the road is empty.",
    ),
    ("traffic_density", "is light"): (
        "Is there light traffic?",
        "Is there just light traffic {in}?",
        "Is there very light traffic?",
        "Please say if there is light traffic.",
    ),
    ("traffic_density", "is busy"): (
        "Is it busy?",
        "Is the road busy?",
        "Is the street busy?",
        "Is the traffic heavy?",
        "Is there heavy traffic?",
        "Is there much traffic?",
        "Please say if the road is busy.",
    ),
    ("traffic_density", "is jam"): (
        "Is there a traffic jam?",
        "Is there a traffic jam {in}?",
        "Is this a traffic jam?",
        "Can you see a traffic jam?",
        "Please say if there is a traffic jam.",
    ),
    ("road_type", "what"): (
        "What type of road is this?",
        "What type of road is it?",
        "What type of street is this?",
        "Which type of road do you see?",
        "Which type of road is {in}?",
        "What type of road is this, please?",
        "Please say what type of road this is.",
    ),
    ("road_type", "is"): (
        "Is this {av}?",
        "Is this {av}, please?",
        "Was this image taken {on}?",
        "Please say if this is {av}.",
    ),
    # "Is this a bridge or a tunnel?" would ask which of them it is.
    ("road_type", "is bridge or tunnel"): (
        "Are we on a bridge or in a tunnel?",
        "Please say if this is a bridge or a tunnel.",
        "Please say if we are on a bridge or in a tunnel.",
        "Please say if this image was taken on a bridge or in a tunnel.",
    ),
    ("lane_count", "what"): (
        "How many lanes are there?",
        "How many lanes are there on the road?",
        "How many lanes does the road have?",
        "How many lanes does this road have?",
        "How many lanes can you see?",
        "What is the number of lanes?",
        "Count the lanes.",
        "Please say how many lanes there are.",
    ),
    ("lane_count", "is"): (
        "Does the road have {lanes}?",
        "Does this road have {lanes}?",
        "Is this a road with {lanes}?",
        "Do you see {lanes}?",
        "Please say if the road has {lanes}.",
    ),
    ("road_shape", "what"): (
        "Which way does the road go?",
        "Which way does the road turn, if it turns?",
        "Which direction does the road take?",
        "In which direction does the road go?",
        "Where does the road go?",
        "Please say which way the road goes.",
    ),
    ("road_shape", "is"): (
        "Does the road {turn}?",
        "Does the road ahead {turn}?",
        "Does the street {turn}?",
        "Will the road {turn}?",
        "Does the road {turn}, please?",
    ),
    ("road_shape", "is straight"): (
        "Is the road straight?",
        "Is this a straight road?",
        "Is the road ahead straight?",
    ),
    ("road_shape", "is left"): (
        "Is there a curve to the left?",
        "Is the road turning left?",
        "Does the road make a turn to the left?",
    ),
    ("road_shape", "is right"): (
        "Is there a curve to the right?",
        "Is the road turning right?",
        "Does the road make a turn to the right?",
    ),
    ("view", "what"): (
        "Is this the view of a driver or of a camera?",
        "Is this seen by a driver or by a traffic camera?",
        "Which view is this, driver or camera?",
        "What is the view, that of a driver or that of a camera?",
        "Is this the view of a driver or of a camera, please?",
        "Please say which view this is, driver or camera.",
    ),
    ("view", "is driver"): (
        "Is this the view of a driver?",
        "Is this a driver's view?",
        "Is this seen from a vehicle on the road?",
        "Was this image taken from a vehicle?",
        "Does the image show the view of a driver?",
        "Please say if this is the view of a driver.",
    ),
    ("view", "is camera"): (
        "Is this the view of a traffic camera?",
        "Is this seen from a camera over the road?",
        "Was this image taken by a traffic camera?",
        "Is this taken from above the road?",
        "Does the image show the view of a traffic camera?",
        "Please say if this is the view of a traffic camera.",
    ),
    ("ahead", "what"): (
        "What is ahead?",
        "What is ahead of us?",
        "What is in front of us?",
        "What is straight ahead?",
        "What can you see ahead?",
        "What do you see ahead of us?",
        "What is there in front of us?",
        "What is in front of the ego car?",
        "What objects are ahead of the ego vehicle?",
        "What is ahead, please?",
        "Please say what is ahead.",
    ),
    ("closest", "what"): (
        "What is the closest vehicle?",
        "Which vehicle is the closest?",
        "Which vehicle is closest to us?",
        "What type of vehicle is closest to the camera?",
        "Please say which vehicle is the closest.",
    ),
    ("closest", "is"): (
        "Is the closest vehicle {b_a}?",
        "Is {b_a} the closest vehicle?",
        "Is {b_a} closest to us?",
        "Please say if the closest vehicle is {b_a}.",
    ),
    ("objects", ""): (
        "What is {where}?",
        "What is there {where}?",
        "What can you see {where}?",
        "What do you see {where}?",
        "What objects are {where}?",
        "Which objects do you see {where}?",
        "Please describe what is {where}.",
    ),
    ("description", "what"): (
        "Describe the objects.",
        "List the objects.",
        "Name the objects.",
        "Please list the objects {in}.",
        "What objects do you see?",
        "What are the objects {in}?",
        "Describe the scene.",
        "Describe the image.",
        "Describe what you see.",
        "Please describe the scene.",
        "Please describe the image.",
        "Please describe what you see {in}.",
        "Can you describe the scene?",
        "Could you describe the image, please?",
        "What do you see {in}?",
        "What can you see {in}?",
        "What is {in}?",
        "What does the image show?",
    ),
}


def with_article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def amount(number: int, category: str, adjective: str = "", is_exact: bool = True) -> str:
    """ "a red car", "2 cars", or "cars" if there may be more than `number`."""
    singular, plural, _ = CLASSES[category]
    noun = singular if number == 1 else plural
    noun = f"{adjective} {noun}" if adjective else noun
    if number == 1:
        return with_article(noun)
    return f"{number} {noun}" if is_exact else noun


def enumeration(parts: Sequence[str]) -> str:
    """ "a car, a bus and 2 people" """
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


@lru_cache(maxsize=1 << 14)
def paraphrases_of(question_id: str) -> tuple[str, ...]:
    """All paraphrases of a question id, the simplest first.

    Raises:
        ValueError: the grammar has no such question id.
    """
    parts = question_id.split("/")
    question_type, category, form, value = (parts + [""] * 4)[:4]
    forms: tuple[str, ...] = (form, f"{form} {value}")  # some values have templates of their own
    slots: dict[str, str | tuple[str, ...]] = {"in": IN, "v": value}
    if question_type == "presence":
        forms = ("", category)
    elif question_type in ("place", "relation", "objects"):
        forms = ("", form) if question_type == "place" else ("",)  # the form is a slot
        slots["where"] = (RELATIONS if question_type == "relation" else PLACES).get(form, ())
    elif question_type == "side":
        slots["where"] = PLACES.get(value, ())
    elif (question_type, form, value) == ("count", "over", "1"):
        forms = ("over 1",)  # "more than one car", not "more than 1 cars"
    elif question_type == "road_type" and value:
        forms = (f"{form} {value}",) if " or " in value else forms
        slots |= {"av": with_article(value), "on": f"{PREPOSITIONS.get(value, 'on')} {with_article(value)}"}
    if category in CLASSES:
        singular, plural, _ = CLASSES[category]
        slots |= {"s": singular, "p": plural, "av": with_article(f"{value} {singular}")}
        slots["a"] = singular if category in MASS_NOUNS else with_article(singular)
        if value in STATUSES:
            slots |= {"status": STATUSES[value], "ps": tuple(f"{status} {plural}" for status in STATUSES[value])}
            slots["as"] = tuple(with_article(f"{status} {singular}") for status in STATUSES[value])
        elif value.endswith(" rider") and category in RIDERS:
            how = value.removesuffix("rider")
            forms = (f"{form} {value}", "any") if form == "any" else (f"{form} {value}",)
            slots |= {"as": f"{slots['a']} {how}a rider", "ps": f"{plural} {how}riders", "rider": RIDERS[category]}
    if value in CLASSES:
        slots["b"], slots["q"], _ = CLASSES[value]
        slots["b_a"] = with_article(CLASSES[value][0])
    if value.isdecimal():
        slots["next"] = str(int(value) + 1)
    slots |= {"facing": FACING.get(value, ()), "travel": TRAVEL.get(value, ()), "turn": TURNS.get(value, ())}
    slots["lanes"] = "just one lane" if value == "1" else f"{value} lanes"
    slots["at"] = "by day" if value == "day" else f"at {value}"
    templates = tuple(template for one in forms for template in TEMPLATES.get((question_type, one), ()))
    if category in MASS_NOUNS:
        templates = tuple(one for one in templates if "{p}" not in one and not one.startswith("Is any object"))
    try:
        texts = tuple(dict.fromkeys(text for template in templates for text in _filled(template, slots)))
    except KeyError as error:
        raise ValueError(f"unknown question id {question_id!r}: its template has no filling for {error}") from None
    if not texts or len(parts) > 4:
        raise ValueError(
            f"unknown question id {question_id!r}; expected type/category/form/value with a type of the grammar"
        )
    return texts


def _filled(template: str, slots: dict[str, str | tuple[str, ...]]) -> Iterator[str]:
    """The text of a template with each combination of fillings, starting with a capital letter."""
    names = [name for _, name, _, _ in Formatter().parse(template) if name]
    options = [(filling,) if isinstance(filling := slots[name], str) else filling for name in names]
    for fillings in product(*options):
        text = template.format(**dict(zip(names, fillings)))
        yield text[0].upper() + text[1:]


def random_paraphrase(question_id: str, rng: random.Random) -> str:
    """A random paraphrase of a question id."""
    texts = paraphrases_of(question_id)
    return texts[int(rng.random() * len(texts))]
