"""The notebook of the first hour, docs/start.ipynb: its cells run, and show what its text says."""

import json
import re

import pytest
import torch

from tiny import ROOT


NOTEBOOK = ROOT / "docs" / "start.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_the_file_is_small_and_shows_its_results():
    assert NOTEBOOK.stat().st_size < 400_000 and str(ROOT) not in NOTEBOOK.read_text(encoding="utf-8")
    outputs = [output for cell in CELLS for output in cell.get("outputs", ())]
    assert sum("image/jpeg" in output.get("data", {}) for output in outputs) == 2
    printed = "".join("".join(output.get("text", ())) for output in outputs)
    assert len(re.findall(r"\? +[01]\.\d\d before, [01]\.\d\d after", printed)) == 4


@pytest.fixture
def run_cells(tmp_path, monkeypatch):
    """A function that runs the first code cells in the folder of the notebook, and returns their variables."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(NOTEBOOK.parent)

    def run(count):
        names: dict = {}
        for index, code in enumerate(CODE[:count]):
            exec(compile(code, f"code cell {index}", "exec"), names)
        return names

    return run


def test_outside_of_a_clone_it_asks_for_the_address(run_cells, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="set REPOSITORY"):
        run_cells(1)


@pytest.mark.slow
@pytest.mark.web
def test_its_cells_run(run_cells, capsys):
    for package in ("yaml", "cv2", "onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    names = run_cells(len(CODE))
    vqa, again, question = names["vqa"], names["again"], names["new_question"]
    assert vqa(names["photograph"], question) == again(names["photograph"], question)  # as saved
    assert [answers[0] for _, answers in names["test"]].count("yes") == len(names["test"]) / 2
    assert names["before"][question] < names["after"][question]
    assert all(torch.isfinite(torch.tensor(names["losses"])))
    assert re.search(r"^vision\.onnx +\d", capsys.readouterr().out, re.MULTILINE)
