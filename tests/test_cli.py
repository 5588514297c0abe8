"""The console command calls the scripts."""

import sys

import pytest

from traffic_vlm import cli


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["traffic-vlm", *arguments])
    cli.main()


def test_usage_names_all_commands(monkeypatch, capsys):
    run(monkeypatch)
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_each_command_has_help_with_an_example(monkeypatch, capsys, command):
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, command, "--help")
    assert stopped.value.code == 0
    assert f"python scripts/{command}.py" in capsys.readouterr().out


def test_an_unknown_command_is_refused(monkeypatch):
    with pytest.raises(SystemExit, match="no command 'fly'; it has ask, watch"):
        run(monkeypatch, "fly")
