"""Evaluation of the vision tower: presence by category and region on development images.

P(yes) [N,C,4] + frames → balanced accuracy and AUC by source, category and region → table, image of worst cases
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..data.ground_truth import GroundTruth
from ..data.presence import CATEGORIES, REGIONS, region_targets
from ..data.scene import Scene
from ..files import atomic_write
from .frames import Frames


MIN_ANSWERS = 10  # of yes and of no; rates over fewer images are too noisy


def auc(probabilities: np.ndarray, truth: np.ndarray) -> float:
    """The probability that a yes gets a higher P than a no; ties count half."""
    yes, no = probabilities[truth == 1], np.sort(probabilities[truth == 0])
    below, upto = np.searchsorted(no, yes, "left"), np.searchsorted(no, yes, "right")
    return float((below + upto).mean() / 2 / len(no))


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
    questions: list[dict[str, Any]] = []
    left_out: list[str] = []
    for source in sorted(set(sources)):
        rows = np.array(sources) == source
        for c, r in np.ndindex(len(CATEGORIES), len(REGIONS)):
            known, p = truth[rows, c, r], probabilities[rows, c, r]
            yes, no = int((known == 1).sum()), int((known == 0).sum())
            if min(yes, no) < MIN_ANSWERS:
                if min(yes, no):
                    left_out.append(f"{source}/{CATEGORIES[c]}/{REGIONS[r]}")
                continue
            rates = float((p[known == 1] > 0.5).mean()), float((p[known == 0] <= 0.5).mean())
            row: dict[str, Any] = {
                "source": source,
                "category": CATEGORIES[c],
                "region": REGIONS[r],
                "yes": yes,
                "no": no,
            }
            row |= {"true_yes": rates[0], "true_no": rates[1], "accuracy": sum(rates) / 2, "auc": auc(p, known)}
            questions.append(row)
    by_source = {s: [q for q in questions if q["source"] == s] for s in sorted({q["source"] for q in questions})}
    means = {
        s: {k: float(np.mean([q[k] for q in some])) for k in ("accuracy", "auc")} for s, some in by_source.items()
    }
    boxed = {
        s: float(np.mean([q["accuracy"] for q in some if ":" not in q["category"]])) for s, some in by_source.items()
    }
    return {
        "macro": float(np.mean([mean["accuracy"] for mean in means.values()])) if means else float("nan"),
        "auc": float(np.mean([mean["auc"] for mean in means.values()])) if means else float("nan"),
        "presence": float(np.mean(list(boxed.values()))) if boxed else float("nan"),
        "sources": {s: round(mean["accuracy"], 4) for s, mean in means.items()},
        "questions": questions,
        "left_out": left_out,
    }


def table(questions: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: balanced accuracy of each category (mean over its regions) by source."""
    sources = sorted({question["source"] for question in questions})
    cells: dict[str, dict[str, list[float]]] = {}
    for question in questions:
        cells.setdefault(question["category"], {}).setdefault(question["source"], []).append(question["accuracy"])
    lines = [f"| | {' | '.join(sources)} |", "|---" * (len(sources) + 1) + "|"]
    for category in (name for name in CATEGORIES if name in cells):
        values = [f"{np.mean(cells[category][source]):.2f}" if source in cells[category] else "" for source in sources]
        lines.append(f"| {category} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


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
