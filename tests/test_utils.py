"""Files that may be read, complete files, and command lines."""

import os
from dataclasses import dataclass, field

import pytest
from safetensors.torch import load_file, save_file

from tiny import tiny_config, tiny_model
from traffic_vlm.utils import (
    DataError,
    atomic_write,
    atomic_write_text,
    check_file,
    load_weights,
    open_inside,
    option_parser,
)


@dataclass
class Options:
    output_dir: str = field(default="runs/x", metadata={"help": "folder of the results"})


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "new" / "file.txt"
    atomic_write_text(path, "old")
    with pytest.raises(OSError, match="disk"), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise OSError("disk full")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_two_writers_of_a_file_do_not_share_its_draft(tmp_path):
    path = tmp_path / "file.txt"
    with atomic_write(path) as first:
        first.write_text("first")
        with atomic_write(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_files_outside_of_a_folder_and_fifos_are_refused(tmp_path):
    folder, secret = tmp_path / "in", tmp_path / "secret.txt"
    folder.mkdir()
    secret.write_text("secret")
    (folder / "a.txt").write_text("a")
    (folder / "inner").symlink_to(folder / "a.txt")
    (folder / "outer").symlink_to(secret)
    (folder / "up").symlink_to(tmp_path)
    os.mkfifo(folder / "fifo")
    (tmp_path / "link").symlink_to(folder)
    for good in (folder / "a.txt", folder / "inner", tmp_path / "link" / "a.txt"):
        check_file(good, folder)
        check_file(good, tmp_path / "link")
        with open_inside(good, folder) as file:
            assert file.read() == b"a"
    for bad in (folder / "outer", folder / "up" / "secret.txt", folder / ".." / "secret.txt"):
        with pytest.raises(DataError, match=rf"{bad} leads to {secret}, which is outside of {folder}"):
            open_inside(bad, folder)
    with pytest.raises(DataError, match="fifo is not a regular file"):
        check_file(folder / "fifo", folder)
    with pytest.raises(FileNotFoundError):
        check_file(folder / "missing", folder)


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


def test_a_renamed_option_names_its_successor(capsys):
    parser = option_parser([Options], None, renamed={"--output": "--output_dir"})
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--output", "x"])
    assert "--output is now --output_dir" in capsys.readouterr().err
    assert parser.parse_args_into_dataclasses(["--output_dir", "x"]) == (Options("x"),)


def test_unexpected_and_missing_weights_are_named(tmp_path):
    tiny_model(text={"num_hidden_layers": 4}).save_pretrained(tmp_path)
    tiny_config().save_pretrained(tmp_path)  # of 2 layers
    with pytest.raises(ValueError, match=r"unexpected tensors: model\.text_model\.layers\.2\..* do not belong"):
        load_weights(tmp_path)
    tiny_config(text={"num_hidden_layers": 5}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the weights have no model\.text_model\.layers\.4\."):
        load_weights(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(tmp_path, value):
    tiny_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"training_head.weight": weights["model.projector.bias"].clone()}, file, {"format": "pt"})
    load_weights(tmp_path)  # heads of training are no part of the model
    weights["model.projector.bias"][3] = value
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"NaN or infinite weights in model\.projector\.bias \(1 in all\)"):
        load_weights(tmp_path)
