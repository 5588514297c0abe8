"""Evaluation of the vision tower: presence by category and region on development images.

P(yes) [N,C,4] + frames → a row for each known answer → balanced accuracy and AUC by source, category and region
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..data.ground_truth import GroundTruth
from ..data.presence import CATEGORIES, REGIONS, region_targets
from ..data.scene import Scene
from ..evaluation.metrics import MIN_ANSWERS, area_under_curve
from ..files import atomic_write
from .frames import Frames


def frame_targets(frames: Frames) -> np.ndarray:
    """Ground truth int8 [N,C,4] of whole frames: 1, 0, or -1 for unknown."""
    return np.stack([region_targets(GroundTruth(Scene.from_json(scene))) for scene in frames.scenes])


def presence_metrics(probabilities: np.ndarray, truth: np.ndarray, sources: Sequence[str]) -> dict[str, Any]:
    """Balanced accuracy and AUC of P(yes) [N,C,4] by source, category and region, with ground truth [N,C,4].

    Returns:
        `macro` and `auc`: balanced accuracy and AUC, means over sources of the means over their questions.
        `presence`: `macro` without weather, time of day, road, traffic, place and view. `sources`: {source: macro}.
        `questions`: a row for each source, category and region with at least 10 yes and 10 no. `left_out`: names of
        the others that have both answers.
    """
    image, category, region = (truth >= 0).nonzero()
    answers = pd.DataFrame({"source": np.array(sources)[image], "c": category, "r": region})
    answers["p"], answers["is_yes"] = probabilities[truth >= 0], truth[truth >= 0] == 1
    questions = pd.DataFrame(
        [
            {"source": source, "category": CATEGORIES[c], "region": REGIONS[r], **_rates(members)}
            for (source, c, r), members in answers.groupby(["source", "c", "r"])
        ]
    )
    fewest = questions[["yes", "no"]].min(axis=1)
    rare, questions = questions[fewest.between(1, MIN_ANSWERS - 1)], questions[fewest >= MIN_ANSWERS]
    means = questions.groupby("source")[["accuracy", "auc"]].mean()
    boxed = questions[~questions["category"].str.contains(":")].groupby("source")["accuracy"].mean()
    return {
        "macro": float(means["accuracy"].mean()),
        "auc": float(means["auc"].mean()),
        "presence": float(boxed.mean()),
        "sources": means["accuracy"].round(4).to_dict(),
        "questions": questions.to_dict("records"),
        "left_out": ["/".join(names) for names in zip(rare["source"], rare["category"], rare["region"])],
    }


def _rates(answers: pd.DataFrame) -> dict[str, float]:
    is_yes, said_yes = answers["is_yes"], answers["p"] > 0.5
    rates = {"true_yes": said_yes[is_yes].mean(), "true_no": 1 - said_yes[~is_yes].mean()}
    found = {"yes": int(is_yes.sum()), "no": int((~is_yes).sum()), **rates, "accuracy": sum(rates.values()) / 2}
    return found | {"auc": area_under_curve(answers["p"], is_yes)}


def table(questions: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: balanced accuracy of each category (mean over its regions) by source."""
    cells = pd.DataFrame(questions).pivot_table("accuracy", "category", "source")
    cells = cells.reindex([name for name in CATEGORIES if name in cells.index])
    lines = ["", *cells], ["---"] * (len(cells.columns) + 1)
    rows = [[name, *("" if np.isnan(x) else f"{x:.2f}" for x in values)] for name, *values in cells.itertuples()]
    return "\n".join(f"| {' | '.join(line)} |" for line in (*lines, *rows)) + "\n"


def draw_worst(probabilities: np.ndarray, truth: np.ndarray, frames: Frames, path: Path) -> None:
    """Save a picture of the 20 images with the highest mean cross-entropy, each with its two worst answers.

    Args:
        probabilities: P(yes) [N,C,4]. truth: [N,C,4] of 1, 0 or -1.
    """
    of_truth = np.where(truth == 1, probabilities, 1 - probabilities).clip(1e-6)
    losses = np.where(truth >= 0, -np.log(of_truth), 0)
    means = losses.sum((1, 2)) / (truth >= 0).sum((1, 2)).clip(1)
    figure = Figure(figsize=(15, 14), layout="constrained")
    for index, row in enumerate(np.argsort(-means)[:20]):
        axes = figure.add_subplot(4, 5, index + 1)
        axes.imshow(frames.pixels[row])
        axes.axis("off")
        answers = []
        for worst in np.argsort(-losses[row].ravel())[:2]:
            c, r = divmod(int(worst), len(REGIONS))
            known = "yes" if truth[row, c, r] == 1 else "no"
            answers.append(f"{CATEGORIES[c]}, {REGIONS[r]}: {probabilities[row, c, r]:.2f}, labeled {known}")
        axes.set_title(
            "\n".join([f"{frames.sources[row]} {Scene.from_json(frames.scenes[row]).image_id}", *answers]), fontsize=8
        )
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=80, format="png")
