"""Presence loss: which categories are in the whole image and in its thirds.

    GroundTruth → region [C,4] of 1, 0, -1 ↔ PresenceLoss ↔ region logits [B,C,4] ← QueryHead ← image tokens [B,P,W]

1 is present, 0 absent, -1 unknown. Regions are the whole image and its left, center and right third: `GroundTruth`
answers for them, as it does for the decoder, so both learn the same.

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
from ...data.scene import CLASSES, LIGHT_STATES, SCENE_ATTRIBUTES, SPEED_LIMITS
from ...data.truth import NO_GROUP, THIRDS, AnswerWithBoxes, GroundTruth
from ..collator import Prepared
from .grounding import interval_coverage


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
    for category, attribute, names in (("traffic light", "state", LIGHTS), ("speed limit sign", "value", LIMITS)):
        is_given, group = attribute in scene.attributed.get(category, ()), truth.groups.get(category, NO_GROUP)
        if not (is_given or scene.of(category)):
            continue
        for value, name in names.items():
            # Some sources that give the states of lights label no yellow ones.
            complete = is_given and (category in scene.exhaustive or name in ("red light", "green light"))
            some = group.having(attribute, value)
            answers = [some.present(complete), *(some.inside(third, complete) for third in THIRDS)]
            for part, answer in enumerate(answers):
                if region[INDEX[name], part] == -1:
                    region[INDEX[name], part] = _to_target(answer)
    return region


def _to_target(answer: AnswerWithBoxes | None) -> int:
    return -1 if answer is None else int(answer.answer == "yes")


def targets(
    images: Sequence[Prepared], batch: Mapping[str, Any], vision_config: Any, sources: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Targets of a batch; all are unknown of an image without a scene.

    Returns:
        region: int8 [I,C,4]. source: [I], the index of each image's source. inside: the `region_weights` [4,P].
    """
    region = np.full((len(images), len(CATEGORIES), len(REGIONS)), -1, np.int8)
    for index, item in enumerate(images):
        if item.truth is not None:
            region[index] = region_targets(item.truth)
    index_of = {source: index for index, source in enumerate(sources)}
    source = torch.tensor([index_of.get(item.source, 0) for item in images])
    grid = token_grid(vision_config, *batch["pixel_values"].shape[-2:])
    return {"region": torch.from_numpy(region), "source": source, "inside": region_weights(*grid)}


def loss(passed: Any, region: torch.Tensor, source: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """The `PresenceLoss` of a model with a training head."""
    head = passed.model.training_head
    found: torch.Tensor = head["loss"](head["head"](passed.seen.last_hidden_state, inside), region, source)
    return found


class QueryHead(nn.Module):
    """Presence by region, from image tokens.

    Learned queries attend to the tokens; each has its own value projection. For a third of the image the same queries
    attend only to the columns of that third. So the appearance of a car is learned once for all regions.
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        self.query = nn.Linear(hidden_size, len(CATEGORIES) * QUERIES, bias=False)
        self.value = nn.Linear(hidden_size, len(CATEGORIES) * QUERIES, bias=False)
        self.bias = nn.Parameter(torch.zeros(len(CATEGORIES), len(REGIONS)))
        for layer in (self.query, self.value):
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        """Region logits [B,categories,4] of tokens [B,P,C].

        Args:
            inside: the `region_weights` [4,P]; tokens before the patches, of objects or a class, are left out.
        """
        tokens = tokens[:, -inside.shape[1] :]
        scores = self.query(tokens).float().transpose(1, 2)  # [B,categories·queries,P]
        values = self.value(tokens).float().transpose(1, 2)
        found = [((scores + weights.log()).softmax(-1) * values).sum(-1) for weights in inside]
        return torch.stack(found, -1).unflatten(1, (len(self.bias), -1)).sum(2) + self.bias


@cache
def region_weights(rows: int, columns: int) -> torch.Tensor:
    """Fraction [4,rows·columns] of each patch inside the whole image and its left, center and right third."""
    left, right = np.array([0, 0, 1, 2]) / 3, np.array([3, 1, 2, 3]) / 3
    weights = torch.from_numpy(interval_coverage(left, right, columns)).float()
    return weights[:, None].expand(-1, rows, -1).flatten(1)


class PresenceLoss(nn.Module):
    """Binary cross-entropy of the regions, balanced between yes and no.

    By running counts, yes and no have equal total weight for each category and region. So P(yes) = 0.5 fits equally
    frequent answers. They are balanced within each source; otherwise the style of a source would be evidence for an
    answer that is common in one source and rare in another. With OVERALL_WEIGHT they are also balanced over all
    sources, so that a category that never occurs in a source is learned as absent there.
    """

    counts: torch.Tensor  # of no and of yes, by source; the last row is of all sources

    def __init__(self, num_sources: int = 1):
        super().__init__()
        self.register_buffer("counts", torch.zeros(num_sources + 1, 2, len(CATEGORIES), len(REGIONS)))

    def forward(self, logits: torch.Tensor, region: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """The mean over known regions.

        Args:
            logits: [B,categories,4], of `QueryHead`.
            region: int8 [B,categories,4], 1, 0 or -1 for unknown.
            source: index of each image's source [B].
        """
        answers = torch.stack([region == 0, region == 1], 1).float()  # [B,2,categories,4]
        by_source = DECAY * self.counts[:-1].index_add(0, source, answers * (1 - DECAY) / DECAY)
        self.counts = torch.cat([by_source, by_source.sum(0, keepdim=True)])
        # The total weight of yes, and of no: smaller where one is so rare that its weight would exceed MAX_WEIGHT.
        both = torch.minimum(self.counts.sum(1) / 2, MAX_WEIGHT * self.counts.amin(1))
        weight = both[:, None] / self.counts.clamp(min=1e-9)  # [sources + 1,2,categories,4]
        weights = (answers * (weight[source] + OVERALL_WEIGHT * weight[-1])).sum(1)
        entropy = nn.functional.binary_cross_entropy_with_logits(
            logits.float(), (region == 1).float(), weights, reduction="sum"
        )
        return entropy / (region >= 0).sum().clamp(min=1)


def load_training_head(name: str | Path) -> QueryHead | None:
    """The head saved beside the weights of a folder or a repository on the Hub; None if there is none."""
    for file in (HEAD_FILE, IN_A_CLONE):
        if path := cached_file(str(name), file, _raise_exceptions_for_missing_entries=False):
            state = load_file(path)
            head = QueryHead(state["query.weight"].shape[1])
            head.load_state_dict({name: state[name] for name in head.state_dict()})  # older ones have patches, too
            return head
    return None


def save_training_head(head: QueryHead, folder: Path) -> None:
    """Write the head to a folder, beside the weights that it was trained with."""
    save_file(head.state_dict(), folder / HEAD_FILE, {"format": "pt"})
