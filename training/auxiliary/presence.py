"""Presence loss: which categories are in the whole image, in its thirds and in its patches.

    GroundTruth → region [C,4] of 1, 0, -1          Scene, patches of its objects → patch [C,rows,columns] of 1, 0, -1
    image tokens [B,P,W] → QueryHead → region logits [B,C,4], patch logits [B,P,C] ↔ PresenceLoss

1 is present, 0 absent, -1 unknown. Regions are the whole image and its left, center and right third: `GroundTruth`
answers for them, as it does for the decoder, so both learn the same. In a patch, an object is unknown if less than
30 % of it is visible, or if its shorter side is under 5 pixels in an image resized to a shorter side of 224.

A model to train, a tower alone or a full one, has the head with its loss as `training_head`. The head is saved beside
the weights as `training_head.safetensors`.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.utils import cached_file

from ...configuration_traffic_vlm import token_grid
from ...data.formats.scene_labels import CLASS_OF, SCENE_ATTRIBUTE_OF, SCENE_VALUES, SEEN, SEEN_BY_DRIVERS
from ...data.scene import CLASSES, LIGHT_STATES, SCENE_ATTRIBUTES, SPEED_LIMITS, Scene, classes_of
from ...data.truth import MIN_VISIBLE, NO_GROUP, THIRDS, AnswerWithBoxes, GroundTruth
from ..collator import Prepared
from .grounding import interval_coverage, object_patches


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

HEAD_FILE = "training_head.safetensors"
IN_A_CLONE = f"training/auxiliary/{HEAD_FILE}"  # the head of the shipped weights
QUERIES = 2  # for each category
MAX_WEIGHT = 16.0  # maximum weight of a rare answer
OVERALL_WEIGHT = 0.25  # weight of the balance over all sources; the balance within each source has weight 1
DECAY = 0.998  # of the running counts of yes and no, per batch
POSITIVE_WEIGHT = 4.0  # weight of patches that an object covers
PATCH_WEIGHT = 2.0  # weight of the patch loss; the region loss has weight 1
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


def region_targets(truth: GroundTruth) -> np.ndarray:
    """Presence int8 [C,4] in the whole image and in its thirds, by the answers to questions about it."""
    scene, region = truth.scene, np.full((len(CATEGORIES), len(REGIONS)), -1, np.int8)
    for key, place in HEAD_QUESTIONS.items():
        region[place] = _to_target(truth.find(key))
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
    logits = head["head"](passed.seen.last_hidden_state, patch.shape[2:])
    found: torch.Tensor = head["loss"](logits, region, patch, source)
    return found


class QueryHead(nn.Module):
    """Presence by region and patch, from image tokens.

    Learned queries attend to the tokens; each has its own value projection. For a third of the image the same queries
    attend only to the columns of that third. So the appearance of a car is learned once for all regions.
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        self.query = nn.Linear(hidden_size, len(CATEGORIES) * QUERIES, bias=False)
        self.value = nn.Linear(hidden_size, len(CATEGORIES) * QUERIES, bias=False)
        self.patch = nn.Linear(hidden_size, len(CATEGORIES))
        self.bias = nn.Parameter(torch.zeros(len(CATEGORIES), len(REGIONS)))
        for layer in (self.query, self.value, self.patch):
            nn.init.normal_(layer.weight, std=0.02)
        nn.init.constant_(self.patch.bias, -4.0)  # few categories are present in a patch

    def forward(self, tokens: torch.Tensor, grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Region logits [B,categories,4] and patch logits [B,P,categories] of tokens [B,P,C].

        Args:
            grid: rows and columns of the patches; tokens before them, of objects or a class, are left out.
        """
        tokens = tokens[:, -grid[0] * grid[1] :]
        scores = self.query(tokens).float().transpose(1, 2)  # [B,categories·queries,P]
        values = self.value(tokens).float().transpose(1, 2)
        inside = region_weights(*grid, tokens.device)
        found = [((scores + weights.log()).softmax(-1) * values).sum(-1) for weights in inside]
        regions = torch.stack(found, -1).unflatten(1, (len(self.bias), -1)).sum(2)
        return regions + self.bias, self.patch(tokens)


@cache
def region_weights(rows: int, columns: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Fraction [4,rows·columns] of each patch inside the whole image and its left, center and right third."""
    left, right = np.array([0, 0, 1, 2]) / 3, np.array([3, 1, 2, 3]) / 3
    weights = torch.from_numpy(interval_coverage(left, right, columns)).float()
    return weights[:, None].expand(-1, rows, -1).flatten(1).to(device)


class PresenceLoss(nn.Module):
    """Binary cross-entropy of the regions, balanced between yes and no, and of the patches.

    By running counts, yes and no have equal total weight for each category and region. So P(yes) = 0.5 fits equally
    frequent answers. They are balanced within each source; otherwise the style of a source would be evidence for an
    answer that is common in one source and rare in another. With OVERALL_WEIGHT they are also balanced over all
    sources, so that a category that never occurs in a source is learned as absent there.
    """

    counts: torch.Tensor  # of no and of yes, by source; the last row is of all sources

    def __init__(self, num_sources: int = 1):
        super().__init__()
        self.register_buffer("counts", torch.zeros(num_sources + 1, 2, len(CATEGORIES), len(REGIONS)))

    def forward(
        self,
        logits: tuple[torch.Tensor, torch.Tensor],
        region: torch.Tensor,
        patch: torch.Tensor,
        source: torch.Tensor,
    ) -> torch.Tensor:
        """The mean over known regions, plus PATCH_WEIGHT times the mean over known patches.

        Args:
            logits: of `QueryHead`.
            region: int8 [B,categories,4]; patch: int8 [B,categories,rows,columns]; both 1, 0 or -1 for unknown.
            source: index of each image's source [B].
        """
        answers = torch.stack([region == 0, region == 1], 1).float()  # [B,2,categories,4]
        by_source = DECAY * self.counts[:-1].index_add(0, source, answers * (1 - DECAY) / DECAY)
        self.counts = torch.cat([by_source, by_source.sum(0, keepdim=True)])
        # The total weight of yes, and of no: smaller where one is so rare that its weight would exceed MAX_WEIGHT.
        both = torch.minimum(self.counts.sum(1) / 2, MAX_WEIGHT * self.counts.amin(1))
        weight = both[:, None] / self.counts.clamp(min=1e-9)  # [sources + 1,2,categories,4]
        weights = (answers * (weight[source] + OVERALL_WEIGHT * weight[-1])).sum(1)
        of_regions = _mean_entropy(logits[0], region, weights)
        patches = patch.flatten(2).transpose(1, 2)  # [B,P,categories]
        # Unknown patches have weight 0. To select the known ones, the CPU would wait for the GPU.
        weights = torch.where(patches == 1, POSITIVE_WEIGHT, (patches == 0).float())
        return of_regions + PATCH_WEIGHT * _mean_entropy(logits[1], patches, weights)


def _mean_entropy(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted binary cross-entropy, divided by the number of known targets."""
    truth = (targets == 1).float()
    entropy = nn.functional.binary_cross_entropy_with_logits(logits.float(), truth, weights, reduction="sum")
    return entropy / (targets >= 0).sum().clamp(min=1)


def load_training_head(name: str | Path) -> QueryHead | None:
    """The head saved beside the weights of a folder or a repository on the Hub; None if there is none."""
    for file in (HEAD_FILE, IN_A_CLONE):
        if path := cached_file(str(name), file, _raise_exceptions_for_missing_entries=False):
            state = load_file(path)
            head = QueryHead(state["query.weight"].shape[1])
            head.load_state_dict(state)
            return head
    return None


def save_training_head(head: QueryHead, folder: Path) -> None:
    """Write the head to a folder, beside the weights that it was trained with."""
    save_file(head.state_dict(), folder / HEAD_FILE, {"format": "pt"})
