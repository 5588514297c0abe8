"""Presence loss: which categories are in the image, in its thirds and in its patches, by the query head (`head.py`).

    GroundTruth → region [C,4] of 1, 0, -1          Scene, patches of its objects → patch [C,rows,columns] of 1, 0, -1

1 is present, 0 absent, -1 unknown. Regions are the whole image and its left, center and right third: `GroundTruth`
answers for them, as it does for the decoder, so both learn the same. In a patch, an object is unknown if less than
30 % of it is visible, or if its shorter side is under 5 pixels in an image resized to a shorter side of 224.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...configuration_traffic_vlm import token_grid
from ...data.formats.scene_labels import CLASS_OF, SCENE_ATTRIBUTE_OF, SCENE_VALUES, SEEN, SEEN_BY_DRIVERS
from ...data.scene import CLASSES, LIGHT_STATES, SCENE_ATTRIBUTES, SPEED_LIMITS, Scene, classes_of
from ...data.truth import MIN_VISIBLE, NO_GROUP, THIRDS, AnswerWithBoxes, GroundTruth
from ..collator import Prepared
from .grounding import object_patches


REGIONS = ("whole", "left", "center", "right")
LIGHTS = {state: f"{state} light" for state in LIGHT_STATES}
LIMITS = {value: f"speed limit {value}" for value in SPEED_LIMITS[:12]}
BOXED = (
    *("vehicle", "car", "van", "bus", "truck", "train", "rickshaw", "ambulance", "motorcycle", "bicycle"),
    *("person", "pedestrian", "rider", "traffic light", *LIGHTS.values(), "traffic sign", "stop sign"),
    *("speed limit sign", *LIMITS.values(), "crosswalk sign", "fence", "pole", "building", "tree", "sidewalk"),
    *("road", "sky"),
)
VALUES = tuple(f"{name}: {value}" for name, values in SCENE_VALUES.items() for value in values)
WHOLE_ONLY = tuple(name for name in (*SEEN, *SEEN_BY_DRIVERS) if name not in BOXED and name != "own hood")
CATEGORIES: tuple[str, ...] = BOXED + WHOLE_ONLY + VALUES
INDEX = {name: index for index, name in enumerate(CATEGORIES)}

MIN_SIDE = 5.0  # pixels, when the shorter side of the image is resized to 224
PATCH_PRESENT, PATCH_ABSENT = 0.5, 0.03  # fraction of a patch that is covered


def _questions() -> dict[tuple[str, ...], tuple[int, int]]:
    found = {}
    for name in (*BOXED, *WHOLE_ONLY):
        category = CLASS_OF.get(name, name)
        if category in CLASSES:
            found[f"presence/{category}"] = (INDEX[name], 0)
        if name in BOXED and category in CLASSES:
            found |= {f"place/{category}/{third}": (INDEX[name], i) for i, third in enumerate(THIRDS, start=1)}
    found["place/pedestrian/road"] = (INDEX["pedestrian on the road"], 0)
    found |= {f"light_state/traffic light/any/{state}": (INDEX[name], 0) for state, name in LIGHTS.items()}
    for field, (attribute, values) in SCENE_ATTRIBUTE_OF.items():
        for value, asked in values.items():
            if asked in SCENE_ATTRIBUTES[attribute] and asked != "other":
                question_id = f"{attribute.replace(' ', '_')}/{attribute}/is/{asked}"
                found[question_id] = (INDEX[f"{field}: {value}"], 0)
    return {tuple(question_id.split("/")): place for question_id, place in found.items()}


# Yes/no questions that the query head answers: {key: (index of the category, index of the region)}.
HEAD_QUESTIONS = _questions()
ASKED = set(HEAD_QUESTIONS.values())


def region_targets(truth: GroundTruth) -> np.ndarray:
    """Presence int8 [C,4] in the whole image and in its thirds, by the answers to questions about it."""
    scene, region = truth.scene, np.full((len(CATEGORIES), len(REGIONS)), -1, np.int8)
    for key, place in HEAD_QUESTIONS.items():
        region[place] = _to_target(truth.find(key))
    for field, (attribute, values) in SCENE_ATTRIBUTE_OF.items():  # values that become "other" have no question
        known = scene.scene_attributes.get(attribute)
        for value, asked in values.items():
            place = INDEX[f"{field}: {value}"], 0
            if place not in ASKED and known not in (None, asked):
                region[place] = 0
    is_exhaustive = _exhaustive(scene)
    for category, attribute, names in (("traffic light", "state", LIGHTS), ("speed limit sign", "value", LIMITS)):
        if attribute in scene.attributed.get(category, ()) or scene.of(category):
            for value, name in names.items():
                group, index = truth.groups.get(category, NO_GROUP).having(attribute, value), INDEX[name]
                complete = bool(is_exhaustive[index])
                answers = [group.present(complete), *(group.inside(third, complete) for third in THIRDS)]
                for part, answer in enumerate(answers):
                    if region[index, part] == -1:
                        region[index, part] = _to_target(answer)
    return region


def _to_target(answer: AnswerWithBoxes | None) -> int:
    return -1 if answer is None else int(answer.answer == "yes")


def patch_targets(scene: Scene, covered: np.ndarray) -> np.ndarray:
    """Presence int8 [C,rows,columns] in each patch.

    Args:
        covered: the fraction [N,rows,columns] of each patch that each object of the scene covers.
    """
    unknown = np.full((len(CATEGORIES), *covered.shape[1:]), -1)
    patch = np.where(_exhaustive(scene)[:, None, None], 0, unknown).astype(np.int8)
    for item, fraction in zip(scene.objects, covered):
        names: list[str | None] = [*classes_of(item.category)]
        is_clear = item.visible >= MIN_VISIBLE
        if item.coverage is None:
            names += [LIGHTS.get(item.attributes.get("state", "")), LIMITS.get(item.attributes.get("value", ""))]
            left, top, right, bottom = item.box
            is_clear &= min(right - left, bottom - top) * 224 / min(scene.width, scene.height) >= MIN_SIDE
        for name in INDEX.keys() & names:
            part = patch[INDEX[name]]
            part[(fraction > PATCH_ABSENT) & (part == 0)] = -1
            if is_clear:
                part[fraction >= PATCH_PRESENT] = 1
    return patch


def _exhaustive(scene: Scene) -> np.ndarray:
    """Bool [C]: whether the source labels every object of each category."""
    exhaustive = np.zeros(len(CATEGORIES), bool)
    exhaustive[[INDEX[name] for name in scene.exhaustive if name in INDEX]] = True
    if "state" in scene.attributed.get("traffic light", ()):  # some sources do not label yellow lights
        exhaustive[[INDEX["red light"], INDEX["green light"]]] = True
        exhaustive[INDEX["yellow light"]] = "traffic light" in scene.exhaustive
    if "value" in scene.attributed.get("speed limit sign", ()) and "speed limit sign" in scene.exhaustive:
        exhaustive[[INDEX[name] for name in LIMITS.values()]] = True
    return exhaustive


def targets(
    images: Sequence[Prepared], batch: Mapping[str, Any], vision_config: Any, sources: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Targets of a batch; all are unknown of an image without a scene.

    Returns:
        region: int8 [I,C,4]. patch: int8 [I,C,rows,columns]. source: [I], the index of each image's source.
    """
    grid = token_grid(vision_config, *batch["pixel_values"].shape[-2:])
    shape = len(images), len(CATEGORIES)
    region, patch = np.full((*shape, len(REGIONS)), -1, np.int8), np.full((*shape, *grid), -1, np.int8)
    for index, item in enumerate(images):
        if item.truth is not None:
            scene = item.truth.scene
            region[index], patch[index] = region_targets(item.truth), patch_targets(scene, object_patches(scene, grid))
    index_of = {source: index for index, source in enumerate(sources)}
    source = torch.tensor([index_of.get(item.source, 0) for item in images])
    return {"region": torch.from_numpy(region), "patch": torch.from_numpy(patch), "source": source}


def loss(passed: Any, region: torch.Tensor, patch: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The `PresenceLoss` of a model with a training head."""
    head = passed.model.training_head
    if passed.presence is None:  # a mixture of images has one pass, and the targets of both
        passed.presence = head["head"](passed.seen.last_hidden_state, patch.shape[2:])
    found: torch.Tensor = head["loss"](passed.presence, region, patch, source)
    return found
