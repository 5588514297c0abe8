"""The benchmark: models of one size do their whole workload, and times have ratios."""

import re

import pytest
import torch

from tiny import TINY_TEXT, TINY_TOWER
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.scripts import benchmark


CONFIG = TrafficVLMConfig(TINY_TOWER | {"hidden_size": 32, "image_size": 64}, TINY_TEXT)
MODELS = (benchmark.TrafficVLM, benchmark.PaliGemma)


@pytest.fixture
def models(processor):
    return {model_class.__name__: model_class(CONFIG, processor) for model_class in MODELS}


def test_models_have_the_same_size(processor):
    with torch.device("meta"):
        ours, peer = (model_class(TrafficVLMConfig(), processor).model.num_parameters() for model_class in MODELS)
    assert ours == pytest.approx(peer, rel=0.05)


@pytest.mark.parametrize("name", ["TrafficVLM", "PaliGemma"])
def test_an_answer_does_not_depend_on_other_questions_and_images(models, name):
    images, questions = torch.randn(2, 3, 64, 64), benchmark.make_questions(40)
    together = models[name].yes_no(images, questions)()
    alone = models[name].yes_no(images[1:], questions[:1])()  # shorter than others
    assert together.shape == (80,)
    torch.testing.assert_close(together[40:41], alone, atol=1e-5, rtol=0)


def test_a_row_for_each_workload_has_times_and_ratios(models, monkeypatch):
    monkeypatch.setattr(benchmark, "SECONDS", 0.001)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # compiling takes a minute
    options = benchmark.BenchmarkOptions(images=2, questions=[1, 3], new_tokens=2, dtype="float32", compiled=True)
    table = benchmark.measure(options, models)
    assert [*table] == ["images: 2, questions: 1", "images: 2, questions: 3", "tokens: 2"]
    for row, cells in table.items():
        (ours, one), (peer, ratio) = (map(float, re.findall(r"[\d.]+", cells[name])) for name in models)
        assert one == 1 and ratio == pytest.approx(peer / ours, rel=0.1)
        assert ("ms" in cells["TrafficVLM, compiled"]) == (row == "tokens: 2")


def test_the_command_prints_machine_and_table(monkeypatch, capsys, run_script):
    monkeypatch.setattr(torch.utils.benchmark.Timer, "blocked_autorange", lambda timer, **_: timer.timeit(1))
    run_script("benchmark.py", "--questions", 1, "--new_tokens", 1, "--dtype", "float32")
    about, columns, _, *rows = capsys.readouterr().out.splitlines()
    assert "float32. Traffic VLM 25.2 M, PaliGemma 37.9 M." in about and len(rows) == 2
    assert [name.strip() for name in columns.split("|")[2:-1]] == ["Traffic VLM", "PaliGemma"]
