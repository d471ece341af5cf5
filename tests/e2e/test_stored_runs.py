"""What older versions left on disk goes on: runs, evaluations, Megatron folders and adapters in tests/stored."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from nursery import Nursery
from quickstart import REPOSITORY
from waiting import HANG_S

STORED = sorted(path for path in (REPOSITORY / "tests" / "stored").iterdir() if path.is_dir())
WITHOUT_EVALUATIONS = ("eval.every=0", "eval.suites=[]", "checkpoint.keep_best=null")
DIFFER = ("best", "files", "figures", "last_figures", "seconds")
# What files have from format 2 on.
STAMP = ("format", "megasharp")
Megasharp = Callable[..., str]
# What the version that wrote `runs/old` had at the steps after its checkpoint, if it went on there.
WENT_ON = {
    5: {"policy/loss": 0.0178388, "policy/grad_norm": 4.304865, "reward/mean": 0.5},
    6: {"policy/loss": 0.058206, "policy/grad_norm": 4.42089, "reward/mean": 0.3125, "eval/dev/pass@1": 0.4375},
}


def names_of(tree: object) -> object:
    """The names in a JSON tree, without what it says of files, figures and seconds, whose names depend on the run."""
    if isinstance(tree, dict):
        return {name: None if name in DIFFER else names_of(inner) for name, inner in tree.items() if name not in STAMP}
    return [names_of(inner) for inner in tree[:1]] if isinstance(tree, list) else None


def read(path: Path) -> object:
    return names_of(json.loads(path.read_text()))


@pytest.fixture(params=STORED, ids=lambda path: path.name)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a stored folder, where commands work."""
    return Path(shutil.copytree(request.param, tmp_path / "stored"))


@pytest.fixture
def megasharp(stored: Path, tmp_path: Path, nursery: Nursery) -> Megasharp:
    """Runs a command in the copy; returns what it printed."""

    def run(*arguments: str) -> str:
        out, error = tmp_path / "out", tmp_path / "error"
        ended = nursery.run(arguments, stored, out, error, timeout_s=HANG_S)
        assert ended == 0, f"exit {ended}\n{out.read_text()}\n{error.read_text()}"
        return out.read_text()

    return run


def check_names(run: Path, before: Path) -> None:
    """What `run` wrote at step 6 has the names of what its older version wrote, in `before`, at step 4."""
    pairs = [
        ("checkpoints/step_000006/manifest.json", "checkpoints/step_000004/manifest.json"),
        ("logs/attempt_2/attempt.json", "logs/attempt_1/attempt.json"),
        ("evals/step_000006/dev.json", "evals/step_000004/dev.json"),
        ("summary.json", "summary.json"),
    ]
    for now, then in pairs:
        assert read(run / now) == read(before / then), now
    for table in ("probe/step_00000{}.parquet", "evals/step_00000{}/dev.parquet"):
        assert pq.read_schema(run / table.format(6)) == pq.read_schema(before / table.format(4)), table
    responses = pq.read_schema(run / "rollouts" / "step_000006.parquet")
    tokens = pq.read_schema(run / "rollout_tokens" / "step_000006.parquet")
    older = pq.read_schema(before / "rollouts" / "step_000004.parquet")
    assert older.names == [*responses.names, *tokens.names[-2:]] and set(older) == {*responses, *tokens}
    # What the stored file calls rollouts: true and rollout_tokens: 256.
    tables = "rollouts:\n    keep_last: null\n    every: 10\n    tokens: 256\n    tokens_keep_last: null\n"
    stored = (before / "config.yaml").read_text().replace("steps: 4\n", "steps: 6\n")
    lines = (run / "config.yaml").read_text().splitlines()
    # Keys that were added since have their defaults there; all others are as they were, in their order.
    there = iter(lines)
    expected = stored.replace("rollouts: true\n  rollout_tokens: 256\n", tables).splitlines()
    assert [line for line in expected if line not in there] == []


def test_a_stored_run_goes_on_and_is_shown(stored: Path, megasharp: Megasharp) -> None:
    """By its own stored configuration, with the optimizer, reference, memory network and decisions it had."""
    before = shutil.copytree(stored / "runs" / "old", stored / "before")
    said = megasharp("train", "runs/old/config.yaml", "--resume", "steps=6").splitlines()
    changed = [line for line in said if line.startswith(("changed", "note"))]
    assert changed == ["changed since the last attempt: steps: 4 -> 6"]
    assert any(line.startswith("resuming") and line.endswith("after step 4") for line in said)
    rows = map(json.loads, (stored / "runs" / "old" / "metrics.jsonl").read_text().splitlines())
    figures: dict[int, dict[str, float]] = {}
    for row in rows:
        figures.setdefault(row["step"], {}).update(row)
    assert sorted(figures) == list(range(7))
    for step, expected in WENT_ON.items():
        found = {name: figures[step].get(name) for name in expected}
        assert found == pytest.approx(expected, rel=1e-3), step
    written, older = ({name for step in steps for name in figures[step]} for steps in ((5, 6), (1, 2, 3, 4)))
    assert "time/annotate" in older and written == older
    check_names(stored / "runs" / "old", before)
    shown = " ".join(megasharp("runs", "show", "runs/old").split())
    for words in ("step 6 of 6", "1 to 4", "5 to 6", "complete, the best", "resets after step 3 (every 3 steps)"):
        assert words in shown, shown
    assert "response limits 8 after step 3" in shown


def test_a_stored_evaluation_is_not_measured_again(stored: Path, megasharp: Megasharp) -> None:
    before = json.loads((stored / "evals/old/step_000004/dev.json").read_text())
    said = megasharp("eval", "runs/old", "--suite", "dev.yaml", "--n", "4", "--k", "1,4")
    assert "dev.json was measured before; figures are from its samples" in " ".join(said.split())
    after = json.loads((stored / "evals/old/step_000004/dev.json").read_text())
    assert {name: value for name, value in after.items() if name not in STAMP} == before


def test_a_stored_megatron_folder_is_its_source_and_begins_a_run(stored: Path, megasharp: Megasharp) -> None:
    said = megasharp("convert", "verify", "model", "megatron", "--tokens", "8")
    assert said.splitlines()[-1] == "equal"
    megasharp("train", "run.yaml", "name=new", "model.path=megatron", "steps=1", *WITHOUT_EVALUATIONS)
    rows = [
        [json.loads(line) for line in (stored / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("old", "new")
    ]
    first, again = (next(row for row in part if "policy/loss" in row) for part in rows)
    assert again["policy/loss"] == pytest.approx(first["policy/loss"], rel=1e-3)
    assert again["reward/mean"] == first["reward/mean"]


def test_stored_adapters_are_exported_merged_and_trained_on(stored: Path, megasharp: Megasharp) -> None:
    checkpoint = "runs/lora/checkpoints/step_000002"
    megasharp("convert", "megatron-to-peft", checkpoint, "again")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert filecmp.cmp(stored / "again" / name, stored / "adapter" / name, shallow=False), name
    megasharp("convert", "megatron-to-hf", checkpoint, "merged")
    assert (stored / "merged" / "model.safetensors").stat().st_size > 20_000
    assert "after step 2" in megasharp("train", "runs/lora/config.yaml", "--resume", "steps=3")
