"""Metrics: each is a function of a table of answered questions, and a column of a table of metrics.

    table of `predict`, a row for each question → metric → a number, None without anything to count
                                                → `by_group` → a table with a row for each group

Balanced accuracy is one figure with one definition. For each question id of a source (all paraphrases of a question)
with at least 10 yes and 10 no, it is the mean of the accuracy where the truth is yes and where it is no; then the mean
over question ids, and then over sources. A source without such a question id counts as a single question, if it has
10 yes and 10 no in all. A model that sees no image scores 0.5 for a question id, whatever the fraction of yes is.
Tables leave it out with fewer than three question ids, which would speak for a whole group.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar
from scipy.special import expit

from ..data.truth import NONE
from . import MIN_ANSWERS


BINS = 15  # of P(yes), for the calibration error
MIN_QUESTION_IDS = 3  # for a balanced accuracy in a table
SMALL = (0.02, 0.06)  # shorter side of an object, as a fraction of the image
MIN_VALUES = 2  # besides "none", for the mean recall of a question type
TEMPERATURES = (0.05, 20.0)  # range of the search
WITHOUT_IMAGE = "is_right_without_image"  # a column: whether the question is answered right about the mean image
# Types of questions in words that are also asked about what is not there.
CAN_BE_NONE = ("closest", "color", "light_state", "side", "sign_value", "status")

Metric = Callable[[pd.DataFrame], float | int | None]


def by_group(rows: pd.DataFrame, metrics: Mapping[str, Metric], *columns: str) -> pd.DataFrame:
    """Table of metrics: a row for each value of `columns` ("color / red"), sorted, and a column for each metric."""
    found = {
        " / ".join(map(str, group)): [metric(members) for metric in metrics.values()]
        for group, members in rows.groupby(list(columns))
    }
    return pd.DataFrame.from_dict(found, orient="index", columns=list(metrics), dtype=object)  # None stays None


def mean(values: Any) -> float | None:
    """Mean of a column, without its NaN; None if nothing is left."""
    known = pd.Series(values, dtype=float).dropna()
    return float(known.mean()) if len(known) else None


def is_yes_no(rows: pd.DataFrame) -> pd.Series:
    """Whether the truth of each question is yes or no."""
    return rows["truth"].isin(["yes", "no"])


# Yes or no


def counted(rows: pd.DataFrame, even_few: bool = False) -> pd.DataFrame:
    """Yes/no questions that count for the balanced accuracy, by the rule above.

    Args:
        even_few: if no source has 10 yes and 10 no, all questions together count as a single one: training needs a
            figure to follow on 20 images, too.

    Returns:
        some of the rows, with new columns: "group", the source; "unit", the question id, or "" for a whole source;
        "weight": the sum of weight × is_right is the balanced accuracy.
    """
    rows = rows[is_yes_no(rows)]
    fine = rows.assign(group=rows["source"], unit=rows["question_id"])
    chosen = fine[_fewest(fine) >= MIN_ANSWERS]
    coarse = fine[~fine["source"].isin(chosen["source"])].assign(unit="")
    chosen = pd.concat([chosen, coarse[_fewest(coarse) >= MIN_ANSWERS]])
    if chosen.empty and even_few:
        chosen = rows.assign(group="", unit="")
        chosen = chosen[_fewest(chosen) > 0]
    units = chosen.groupby("group")["unit"].transform("nunique")
    sizes = chosen.groupby(["group", "unit", "truth"])["truth"].transform("size")
    return chosen.assign(weight=1 / (2 * sizes * units * max(1, chosen["group"].nunique())))


def _fewest(rows: pd.DataFrame) -> pd.Series:
    """min(number of yes, number of no) of each row's unit."""
    units = [rows["group"], rows["unit"]]
    yes = (rows["truth"] == "yes").groupby(units).transform("sum")
    return np.minimum(yes, rows["truth"].groupby(units).transform("size") - yes)


def balanced_accuracy(rows: pd.DataFrame, column: str = "is_right", even_few: bool = False) -> float | None:
    """Balanced accuracy in 0..1; `column` says which answers are right. `even_few`: see `counted`."""
    chosen = counted(rows, even_few)
    return float(chosen["weight"] @ chosen[column].astype(float)) if len(chosen) else None


def balanced_error(rows: pd.DataFrame) -> float | None:
    """Standard error of the balanced accuracy, with images as clusters; None with fewer than two images."""
    chosen = counted(rows)
    return clustered_error(chosen, chosen["is_right"])


def clustered_error(rows: pd.DataFrame, values: pd.Series) -> float | None:
    """Standard error of the sum of weight × value over `rows` of `counted`; None with fewer than two images.

    Images are the clusters: questions about one image are often right or wrong together.
    """
    values = values.astype(float)
    deviations = values - values.groupby([rows["group"], rows["unit"], rows["truth"]]).transform("mean")
    images = (rows["weight"] * deviations).groupby([rows["source"], rows["image_id"]]).sum()
    if len(images) < 2:
        return None
    return float(math.sqrt(len(images) / (len(images) - 1) * (images**2).sum()))


def question_ids(rows: pd.DataFrame) -> int:
    """Number of question ids, within a source, that the balanced accuracy is the mean of."""
    return len(counted(rows)[["group", "unit"]].drop_duplicates())


def auc(rows: pd.DataFrame) -> float | None:
    """Area under the ROC curve: how often a yes has a higher P(yes) than a no; ties count half.

    It is a mean over question ids and sources, like the balanced accuracy.
    """
    rows = counted(rows.dropna(subset="p_yes"))
    if rows.empty:
        return None
    units, is_yes = [rows["group"], rows["unit"]], rows["truth"] == "yes"
    alike = [*units, rows["truth"]]
    # For each row, the fraction of its unit's other answers (no for a yes) that P(yes) ranks right.
    below = rows["p_yes"].groupby(units).rank() - rows["p_yes"].groupby(alike).rank()
    others = is_yes.groupby(units).transform("size") - is_yes.groupby(alike).transform("size")
    return float(rows["weight"] @ (below / others).where(is_yes, 1 - below / others))


def of_small_objects(rows: pd.DataFrame) -> pd.DataFrame:
    """Questions such as "Is there a car?" where the largest car is small, or where there is none."""
    asked = rows[rows["question_type"] == "presence"]
    return asked[asked["side"].between(*SMALL) | (asked["truth"] == "no")]


def right_if_there(rows: pd.DataFrame) -> float | None:
    """Fraction of right answers where the truth is yes; None below 10 questions."""
    there = rows[rows["truth"] == "yes"]
    return mean(there["is_right"]) if len(there) >= MIN_ANSWERS else None


# Words


def exact_match(rows: pd.DataFrame) -> float | None:
    """Fraction of the questions with a truth in words that are answered with exactly these words."""
    return mean(rows[~is_yes_no(rows)]["is_right"])


def mean_recall(rows: pd.DataFrame) -> float | None:
    """Mean over question types of the mean recall of their values in words; rare values count like frequent ones.

    The recall of a value ("rainy") is the fraction of the questions with this truth that are answered with it. Values
    with fewer than 10 questions are left out, and so are question types with fewer than two values besides "none": a
    model that always answers "none" would be right.
    """
    rows = rows[~is_yes_no(rows)]
    values = rows.groupby(["question_type", "truth"], as_index=False)["is_right"].agg(["mean", "size"])
    values = values[values["size"] >= MIN_ANSWERS]
    others = (values["truth"] != NONE).groupby(values["question_type"]).transform("sum")
    return mean(values[others >= MIN_VALUES].groupby("question_type")["mean"].mean())


def none_if(rows: pd.DataFrame, is_there: bool) -> float | None:
    """Fraction of "none" among the answers in words about something that is there (should be 0) or not (1)."""
    asked = rows[~is_yes_no(rows) & rows["question_type"].isin(CAN_BE_NONE)]
    return mean((asked["answer"] == NONE)[(asked["truth"] != NONE) == is_there])


# Calibration


def with_probability(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the truth yes or no and a P(yes)."""
    return rows[is_yes_no(rows) & rows["p_yes"].notna()]


def reliability(rows: pd.DataFrame, bins: int = BINS) -> pd.DataFrame:
    """Table with a row for each bin of P(yes), of which the last one includes 1.

    Its columns are "low", "high", "questions", "p_yes" (the mean) and "yes_rate" (the fraction with the truth yes).
    The last two are NaN for an empty bin.
    """
    rows = with_probability(rows)
    index = np.minimum((rows["p_yes"] * bins).astype(int), bins - 1)
    table = pd.DataFrame({"low": np.arange(bins) / bins, "high": np.arange(1, bins + 1) / bins})
    table["questions"] = np.bincount(index, minlength=bins)
    table["p_yes"] = rows["p_yes"].groupby(index).mean()
    table["yes_rate"] = (rows["truth"] == "yes").groupby(index).mean()
    return table


def calibration_error(rows: pd.DataFrame, bins: int = BINS) -> float | None:
    """Expected calibration error: mean over bins of |mean P(yes) - yes rate|, weighted by their questions."""
    table = reliability(rows, bins)
    count = table["questions"].sum()
    return float(((table["p_yes"] - table["yes_rate"]).abs() * table["questions"]).sum() / count) if count else None


def fit_temperature(rows: pd.DataFrame) -> float:
    """Temperature in TEMPERATURES with the highest likelihood of the truth (https://arxiv.org/abs/1706.04599).

    It is the lower limit if all answers are right, and the upper limit if answers and truth are unrelated.

    Args:
        rows: at least one row of `with_probability`.
    """
    signed = rows["margin"].where(rows["truth"] == "yes", -rows["margin"]).to_numpy(float)  # of the true answer

    def loss(log_temperature: float) -> float:
        return float(np.logaddexp(0, -signed / np.exp(log_temperature)).mean())

    found = minimize_scalar(loss, bounds=np.log(TEMPERATURES), method="bounded", options={"xatol": 1e-6})
    return float(np.exp(found.x))


def at_temperature(rows: pd.DataFrame, temperature: float) -> pd.DataFrame:
    """The same table with P(yes) at another temperature, where it has one."""
    p_yes = expit((rows["margin"] / temperature).astype(np.float32)).astype(float)
    return rows.assign(p_yes=p_yes.where(rows["p_yes"].notna()))


def of_enough(metric: Metric) -> Metric:
    """The metric in a table: None with fewer than three question ids."""
    return lambda rows: metric(rows) if question_ids(rows) >= MIN_QUESTION_IDS else None


# Columns of the tables of a report, whose answers also have the column WITHOUT_IMAGE.
YES_NO: dict[str, Metric] = {
    "balanced accuracy": of_enough(balanced_accuracy),
    "±": of_enough(balanced_error),
    "mean image": of_enough(partial(balanced_accuracy, column=WITHOUT_IMAGE)),
    "right where it is there": right_if_there,
    "AUC": of_enough(auc),
    "AUC of small objects": lambda rows: auc(of_small_objects(rows)),
    "calibration error": calibration_error,
    "questions": len,
}
WORDS: dict[str, Metric] = {
    "exact match": exact_match,
    "mean recall": mean_recall,
    '"none" if not there': partial(none_if, is_there=False),
    '"none" if there': partial(none_if, is_there=True),
    "questions": len,
}
