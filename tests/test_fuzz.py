"""The fuzzer finds nothing in a few hundred cases, and does find a bug that is there. `make fuzz` does many more."""

import importlib.util
import sys

import pytest

from tiny import ROOT


pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "scripts/fuzz.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["images", "texts", "model", "configs", "readers", "server"])
@pytest.mark.filterwarnings("ignore")
def test_strange_input_is_answered_or_refused_in_words(fuzz, kind, capsys):
    if kind == "server":
        pytest.importorskip("ray.serve")
        pytest.importorskip("httpx")
    assert fuzz.fuzz(100, 20_000, [kind]) == 0, capsys.readouterr().out
    told = capsys.readouterr().out
    assert f"{kind} " in told and not told.startswith(f"{kind} 0 answered")


def test_a_bug_is_found_and_can_be_had_again(fuzz, monkeypatch, capsys):
    def broken(dice, folder):
        if dice.random() < 0.3:
            raise KeyError("a")

    monkeypatch.setitem(fuzz.KINDS, "texts", (broken, (ValueError,)))
    found = fuzz.fuzz(50, 0, ["texts"])
    told = capsys.readouterr().out
    assert 0 < found < 50 and told.count("bug in texts") == found and "KeyError" in told
    seed = told.partition("--seed ")[2].partition(" ")[0]
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "--seed", seed, "--number", "1", "--only", "texts"])
    assert fuzz.main() == 1 and "1 bugs" in capsys.readouterr().out
