"""The benchmark: models of one size do their whole workload; times have ratios, memory is counted by hand."""

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

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
    images, questions = benchmark.random_images(models[name], 2), benchmark.make_questions(40)
    together = models[name].yes_no(images, questions)()
    alone = models[name].yes_no(images[1:], questions[:1])()  # shorter than others
    assert together.shape == (80,)
    torch.testing.assert_close(together[40:41], alone, atol=1e-5, rtol=0)


def test_a_row_for_each_workload_has_times_and_ratios(models, processor, monkeypatch):
    """Also of models that see images of another size."""
    smaller = TrafficVLMConfig(TINY_TOWER | {"hidden_size": 32, "image_size": 32}, TINY_TEXT)
    models["PaliGemma"] = benchmark.PaliGemma(smaller, processor)
    monkeypatch.setattr(benchmark, "SECONDS", 0.001)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # compiling takes a minute
    options = benchmark.Options(images=2, questions=[1, 3], new_tokens=2, compiled=True)
    table = benchmark.measure_speed(options, models)
    assert [*table] == ["images: 2, questions: 1", "images: 2, questions: 3", "tokens: 2"]
    for row, cells in table.items():
        (ours, one), (peer, ratio) = (map(float, re.findall(r"[\d.]+", cells[name])) for name in models)
        assert one == 1 and ratio == pytest.approx(peer / ours, rel=0.1)
        assert ("ms" in cells["TrafficVLM, compiled"]) == (row == "tokens: 2")


def test_the_command_prints_machine_and_table(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "SECONDS", 0.001)
    monkeypatch.setattr(benchmark, "ROUNDS", 1)
    options = "speed --questions 1 --new_tokens 1 --dtype float32"
    monkeypatch.setattr("sys.argv", ["benchmark.py", *options.split()])
    assert benchmark.main() == 0
    about, columns, _, *rows = capsys.readouterr().out.splitlines()
    assert "float32. Traffic VLM 25.2 M, PaliGemma 37.9 M." in about and len(rows) == 2
    assert [name.strip() for name in columns.split("|")[2:-1]] == ["Traffic VLM", "PaliGemma"]


def test_the_peak_of_a_run_is_that_of_its_tensors():
    def run():
        first = torch.zeros(1000, 1000)
        second = torch.zeros(500, 1000)
        del first
        return torch.zeros(250, 1000), second

    assert benchmark.peak_bytes(run, "cpu") == 6_000_000


def test_the_memory_of_training(models):
    # In a new process, as people measure: what other tests left behind would change the peaks.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        options = benchmark.Options(questions=[3], dtype="float32")
        table = pool.submit(benchmark.measure_memory, options, models).result(timeout=120)
    model = models["TrafficVLM"].model
    weights, buffers = (sum(tensor.nbytes for tensor in found) for found in (model.parameters(), model.buffers()))
    counts = 4 * len(list(model.parameters()))  # AdamW's steps
    found = {title: cells["TrafficVLM"] for title, cells in table.items()}
    assert found["weights, MB"] == f"{(weights + buffers) / 1e6:.1f}"
    assert found["training: weights, gradients and AdamW, MB"] == f"{(4 * weights + buffers + counts) / 1e6:.1f}"
    plain, less = (float(found[f"training: an image with 16 questions{way}, MB"]) for way in ("", ", checkpointing"))
    assert 0 < less < plain
