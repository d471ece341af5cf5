"""The optimizer's state in host memory under every kind of parallelism: the numbers of a learner without."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

DIST = Path(__file__).parents[1] / "multirank"
sys.path[:0] = [str(DIST), str(DIST / "learner")]

import torch  # noqa: E402
from test_optimizer_offload import check  # noqa: E402
from test_optimizer_offload_places import check_places  # noqa: E402

pytestmark = pytest.mark.long("layouts")


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("tp1", ("bfloat16", "lora")),
        ("tp2", ("bfloat16",)),
        ("pp2", ("bfloat16", "float32")),
        ("dp2", ("bfloat16", "float32", "lora")),
        ("tp2dp2", ("bfloat16",)),
    ],
)
def test_layouts(layout: str, names: tuple[str, ...], tmp_path: Path) -> None:
    check(layout, names, tmp_path)


def test_where_everything_is_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_places(tmp_path, torch.float32, monkeypatch)
