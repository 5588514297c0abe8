"""All scripts: help, bad options and errors in one line, their folder on the path, and the console command."""

import sys

import pytest
import torch
from PIL import Image

from tiny import ROOT
from traffic_vlm.common.options import choose_threads
from traffic_vlm.scripts import __main__ as console
from traffic_vlm.scripts import command


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
        console.main()

    run()
    assert all(name in capsys.readouterr().out or f"{name}.py" in SCRIPTS for name in console.COMMANDS)
    with pytest.raises(SystemExit, match="no command 'fly'"):
        run("fly")
    with pytest.raises(SystemExit):
        run("ask", "--help")
    assert capsys.readouterr().out.startswith("usage: traffic-vlm ask")


def test_threads_of_the_option_and_of_the_environment_count(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    choose_threads()
    assert torch.get_num_threads() == before
    choose_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


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


ASK = "ask.py scene.png Q"
LABEL = "label.py . --ask Q --output_dir out"
WATCH = "watch.py scene.png --ask Q --output_dir out"
DATASET = "make_dataset.py --output_dir out"
EVALUATE = "evaluate.py --model MODEL --dataset . --output_dir out"
BAD_OPTIONS = [
    ("ask.py scene.png Q --jsn", "unrecognized arguments: --jsn"),
    ("ask.py scene.png", "there is no question"),
    ("ask.py Q street", "there is no image: neither a file nor a folder has such a name"),
    ("ask.py missing.jpg Q", "missing.jpg: no such image"),
    (f"{ASK} --model nowhere", "nowhere: no model can be loaded"),
    (f"{ASK} --threads 0", "--threads must be above 0, got 0"),
    (f"{ASK} --region 0,0,2,1", "region 0,0,2,1: x, y, width and height are fractions"),
    (f"{ASK} --overlay ./scene.png", "is an image that is asked about"),
    ("build_files.py --output_dir out --vocabulary words.txt", "must have 500 words, it has 2 different ones"),
    ("compare_towers.py --runs nowhere", "nowhere/answers.parquet"),
    (EVALUATE, "has neither data/SPLIT-00000.parquet"),
    ("evaluate.py --model a --dataset . --output_dir out --write_temperature true", "a has no config.json"),
    ("export.py --output_dir .", "exists; choose another --output_dir"),
    (f"{LABEL} --ask zeppelin?", "the model knows no word of the question 'zeppelin?'"),
    (f"{DATASET} --source camvid", "camvid=FOLDER"),
    (f"{DATASET} --source synthetic synthetic", "given twice: synthetic synthetic"),
    (f"{DATASET} --num_images 0", "have no usable image: --num_images is 0"),
    (f"{DATASET} --split ../train", "like train or val.night, got '../train'"),
    ("push_to_hub.py name --model nowhere --dry_run", "nowhere has no model.safetensors, config.json"),
    ("train.py --output_dir out --learn_rate 1", "unrecognized arguments: --learn_rate"),
    ("serve.py --max_waiting 0", "--max_waiting must be above 0, got 0"),
    ("serve.py --port 65536", "--host 127.0.0.1 --port 65536: "),
    (f"{WATCH} --on 0.2", "on=0.2 and off=0.4"),
    (f"{WATCH} --frame_rate nan", "--frame_rate must be above 0"),
    (f"{WATCH} --video seen.gif", "must end in .mp4"),
]


@pytest.mark.parametrize(("line", "message"), BAD_OPTIONS)
def test_bad_options_are_refused_before_anything_is_written(line, message, folder, run_script, capsys):
    script, *options = line.split()
    pytest.importorskip(EXTRAS.get(script, "torch"))
    (folder / "words.txt").write_text("two words")
    words = {"Q": "Is there a car?", "MODEL": ROOT}
    with pytest.raises(SystemExit) as end:
        run_script(script, *[words.get(option, option) for option in options])
    assert end.value.code and message in f"{capsys.readouterr().err}{end.value.code}"
    assert sorted(path.name for path in folder.iterdir()) == ["scene.png", "words.txt"]
