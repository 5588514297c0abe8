"""The console command calls the scripts; modules of version 0.1 name their successors."""

import importlib
import re
import runpy
import sys

import pytest

import traffic_vlm
from traffic_vlm.scripts import __main__ as command_line


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["traffic-vlm", *arguments])
    command_line.main()


def test_usage_names_all_commands(monkeypatch, capsys):
    run(monkeypatch)
    shown = capsys.readouterr().out
    assert all(name in shown for name in command_line.COMMANDS)


def test_the_package_of_scripts_runs_as_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["traffic-vlm"])
    monkeypatch.delitem(sys.modules, command_line.__name__)
    runpy.run_module("traffic_vlm.scripts", run_name="__main__")
    assert capsys.readouterr().out.startswith("usage: traffic-vlm")


@pytest.mark.parametrize("command", command_line.COMMANDS)
def test_each_command_has_help_with_an_example(monkeypatch, capsys, command):
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, command, "--help")
    assert stopped.value.code == 0
    assert f"python scripts/{command}.py" in capsys.readouterr().out


def test_an_unknown_command_is_refused(monkeypatch):
    with pytest.raises(SystemExit, match="no command 'fly'; it has ask, watch"):
        run(monkeypatch, "fly")


@pytest.mark.parametrize(("old", "new"), sorted(traffic_vlm.RENAMED_MODULES.items()))
def test_a_renamed_module_names_its_successor(old, new):
    with pytest.raises(ModuleNotFoundError, match=re.escape(f"traffic_vlm.{old} is now {new}")):
        importlib.import_module(f"traffic_vlm.{old}")
    for module in re.findall(r"traffic_vlm[.\w]+", new):
        importlib.import_module(module)
