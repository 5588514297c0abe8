"""Evaluation of a vision tower alone: its query head says what is in a picture, and in which third of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from ...configuration_traffic_vlm import token_grid
from ...data.scene import parse_scene
from ...data.truth import GroundTruth
from ...evaluation import markdown
from ...evaluation.metrics import auc, balanced_accuracy, by_group
from .presence import CATEGORIES, REGIONS, region_targets, region_weights


FIGURES = {"balanced accuracy": balanced_accuracy, "AUC": auc, "answers": len}


def answer_presence(model: Any, processor: Any, rows: Any, sizes: Sequence[int]) -> pd.DataFrame:
    """Table of the known answers about rows with scenes at sides of these sizes, for `evaluation.metrics`.

    A question id is a category and a region, such as "car/left".
    """
    truth = np.stack([region_targets(GroundTruth(parse_scene(row["scene"]))) for row in rows.select_columns("scene")])
    image, category, region = known = (truth >= 0).nonzero()
    named = {name: np.array(rows[name])[image] for name in ("source", "group", "image_id")}
    table = pd.DataFrame({**named, "category": np.array(CATEGORIES)[category], "region": np.array(REGIONS)[region]})
    table["question_id"] = table["category"] + "/" + table["region"]
    table["truth"] = np.where(truth[known] == 1, "yes", "no")
    p_yes = [predict_presence(model, processor, rows, size)[known] for size in sizes]
    answers = pd.concat([table.assign(size=size, p_yes=found) for size, found in zip(sizes, p_yes)])
    return answers.assign(is_right=(answers["p_yes"] > 0.5) == (answers["truth"] == "yes"))


@torch.inference_mode()
def predict_presence(model: Any, processor: Any, rows: Any, size: int, batch_size: int = 16) -> np.ndarray:
    """P(present) [N,categories,4] in rows at `size` × `size` pixels, by a `TowerModel` in evaluation mode."""
    device, found = next(model.parameters()).device, []
    inside = region_weights(*token_grid(model.tower.config, size, size)).to(device)
    for batch in rows.select_columns("image").iter(batch_size):
        inputs = processor(images=batch["image"], image_size=size, return_tensors="pt").to(device)
        regions = model.training_head["head"](model(inputs["pixel_values"]).last_hidden_state, inside)
        found.append(regions.float().sigmoid().cpu().numpy())
    return np.concatenate(found)


def presence_table(answers: pd.DataFrame) -> str:
    """A Markdown table of the figures by source and size."""
    return markdown.table("source / size", by_group(answers, FIGURES, "source", "size").to_dict("index"))
