"""Files that may be read, and complete files."""

import os

import pytest

from traffic_vlm.common.files import DataError, atomic_write, atomic_write_text
from traffic_vlm.data.formats.reading import open_inside


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
        for root in (folder, tmp_path / "link"):
            with open_inside(good, root) as file:
                assert file.read() == b"a"
    for bad in (folder / "outer", folder / "up" / "secret.txt", folder / ".." / "secret.txt"):
        with pytest.raises(DataError, match=rf"{bad} leads to {secret}, which is outside of {folder}"):
            open_inside(bad, folder)
    with pytest.raises(DataError, match="fifo is not a regular file"):
        open_inside(folder / "fifo", folder)
    with pytest.raises(FileNotFoundError):
        open_inside(folder / "missing", folder)
