"""All scripts: help, bad options and errors in one line, their folder on the path, and the console command."""

import sys

import pytest
from PIL import Image

from tiny import ROOT
from traffic_vlm.scripts import COMMANDS, command, main


SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("[a-z]*.py"))
EXTRAS = {"label.py": "ray", "serve.py": "ray", "watch.py": "av"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder that scripts start in, with an image."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 48)).save("scene.png")
    return tmp_path


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_help_with_an_example(script, folder, run_script, capsys):
    pytest.importorskip(EXTRAS.get(script, "torch"))
    run_script(script, "--help")
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: {script}") and f"python scripts/{script}" in shown
    assert [path.name for path in folder.iterdir()] == ["scene.png"]


def test_the_console_command_runs_scripts(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["traffic-vlm", *words])
        main()

    run()
    usage = capsys.readouterr().out
    assert all(name in usage and f"{name}.py" in SCRIPTS for name in COMMANDS)
    with pytest.raises(SystemExit, match="no command 'fly'"):
        run("fly")
    with pytest.raises(SystemExit):
        run("ask", "--help")
    assert capsys.readouterr().out.startswith("usage: traffic-vlm ask")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("no"), 2, "no"),
        (ModuleNotFoundError("No module named 'av'"), 2, "No module named 'av': pip install \"traffic_vlm[video]\""),
        (OSError(28, "No space"), 2, "[Errno 28] No space"),
        (KeyboardInterrupt(), 130, ""),
        (None, 0, ""),
    ],
)
def test_errors_are_one_line_and_a_status(error, status, line, capsys):
    def fail():
        if error:
            raise error

    assert command("video")(fail)() == status
    assert capsys.readouterr().err.removesuffix("\n") == line


BAD_OPTIONS = (ROOT / "tests" / "data" / "bad_options.txt").read_text("utf-8").splitlines()


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_are_refused_before_anything_is_written(case, folder, run_script, capsys):
    line, message = case.split(" | ")
    script, *options = line.split()
    pytest.importorskip(EXTRAS.get(script, "torch"))
    words = {"Q": "Is there a car?", "MODEL": ROOT}
    with pytest.raises(SystemExit) as end:
        run_script(script, *[words.get(option, option) for option in options])
    assert end.value.code and message in f"{capsys.readouterr().err}{end.value.code}"
    assert sorted(path.name for path in folder.iterdir()) == ["scene.png"]
