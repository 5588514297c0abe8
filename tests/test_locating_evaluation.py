"""Recall of located objects at a precision, from hand-made matches."""

from types import SimpleNamespace

import pandas as pd
import pytest
from PIL import Image

from traffic_vlm.data.scene import Scene, SceneObject
from traffic_vlm.evaluation.locating import fit_score, locating_table, match_objects


COLUMNS = ["label", "half", "score", "is_right", "side", "iou"]


def test_points_are_matched_with_boxes_once():
    """Two points in one box, one beside all boxes, on a hidden car, on a group of cars, and a car without a point."""
    cars = [(0, 0, 100, 100), (200, 200, 300, 300), (300, 0, 400, 100), (0, 300, 100, 400)]
    unclear = SceneObject("car", cars[2], visible=0.1), SceneObject("car", cars[3], is_instance=False)
    objects = (*(SceneObject("car", box) for box in cars[:2]), *unclear)
    scene = Scene(400, 400, objects, exhaustive=frozenset({"car"}))
    found = [(0.9, [0, 0, 0.25, 0.25], [0.1, 0.1]), (0.8, [0, 0, 0.2, 0.2], [0.12, 0.12])]
    found += [(0.7, [0.4, 0.1, 0.6, 0.3], [0.5, 0.2]), (0.6, [0.75, 0, 1, 0.25], [0.9, 0.1])]
    found += [(0.5, [0, 0.75, 0.1, 1], [0.05, 0.9])]

    model = SimpleNamespace(locate=lambda encoded, label, threshold: [found])
    pipe = SimpleNamespace(located={"bus": 0.3, "car": 0.3}, encode=lambda image: None, model=model)
    row = {"scene": scene.to_json(), "image": Image.new("RGB", (8, 8)), "source": "a", "image_id": "b"}
    table = match_objects(pipe, [row])
    assert table[["label", "score", "is_right"]].values.tolist() == [
        ["car", 0.9, True],
        ["car", 0.8, False],
        ["car", 0.7, False],
        ["car", 0.0, True],  # missed
    ]
    assert table["iou"].tolist() == [pytest.approx(1.0), 0.0, 0.0, 0.0]


def test_scores_and_recall_are_of_two_halves():
    rights = [
        ("car", half, 0.9 - i / 100, True, 0.03 + 0.06 * (i % 2), 0.4 + 0.2 * (i % 2))
        for half in (0, 1)
        for i in range(40)
    ]
    wrongs = [("car", half, 0.6 - i / 100, False, 0.1, 0.0) for half in (0, 1) for i in range(30)]
    missed = [("car", half, 0.0, True, 0.03, 0.0) for half in (0, 1) for _ in range(10)]
    few = [("bus", 0, 0.5, True, 0.1, 0.9)]
    found = pd.DataFrame(rights + wrongs + missed + few, columns=COLUMNS)
    table = locating_table(found)
    assert list(table.index) == ["car"]
    car = table.loc["car"]
    assert car["score"] == pytest.approx(fit_score(found[found["label"] == "car"])) and 0.5 < car["score"] < 0.6
    assert car["objects"] == 50 and car["recall"] == 0.8 and car["precision"] == pytest.approx(0.8, abs=0.02)
    assert car["2 to 4 %"] == pytest.approx(20 / 30) and car["above 8 %"] == 1.0 and car["IoU ≥ 0.5"] == 1.0
    assert pd.isna(car["4 to 8 %"])
    assert fit_score(pd.DataFrame(wrongs, columns=COLUMNS)) is None
