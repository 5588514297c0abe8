"""Events from answers over time: periods of "yes", or of one answer in words; with a minimum duration against flicker.

    P(yes) ≥ on ──────────────────────── P(yes) < off for `shortest` seconds: the event ended where the "no" began
           └─ for `shortest` seconds: the event began here

The answer to one frame holds until the next frame. A "yes" shorter than `shortest` is not an event, and a "no" shorter
than `shortest` does not end one. Answers in words are treated the same way: "red" is an event, "none" is not.
"""

from dataclasses import dataclass, replace

from ..question_traffic_vlm import NONE


ROUNDING = 1e-6  # seconds: differences of time stamps are not exact


@dataclass(frozen=True, slots=True)
class Event:
    """A period of one answer.

    Attributes:
        start: seconds, where the answer began.
        end: seconds, where another answer began; None while the event lasts.
        peak: highest P(yes) so far, or highest score of the answer in words.
        is_cut: the video ended before the answer did.
        answer: "yes", or words.
    """

    start: float
    end: float | None
    peak: float
    is_cut: bool = False
    answer: str = "yes"


class EventDetector:
    """Finds the events of one question.

    Args:
        on: P(yes) from which a "no" becomes a "yes".
        off: P(yes) below which a "yes" becomes a "no".
        shortest: seconds; a shorter answer is flicker.

    Attributes:
        event: the current event; None between events.

    Raises:
        ValueError: not 0 < off <= on <= 1, or a duration that is negative or not finite.
    """

    def __init__(self, on: float = 0.6, off: float = 0.4, shortest: float = 0.5):
        if not 0 < off <= on <= 1:
            raise ValueError(f"the thresholds must be 0 < off <= on <= 1, got on={on} and off={off}")
        if not 0 <= shortest < float("inf"):
            raise ValueError(f"the shortest duration must be 0 seconds or more, got {shortest}")
        self.on, self.off, self.shortest = on, off, shortest
        self.event: Event | None = None
        self._latest = Event(0.0, None, 0.0, answer="")  # the latest answer, "" for "no" and "none"
        self._left = 0.0  # seconds, where another answer last followed that of the current event

    def update(self, seconds: float, p: float, words: str | None = None) -> list[Event]:
        """Add the answer at a time, which must not decrease.

        Args:
            p: P(yes), or the score of the answer in words.
            words: the answer to a question that asks for words.

        Returns:
            events that have begun (`end` is None) or ended since the last call, in the order of time.
        """
        changes = self._advance(seconds)
        if words is None:
            answer = "yes" if p >= (self.off if self._latest.answer else self.on) else ""
        else:
            answer = "" if words == NONE else words
        if answer != self._latest.answer:
            if self.event is not None and self.event.answer == self._latest.answer:
                self._left = seconds
            self._latest = Event(seconds, None, 0.0, answer=answer)
        self._latest = replace(self._latest, peak=max(self._latest.peak, p))
        if self.event is not None and self.event.answer == answer:
            self.event = replace(self.event, peak=max(self.event.peak, p))
        return changes + self._advance(seconds)

    def _advance(self, seconds: float) -> list[Event]:
        """Let the latest answer hold until now: once it is long enough, an event ends or begins."""
        changes = []
        if self.event is not None and self.event.answer != self._latest.answer and self._is_long(self._left, seconds):
            changes.append(self._end(self.event, self._left))
        if self.event is None and self._latest.answer and self._is_long(self._latest.start, seconds):
            self.event = self._latest
            changes.append(self.event)
        return changes

    def _is_long(self, start: float, end: float) -> bool:
        return end - start >= self.shortest - ROUNDING

    def _end(self, event: Event, seconds: float, is_cut: bool = False) -> Event:
        self.event = None
        return replace(event, end=seconds, is_cut=is_cut)

    def close(self, seconds: float) -> list[Event]:
        """End the video at a time, and the current event with it."""
        changes = self._advance(seconds)
        if self.event is not None:
            is_cut = self.event.answer == self._latest.answer
            changes.append(self._end(self.event, seconds if is_cut else self._left, is_cut))
        return changes
