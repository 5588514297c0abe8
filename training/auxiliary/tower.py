"""Evaluation of a vision tower alone: its query head says what is in an image, and in which third of it."""

from typing import Any

import numpy as np
import pandas as pd
import torch

from ...configuration_traffic_vlm import token_grid
from ...data.scene import parse_scene
from ...data.truth import GroundTruth
from .presence import CATEGORIES, REGIONS, region_targets, region_weights


def answer_presence(model: Any, processor: Any, rows: Any) -> pd.DataFrame:
    """Table of the known answers about rows with scenes, for `evaluation.metrics`.

    A question id is a category and a region, such as "car/left".
    """
    truth = np.stack([region_targets(GroundTruth(parse_scene(row["scene"]))) for row in rows.select_columns("scene")])
    image, category, region = known = (truth >= 0).nonzero()
    ids = np.array([[f"{category}/{region}" for region in REGIONS] for category in CATEGORIES])
    table = pd.DataFrame({name: np.array(rows[name])[image] for name in ("source", "image_id")})
    table["question_id"] = ids[category, region]
    table["truth"] = np.where(truth[known] == 1, "yes", "no")
    table["p_yes"] = predict_presence(model, processor, rows)[known]
    return table.assign(is_right=(table["p_yes"] > 0.5) == (table["truth"] == "yes"))


@torch.inference_mode()
def predict_presence(model: Any, processor: Any, rows: Any, batch_size: int = 16) -> np.ndarray:
    """P(present) [N,categories,4] in rows, by a `TowerModel` in evaluation mode."""
    device, found = next(model.parameters()).device, []
    for batch in rows.select_columns("image").iter(batch_size):
        pixels = processor(images=batch["image"], return_tensors="pt")["pixel_values"].to(device)
        inside = region_weights(*token_grid(model.tower.config, *pixels.shape[-2:])).to(device)
        regions = model.training_head["head"](model(pixels).last_hidden_state, inside)
        found.append(regions.float().sigmoid().cpu().numpy())
    return np.concatenate(found)
