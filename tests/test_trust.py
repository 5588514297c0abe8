"""The report on trust: presupposing questions, answer types, contradictions and words."""

from dataclasses import replace

import pytest

from traffic_vlm.data import scene
from traffic_vlm.data.agreement import exclusions, implications, implied_by
from traffic_vlm.data.ground_truth import MAX_COUNT, NONE, THIRDS, GroundTruth
from traffic_vlm.data.questions import enumerate_questions
from traffic_vlm.data.synthetic import render
from traffic_vlm.evaluation.predict import Prediction
from traffic_vlm.evaluation.trust import PROBES, VALUES, answer_types, presuppositions


def words(question_type: str, truth: str, answer: str, question: str = "?") -> Prediction:
    return Prediction("a", "1", question_type, "car", f"{question_type}/car/what", question, truth, answer)


def test_implications_follow_from_the_meaning():
    assert implied_by("place/car/left") == {"presence/car", "presence/vehicle", "place/vehicle/left"}
    assert implied_by("count/car/over/3") >= {"count/car/over/1", "count/car/over/2", "presence/car"}
    assert implied_by("color/car/is/red") == implied_by("weather/weather/is/rainy") == frozenset()
    ids = ["presence/vehicle", "presence/car", "road_surface/road surface/is/wet", "road_surface/road surface/is/dry"]
    assert implications(ids) == [(1, 0)] and exclusions(ids) == [(2, 3)]
    rainy, cloudy, clear = (f"weather/weather/is/{value}" for value in ("rainy", "cloudy", "clear"))
    assert exclusions([rainy, cloudy, clear]) == [(0, 2), (1, 2)]  # rain comes from clouds
    assert exclusions(["weather/weather/what", rainy, ""]) == implications(["weather/weather/what", rainy, ""]) == []
    assert len(implications(PROBES)) == 27 and len(exclusions(PROBES)) == 14


@pytest.mark.parametrize("seed", range(40))
def test_ground_truth_never_contradicts_itself(seed):
    found = {truth.question_id: truth.answer for truth in enumerate_questions(GroundTruth(render(seed)[1]))}
    ids = [question_id for question_id, answer in found.items() if answer in ("yes", "no")]
    pairs = implications(ids)
    assert len(pairs) > 20
    assert not [(ids[i], ids[j]) for i, j in pairs if (found[ids[i]], found[ids[j]]) == ("yes", "no")]
    assert not [(ids[i], ids[j]) for i, j in exclusions(ids) if found[ids[i]] == found[ids[j]] == "yes"]


def test_values_are_those_of_the_ground_truth():
    assert VALUES["light_state"] == {*scene.LIGHT_STATES, NONE} and VALUES["color"] == {*scene.COLORS, NONE}
    assert VALUES["status"] == {*scene.ATTRIBUTES["status"], "with rider", "without rider", NONE}
    assert VALUES["facing"] == set(scene.DIRECTIONS) and VALUES["side"] == {*THIRDS, NONE}
    signs = {name for name in scene.CLASSES if scene.is_a(name, "traffic sign")}
    assert VALUES["sign_value"] == {*scene.SPEED_LIMITS, *signs, NONE}
    assert VALUES["count"] == {str(count) for count in range(MAX_COUNT + 1)}


def test_presuppositions_and_answer_types_in_closed_form():
    rendered = words("light_state", "none", "none")
    asked = [
        rendered,
        words("light_state", "none", "red"),
        words("light_state", "red", "none"),
        words("light_state", "red", "left"),
        words("weather", "rainy", "rainy"),
    ]
    found = presuppositions(asked)
    assert found == {
        name: {"none_if_absent": 0.5, "none_if_present": 0.5, "absent": 2, "present": 2}
        for name in ("all", "light_state")
    }
    asked[0] = replace(rendered, source="synthetic")
    assert presuppositions(asked)["all"] == found["all"]
    assert presuppositions(asked)["photographs"] == found["all"] | {"none_if_absent": 0.0, "absent": 1}
    types = answer_types(asked)
    assert types["light_state"] == {"own_type": 0.75, "questions": 4} and types["all"]["own_type"] == 0.8
    assert presuppositions([asked[-1]]) == {}
