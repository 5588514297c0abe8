"""Targets and loss of the center head (`locating_traffic_vlm.py`).

    Scene → heat and weight [K,rows,columns], shape [4,rows,columns], is_center [rows,columns] ↔ `TrafficVLMCenterHead`

A cell is known to hold no center only where the source labels the class exhaustively, or says that it is absent. Where
an object may be of the class, is cut or tiny, or is a mask without instances, its box is unknown.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...data.scene import Scene, is_a
from ...data.truth import MIN_VISIBLE
from ...locating_traffic_vlm import STRIDE
from ..collator import Prepared


SPREAD = 0.1  # standard deviation of the heat around a center, of the width and height of its box
MIN_SIDE = 3 / 224  # of a box, as a fraction of the image: smaller ones are neither learned nor denied
NEAR = 0.3  # heat down to which the cells around a center are known, if the class is not labeled exhaustively


def center_targets(scene: Scene, classes: Sequence[str], height: int, width: int) -> dict[str, np.ndarray]:
    """The targets of an image of `height` × `width` pixels.

    Returns:
        heat: [K,rows,columns], 1 at the center of each object of each class, falling with the distance.
        weight: [K,rows,columns], 1 where the heat is known, 0 elsewhere.
        shape: [4,rows,columns], at centers as `TrafficVLMCenterHead` returns it. is_center: [rows,columns].
    """
    rows, columns = height // STRIDE, width // STRIDE
    is_known = [_is_exhaustive(scene, name) for name in classes]
    heat = np.zeros((len(classes), rows, columns), np.float32)
    weight = np.broadcast_to(np.array(is_known, np.float32)[:, None, None], heat.shape).copy()
    shape, is_center = np.zeros((4, rows, columns), np.float32), np.zeros((rows, columns), np.float32)
    y, x = np.mgrid[:rows, :columns]
    for item in sorted(scene.objects, key=lambda item: -item.size):  # of two centers in a cell the smaller one stays
        left, right = (side / scene.width * columns for side in item.box[::2])
        top, bottom = (side / scene.height * rows for side in item.box[1::2])
        inside = np.s_[int(top) : math.ceil(bottom), int(left) : math.ceil(right)]
        side = min((right - left) / columns, (bottom - top) / rows)
        is_learned = item.is_instance and item.visible >= MIN_VISIBLE and side >= MIN_SIDE
        for index, name in enumerate(classes):
            if not (is_a(item.category, name) or is_a(name, item.category)):  # a vehicle may be a bus
                continue
            if not (is_learned and is_a(item.category, name) and item.category != "rider"):
                weight[index][inside] = 0
                continue
            row, column = min(int((top + bottom) / 2), rows - 1), min(int((left + right) / 2), columns - 1)
            across, down = max(SPREAD * (right - left), 0.4), max(SPREAD * (bottom - top), 0.4)
            near = np.exp(-(((x - column) / across) ** 2 + ((y - row) / down) ** 2) / 2).astype(np.float32)
            heat[index] = np.maximum(heat[index], np.where(near < 0.02, 0, near))
            if not is_known[index]:
                weight[index][near > NEAR] = 1
            heat[index, row, column] = weight[index, row, column] = is_center[row, column] = 1
            size = math.log((right - left) / columns), math.log((bottom - top) / rows)
            shape[:, row, column] = *size, (left + right) / 2 - column, (top + bottom) / 2 - row
    return {"heat": heat, "weight": weight, "shape": shape, "is_center": is_center}


def _is_exhaustive(scene: Scene, name: str) -> bool:
    """Whether every object of the class is labeled, or there is none."""
    is_absent = scene.presence.get(name) is False and not scene.of(name)
    return is_absent or any(is_a(name, wider) for wider in scene.exhaustive)


def targets(images: Sequence[Prepared], batch: Mapping[str, Any], classes: Sequence[str]) -> dict[str, torch.Tensor]:
    """The `center_targets` of each image, stacked. Nothing is known about images without a scene."""
    height, width = batch["pixel_values"].shape[-2:]
    scenes = [Scene(width, height) if item.truth is None else item.truth.scene for item in images]
    found = [center_targets(scene, classes, height, width) for scene in scenes]
    return {name: torch.from_numpy(np.stack([one[name] for one in found])) for name in found[0]}


def loss(
    passed: Any, heat: torch.Tensor, weight: torch.Tensor, shape: torch.Tensor, is_center: torch.Tensor
) -> torch.Tensor:
    """Focal loss of the heat, for each center, and mean absolute error of the shape at centers."""
    centers = passed.seen.centers  # [B,K + 4,rows,columns]
    logits, is_peak = centers[:, :-4].float(), (heat == 1).float()
    p = logits.sigmoid()
    found = is_peak * (1 - p) ** 2 * nn.functional.logsigmoid(logits)
    empty = (1 - is_peak) * (1 - heat) ** 4 * p**2 * nn.functional.logsigmoid(-logits)
    focal = -((found + empty) * weight).sum() / (is_peak * weight).sum().clamp(min=1)
    error = ((centers[:, -4:].float() - shape).abs() * is_center[:, None]).sum() / is_center.sum().clamp(min=1)
    return focal + error
