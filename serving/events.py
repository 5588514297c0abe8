"""Events from P(yes) over time, with two thresholds and a minimum duration against flicker.

    P(yes) ≥ on ──────────────────────── P(yes) < off for `shortest` seconds: the event ended where the "no" began
           └─ for `shortest` seconds: the event began here

The answer to one frame holds until the next frame. A "yes" shorter than `shortest` is no event, and a "no" shorter
than `shortest` does not end one.
"""

from dataclasses import dataclass


TOLERANCE = 1e-6  # seconds: differences of time stamps are not exact


@dataclass(frozen=True, slots=True)
class Event:
    """A period of "yes".

    Attributes:
        start: seconds, where the "yes" began.
        end: seconds, where the "no" began; None while the event lasts.
        peak: highest probability so far.
        is_cut: the video ended before the "yes" did.
    """

    start: float
    end: float | None
    peak: float
    is_cut: bool = False


class EventDetector:
    """Finds the events of one question.

    Args:
        on: probability from which a "no" becomes a "yes".
        off: probability below which a "yes" becomes a "no".
        shortest: seconds; a shorter "yes" or "no" is flicker.

    Raises:
        ValueError: not 0 < off <= on <= 1, or a duration that is negative or not finite.
    """

    def __init__(self, on: float = 0.6, off: float = 0.4, shortest: float = 0.5):
        if not 0 < off <= on <= 1:
            raise ValueError(f"the thresholds must be 0 < off <= on <= 1, got on={on} and off={off}")
        if not 0 <= shortest < float("inf"):
            raise ValueError(f"the shortest duration must be 0 seconds or more, got {shortest}")
        self.on, self.off, self.shortest = on, off, shortest
        self.is_event = False  # whether the last "yes" was long enough, and no "no" since then
        self._is_yes = False
        self._changed = 0.0  # seconds, where the current "yes" or "no" began
        self._start, self._peak = 0.0, 0.0

    def update(self, seconds: float, probability: float) -> list[Event]:
        """Add the probability at a time, which must not decrease.

        Returns:
            events that have begun (`end` is None) or ended since the last call, in that order.
        """
        changes = self._advance(seconds)
        if probability < self.off if self._is_yes else probability >= self.on:
            self._is_yes, self._changed = not self._is_yes, seconds
            if self._is_yes and not self.is_event:
                self._peak = 0.0
        if self._is_yes:
            self._peak = max(self._peak, probability)
        return changes + self._advance(seconds)

    def _advance(self, seconds: float) -> list[Event]:
        """Let the last answer hold until now: once it is long enough, an event begins or ends."""
        if self._is_yes == self.is_event or seconds - self._changed < self.shortest - TOLERANCE:
            return []
        self.is_event = self._is_yes
        if self.is_event:
            self._start = self._changed
            return [Event(self._start, None, self._peak)]
        return [Event(self._start, self._changed, self._peak)]

    def close(self, seconds: float) -> list[Event]:
        """End the video at a time, and the current event with it."""
        changes = self._advance(seconds)
        if self.is_event:
            end = seconds if self._is_yes else self._changed
            changes.append(Event(self._start, end, self._peak, is_cut=self._is_yes))
        return changes
