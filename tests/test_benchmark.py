"""The benchmark: models of one size do their whole workload, and times have ratios."""

import re
from functools import cache

import pytest
import torch

from tiny import TINY_TEXT, TINY_TOWER
from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.scripts import benchmark


CONFIG = TrafficVLMConfig(TINY_TOWER | {"hidden_size": 32, "image_size": 64}, TINY_TEXT)
MODELS = {"Traffic VLM": benchmark.TrafficVLM, "PaliGemma": benchmark.PaliGemma}


@pytest.mark.parametrize("name", MODELS)
def test_an_answer_does_not_depend_on_other_questions_and_images(name, processor):
    torch.manual_seed(0)
    model, images, questions = MODELS[name](CONFIG, processor), torch.randn(2, 3, 64, 64), benchmark.make_questions(40)
    together = model.yes_no(images, questions)()
    alone = model.yes_no(images[1:], questions[:1])()  # shorter than others
    assert together.shape == (80,)
    torch.testing.assert_close(together[40:41], alone, atol=1e-4, rtol=0)


def test_the_command_prints_models_of_one_size_and_times_with_ratios(monkeypatch, capsys, run_script):
    with torch.device("meta"):
        config = TrafficVLMConfig.with_patch_tower()
        ours, peer = (kind(config, None).model.num_parameters() for kind in MODELS.values())
    assert ours == pytest.approx(peer, rel=0.1)
    monkeypatch.setattr(torch.utils.benchmark.Timer, "blocked_autorange", cache(lambda timer, **_: timer.timeit(1)))
    run_script("benchmark.py", "--questions", 2, "--new_tokens", 1, "--dtype", "float32")
    about, columns, _, *rows = capsys.readouterr().out.splitlines()
    assert "float32. Traffic VLM 25.8 M, PaliGemma 38.2 M." in about
    assert [name.strip() for name in columns.split("|")[2:-1]] == [*MODELS]
    for row, title in zip(rows, ("images: 1, questions: 2", "tokens: 1"), strict=True):
        _, name, *cells, _ = row.split("|")
        (ours, one), (peer, ratio) = (map(float, re.findall(r"[\d.]+", cell.replace(",", ""))) for cell in cells)
        assert name.strip() == title and one == 1 and ratio == pytest.approx(peer / ours, rel=0.1)
