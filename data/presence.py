"""What is where in an image: the targets of the tower's training.

    Scene + SceneLabels → ImageLabels → (window, mirrored) → region [C,4] and patch [C,rows,columns] of 1, 0, -1

1 is "it is there", 0 "it is not", -1 unknown. Regions are the whole image and its left, middle and right third.
- An object is in the third that holds its center. It makes the other thirds that it touches unknown.
- An object of which less than 30 % is visible, or whose shorter side is under 5 pixels where the image's shorter side
  is 224, makes a "no" unknown and is no "yes". So is the color of a light, or the number on a sign, that is cut.
- Boxes and masks of the source decide. Where it has none, scene labels decide about the whole image: "absent" holds
  in every crop, "present" only in crops of more than 70 % of the image. Weather, time, road, traffic, place and view
  hold in every crop.
"""

from dataclasses import dataclass

import numpy as np

from .patches import GRID, box_coverage, resampling
from .scene import CLASSES, LIGHT_STATES, SPEED_LIMITS, Scene
from .scene_labels import SCENE_VALUES, SEEN, SEEN_BY_DRIVERS, SceneLabels
from .truths import MIN_VISIBLE


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
FINE = np.isin(CATEGORIES, [*LIGHTS.values(), *LIMITS.values()])  # [C], told by a part of the object
VALUE_NAMES = {"rainy": "rain", "snowy": "snow", "foggy": "fog"}  # of Scene, in the words of scene labels
VEHICLES = [name for name in SEEN if name in CLASSES and CLASSES[name][2] == "vehicle"]

MIN_SIDE = 5.0  # pixels, where the shorter side of what is seen has 224
MASK_PRESENT, MASK_ABSENT = 0.25, 0.035  # patches that a mask fills, of 196
PRESENT_IN_CROP = 0.7  # of the image's area
UNCUT = 0.9  # of an object: less may lack the lamp that is lit, or a digit
PATCH_PRESENT, PATCH_ABSENT = 0.5, 0.03  # of a patch


@dataclass(frozen=True)
class ImageLabels:
    """All that is known about one image, as arrays. N objects with boxes, M masks, C categories.

    Attributes:
        size: (width, height) in pixels.
        boxes: [N,4] left, top, right, bottom in 0..1; visible: [N] the fraction that is not hidden.
        members: [N,C] the categories of each object.
        masks: [M,14,14] the fraction of each patch that is filled; mask_categories: [M]. `mask_known`: [M], False for
            a mask too small to be sure of.
        exhaustive: [C] whether the source labels every object of a category.
        whole: [C] what scene labels say about the whole image: 1, 0, -1.
        always: [C] whether that holds in every crop.
    """

    size: tuple[int, int]
    boxes: np.ndarray
    visible: np.ndarray
    members: np.ndarray
    masks: np.ndarray
    mask_categories: np.ndarray
    mask_known: np.ndarray
    exhaustive: np.ndarray
    whole: np.ndarray
    always: np.ndarray


def image_labels(scene: Scene, seen: SceneLabels | None = None) -> ImageLabels:
    """Gather what a source's boxes or masks and the scene labels know about an image."""
    boxed = [item for item in scene.objects if item.cells is None]
    masked = [
        (item, INDEX[name])
        for item in scene.objects
        for name in (item.label, CLASSES[item.label][2])
        if item.cells is not None and name in INDEX
    ]
    members = np.zeros((len(boxed), len(CATEGORIES)), bool)
    for row, item in enumerate(boxed):
        names = [item.label, CLASSES[item.label][2], LIGHTS.get(item.attributes.get("state", ""))]
        names.append(LIMITS.get(item.attributes.get("value", "")))
        members[row, [INDEX[name] for name in names if name in INDEX]] = True
    exhaustive = np.zeros(len(CATEGORIES), bool)
    exhaustive[[INDEX[name] for name in scene.exhaustive if name in INDEX]] = True
    if "state" in scene.attributed.get("traffic light", ()):  # a source may leave out yellow lights
        exhaustive[[INDEX["red light"], INDEX["green light"]]] = True
        exhaustive[INDEX["yellow light"]] = "traffic light" in scene.exhaustive
    if "value" in scene.attributed.get("speed limit sign", ()) and "speed limit sign" in scene.exhaustive:
        exhaustive[[INDEX[name] for name in LIMITS.values()]] = True
    whole, always = np.full(len(CATEGORIES), -1, np.int8), np.zeros(len(CATEGORIES), bool)
    if seen is not None:
        _add_seen(seen, whole)
    _add_values(scene.facts, seen, whole, always)
    shape = (scene.width, scene.height, scene.width, scene.height)
    return ImageLabels(
        (scene.width, scene.height),
        np.array([item.box for item in boxed], np.float32).reshape(-1, 4) / np.array(shape, np.float32),
        np.array([item.visible for item in boxed], np.float32),
        members,
        np.array([item.cells for item, _ in masked], np.float32).reshape(-1, GRID, GRID),
        np.array([category for _, category in masked], int),
        np.array([item.visible >= MIN_VISIBLE for item, _ in masked], bool),
        exhaustive,
        whole,
        always,
    )


def _add_seen(seen: SceneLabels, whole: np.ndarray) -> None:
    for name in seen.asked & INDEX.keys():
        whole[INDEX[name]] = 1 if name in seen.present else -1 if name in seen.unsure else 0
    vehicles = whole[[INDEX[name] for name in VEHICLES]]
    whole[INDEX["vehicle"]] = 1 if (vehicles == 1).any() else 0 if (vehicles == 0).all() else -1


def _add_values(facts: dict[str, str], seen: SceneLabels | None, whole: np.ndarray, always: np.ndarray) -> None:
    """Weather, time of day, view and the like: by scene labels, or else as the source reports them."""
    values = {name.replace(" ", "_"): VALUE_NAMES.get(value, value) for name, value in facts.items()}
    values |= seen.values if seen is not None else {}
    for name, known in values.items():
        for value in SCENE_VALUES[name] if known != "none" else ():
            whole[INDEX[f"{name}: {value}"]] = value == known
            always[INDEX[f"{name}: {value}"]] = True


def targets(
    labels: ImageLabels,
    window: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0),
    mirrored: bool = False,
    grid: tuple[int, int] = (GRID, GRID),
) -> tuple[np.ndarray, np.ndarray]:
    """Targets of what is seen through a window (left, top, right, bottom in 0..1), then mirrored or not.

    Returns:
        region int8 [C,4] and patch int8 [C,rows,columns] of 1, 0 and -1.
    """
    region = np.full((len(CATEGORIES), 4), -1, np.int8)
    patch = np.full((len(CATEGORIES), *grid), -1, np.int8)
    region[labels.exhaustive] = 0
    patch[labels.exhaustive] = 0
    _add_boxes(labels, window, mirrored, region, patch)
    _add_masks(labels, window, mirrored, region, patch)
    area = (window[2] - window[0]) * (window[3] - window[1])
    holds = labels.always | (labels.whole == 0) | (area > PRESENT_IN_CROP)
    fill = (region[:, 0] == -1) & ~labels.exhaustive & ~labels.members.any(0) & holds
    region[fill, 0] = labels.whole[fill]
    if mirrored:  # mirrored digits cannot be read
        region[[INDEX[name] for name in LIMITS.values()]] = -1
        patch[[INDEX[name] for name in LIMITS.values()]] = -1
    return region, patch


def _add_boxes(
    labels: ImageLabels, window: tuple[float, ...], mirrored: bool, region: np.ndarray, patch: np.ndarray
) -> None:
    if not len(labels.boxes):
        return
    origin, scale = np.array(window[:2] * 2), np.array([window[2] - window[0], window[3] - window[1]] * 2)
    boxes = (labels.boxes - origin) / scale
    if mirrored:
        boxes = np.stack([1 - boxes[:, 2], boxes[:, 1], 1 - boxes[:, 0], boxes[:, 3]], 1)
    before = np.prod(boxes[:, 2:] - boxes[:, :2], 1)
    boxes = boxes.clip(0, 1)
    sides = boxes[:, 2:] - boxes[:, :2]
    inside = (sides > 0).all(1)
    boxes, sides, members = boxes[inside], sides[inside], labels.members[inside]
    kept = labels.visible[inside] * np.prod(sides, 1) / before[inside]
    pixels = np.array(labels.size) * scale[:2]  # of what is seen
    clear = (kept >= MIN_VISIBLE) & ((sides * pixels).min(1) * 224 / pixels.min() >= MIN_SIDE)
    is_whole = np.prod(sides, 1) / before[inside] >= UNCUT
    shown = members & clear[:, None] & (is_whole[:, None] | ~FINE)  # [N,C]
    third = np.minimum((boxes[:, 0] + boxes[:, 2]) * 1.5, 2).astype(int)
    starts = np.arange(3) / 3
    touches = (boxes[:, :1] < starts + 1 / 3) & (boxes[:, 2:3] > starts)  # [N,3]
    touches = np.concatenate([np.ones((len(boxes), 1), bool), touches], 1)
    holds = np.concatenate([np.ones((len(boxes), 1), bool), third[:, None] == np.arange(3)], 1)
    some, maybe = shown.T.astype(np.float32) @ holds > 0, members.T.astype(np.float32) @ touches > 0
    region[maybe & (region == 0)] = -1
    region[some] = 1
    covered = box_coverage(boxes, (patch.shape[1], patch.shape[2]))
    for category in np.flatnonzero(members.any(0)):
        covers = covered[members[:, category]].max(0)
        _paint(patch[category], covers, covered[shown[:, category]].max(0, initial=0))


def _paint(patch: np.ndarray, covered: np.ndarray, clear: np.ndarray) -> None:
    patch[(covered > PATCH_ABSENT) & (patch == 0)] = -1
    patch[clear >= PATCH_PRESENT] = 1


def _add_masks(
    labels: ImageLabels, window: tuple[float, ...], mirrored: bool, region: np.ndarray, patch: np.ndarray
) -> None:
    left, top, right, bottom = window
    for mask, category, known in zip(labels.masks, labels.mask_categories, labels.mask_known):
        rows = resampling(top, bottom, patch.shape[1])
        columns = resampling(left, right, patch.shape[2])
        seen = rows @ mask @ columns.T
        by_third = resampling(top, bottom, GRID) @ mask @ resampling(left, right, 3).T  # [14,3]
        filled = np.concatenate([[by_third.sum() / 3], by_third.sum(0) / 3]) * GRID  # patches, of 196
        if mirrored:
            seen, filled = seen[:, ::-1], filled[[0, 3, 2, 1]]
        region[category, (filled > MASK_ABSENT) & (region[category] == 0)] = -1
        if known:
            region[category, filled >= MASK_PRESENT] = 1
        _paint(patch[category], seen, seen if known else np.zeros_like(seen))
