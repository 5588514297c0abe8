"""The benchmark: each model does its whole workload, the models have the same size, and memory is counted by hand."""

import re

import pytest
import torch

from tiny import TINY_TEXT, TINY_TOWER, save_folder
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from traffic_vlm.scripts import benchmark


CONFIG = TrafficVLMConfig(TINY_TOWER | {"hidden_size": 32, "image_size": 64}, TINY_TEXT)
PIXELS = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
CPU = {"device": "cpu", "dtype": torch.float32}
MODELS = (benchmark.TrafficVLM, benchmark.PaliGemma)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Options that choose a tiny model and a PaliGemma of its size."""
    folder = save_folder(TrafficVLMForConditionalGeneration(CONFIG), tmp_path_factory.mktemp("model"))
    return ["--model", folder, "--peer", folder, "--dtype", "float32"]


def read_table(text):
    """The cells of the table that was printed, by the titles of its rows and columns."""
    columns, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {title: dict(zip(columns[1:], cells)) for title, *cells in rows}


def test_models_have_the_same_size(processor):
    with torch.device("meta"):
        models = [build(TrafficVLMConfig(), processor, device="meta", dtype=torch.float32) for build in MODELS]
    ours, peer = (model.model.num_parameters() for model in models)
    assert ours == pytest.approx(peer, rel=0.05)


@pytest.mark.parametrize("build", MODELS)
def test_an_answer_does_not_depend_on_other_questions_and_images(processor, build):
    model, questions = build(CONFIG, processor, **CPU), benchmark.make_questions(40)
    together = model.yes_no(PIXELS, questions)()
    alone = model.yes_no(PIXELS[1:], questions[2:3])()
    assert together.shape == (80,)
    torch.testing.assert_close(together[42:43], alone, atol=1e-5, rtol=0)


def test_a_row_for_each_workload_has_times_and_ratios(tiny, run_script, capsys, monkeypatch):
    options = ["--images", 2, "--questions", 1, 3, "--new_tokens", 2, "--min_run_time", 0.001, "--compiled", "true"]
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # compiling takes a minute
    run_script("benchmark.py", "speed", *tiny, *options)
    table = read_table(capsys.readouterr().out)
    assert [*table] == ["images: 2, questions: 1", "images: 2, questions: 3", "tokens: 2"]
    for row, cells in table.items():
        (ours, one), (peer, ratio) = (
            map(float, re.findall(r"[\d.]+", cells[name])) for name in ("Traffic VLM", "PaliGemma")
        )
        assert one == 1 and ratio == pytest.approx(peer / ours, rel=0.1)
        assert ("ms" in cells["Traffic VLM, compiled"]) == (row == "tokens: 2")


def test_the_peak_of_a_run_is_that_of_its_tensors():
    def run():
        first = torch.zeros(1000, 1000)
        second = torch.zeros(500, 1000)
        del first
        return torch.zeros(250, 1000), second

    assert benchmark.peak_bytes(run, "cpu") == 6_000_000


def test_the_memory_of_training(tiny, run_script, capsys):
    run_script("benchmark.py", "memory", *tiny, "--questions", 3)
    table = {title: cells["Traffic VLM"] for title, cells in read_table(capsys.readouterr().out).items()}
    model = TrafficVLMForConditionalGeneration(CONFIG)
    weights, buffers = (sum(tensor.nbytes for tensor in found) for found in (model.parameters(), model.buffers()))
    state = 4 * weights + buffers + 4 * len(list(model.parameters()))  # AdamW counts the steps of each tensor
    assert table["weights, MB"] == f"{(weights + buffers) / 1e6:.1f}"
    assert table["training: weights, gradients and AdamW, MB"] == f"{state / 1e6:.1f}"
    plain, less = (float(table[f"training: an image with 16 questions{way}, MB"]) for way in ("", ", checkpointing"))
    assert 0 < less < plain
