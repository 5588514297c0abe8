"""Presence of categories by region and patch: the targets for training the vision tower.

    Scene → ImageLabels → (window, mirrored) → region [C,4] and patch [C,rows,columns] of 1, 0, -1

1 is present, 0 absent, -1 unknown. Regions are the whole image and its left, middle and right third.
- An object is in the third that contains its center. The other thirds that it overlaps become unknown, unless another
  object is present there.
- An object makes its category unknown, not present, if less than 30 % of it is visible, or if its shorter side is
  under 5 pixels in an image resized to a shorter side of 224. The same holds for the color of a light and the number
  on a sign that are cut off by the window.
- Where a source has neither boxes nor masks of a category, scene labels give the value for the whole image: "absent"
  holds in every crop, "present" only in crops of more than 70 % of the image. Weather, time of day, road, traffic,
  place and view hold in every crop.
"""

from dataclasses import dataclass

import numpy as np

from .ground_truth import MIN_VISIBLE, THIRDS
from .patches import GRID, box_coverage, resampling
from .scene import CLASSES, LIGHT_STATES, PRESENT_IN_CROP, SCENE_ATTRIBUTES, SPEED_LIMITS, Scene
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
FINE = np.isin(CATEGORIES, [*LIGHTS.values(), *LIMITS.values()])  # [C], recognized by a small part of the object

MIN_SIDE = 5.0  # pixels, when the shorter side of the window is resized to 224
MASK_PRESENT, MASK_ABSENT = 0.25, 0.035  # area in patches that a mask fills, of 196
UNCUT = 0.9  # fraction of an object; with less, the lit lamp or a digit may be missing
PATCH_PRESENT, PATCH_ABSENT = 0.5, 0.03  # fraction of a patch that is covered


@dataclass(frozen=True)
class ImageLabels:
    """All labels of one image as arrays: N objects with boxes, M masks, C categories.

    Attributes:
        size: (width, height) in pixels.
        boxes: [N,4] left, top, right, bottom in 0..1.
        visible: [N] fraction of each object that is not hidden.
        members: [N,C] whether an object belongs to a category.
        masks: [M,14,14] fraction of each patch that is filled.
        mask_categories: [M] index of each mask's category.
        mask_known: [M] False for a mask too small or too hidden to be certain: its category is unknown, not present.
        exhaustive: [C] whether the source labels every object of a category.
        whole: [C] presence in the whole image by scene labels: 1, 0, -1.
        always: [C] whether `whole` holds in every crop.
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


def image_labels(scene: Scene) -> ImageLabels:
    """The boxes or masks of a scene, and what else is known of it, as arrays."""
    boxed = [item for item in scene.objects if item.coverage is None]
    masked = [
        (item, INDEX[name])
        for item in scene.objects
        for name in (item.category, CLASSES[item.category][2])
        if item.coverage is not None and name in INDEX
    ]
    members = np.zeros((len(boxed), len(CATEGORIES)), bool)
    for row, item in enumerate(boxed):
        names = [item.category, CLASSES[item.category][2], LIGHTS.get(item.attributes.get("state", ""))]
        names.append(LIMITS.get(item.attributes.get("value", "")))
        members[row, [INDEX[name] for name in names if name in INDEX]] = True
    exhaustive = np.zeros(len(CATEGORIES), bool)
    exhaustive[[INDEX[name] for name in scene.exhaustive if name in INDEX]] = True
    if "state" in scene.attributed.get("traffic light", ()):  # some sources do not label yellow lights
        exhaustive[[INDEX["red light"], INDEX["green light"]]] = True
        exhaustive[INDEX["yellow light"]] = "traffic light" in scene.exhaustive
    if "value" in scene.attributed.get("speed limit sign", ()) and "speed limit sign" in scene.exhaustive:
        exhaustive[[INDEX[name] for name in LIMITS.values()]] = True
    whole, always = np.full(len(CATEGORIES), -1, np.int8), np.zeros(len(CATEGORIES), bool)
    for name in PRESENCE.keys() & scene.presence.keys():
        whole[PRESENCE[name]] = scene.presence[name]
    _add_values(scene.scene_attributes, whole, always)
    shape = (scene.width, scene.height, scene.width, scene.height)
    return ImageLabels(
        (scene.width, scene.height),
        np.array([item.box for item in boxed], np.float32).reshape(-1, 4) / np.array(shape, np.float32),
        np.array([item.visible for item in boxed], np.float32),
        members,
        np.array([item.coverage for item, _ in masked], np.float32).reshape(-1, GRID, GRID),
        np.array([category for _, category in masked], int),
        np.array([item.visible >= MIN_VISIBLE for item, _ in masked], bool),
        exhaustive,
        whole,
        always,
    )


def _add_values(scene_attributes: dict[str, str], whole: np.ndarray, always: np.ndarray) -> None:
    """Add weather, time of day, view, ..."""
    for field, (attribute, renamed) in SCENE_ATTRIBUTE_OF.items():
        values, known = SCENE_VALUES[field], scene_attributes.get(attribute)
        possible = {value for value in values if renamed.get(value, value) == known}  # several views are "other"
        for value in values if possible else ():
            if value not in possible or len(possible) == 1:
                whole[INDEX[f"{field}: {value}"]] = value in possible
                always[INDEX[f"{field}: {value}"]] = True


def targets(
    labels: ImageLabels,
    window: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0),
    mirrored: bool = False,
    grid: tuple[int, int] = (GRID, GRID),
) -> tuple[np.ndarray, np.ndarray]:
    """Presence targets of an image that is cropped to a window, and then mirrored if `mirrored`.

    Args:
        window: left, top, right, bottom in 0..1.
        grid: rows and columns of patches over the window.

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
    holds = labels.always | (area > PRESENT_IN_CROP)  # also for absence, see `Scene.cropped`
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
    pixels = np.array(labels.size) * scale[:2]  # width and height of the window
    clear = (kept >= MIN_VISIBLE) & ((sides * pixels).min(1) * 224 / pixels.min() >= MIN_SIDE)
    is_whole = np.prod(sides, 1) / before[inside] >= UNCUT
    shown = members & clear[:, None] & (is_whole[:, None] | ~FINE)  # [N,C]
    third = np.minimum((boxes[:, 0] + boxes[:, 2]) * 1.5, 2).astype(int)
    starts = np.arange(3) / 3
    touches = (boxes[:, :1] < starts + 1 / 3) & (boxes[:, 2:3] > starts)  # [N,3]
    touches = np.concatenate([np.ones((len(boxes), 1), bool), touches], 1)
    holds = np.concatenate([np.ones((len(boxes), 1), bool), third[:, None] == np.arange(3)], 1)
    present, possible = shown.T.astype(np.float32) @ holds > 0, members.T.astype(np.float32) @ touches > 0
    region[possible & (region == 0)] = -1
    region[present] = 1
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
        filled = np.concatenate([[by_third.sum() / 3], by_third.sum(0) / 3]) * GRID  # area in patches, of 196
        if mirrored:
            seen, filled = seen[:, ::-1], filled[[0, 3, 2, 1]]
        region[category, (filled > MASK_ABSENT) & (region[category] == 0)] = -1
        if known:
            region[category, filled >= MASK_PRESENT] = 1
        _paint(patch[category], seen, seen if known else np.zeros_like(seen))
