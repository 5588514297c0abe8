"""The notebooks of docs/: their cells run, and show what their text says."""

import json
import re

import pytest
import torch

from tiny import ROOT


def run_cells(name, monkeypatch):
    """(variables after all cells of a notebook have run, what its stored outputs print)."""
    cells = json.loads((ROOT / "docs" / name).read_text(encoding="utf-8"))["cells"]
    monkeypatch.chdir(ROOT / "docs")
    variables: dict = {}
    for index, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {index}", "exec"), variables)
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return variables, "".join("".join(output.get("text", ())) for output in outputs)


@torch.no_grad()  # restores gradients, which a cell turns off
def test_how_it_works(monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    state = torch.get_rng_state()
    names, printed = run_cells("how_it_works.ipynb", monkeypatch)
    torch.set_rng_state(state)
    pyplot.close("all")
    assert names["attention_error"] < 1e-4 < names["by_hand"].abs().max()
    assert names["absorbed_error"] < 1e-9 < names["with_keys"].abs().max()
    assert len(names["steps"]) > 2 and names["cache_error"] < 1e-3 and names["same_words"]
    for _, length, text_bytes, image_bytes in names["steps"]:  # 4 layers, keys and values, 2 heads of size 64, 4 bytes
        assert (text_bytes, image_bytes) == (length * 4 * 2 * 2 * 64 * 4, 154 * 4 * 2 * 2 * 64 * 4)
    pedestrian = names["maps"][names["tokens"].index("pedestrian")]
    assert pedestrian.argmax() % 12 >= 8  # the pedestrian is on the right
    assert names["sentence"] in printed and str(names["numbers_a_word"]) in printed
    # Lines of the code may have moved since the outputs were stored; concepts, files and names may not.
    stored = {line[:29].strip(): line[29:].split() for line in printed.splitlines() if ".py:" in line}
    assert stored.keys() == names["places"].keys()
    for concept, (file, name, _) in names["places"].items():
        assert stored[concept][0] == name and stored[concept][1].split(":")[0] == file


@pytest.mark.slow
def test_the_first_hour(tmp_path, monkeypatch, capsys):
    for package in ("yaml", "cv2", "onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names, _ = run_cells("start.ipynb", monkeypatch)
    question = names["new_question"]
    assert names["vqa"](names["photograph"], question) == names["again"](names["photograph"], question)  # as saved
    assert names["before"][question] < names["after"][question]
    assert re.search(r"^vision\.onnx +\d", capsys.readouterr().out, re.MULTILINE)
