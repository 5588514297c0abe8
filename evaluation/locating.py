"""How well a model locates objects: one point for each box, by class and size.

rows with scenes → objects that the model finds, of classes whose every object is labeled ↔ boxes of the scenes

Of two points in one box the second is wrong. Points do not count on objects that may be of the class and on groups of
objects (masks, crowds), nor do boxes and points of objects below `MIN_SIDE`. The score from which an object is
reported is fitted to one half of the images, and tested on the other.
"""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import numpy as np
import pandas as pd

from ..data.scene import scene_of
from ..data.truth import NO_GROUP, GroundTruth
from ..locating_traffic_vlm import FAINT, overlap
from ..pipeline_traffic_vlm import TrafficVLMPipeline
from .predict import Row


PRECISION = 0.8
MIN_SIDE = 0.02  # of the shorter side of a box, as a fraction of the image
SIZES = {"2 to 4 %": (0.02, 0.04), "4 to 8 %": (0.04, 0.08), "above 8 %": (0.08, 1.0)}
MIN_IOU = 0.5
MIN_BOXES = 20  # of a class in each half


def match_objects(pipe: TrafficVLMPipeline, rows: Any) -> pd.DataFrame:
    """Table of found and missed objects: "label", "half" of the images, "score" (0 if missed), "is_right", "side" of
    the true box, or of the found one, and "iou" of the two boxes.
    """
    found = [item for row in rows for item in _match_image(pipe, row)]
    return pd.DataFrame(found, columns=["label", "half", "score", "is_right", "side", "iou"])


def _match_image(pipe: TrafficVLMPipeline, row: Row) -> Iterator[tuple[Any, ...]]:
    scene = scene_of(row)
    if scene is None:
        return
    truth, half = GroundTruth(scene), sha256(f"{row['source']}/{row['image_id']}".encode()).digest()[0] % 2
    known = [label for label in pipe.located if label in truth.exhaustive]
    encoded, scale = pipe.encode(row["image"]) if known else None, (scene.width, scene.height) * 2
    for label in known:
        group = truth.groups.get(label, NO_GROUP)
        missed, ignored = list[Any](), list[Any]()
        for seen in (*group.clear, *group.unclear):
            box = [side / whole for side, whole in zip(seen.box, scale)]
            is_one = seen.clear and seen.is_instance  # a mask or a crowd may be several objects
            (missed if is_one and _side(box) >= MIN_SIDE else ignored).append(box)
        for score, sides, (x, y) in pipe.model.locate(encoded, label, FAINT)[0]:
            around = [box for box in missed if _has(box, x, y)]
            if around:
                best = max(around, key=lambda box: overlap(box, sides))
                missed.remove(best)
                yield label, half, score, True, _side(best), overlap(best, sides)
            elif _side(sides) >= MIN_SIDE and not any(_has(box, x, y) for box in ignored):
                yield label, half, score, False, _side(sides), 0.0
        for box in missed:
            yield label, half, 0.0, True, _side(box), 0.0


def fit_score(found: pd.DataFrame) -> float | None:
    """The lowest score from which `PRECISION` of the found objects are right; None if there is none."""
    found = found[found["score"] > 0].sort_values("score", ascending=False)
    precision = found["is_right"].cumsum() / np.arange(1, len(found) + 1)
    good = found["score"][precision >= PRECISION]
    return float(good.min()) if len(good) else None


def locating_table(found: pd.DataFrame) -> pd.DataFrame:
    """Recall of each class by size, and how well boxes fit; "score", from which to report, is fitted to all images."""
    table = {}
    for label, some in found.groupby("label"):
        fitted, tested = some[some["half"] == 0], some[some["half"] == 1]
        if min(int(half["is_right"].sum()) for half in (fitted, tested)) < MIN_BOXES:
            continue
        least = fit_score(fitted)
        objects, least = tested[tested["is_right"]], 1.0 if least is None else least
        is_found = objects["score"] >= least
        row = {"score": fit_score(some), "objects": len(objects), "recall": is_found.mean()}
        reported = tested[tested["score"] >= least]
        row["precision"] = reported["is_right"].mean()
        for name, (low, high) in SIZES.items():
            row[name] = is_found[objects["side"].between(low, high, inclusive="left")].mean()
        large = objects[is_found & (objects["side"] >= SIZES["above 8 %"][0])]
        table[label] = row | {"IoU ≥ 0.5": (large["iou"] >= MIN_IOU).mean()}
    return pd.DataFrame.from_dict(table, orient="index")


def _side(box: Any) -> float:
    return float(min(box[2] - box[0], box[3] - box[1]))


def _has(box: Any, x: float, y: float) -> bool:
    return bool(box[0] <= x <= box[2] and box[1] <= y <= box[3])
