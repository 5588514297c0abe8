"""scripts/compare_attention.py: sizes by hand, questions with true answers, a report that goes on where it was."""

import json
import time

import pytest
import torch

from tiny import ROOT
from traffic_vlm.scripts import compare_attention
from traffic_vlm.scripts.compare_attention import (
    VARIANTS,
    Arguments,
    Scenes,
    cache_bytes,
    learn,
    make_decoder,
    milliseconds,
)


@pytest.fixture
def small(monkeypatch):
    """Fewer image tokens and questions."""
    monkeypatch.setattr(compare_attention, "IMAGE_TOKENS", 7)
    monkeypatch.setattr(compare_attention, "QUESTIONS", 2)
    monkeypatch.setattr(compare_attention, "TRAINING_IMAGES", 1)
    monkeypatch.setattr(compare_attention, "LENGTHS", (3, 5))


@pytest.mark.parametrize(
    ("variant", "text", "image"),
    [
        ("MHA", 2 * 8 * 64, 2 * 8 * 64),
        ("GQA 8/2", 2 * 2 * 64, 2 * 2 * 64),
        ("MQA", 2 * 64, 2 * 64),
        ("MLA 128+32", 128 + 32, 2 * 2 * 64),
        ("MLA 128+32, image 128", 128 + 32, 128),
    ],
)
def test_cache_holds_these_numbers_for_each_token_and_layer(small, variant, text, image):
    found = cache_bytes(make_decoder(variant), 5)
    assert found == {"text": 4 * 4 * 5 * text, "image": 4 * 4 * 7 * image}  # 4 layers, 4 bytes


def test_answers_are_the_colors_of_the_asked_categories():
    scenes = Scenes(width=64, seed=3)
    questions, tokens, answers = scenes.batch(50)
    for question, image, answer in zip(questions, tokens, answers, strict=True):
        asked = (scenes.questions == question).all(1).nonzero().item()
        color = (scenes.answers == answer).nonzero().item()
        shown = image - scenes.positions - scenes.categories[asked] - scenes.colors[color]
        assert (shown.norm(dim=1) < 1e-4).sum() == 1  # exactly one patch shows it
    assert len(set(answers.tolist())) > 4


def test_learning_reaches_a_lower_loss_and_starts_from_its_seed(monkeypatch):
    monkeypatch.setattr(compare_attention, "EVALUATE_EVERY", 1)
    first, again = (learn("MLA 128+32", seed=1, steps=12, batch_size=8) for _ in range(2))
    assert first == again and first["step"] == list(range(1, 13))
    assert first["loss"][-1] < first["loss"][0] - 0.5


def test_runs_are_timed_in_milliseconds():
    times = milliseconds({"a": lambda: time.sleep(0.01), "b": lambda: time.sleep(0.03)}, min_run_time=0.01)
    assert 10 <= times["a"] < times["b"]


def test_report_goes_on_where_it_was(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare_attention, "VARIANTS", {name: VARIANTS[name] for name in ("GQA 8/2", "MQA")})
    arguments = Arguments(tmp_path, ["sizes", "speed"], min_run_time=0.001)
    compare_attention.compare(arguments)
    arguments = Arguments(tmp_path, ["learning"], seeds=2, steps=1, batch_size=2)
    compare_attention.compare(arguments)
    report = (tmp_path / "attention.md").read_text()
    assert [line for line in report.splitlines() if line.startswith("## ")] == ["## Sizes", "## Speed", "## Learning"]
    assert "| GQA 8/2 | 1.00 (" in report and (tmp_path / "attention_learning.png").stat().st_size > 5000
    files = sorted((tmp_path / "learning").iterdir())
    assert len(files) == 4
    known = {"step": [1], "loss": [0.25], "accuracy": [0.75]}
    files[0].write_text(json.dumps(known))
    monkeypatch.setattr(compare_attention, "learn", lambda *_: pytest.fail("a finished run was repeated"))
    assert known in compare_attention.compare(arguments)["learning"]["GQA 8/2"]


def test_generation_is_timed_with_and_without_the_cache(monkeypatch):
    monkeypatch.setattr(compare_attention, "LENGTHS", (2,))
    monkeypatch.setattr(compare_attention, "DTYPES", (torch.float32,))
    rows = compare_attention.measure_cache(str(ROOT), min_run_time=0.001)
    assert [(row["dtype"], row["tokens"]) for row in rows] == [("float32", 2)] * len(rows)
    assert all(row["with"] > 0 and row["without"] > 0 for row in rows)


def test_options_are_checked():
    with pytest.raises(ValueError, match=r"--parts must be of sizes, speed, learning, cache, got colors"):
        Arguments("out", ["colors"])
    with pytest.raises(ValueError, match="--seeds must be at least 1, got 0"):
        Arguments("out", seeds=0)
