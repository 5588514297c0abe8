"""Events in closed form."""

import itertools

import pytest

from clips import RATE
from traffic_vlm.serving.events import Event, EventDetector


def events_of(probabilities, rate=RATE, **options):
    detector = EventDetector(**options)
    changes = [detector.update(index / rate, p) for index, p in enumerate(probabilities)]
    changes.append(detector.close(len(probabilities) / rate))
    flat = list(itertools.chain(*changes))
    begun = [event for event in flat if event.end is None]
    over = [event for event in flat if event.end is not None]
    assert [event.start for event in begun] == [event.start for event in over]
    return over


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [
        ([0.1] * 50, []),
        ([0.1] * 10 + [0.9] * 20 + [0.1] * 10, [Event(1.0, 3.0, 0.9)]),
        ([0.1] * 10 + [0.5] * 20 + [0.1] * 10, []),  # never reaches `on`
        ([0.1] * 10 + [0.7] * 10 + [0.5] * 10 + [0.1] * 10, [Event(1.0, 3.0, 0.7)]),  # 0.5 continues the "yes"
        ([0.1] * 10 + [0.9] * 5 + [0.1] * 10, [Event(1.0, 1.5, 0.9)]),  # the shortest event
        ([0.1] * 10 + [0.9] * 4 + [0.1] * 10, []),  # shorter
        ([0.9, 0.1] * 25, []),  # flicker
        ([0.9] * 10 + [0.1] * 4 + [0.9] * 6 + [0.1] * 10, [Event(0.0, 2.0, 0.9)]),  # a gap that is flicker
        ([0.9] * 10 + [0.1] * 5 + [0.8] * 5 + [0.1] * 10, [Event(0.0, 1.0, 0.9), Event(1.5, 2.0, 0.8)]),
        ([0.9] * 10 + [0.1, 0.5, 0.5] + [0.1] * 10, [Event(0.0, 1.0, 0.9)]),  # 0.5 continues the "no"
        ([0.1] * 10 + [0.7, 0.9] + [0.6] * 8, [Event(1.0, 2.0, 0.9, is_cut=True)]),
        ([0.1] * 16 + [0.9] * 4, []),  # too short before the video ends
        ([0.9] * 10 + [0.1] * 3, [Event(0.0, 1.0, 0.9)]),  # over, although the video ends soon after
        ([0.6] * 5 + [0.4] * 5 + [0.39] * 5, [Event(0.0, 1.0, 0.6)]),  # the thresholds themselves
    ],
)
def test_events_in_closed_form(probabilities, expected):
    assert events_of(probabilities) == expected


def test_a_frame_lasts_until_the_next_one():
    assert events_of([0.1, 0.9, 0.1, 0.9], shortest=0) == [Event(0.1, 0.2, 0.9), Event(0.3, 0.4, 0.9, is_cut=True)]
    assert events_of([0.1, 0.9, 0.1], rate=1) == [Event(1.0, 2.0, 0.9)]
    assert events_of([0.1, 0.9, 0.1], rate=1, shortest=1.5) == []


def test_an_event_is_reported_once_it_is_long_enough():
    detector = EventDetector()
    changes = [(index / RATE, detector.update(index / RATE, 0.9)) for index in range(10)]
    assert [(seconds, events) for seconds, events in changes if events] == [(0.5, [Event(0.0, None, 0.9)])]


@pytest.mark.parametrize("limits", [{"on": 0.2}, {"off": 0.0}, {"on": 1.1}, {"shortest": -1.0}])
def test_impossible_limits_are_refused(limits):
    with pytest.raises(ValueError, match="must be 0"):
        EventDetector(**limits)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["none"] * 9, []),
        (
            ["red"] * 10 + ["green"] * 10 + ["none"] * 10,
            [Event(0.0, 1.0, 0.9, answer="red"), Event(1.0, 2.0, 0.9, answer="green")],
        ),
        (["red"] * 10 + ["none"] * 4 + ["red"] * 6, [Event(0.0, 2.0, 0.9, True, "red")]),  # flicker
        (
            ["red"] * 10 + ["yellow"] * 2 + ["green"] * 8,  # "red" ended where it was last seen
            [Event(0.0, 1.0, 0.9, answer="red"), Event(1.2, 2.0, 0.9, True, "green")],
        ),
        (["red"] * 10 + ["yellow", "green"] * 10, [Event(0.0, 1.0, 0.9, answer="red")]),
    ],
)
def test_answers_in_words_are_events(words, expected):
    detector = EventDetector()
    changes = [detector.update(index / RATE, 0.9, text) for index, text in enumerate(words)]
    changes.append(detector.close(len(words) / RATE))
    assert [event for event in itertools.chain(*changes) if event.end is not None] == expected
