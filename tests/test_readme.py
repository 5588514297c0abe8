"""The README's Python runs as it is written, on a folder with a tiny model."""

import ast
import json
import re
import shutil

import pytest
import transformers
import yaml

from tiny import ROOT, locating_model, new_process, picture
from traffic_vlm.evaluation.markdown import format_value, headline


README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
FILES = sorted(set(re.findall(r"`((?:\w+/)*\w+\.(?:py|txt))`", README)))
DOCUMENTS = "\n".join([README, *(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))])
COMMANDS = re.findall(r"python (scripts/\w+\.py)((?:[^`\n]|\\\n)*)", DOCUMENTS)
# Where a script's options are, beside the script.
OPTIONS = {
    "scripts/make_dataset.py": ["data/datasets.py"],
    "scripts/train.py": ["training/options.py"],
    "scripts/ask.py": ["serving/options.py"],
    "scripts/serve.py": ["serving/options.py", "serving/service.py", "serving/deployment.py"],
    "scripts/watch.py": ["serving/options.py", "serving/watcher.py"],
    "scripts/label.py": ["serving/options.py", "serving/labeling.py"],
}


def test_readme_runs(processor, tmp_path, monkeypatch, capsys):
    assert len(BLOCKS) == 3
    locating_model().save_pretrained(tmp_path / "folder")
    processor.save_pretrained(tmp_path / "folder")
    picture().save(tmp_path / "scene.jpg")
    monkeypatch.chdir(tmp_path)
    names = {"folder": str(tmp_path / "folder")}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    number = r"[01]\.\d+"
    item = rf"'question': 'Is there a pedestrian\?', 'answer': '(yes|no)', 'score': {number}, 'p_yes': {number}"
    assert len(re.findall(item, printed)) == 1
    assert len(re.findall(rf"tensor\(\[{number}, {number}\]\)", printed)) == 1  # of the model itself


@pytest.mark.slow
def test_readme_runs_without_the_package_and_prints_what_it_says(tmp_path):
    """With remote code and the weights of this folder, in a process that cannot import `traffic_vlm`."""
    shutil.copy(ROOT / "docs/crossing.jpg", tmp_path / "scene.jpg")
    blocks = [block for block in BLOCKS if "traffic_vlm" not in block]
    printed = new_process(f"folder = {str(ROOT)!r}\n" + "\n".join(blocks), tmp_path)
    assert "problem" not in printed
    [documented] = re.findall(r"This prints one item .*?\n\n    (\[.*?\])\n\n", README, flags=re.DOTALL)
    items, expected = map(ast.literal_eval, (printed.splitlines()[0], documented))
    # In bfloat16, CPUs differ: a score was 0.73 on some and 0.84 on others.
    assert items == [pytest.approx(item, abs=0.15) for item in expected]


@pytest.mark.parametrize("path", FILES)
def test_files_that_the_readme_names_are_there(path):
    assert (ROOT / path).is_file()


@pytest.mark.parametrize(("script", "arguments"), COMMANDS)
def test_options_that_the_readme_names_exist(script, arguments):
    """As an argument of argparse or as a field of a dataclass of options."""
    modules = [script, *OPTIONS.get(script, [])]
    code = "\n".join((ROOT / module).read_text() for module in modules)
    for option in re.findall(r"--([\w-]+)", arguments):
        library = script == "scripts/train.py" and hasattr(transformers.TrainingArguments, option)
        assert library or re.search(rf'"--{option}"|^    {option}: ', code, re.MULTILINE), option


def test_figures_are_those_of_the_committed_report():
    """README, its metadata and docs/evaluation.md follow docs/report.json, which scripts/evaluate.py wrote."""
    report = json.loads((ROOT / "docs" / "report.json").read_text(encoding="utf-8"))
    tables = report["tables"]
    assert headline(report) in README
    unseen = tables["yes_no_by_kind"]["unseen"]
    [result] = yaml.safe_load(README.split("---")[1])["model-index"][0]["results"]
    names = {"balanced_accuracy": "balanced accuracy", "roc_auc": "AUC"}
    names |= {"expected_calibration_error": "calibration error"}
    metrics = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert metrics == {kind: round(unseen[name], 3) for kind, name in names.items()}
    wrong, right = (tables["words_by_kind"]["unseen"][f'"none" if {where}'] for where in ("there", "not there"))
    assert f'{right:.0%} are "none" if the object is not there, and {wrong:.0%} if it is.' in README.replace(" %", "%")
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    assert all(
        f"| {name} | {format_value(row['balanced accuracy'])} |" in text
        for name, row in tables["yes_no_by_source"].items()
    )
