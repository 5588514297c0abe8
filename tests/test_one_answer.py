"""One image and question have the same answer, score and p_yes wherever they are asked, with the shipped weights."""

import ast
import json

import pyarrow as pa
import pytest
import torch

from tiny import ROOT


for name in ("fastapi", "httpx", "ray"):
    pytest.importorskip(name)

from starlette.testclient import TestClient  # noqa: E402
from transformers import AutoModel, AutoProcessor, pipeline  # noqa: E402

from traffic_vlm.serving.labeling import Labeler, LabelOptions  # noqa: E402
from traffic_vlm.serving.service import ServeOptions, build_app  # noqa: E402


pytestmark = pytest.mark.slow
YES_NO = ["Is there a pedestrian?", "Is there a bus?", "Is there no truck?", "Is it night? Answer yes or no."]
WORDS = [
    "What color is the traffic light?",
    "How many people are there?",
    "On which side is the bus?",
    "What is ahead?",
]
QUESTIONS = YES_NO + WORDS
PHOTOGRAPH = ROOT / "docs" / "crossing.jpg"


@pytest.fixture(scope="module")
def vqa():
    return pipeline("visual-question-answering", model=str(ROOT), dtype=torch.float32)


@pytest.fixture(scope="module")
def expected(vqa):
    """The items of the pipeline, with numbers that may differ by rounding."""
    items = vqa(PHOTOGRAPH, QUESTIONS)
    assert [item["answer"] for item in items[:4]] == ["yes", "no", "yes", "no"]
    assert [item["answer"] for item in items[4:]] == ["red", "2", "none", "a car and a traffic light"]
    for item in items:
        for field in ("score", "p_yes"):
            item[field] = item[field] and pytest.approx(item[field], abs=1e-3)
    return items


def test_the_model_itself(expected):
    """It asks as a question is written."""
    model = AutoModel.from_pretrained(ROOT, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(ROOT)
    [scores] = model.score_yes_no(**processor(images=[PHOTOGRAPH], text=[YES_NO[:2]], packed=True))
    assert scores.tolist() == [item["p_yes"] for item in expected[:2]]


def test_readme_prints_these_answers(vqa):
    """The items of its first example, rounded to two decimals."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("About docs/crossing.jpg, rounded:")[1]
    items = ast.literal_eval(text.split("| field")[0].strip())
    found = vqa(PHOTOGRAPH, [item["question"] for item in items])
    assert items == [
        {name: round(value, 2) if isinstance(value, float) else value for name, value in item.items()}
        for item in found
    ]


def test_ask(expected, run_script, capsys):
    run_script("ask.py", PHOTOGRAPH, *QUESTIONS, "--json")
    assert json.loads(capsys.readouterr().out)["answers"] == expected


def test_service(expected):
    with TestClient(build_app(ServeOptions(str(ROOT), "cpu", threads=2))) as client:
        files = {"image": PHOTOGRAPH.read_bytes()}
        response = client.post("/v1/answer", files=files, data={"questions": QUESTIONS})
        assert response.json()["answers"] == expected


def test_labels(expected, tmp_path):
    options = LabelOptions(model=str(ROOT), device="cpu", ask=QUESTIONS, output_dir=str(tmp_path / "labels"))
    block = pa.table({"bytes": [PHOTOGRAPH.read_bytes()], "path": [str(PHOTOGRAPH)]})
    rows = Labeler(options, "image")(block).to_pylist()
    assert [{name: row[name] for name in ("question", "answer", "score", "p_yes")} for row in rows] == expected
