"""The benchmark: PaliGemma does its whole workload, and times have ratios."""

import re
from functools import cache

import pytest
import torch

from traffic_vlm.scripts import benchmark


@torch.no_grad()
def test_a_row_of_paligemma_does_not_depend_on_other_questions_and_images(processor):
    torch.manual_seed(0)
    peer, images, questions = benchmark.make_peer(64), torch.randn(2, 3, 64, 64), benchmark.QUESTIONS[:40]
    together = peer(**benchmark.peer_inputs(peer, processor, images, questions), logits_to_keep=1).logits
    alone = peer(**benchmark.peer_inputs(peer, processor, images[1:], questions[:1]), logits_to_keep=1).logits
    assert len(together) == 80
    torch.testing.assert_close(together[40:41], alone, atol=1e-4, rtol=0)  # which is shorter than others


def test_the_command_prints_models_and_times_with_ratios(monkeypatch, capsys, run_script):
    monkeypatch.setattr(torch.utils.benchmark.Timer, "blocked_autorange", cache(lambda timer, **_: timer.timeit(1)))
    options = ("--questions", 2, "--new_tokens", 1, "--dtype", "float32", "--image_size", 256, 224)
    run_script("benchmark.py", *options)
    about, columns, _, *rows = capsys.readouterr().out.splitlines()
    assert "float32. Traffic VLM 25.8 M, PaliGemma 37.9 M." in about
    names = [name.strip() for name in columns.split("|")[2:-1]]
    assert names == ["Traffic VLM, 256", "PaliGemma, 256", "Traffic VLM, 224", "PaliGemma, 224"]
    for row, title in zip(rows, ("images: 1, questions: 2", "tokens: 1"), strict=True):
        _, name, *cells, _ = row.split("|")
        (first, one), *others = (map(float, re.findall(r"[\d.]+", cell.replace(",", ""))) for cell in cells)
        assert name.strip() == title and one == 1
        for time, ratio in others:
            assert ratio == pytest.approx(time / first, rel=0.1)
