"""From P(yes) over time to events: two thresholds and a shortest duration, so that flicker raises no alarm.

    probability ──┐ on ───────────────┐ below off for `shortest` seconds: the event is over,
                  └ lasted `shortest` ┘ and ended where the "no" began
                    seconds: an event

What is seen in one frame is held to last until the next one. A "yes" shorter than `shortest` is no event, and a "no"
shorter than `shortest` does not end one.
"""

from dataclasses import dataclass


SLACK = 1e-6  # seconds: time stamps are fractions, whose differences are not exact


@dataclass(frozen=True, slots=True)
class Event:
    """A time of "yes".

    Attributes:
        start: seconds at which "yes" began.
        end: seconds at which "no" began; None while the event goes on.
        peak: the highest probability so far.
        is_cut: the end is that of the video, not of the "yes".
    """

    start: float
    end: float | None
    peak: float
    is_cut: bool = False


class EventDetector:
    """Finds the events of one question.

    Args:
        on: the probability from which "no" becomes "yes".
        off: the probability below which "yes" becomes "no".
        shortest: seconds; what lasts less, yes or no, is flicker.

    Raises:
        ValueError: not 0 < off <= on <= 1, or a negative duration.
    """

    def __init__(self, on: float = 0.6, off: float = 0.4, shortest: float = 0.5):
        if not 0 < off <= on <= 1:
            raise ValueError(f"the thresholds must be 0 < off <= on <= 1, got on={on} and off={off}")
        if not 0 <= shortest < float("inf"):
            raise ValueError(f"the shortest duration must be 0 seconds or more, got {shortest}")
        self.on, self.off, self.shortest = on, off, shortest
        self._forget()

    def _forget(self) -> None:
        self._start: float | None = None  # of the "yes" under way
        self._no: float | None = None  # start of the "no" that may end it
        self._peak = 0.0
        self.is_event = False  # whether the "yes" has lasted long enough

    def update(self, time: float, probability: float) -> list[Event]:
        """Take the probability at a time in seconds, which never goes back.

        Returns:
            events that have become sure (`end` is None) or are over by now, in the order in which that happened.
        """
        changes = self._hold(time)
        if self._start is None:
            if probability >= self.on:
                self._start, self._peak = time, probability
        elif self._no is None and probability < self.off:
            if self.is_event:
                self._no = time
            else:
                self._forget()
        elif self._no is None or probability >= self.on:
            self._no, self._peak = None, max(self._peak, probability)
        return changes + self._hold(time)

    def _hold(self, time: float) -> list[Event]:
        """What the last frame's answer comes to by lasting until now."""
        changes = []
        least = self.shortest - SLACK
        if self._start is not None and not self.is_event and time - self._start >= least:
            self.is_event = True
            changes.append(Event(self._start, None, self._peak))
        if self._start is not None and self._no is not None and time - self._no >= least:
            changes.append(Event(self._start, self._no, self._peak))
            self._forget()
        return changes

    def close(self, time: float) -> list[Event]:
        """The video ends at `time`: the event under way ends with it."""
        changes = self._hold(time)
        if self._start is not None and self.is_event:
            is_cut = self._no is None
            end = time if self._no is None else self._no
            changes.append(Event(self._start, end, self._peak, is_cut))
        self._forget()
        return changes
