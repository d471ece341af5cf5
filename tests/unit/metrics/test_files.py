"""Files that appear whole or not at all."""

from __future__ import annotations

import errno

import pytest

from megasharp.common.errors import UserError
from megasharp.common.files import completed


def test_the_body_writes_beside_and_the_name_appears_at_the_end(tmp_path):
    path = tmp_path / "new" / "a.json"
    with completed(path) as temporary:
        temporary.write_text("1")
        assert not path.exists()
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]
    assert path.read_text() == "1"


@pytest.mark.parametrize("error", [KeyError("x"), OSError(errno.ENOSPC, "No space left on device")])
def test_a_failure_leaves_the_old_file_and_no_litter(tmp_path, error):
    path = tmp_path / "a.json"
    path.write_text("old")
    expected = UserError if isinstance(error, OSError) else KeyError
    with pytest.raises(expected) as caught, completed(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    if expected is UserError:
        assert str(path) in str(caught.value)
        assert "no space left on the disk" in str(caught.value)


def test_a_file_in_the_place_of_the_folder_is_one_line(tmp_path):
    (tmp_path / "taken").write_text("a file")
    path = tmp_path / "taken" / "a.json"
    with pytest.raises(UserError, match=r"taken/a\.json: cannot write this file") as caught, completed(path):
        pass
    assert "\n" not in str(caught.value)
