"""Answers that contradict each other: what a yes implies and excludes, and that ground truth never does."""

from truths import enumerate_questions

from traffic_vlm.data.agreement import exclusions, implications, implied_by
from traffic_vlm.data.synthetic import render
from traffic_vlm.data.truth import GroundTruth


def test_implications_follow_from_the_meaning():
    assert implied_by("place/car/left") == {"presence/car", "presence/vehicle", "place/vehicle/left"}
    assert implied_by("relation/car/left/bus") == {"presence/car", "presence/bus", "presence/vehicle"}
    assert implied_by("count/car/over/3") >= {"count/car/over/1", "count/car/over/2", "presence/car"}
    assert implied_by("color/car/is/red") == implied_by("weather/weather/is/rainy") == frozenset()
    ids = ["presence/vehicle", "presence/car", "road_surface/road surface/is/wet", "road_surface/road surface/is/dry"]
    assert implications(ids) == [(1, 0)] and exclusions(ids) == [(2, 3)]
    rainy, cloudy, clear = (f"weather/weather/is/{value}" for value in ("rainy", "cloudy", "clear"))
    assert exclusions([rainy, cloudy, clear]) == [(0, 2), (1, 2)]  # rain comes from clouds
    assert exclusions([cloudy, rainy]) == []
    assert exclusions(["weather/weather/what", rainy, ""]) == implications(["weather/weather/what", rainy, ""]) == []


def test_ground_truth_never_contradicts_itself():
    for seed in range(25):
        found = {one.question_id: one.answer for one in enumerate_questions(GroundTruth(render(seed)[1]))}
        ids = [question_id for question_id, answer in found.items() if answer in ("yes", "no")]
        pairs = implications(ids)
        assert len(pairs) > 20
        assert not [(ids[i], ids[j]) for i, j in pairs if (found[ids[i]], found[ids[j]]) == ("yes", "no")]
        assert not [(ids[i], ids[j]) for i, j in exclusions(ids) if found[ids[i]] == found[ids[j]] == "yes"]
