"""The notebook of the first hour, docs/start.ipynb: its cells run, and show what its text says."""

import json
import re

import pytest

from tiny import ROOT


NOTEBOOK = ROOT / "docs" / "start.ipynb"


@pytest.mark.slow
@pytest.mark.web
def test_its_cells_run(tmp_path, monkeypatch, capsys):
    for package in ("yaml", "cv2", "onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(NOTEBOOK.parent)
    names: dict = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    question = names["new_question"]
    assert names["vqa"](names["photograph"], question) == names["again"](names["photograph"], question)  # as saved
    assert names["before"][question] < names["after"][question]
    assert re.search(r"^vision\.onnx +\d", capsys.readouterr().out, re.MULTILINE)
