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

from megasharp.config.core import flat, parse_yaml

STORED = sorted(path for path in (REPOSITORY / "tests" / "stored").iterdir() if path.is_dir())
WITHOUT_EVALUATIONS = ("eval.every=0", "eval.suites=[]", "checkpoint.keep_best=null")
DIFFER = ("best", "files", "figures", "last", "last_figures", "seconds")
# Columns that tables of responses had until format 2, where they have a table of their own.
TOKENS = {"token_texts", "token_policy_logp"}
Megasharp = Callable[..., str]
# What the versions that wrote `runs/old` had at the steps after its checkpoint, if they went on there.
SMALLER = {
    5: {"policy/loss": -0.0204850, "policy/grad_norm": 2.0291878, "memory/cross_entropy": 1.1212708},
    6: {"policy/loss": 0.0057396, "policy/grad_norm": 1.1367635, "reward/mean": 0.1875, "eval/dev/pass@1": 7 / 24},
}
WENT_ON = {
    "2026_11_22": SMALLER,
    "2026_11_24": {
        5: {"policy/loss": 0.0178388, "policy/grad_norm": 4.304865, "reward/mean": 0.5},
        6: {"policy/loss": 0.058206, "policy/grad_norm": 4.42089, "reward/mean": 0.3125, "eval/dev/pass@1": 0.4375},
    },
    "2026_11_24_format_2": SMALLER,
    "2026_11_25_mixture": {
        5: {"policy/loss": 0.0133234, "policy/grad_norm": 1.1178379, "reward/mean": 5 / 11, "group/numbers/prompts": 5},
        6: {"policy/loss": -0.0137464, "policy/grad_norm": 1.4483634, "reward/mean": 29 / 56, "group/own/prompts": 4},
    },
}


def holding(name: str, *short: str) -> pytest.MarkDecorator:
    """The stored folders that have a file or folder of this name; those that are not in `short` are long tests."""
    found = [path for path in STORED if (path / name).exists()]
    long = pytest.mark.long("saves")
    each = [pytest.param(path, id=path.name, marks=[] if path.name in short else long) for path in found]
    return pytest.mark.parametrize("stored", each, indirect=True)


def missing(now: object, then: object, where: str = "") -> list[str]:
    """Names of the JSON tree `then` that `now` has not; what is said of files and figures has names of its own."""
    if isinstance(then, dict) and isinstance(now, dict):
        lost = [f"{where}{name}" for name in then.keys() - now.keys()]
        both = [name for name in then.keys() & now.keys() if name not in DIFFER]
        return lost + [line for name in both for line in missing(now[name], then[name], f"{where}{name}.")]
    if isinstance(then, list) and isinstance(now, list):
        return [line for one, other in zip(now[:1], then[:1], strict=False) for line in missing(one, other, where)]
    return []


def kept_in(now: object, then: object) -> bool:
    """Return whether a value of a configuration is what it was; tables in lists may have more keys."""
    if isinstance(then, list) and isinstance(now, list):
        return len(now) == len(then) and all(map(kept_in, now, then))
    if isinstance(then, dict) and isinstance(now, dict):
        return all(name in now and kept_in(now[name], value) for name, value in then.items())
    return now == then


@pytest.fixture
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a stored folder, where commands work."""
    return Path(shutil.copytree(request.param, tmp_path / request.param.name))


@pytest.fixture
def megasharp(stored: Path, tmp_path: Path, nursery: Nursery) -> Megasharp:
    """Runs a command in the copy; returns what it printed."""

    def run(*arguments: str) -> str:
        out, error = tmp_path / "out", tmp_path / "error"
        ended = nursery.run(arguments, stored, out, error, timeout_s=HANG_S)
        assert ended == 0, f"exit {ended}\n{out.read_text()}\n{error.read_text()}"
        return out.read_text()

    return run


def columns_of(table: Path) -> dict[str, str]:
    """Types of a table by its columns; the first ones were written by pandas, whose strings are large."""
    return {field.name: str(field.type).removeprefix("large_") for field in pq.read_schema(table)}


def check_names(run: Path, before: Path) -> None:
    """What `run` wrote at step 6 has the names of what its older version wrote, in `before`, at step 4."""
    pairs = [
        ("checkpoints/step_000006/manifest.json", "checkpoints/step_000004/manifest.json"),
        ("logs/attempt_2/attempt.json", "logs/attempt_1/attempt.json"),
        ("evals/step_000006/dev.json", "evals/step_000004/dev.json"),
        ("summary.json", "summary.json"),
    ]
    for now, then in pairs:
        assert missing(json.loads((run / now).read_text()), json.loads((before / then).read_text())) == [], now
    for table in ("rollouts/{}.parquet", "rollout_tokens/{}.parquet", "probe/{}.parquet", "evals/{}/dev.parquet"):
        older = before / table.format("step_000004")
        if older.exists():
            columns, kept = columns_of(run / table.format("step_000006")), columns_of(older)
            kept = {name: kind for name, kind in kept.items() if name not in TOKENS}
            assert columns | kept == columns, table
    now, then = (dict(flat(parse_yaml((at / "config.yaml").read_text(), "stored"))) for at in (run, before))
    tables = ("log.rollouts", "log.rollout_tokens")
    changed = {
        key for key, value in then.items() if not key.startswith(tables) and not kept_in(now.get(key, "lost"), value)
    }
    assert changed == {"steps"}


def figures_of(run: Path, version: str) -> dict[int, dict[str, float]]:
    """Return the figures of each step of a run that went on, after a comparison with what its version had."""
    figures: dict[int, dict[str, float]] = {}
    for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        figures.setdefault(row["step"], {}).update(row)
    for step, expected in WENT_ON[version].items():
        found = {name: figures[step].get(name) for name in expected}
        assert found == pytest.approx(expected, rel=1e-3), step
    return figures


@holding("runs/old", "2026_11_24_format_2")
def test_a_stored_run_goes_on_and_is_shown(stored: Path, megasharp: Megasharp) -> None:
    """By its own stored configuration, with the optimizer, reference, memory network and decisions it had."""
    run = stored / "runs" / "old"
    before = shutil.copytree(run, stored / "before")
    said = megasharp("train", "runs/old/config.yaml", "--resume", "steps=6").splitlines()
    changed = [line for line in said if line.startswith(("changed", "note"))]
    assert changed == ["changed since the last attempt: steps: 4 -> 6"]
    assert any(line.startswith("resuming") and line.endswith("after step 4") for line in said)
    inputs = json.loads((before / "checkpoints/step_000004/manifest.json").read_text()).get("inputs")
    assert any("has no digests of problems" in line for line in said) == (inputs is None)
    figures = figures_of(run, stored.name)
    assert sorted(figures) == list(range(7))
    written, older = ({name for step in steps for name in figures[step]} for steps in ((5, 6), (1, 2, 3, 4)))
    assert "time/annotate" in older and not older - written
    check_names(run, before)
    assert json.loads((run / "run.json").read_text())["begun"] == pytest.approx(
        json.loads((before / "logs" / "attempt_1" / "attempt.json").read_text())["started"], abs=60
    )
    shown = " ".join(megasharp("runs", "show", "runs/old").split())
    for words in ("step 6 of 6", "1 to 4", "5 to 6", "complete, the best", "resets after step 3 (every 3 steps)"):
        assert words in shown, shown
    assert "response limits 8 after step 3" in shown


@holding("runs/old")
def test_what_is_stored_is_read_back(stored: Path, megasharp: Megasharp) -> None:
    """Without training on: listed, drawn, compared, probed, and its weights as another folder."""
    assert "old finished 4 of 4" in " ".join(megasharp("runs", "list").split())
    megasharp("report", "runs/old")
    page = (stored / "runs" / "old" / "report.html").read_text()
    assert "cannot be read" not in page and "sum-" in page
    evaluations = [f"runs/old/evals/step_00000{step}/dev.json" for step in (0, 4)]
    compared = megasharp("eval", "--compare", *evaluations)
    assert "problems whose success rate crosses 1/k" in compared
    assert "step_000004.parquet" in megasharp("probe", "runs/old", "--suite", "dev.yaml")
    megasharp("convert", "megatron-to-hf", "runs/old/checkpoints/step_000004", "hf")
    megasharp("eval", "hf", "--suite", "dev.yaml", "--n", "4", "--k", "1,4")
    (by_hand,) = (stored / "evals" / "old").rglob("dev.json")
    again, then = (json.loads(path.read_text()) for path in (stored / "evals/hf/dev.json", by_hand))
    assert again["pass_at_k"] == then["pass_at_k"] and again["tokens"] == then["tokens"]


@holding("evals/old/step_000004/dev.json", "2026_11_24")
def test_a_stored_evaluation_is_not_measured_again(stored: Path, megasharp: Megasharp) -> None:
    before = json.loads((stored / "evals/old/step_000004/dev.json").read_text())
    # No figure depended on the size of chunks, which is no part of an evaluation any more.
    del before["identity"]["chunk"]
    # 32 tokens were the limit where nobody gave one; it is the run's now.
    said = megasharp("eval", "runs/old", "--suite", "dev.yaml", "--n", "4", "--k", "1,4", "--max-tokens", "32")
    assert "dev.json was measured before; figures are from its samples" in " ".join(said.split())
    after = json.loads((stored / "evals/old/step_000004/dev.json").read_text())
    assert before == {name: value for name, value in after.items() if name in before}


@holding("megatron")
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


@holding("adapter")
def test_stored_adapters_are_exported_merged_and_trained_on(stored: Path, megasharp: Megasharp) -> None:
    checkpoint = "runs/lora/checkpoints/step_000002"
    megasharp("convert", "megatron-to-peft", checkpoint, "again")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert filecmp.cmp(stored / "again" / name, stored / "adapter" / name, shallow=False), name
    megasharp("convert", "megatron-to-hf", checkpoint, "merged")
    assert (stored / "merged" / "model.safetensors").stat().st_size > 20_000
    assert "after step 2" in megasharp("train", "runs/lora/config.yaml", "--resume", "steps=3")


@holding("runs/lora")
def test_a_stored_run_of_adapters_goes_on_by_the_file_that_began_it(stored: Path, megasharp: Megasharp) -> None:
    """Keys that are younger than the run have today's defaults then; those that changed are named, none is refused."""
    assert "after step 2" in megasharp("train", "lora.yaml", "--resume", "steps=3")


@holding("runs/mixture")
def test_a_stored_mixture_goes_on_by_the_file_that_began_it(stored: Path, megasharp: Megasharp) -> None:
    """Within a block of both sources, in the course that came after its stage."""
    assert "after step 4" in megasharp("train", "mixture.yaml", "--resume")
    figures = figures_of(stored / "runs" / "mixture", stored.name)
    assert figures[6]["group/numbers/prompts"] == 3 * figures[6]["group/own/prompts"]
    assert figures[6]["rollout/own/length_mean"] <= 5 and "group/own/pass@4" not in figures[6]
