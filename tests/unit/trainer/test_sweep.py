"""Messages about a sweep's jobs name the keys of its own file."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.trainer.sweep import Sweep

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "run.yaml"


@each_case(
    ("slurm", "words"),
    [
        ("{time: 1d}", r"grid.yaml: slurm.time 1d: give HH:MM:SS"),
        ("{time: '5'}", r"slurm.time 5: .* \(slurm.lead\), .* give more time or a smaller slurm.lead$"),
        ("{lead: 70000, time: 2-00}", r"slurm.lead 70000: Slurm warns at most"),
        ("{nodes: 2}", r"of the 2 nodes of slurm.nodes would"),
        ("{sbatch: [--signal=USR2@60]}", r"slurm.sbatch '--signal=USR2@60': .* sets --signal itself; give slurm.lead"),
        ("{sbatch: [--time 10]}", r"slurm.sbatch '--time 10': .* sets --time itself; give slurm.time"),
        ("{sbatch: [--exclusive]}", r"sets --exclusive itself; leave out slurm.cpus_per_node"),
        ("{mount: [/a:/b]}", r"slurm.mount /a:/b is for slurm.container; add slurm.container IMAGE"),
    ],
)
def test_messages_name_the_keys_of_the_sweep(
    slurm: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweep, "_prepare", lambda self, weights: None)
    grid = tmp_path / "grid.yaml"
    grid.write_text(f"name: grid\nrun: {QUICKSTART}\nslurm: {slurm}\n")
    with pytest.raises(UserError, match=words):
        Sweep(grid, [], tmp_path / "runs", print).submit(dry_run=True)


def test_every_job_of_an_array_asks_for_its_nodes_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Sweep, "_prepare", lambda self, weights: None)
    grid = tmp_path / "grid.yaml"
    for slurm, asked in (("{}", "--mem=0"), ("{sbatch: [--mem=200G]}", "--mem=200G"), ("{cpus_per_node: 4}", None)):
        grid.write_text(f"name: grid\nrun: {QUICKSTART}\nseeds: [1, 2]\nslurm: {slurm}\n")
        Sweep(grid, [], tmp_path / "runs", print).submit(dry_run=True)
        told = capsys.readouterr().out
        assert [line for line in told.splitlines() if "--mem" in line] == ([f"#SBATCH {asked}"] if asked else [])


def test_a_refused_array_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for sbatch; what was there before stays."""
    monkeypatch.setattr(Sweep, "_prepare", lambda self, weights: None)
    sbatch, runs, grid = tmp_path / "sbatch", tmp_path / "runs", tmp_path / "grid.yaml"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: no such partition' >&2; exit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    grid.write_text(f"name: grid\nrun: {QUICKSTART}\nseeds: [1, 2]\nslurm: {{}}\n")
    for there in ([], [runs / "grid" / "jobs" / "0.sbatch"]):
        for file in there:
            file.parent.mkdir(parents=True)
            file.touch()
        with pytest.raises(UserError, match=r"^sbatch refused array.sbatch .*: no such partition$"):
            Sweep(grid, [], runs, print).submit(dry_run=False)
        assert [path for path in runs.rglob("*") if path.is_file()] == there
        assert there or not (runs / "grid").exists()
