"""`megasharp doctor --gpu-smoke` as it is rehearsed on a CPU: real runs, one of them with a real SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasharp.trainer.gpu_smoke import smoke


@pytest.mark.long("fleet-runs")
def test_both_parts_on_a_cpu(tmp_path: Path) -> None:
    learner, engines = smoke(tmp_path / "smoke", "cpu")
    assert (learner.how, engines.how) == ("ok", "ok"), f"{learner.text}\n{engines.text}"
    assert "5 steps" in learner.text and ".venv-fleet" in engines.text
