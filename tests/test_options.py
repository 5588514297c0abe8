"""Command lines: help and errors."""

from dataclasses import dataclass, field

import pytest

from traffic_vlm.options import option_parser


@dataclass
class Options:
    output_dir: str = field(default="runs/x", metadata={"help": "folder of the results"})


def test_help_shows_defaults_and_the_description_as_written(capsys):
    with pytest.raises(SystemExit):
        option_parser([Options], "An example:\n\n    python x.py").parse_args_into_dataclasses(["--help"])
    shown = capsys.readouterr().out
    assert "An example:\n\n    python x.py" in shown
    assert "folder of the results (default: runs/x)" in shown


def test_a_mistyped_option_is_named(capsys):
    with pytest.raises(SystemExit):
        option_parser([Options], None).parse_args_into_dataclasses(["--output_dri", "x"])
    assert "unrecognized arguments: --output_dri x" in capsys.readouterr().err
