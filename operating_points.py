"""Operating points: from which P(yes) an answer is yes, and where it is not sure. Evaluation fits, serving uses them.

thresholds.json → operating points ─┐
question → question type ───────────┴→ threshold and band ── P(yes) → yes or no, sure or not
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .data.question_types import question_type_of
from .data.questions import QUESTION_TYPES
from .utils import DataError


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """How P(yes) becomes an answer, and what was measured of it on development questions.

    Attributes:
        threshold: P(yes) from which the answer is yes.
        band: (low, high) with low <= threshold <= high: answers with P(yes) in it are not sure. None: all are sure.
        precision: fraction of the answers yes that are right; None without such an answer, or if not measured.
        recall: fraction of the questions with the ground truth yes that are answered yes; None if not measured.
        yes, no: number of questions with this ground truth; None if not measured.

    Raises:
        ValueError: a value has the wrong type or is outside its range.
    """

    threshold: float
    band: tuple[float, float] | None = None
    precision: float | None = None
    recall: float | None = None
    yes: int | None = None
    no: int | None = None

    def __post_init__(self) -> None:
        _check_fraction("threshold", self.threshold)
        for name in ("precision", "recall"):
            if (value := getattr(self, name)) is not None:
                _check_fraction(name, value)
        for name in ("yes", "no"):
            count = getattr(self, name)
            if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
                raise ValueError(f"{name} must be a number of questions, got {count!r:.80}")
        if self.band is not None:
            if not isinstance(self.band, list | tuple) or len(self.band) != 2:
                raise ValueError(f"band must be [low, high] or null, got {self.band!r:.80}")
            for limit in self.band:
                _check_fraction("band", limit)
            if not self.band[0] <= self.threshold <= self.band[1]:
                raise ValueError(f"band must include the threshold {self.threshold}, got {self.band!r}")

    def answer(self, yes_probability: float) -> str:
        return "yes" if yes_probability >= self.threshold else "no"

    def is_unsure(self, yes_probability: float) -> bool:
        return self.band is not None and self.band[0] <= yes_probability <= self.band[1]


def _check_fraction(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:  # NaN too
        raise ValueError(f"{name} must be a number in 0..1, got {value!r:.80}")


@dataclass(frozen=True)
class OperatingPoints:
    """The operating points of a model: the content of thresholds.json.

    Attributes:
        default: for questions of all other types, and for those that no template produces.
        question_types: one for each of some question types.
        target_accuracy: that answers outside the bands have reached; None if not measured.

    Raises:
        ValueError: the target accuracy is not in 0..1.
    """

    default: OperatingPoint
    question_types: Mapping[str, OperatingPoint] = field(default_factory=dict)
    target_accuracy: float | None = None

    def __post_init__(self) -> None:
        if self.target_accuracy is not None:
            _check_fraction("target_accuracy", self.target_accuracy)

    def of(self, question: str) -> OperatingPoint:
        """The operating point of a question, by its words."""
        return self.question_types.get(question_type_of(question) or "", self.default)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def load_operating_points(path: str | Path) -> OperatingPoints:
    """Read a thresholds.json of scripts/evaluate.py, or one written by hand: only thresholds are required.

    Raises:
        DataError: the file cannot be read or is no JSON; a field or question type is missing or unknown; a value is
            outside its range. The message names the file and the value.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is no JSON: {error}") from error
    try:
        _check_fields("the file", content, OperatingPoints, "default")
        points = _read_points(content.pop("question_types", {}))
        return OperatingPoints(_read_point("default", content.pop("default")), points, **content)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def _read_points(content: Any) -> dict[str, OperatingPoint]:
    if not isinstance(content, dict):
        raise ValueError(f"question_types must be an object, got {content!r:.80}")
    for name in content:
        if name not in QUESTION_TYPES:
            raise ValueError(f"unknown question type {name!r:.80}; known are {', '.join(QUESTION_TYPES)}")
    return {name: _read_point(name, values) for name, values in content.items()}


def _read_point(name: str, content: Any) -> OperatingPoint:
    _check_fields(name, content, OperatingPoint, "threshold")
    if isinstance(content.get("band"), list):
        content["band"] = tuple(content["band"])
    try:
        return OperatingPoint(**content)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_fields(name: str, content: Any, expected: Any, required: str) -> None:
    """Raise a ValueError unless `content` is an object with fields of the dataclass `expected`."""
    known = [one.name for one in fields(expected)]
    if not isinstance(content, dict):
        raise ValueError(f"{name} must be an object with {', '.join(known)}, got {content!r:.80}")
    for key in content:
        if key not in known:
            raise ValueError(f"{name} has an unknown field {key!r:.80}; known are {', '.join(known)}")
    if required not in content:
        raise ValueError(f"{name} has no {required}")
