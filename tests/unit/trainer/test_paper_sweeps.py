"""The papers' sweeps on nodes of GPUs: every case may start there by all checks but that of the engines' packages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cases import each_case
from paper_stand_ins import ABLATIONS, STAND_INS, prepare, rows_of, sweep_file

from megasharp.planner.records import range_text
from megasharp.trainer.resolve import resolved_run
from megasharp.trainer.sweep import Sweep

EACH = [(name, gpu) for name in (*STAND_INS, *ABLATIONS) for gpu in ("h200", "h100")]
# No rows of ablations.
RATES = ("grpo_half_lr", "grpo_double_lr")


@pytest.mark.long("runs")
@each_case("gpu", ["h200", "h100"])
@each_case("name", [*STAND_INS, *ABLATIONS])
def test_every_case_may_start_on_a_node(name: str, gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the paper's lengths, on as many positions as its model has; they fit either GPU by plan, as told below."""
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


@each_case(("name", "gpu"), EACH, ids=str)
def test_the_readme_has_the_cost_by_plan(name: str, gpu: str, tmp_path: Path) -> None:
    """Every case fits by plan. Renew the table by `megasharp sweep configs/sweep/NAME.yaml --plan`."""
    said: list[str] = []
    sweep = Sweep(sweep_file(name), [f"run=cluster/8x{gpu}.yaml", f"slurm.gpu={gpu}"], tmp_path, said.append)
    assert sweep.plan(None)
    (text,) = said
    cases = {
        row: (int(runs), one)
        for row, runs, one in re.findall(r"^\| `([\w.-]+)` \| (\d+) .* \| (.+?) \| .+? \|$", text, re.M)
    }
    runs, hours, days, disk = re.findall(r": (\d+) runs, (.+?) GPU-hours .* GPUs (.+?) days; (.+) on disk", text)[0]
    ends = [float(end.replace(",", "")) for _, one in cases.values() for end in one.split(" to ")]
    readme = (sweep_file(name).parent / "README.md").read_text()
    cells = next(line for line in readme.splitlines() if line.startswith(f"| `{name}` | {gpu} |")).split(" | ")
    assert cells[2:7] == [
        f"{len(cases)} x {int(runs) // len(cases)}",
        runs,
        range_text((min(ends), max(ends))),
        hours,
        days,
    ]
    *rest, on_disk = cells[7:]
    assert on_disk == f"{disk} |"
    papers = [count for row, (count, _) in cases.items() if row not in RATES]
    assert [cell.split(",")[0] for cell in rest] == ([] if name in ABLATIONS else [f"{sum(papers)} runs"])


def test_the_readme_has_the_cost_of_other_rows_by_plan(tmp_path: Path) -> None:
    said: list[str] = []
    assert Sweep(sweep_file("other_rows"), [], tmp_path, said.append).plan(None)
    readme = (sweep_file("other_rows").parent / "README.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| 1 \| .+? \| ([\d,]+) \| .* \| (.+?) \| .+? \|$", said[0], re.M)
    assert len(rows) == 11
    for case, steps, hours in rows:
        assert re.search(rf"^\| `{re.escape(case)}`.* \| {steps} \| {hours} \|$", readme, re.M), (case, steps, hours)
