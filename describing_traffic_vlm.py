"""Captions: one or two sentences, composed by grammar from answers to yes/no questions and from located objects.

    "A busy city street by day; the road is wet. Three cars ahead, a bus on the right, a red light."

    P(yes) of QUESTIONS ── what is sure; of values that exclude each other, the likeliest ──┐
    located objects ── their number, and the third of the image that all of a class are in ─┴→ sentences

A place, traffic and a surface are named only of a road that is surely in view. "Several" are 4 to 6, "many" are more.
This module needs only the standard library.
"""

from collections.abc import Iterable, Mapping

from .question_traffic_vlm import MASS, with_article


ROAD, DRIVER, LIGHT = "Is there a road?", "Is this the view of a driver?", "traffic light"
# Questions ask how many there are of COUNTED, and whether there is one of the others.
COUNTED = ("car", "van", "truck", "bus", "motorcycle", "bicycle", "person")
OTHERS = ("rickshaw", "train", "emergency vehicle", "animal", LIGHT, "traffic sign", "crosswalk", "traffic cone")
PLURALS = {"bus": "buses", "person": "people"} | {noun: noun for noun in MASS}  # others end in "s"
SEVERAL, MANY = 4, 7
NUMBERS = {2: "two", 3: "three"}


def plural(noun: str) -> str:
    return PLURALS.get(noun, f"{noun}s")


def more_than(number: int, name: str) -> str:
    """The question whether there are more than a number of a thing."""
    return f"Is there more than one {name}?" if number == 1 else f"Are there more than {number} {plural(name)}?"


# {question: words}. The values of each table exclude each other, but for those of PRESENCE.
PRESENCE = {f"Is there {with_article(name)}?": name for name in (*COUNTED, *OTHERS, *MASS)}
PLACES = ("city street", "residential street", "highway", "rural road", "intersection", "parking area")
PLACE = {f"Is this {with_article(place)}?": place for place in PLACES}
TRAFFIC = {
    "Is the road empty?": "{} without moving traffic",  # vehicles may be parked
    "Is there light traffic?": "{} with light traffic",
    "Is the road busy?": "busy {}",
    "Is there a traffic jam?": "{} with a traffic jam",
}
TIME = {"Is it day?": " by day", "Is it night?": " at night", "Is it dusk?": " at dusk"}
WEATHER = {
    "Is it clear?": " in clear weather",
    "Is it cloudy?": " under a cloudy sky",
    "Is it rainy?": " in rain",
    "Is it snowy?": " in snow",
    "Is it foggy?": " in fog",
}
SURFACE = {f"Is the road {value}?": f"; the road is {value}" for value in ("dry", "wet", "snowy")}
LIGHT_COLOR = {f"Is the traffic light {color}?": f"{color} light" for color in ("red", "yellow", "green")}
MORE = [more_than(number, name) for name in COUNTED for number in (1, *NUMBERS)]
QUESTIONS = (ROAD, DRIVER, *PLACE, *TRAFFIC, *TIME, *WEATHER, *SURFACE, *PRESENCE, *LIGHT_COLOR, *MORE)


class Caption:
    """The caption of an image: `text`, and the questions whose answers it says, `said`.

    Args:
        p_yes: {question: P(yes)} of QUESTIONS. Nothing is said of those that are missing.
        objects: (class, center) of each located object; the center is 0 at the left edge of the image and 1 at the
            right edge.
        sure: P(yes) from which a yes is sure, and P(no) from which it is sure that no road is in view.
    """

    def __init__(self, p_yes: Mapping[str, float], objects: Iterable[tuple[str, float]] = (), sure: float = 0.8):
        self.p_yes, self.sure = p_yes, sure
        self.said: list[str] = []
        self.centers: dict[str, list[float]] = {}
        for name, center in objects:
            self.centers.setdefault(name, []).append(center)
        things = [self.thing({question: name}) for question, name in PRESENCE.items()]
        sentences = [self.scene(), ", ".join(filter(None, things))]
        self.text = " ".join(text[0].upper() + text[1:] + "." for text in sentences if text) or "Nothing is sure."

    def say(self, words: Mapping[str, str]) -> str:
        """The words of the likeliest question, which is said; "" if its yes is not sure."""
        question = max(words, key=lambda one: self.p_yes.get(one, 0.0))
        if self.p_yes.get(question, 0.0) < self.sure:
            return ""
        self.said.append(question)
        return words[question]

    def scene(self) -> str:
        """A phrase such as "a busy city street by day; the road is wet"."""
        if self.p_yes.get(ROAD, 1.0) <= 1 - self.sure:
            self.said.append(ROAD)
            return "no road is in view"
        if not self.say({ROAD: "road"}):
            when = self.say(TIME) + self.say(WEATHER)
            return when and f"a scene{when}"
        place = (self.say(TRAFFIC) or "{}").format(self.say(PLACE) or "road")
        return with_article(place) + self.say(TIME) + self.say(WEATHER) + self.say(SURFACE)

    def thing(self, words: Mapping[str, str]) -> str:
        """A phrase such as "three cars ahead"; "" if it is not sure that there are any.

        A number is said if as many are located, the answers agree, and more are surely not there. A side is said if
        all are located there.
        """
        name = self.say(words)
        if not name:
            return ""
        centers = self.centers.get(name, [])
        more = {number: self.p_yes.get(more_than(number, name), 0.0) for number in (1, *NUMBERS)}
        number = max(len(centers), 2 if more[1] >= 0.5 else 1)
        thirds = {min(int(3 * center), 2) for center in centers} if len(centers) == number else set()
        if name == LIGHT and (color := self.say(LIGHT_COLOR)):
            text = with_article(color)
        elif number == 1:
            text = with_article(name)
        elif number >= SEVERAL:
            text = f"{'many' if number >= MANY else 'several'} {plural(name)}"
        elif thirds and more[number - 1] >= 0.5 and more[number] <= 1 - self.sure:
            text = f"{NUMBERS[number]} {plural(name)}"
            self.said.append(more_than(number - 1, name))
        else:
            text = plural(name)
        ahead = " ahead" if self.p_yes.get(DRIVER, 0.0) >= self.sure else " in the middle"
        return text + ((" on the left", ahead, " on the right")[thirds.pop()] if len(thirds) == 1 else "")
