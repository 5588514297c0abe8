"""The console command calls the scripts."""

import runpy
import sys

import pytest

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
