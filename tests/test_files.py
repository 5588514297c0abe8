"""Complete files: a draft takes the place of a file when it is whole."""

import pytest

from traffic_vlm.common.files import atomic_write, atomic_write_text


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
