"""Where the parts of a checkpoint lie."""

from __future__ import annotations

from pathlib import Path

from megasharp.build.checkpoints import _memory_weights


def test_a_memory_network_is_found_where_older_versions_wrote_it(tmp_path: Path) -> None:
    assert _memory_weights(tmp_path) == tmp_path
    (tmp_path / "policy").mkdir()
    assert _memory_weights(tmp_path) == tmp_path / "policy"
