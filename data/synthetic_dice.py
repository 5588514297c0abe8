"""Chances from a seed that fall alike on every machine and version: only `random.random()` is used."""

import random
from collections.abc import Sequence
from typing import TypeVar


T = TypeVar("T")


class Dice:
    """Random choices from a seed; the same text gives the same choices."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed).random

    def between(self, low: float, high: float) -> float:
        """A number of an interval."""
        return low + (high - low) * self.random()

    def count(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int(self.random() * (high - low + 1))

    def chance(self, share: float) -> bool:
        """True in a share of the cases."""
        return self.random() < share

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[int(self.random() * len(items))]
