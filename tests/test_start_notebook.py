"""The notebook of the first hour, docs/start.ipynb: its cells run, and show what its text says."""

import json
import re

import pytest
import torch

from tiny import ROOT


NOTEBOOK = ROOT / "docs" / "start.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
TEXT = "".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")


def test_the_file_is_small_and_shows_its_results():
    assert NOTEBOOK.stat().st_size < 400_000 and len(CODE) <= 10
    outputs = [output for cell in CELLS for output in cell.get("outputs", ())]
    assert sum("image/jpeg" in output.get("data", {}) for output in outputs) == 2
    printed = "".join("".join(output.get("text", ())) for output in outputs)
    assert len(re.findall(r"\? +[01]\.\d\d before, [01]\.\d\d after", printed)) == 4
    assert str(ROOT) not in NOTEBOOK.read_text(encoding="utf-8")


@pytest.mark.slow
def test_its_cells_run(tmp_path, monkeypatch, capsys):
    """With fewer steps of training."""
    for package in ("yaml", "cv2", "onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(NOTEBOOK.parent)
    names: dict = {}
    assert sum("STEPS = 60" in code for code in CODE) == 1
    for index, code in enumerate(CODE):
        exec(compile(code.replace("STEPS = 60", "STEPS = 2"), f"code cell {index}", "exec"), names)
    vqa, again, question = names["tuned_vqa"], names["again"], names["new_question"]
    assert vqa(names["photograph"], question) == again(names["photograph"], question)  # as saved
    assert len(names["training"]) == 60 and len(names["test"]) == 40
    assert [answers[0] for _, answers in names["test"]].count("yes") == 20
    assert names["before"].keys() == names["after"].keys() == names["MEANINGS"].keys()
    assert all(torch.isfinite(torch.tensor(names["losses"])))
    assert re.search(r"^vision\.onnx +\d", capsys.readouterr().out, re.MULTILINE)
