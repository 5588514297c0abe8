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
