"""Random choices of a scene."""

import random
from collections.abc import Sequence
from typing import TypeVar


T = TypeVar("T")


class Dice(random.Random):
    """`random.Random` with choices that use exactly one call of `random()` each."""

    def integer(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return low + int(self.random() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        """True with a probability."""
        return self.random() < probability

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[int(self.random() * len(items))]
