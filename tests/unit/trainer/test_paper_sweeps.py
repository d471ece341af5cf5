"""The papers' sweeps on nodes of GPUs: every case may start there by all checks but that of the engines' packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case
from paper_stand_ins import STAND_INS, prepare, rows_of, sweep_file

from megasharp.trainer.resolve import resolved_run
from megasharp.trainer.sweep import Sweep


@each_case(("name", "gpu"), [(name, gpu) for name in STAND_INS for gpu in ("h200", "h100")], ids=str)
def test_every_case_may_start_on_a_node(name: str, gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the paper's lengths, on as many positions as its model has."""
    # The engines' Python is on the nodes.
    monkeypatch.setattr(resolved_run, "check_engines", lambda settings, where: None)
    overrides = [*prepare(name, tmp_path), "seeds=[1]", f"run=cluster/8x{gpu}.yaml", f"slurm.gpu={gpu}"]
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    sweep = Sweep(sweep_file(name), overrides, tmp_path / "runs", said.append)
    sweep.run(1, dry_run=True)
    assert said == [f"{row}_s1: to do" for row in rows_of(name)]
    said.clear()
    sweep.submit(dry_run=True)
    numbers = ",".join(map(str, range(len(rows_of(name)))))
    assert {f"#SBATCH --array={numbers}", "#SBATCH --nodes=1"} <= {*said[0].splitlines()}
