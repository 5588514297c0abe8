"""Presence of categories by region and patch: the targets for training the vision tower.

    Scene → region [C,4] and patch [C,rows,columns] of 1, 0, -1

1 is present, 0 absent, -1 unknown. Regions are the whole image and its left, middle and right third.
- An object is in the third that contains its center. The other thirds that it overlaps become unknown, unless another
  object is present there.
- An object makes its category unknown, not present, if less than 30 % of it is visible, or if its shorter side is
  under 5 pixels in an image resized to a shorter side of 224.
- Where a source has neither boxes nor masks of a category, scene labels give the value for the whole image.
"""

from collections.abc import Sequence

import numpy as np

from .ground_truth import MIN_VISIBLE, THIRDS
from .patches import GRID, box_coverage, resampling
from .scene import CLASSES, LIGHT_STATES, SCENE_ATTRIBUTES, SPEED_LIMITS, Scene, SceneObject
from .scene_labels import CLASS_OF, SCENE_ATTRIBUTE_OF, SCENE_VALUES, SEEN, SEEN_BY_DRIVERS


REGIONS = ("whole", "left", "middle", "right")
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
MASK_PRESENT, MASK_ABSENT = 0.25, 0.035  # area in patches that a mask fills, of 196
PATCH_PRESENT, PATCH_ABSENT = 0.5, 0.03  # fraction of a patch that is covered


def _questions() -> dict[str, tuple[int, int]]:
    found = {}
    for name in (*BOXED, *WHOLE_ONLY):
        category = CLASS_OF.get(name, name)
        if category in CLASSES:
            found[f"presence/{category}"] = (INDEX[name], 0)
        if name in BOXED and category in CLASSES:
            found |= {f"place/{category}/{third}": (INDEX[name], i) for i, third in enumerate(THIRDS, start=1)}
    found["place/pedestrian/road"] = (INDEX["pedestrian on the road"], 0)
    found |= {f"light_state/traffic light/any/{state}": (INDEX[name], 0) for state, name in LIGHTS.items()}
    for field, (attribute, renamed) in SCENE_ATTRIBUTE_OF.items():
        for value in SCENE_VALUES[field]:
            asked = renamed.get(value, value)
            if asked in SCENE_ATTRIBUTES[attribute] and asked != "other":
                question_id = f"{attribute.replace(' ', '_')}/{attribute}/is/{asked}"
                found[question_id] = (INDEX[f"{field}: {value}"], 0)
    return found


PRESENCE = {CLASS_OF.get(name, name): INDEX[name] for name in (*BOXED, *WHOLE_ONLY)}  # names of `Scene.presence`
# Yes/no questions that the query head answers: {question id: (index of the category, index of the region)}.
HEAD_QUESTIONS = _questions()


def targets(scene: Scene, grid: tuple[int, int] = (GRID, GRID)) -> tuple[np.ndarray, np.ndarray]:
    """Presence of each category in an image.

    Args:
        grid: rows and columns of patches.

    Returns:
        region int8 [C,4] and patch int8 [C,rows,columns] of 1, 0 and -1.
    """
    exhaustive = _exhaustive(scene)
    region = np.where(exhaustive[:, None], 0, np.full((len(CATEGORIES), 4), -1)).astype(np.int8)
    patch = np.where(exhaustive[:, None, None], 0, np.full((len(CATEGORIES), *grid), -1)).astype(np.int8)
    boxed = [item for item in scene.objects if item.coverage is None]
    members = np.zeros((len(boxed), len(CATEGORIES)), bool)  # whether an object belongs to a category
    for row, item in enumerate(boxed):
        names = [item.category, CLASSES[item.category][2], LIGHTS.get(item.attributes.get("state", ""))]
        names.append(LIMITS.get(item.attributes.get("value", "")))
        members[row, [INDEX[name] for name in names if name in INDEX]] = True
    if boxed:
        _add_boxes(scene, boxed, members, region, patch)
    for item in scene.objects:
        for name in {item.category, CLASSES[item.category][2]} & INDEX.keys() if item.coverage is not None else ():
            _add_mask(np.array(item.coverage), item.visible >= MIN_VISIBLE, region[INDEX[name]], patch[INDEX[name]])
    whole = _whole(scene)
    fill = (region[:, 0] == -1) & ~exhaustive & ~members.any(0)
    region[fill, 0] = whole[fill]
    return region, patch


def _exhaustive(scene: Scene) -> np.ndarray:
    """Whether the source labels every object of a category [C]."""
    exhaustive = np.zeros(len(CATEGORIES), bool)
    exhaustive[[INDEX[name] for name in scene.exhaustive if name in INDEX]] = True
    if "state" in scene.attributed.get("traffic light", ()):  # some sources do not label yellow lights
        exhaustive[[INDEX["red light"], INDEX["green light"]]] = True
        exhaustive[INDEX["yellow light"]] = "traffic light" in scene.exhaustive
    if "value" in scene.attributed.get("speed limit sign", ()) and "speed limit sign" in scene.exhaustive:
        exhaustive[[INDEX[name] for name in LIMITS.values()]] = True
    return exhaustive


def _whole(scene: Scene) -> np.ndarray:
    """Presence in the whole image [C] by scene labels: 1, 0, -1."""
    whole = np.full(len(CATEGORIES), -1, np.int8)
    for name in PRESENCE.keys() & scene.presence.keys():
        whole[PRESENCE[name]] = scene.presence[name]
    for field, (attribute, renamed) in SCENE_ATTRIBUTE_OF.items():
        values, known = SCENE_VALUES[field], scene.scene_attributes.get(attribute)
        possible = {value for value in values if renamed.get(value, value) == known}  # several views are "other"
        for value in values if possible else ():
            if value not in possible or len(possible) == 1:
                whole[INDEX[f"{field}: {value}"]] = value in possible
    return whole


def _add_boxes(
    scene: Scene, items: Sequence[SceneObject], members: np.ndarray, region: np.ndarray, patch: np.ndarray
) -> None:
    size = np.array([scene.width, scene.height])
    boxes = np.array([item.box for item in items]) / np.tile(size, 2)  # [N,4]
    sides = (boxes[:, 2:] - boxes[:, :2]) * size  # in pixels
    visible = np.array([item.visible for item in items])
    clear = (visible >= MIN_VISIBLE) & (sides.min(1) * 224 / size.min() >= MIN_SIDE)
    shown = members & clear[:, None]  # [N,C]
    third = np.minimum((boxes[:, 0] + boxes[:, 2]) * 1.5, 2).astype(int)
    starts = np.arange(3) / 3
    whole = np.ones((len(boxes), 1), bool)
    touches = np.concatenate([whole, (boxes[:, :1] < starts + 1 / 3) & (boxes[:, 2:3] > starts)], 1)  # [N,4]
    holds = np.concatenate([whole, third[:, None] == np.arange(3)], 1)
    present, possible = shown.T.astype(np.float32) @ holds > 0, members.T.astype(np.float32) @ touches > 0
    region[possible & (region == 0)] = -1
    region[present] = 1
    covered = box_coverage(boxes, (patch.shape[1], patch.shape[2]))
    for category in np.flatnonzero(members.any(0)):
        covers = covered[members[:, category]].max(0)
        _paint(patch[category], covers, covered[shown[:, category]].max(0, initial=0))


def _add_mask(mask: np.ndarray, is_clear: bool, region: np.ndarray, patch: np.ndarray) -> None:
    """Add a mask [rows,columns] to the region [4] and patch [rows,columns] of its category.

    Args:
        is_clear: False for a mask too small or too hidden to be certain: it is unknown, not present.
    """
    seen = resampling(0, 1, patch.shape[0], len(mask)) @ mask @ resampling(0, 1, patch.shape[1], len(mask[0])).T
    by_third = mask @ resampling(0, 1, 3, len(mask[0])).T  # [rows,3]
    filled = np.concatenate([[by_third.sum() / 3], by_third.sum(0) / 3]) * len(mask[0])  # area in patches, of 196
    region[(filled > MASK_ABSENT) & (region == 0)] = -1
    if is_clear:
        region[filled >= MASK_PRESENT] = 1
    _paint(patch, seen, seen if is_clear else np.zeros_like(seen))


def _paint(patch: np.ndarray, covered: np.ndarray, clear: np.ndarray) -> None:
    patch[(covered > PATCH_ABSENT) & (patch == 0)] = -1
    patch[clear >= PATCH_PRESENT] = 1
