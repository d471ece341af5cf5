"""The papers' combinations, end to end on the quickstart's task: real engine, verifier, Megatron and checkpoints.

In this process, because starting a command costs more than three steps.
"""

from __future__ import annotations

import json
import math
import re
from fnmatch import fnmatch
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from quickstart import QUICKSTART, REPOSITORY, SMALL, Command

from megasharp.config.run_config import load_run
from megasharp.trainer.resolve.resolved_run import check
from megasharp.trainer.run import train

# Two optimizer steps per batch, so that ratios differ from one; groups of eight, some of which are uniform.
STEPS = (
    "steps=3",
    "data.prompts_per_step=24",
    "recipe.mini_batches=2",
    "policy.optimizer.lr=3e-4",
    "policy.optimizer.warmup_steps=0",
)
# The methods, and metrics that only they bring; each must be a finite number in every step.
COMPOSITIONS: dict[str, tuple[str, ...]] = {
    "dapo,iac": ("method/iac/weight", "group/dropped_uniform"),
    "dapo,iac,dlc": ("method/iac/weight", "memory/cross_entropy"),
    "grpo,casp": ("method/casp/gate_rate",),
    "grpo,casp,iac": ("method/casp/gate_rate", "method/iac/weight"),
    "grpo,ds": (),
    "grpo,ds,casp": ("method/casp/gate_rate",),
    "grpo,gspo,negative_only": (),
    "grpo,kl_cov": (),
    "dapo,forking_tokens": (),
    "w_reinforce": (),
}
# With a memory network, as no other run of `make test`.
FEW = ("dapo,iac,dlc",)
OF_RESPONSES = ("", "_tokens", "_length_mean", "_length_p90")
# Figures that every run logs.
ALWAYS = (
    "candidates/lambda_1", "candidates/lambda_2", "candidates/lambda_3", "candidates/lambda_sample",
    "candidates/gate_rate", "candidates/top1_rate", "candidates/distinct_next",
    "entropy/policy", "entropy/response_mean", "entropy/correct",
    "entropy/incorrect", "group/answer_entropy", "group/zero_advantage", "group/solved_all", "group/solved_none",
    "group/distinct_correct", "policy/ratio",
    *(f"responses/{word}{of}" for word in ("asked", "finished", "trained") for of in OF_RESPONSES),
    *(f"responses/{word}{of}" for word in ("retried", "discarded", "dropped") for of in OF_RESPONSES[:2]),
)  # fmt: skip


def run(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Train; returns the rows of the training steps."""
    resolved = check(load_run(REPOSITORY / QUICKSTART, [*SMALL, *STEPS, *overrides]), QUICKSTART)
    train(resolved, folder, resume=False, say=lambda line: None)
    return rows_of(folder)


def rows_of(folder: Path) -> list[dict[str, float]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "policy/loss" in row]


def documented() -> list[str]:
    """Patterns of figures that the page about them explains."""
    lines = (REPOSITORY / "docs/reference/metrics.md").read_text().splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return [re.sub(r"<\w+>|(?<=lambda_)1", "*", name) for name in names]


@pytest.mark.long("runs")
def test_two_runs_of_one_resolved_run_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first leaves nothing behind in it: no place in the data, above all."""
    monkeypatch.chdir(REPOSITORY)
    resolved = check(load_run(REPOSITORY / QUICKSTART, [*SMALL, "steps=1", "eval.suites=[]"]), QUICKSTART)
    prompts, losses = [], []
    for name in ("first", "second"):
        train(resolved, tmp_path / name, resume=False, say=lambda line: None)
        prompts.append(pq.read_table(tmp_path / name / "rollouts" / "step_000001.parquet")["prompt_id"].to_pylist())
        losses += [row["policy/loss"] for row in rows_of(tmp_path / name)]
    assert prompts[0] == prompts[1] and len(losses) == 2 and losses[0] == losses[1]


@pytest.mark.parametrize(
    "methods", [pytest.param(names, marks=[] if names in FEW else [pytest.mark.long("runs")]) for names in COMPOSITIONS]
)
def test_combination_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, methods: str) -> None:
    monkeypatch.chdir(REPOSITORY)
    window = ["recipe.dlc.window=6"] if "dlc" in methods else []
    rows = run(tmp_path / "run", f"recipe.methods=[{methods}]", f"name={methods.replace(',', '-')}", *window)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["policy/skipped"] == 0 and row["policy/grad_norm"] > 0
        clip = () if "kl_cov" in methods else ("policy/clip_high", "policy/clip_low")
        for name in (*ALWAYS, *clip, *COMPOSITIONS[methods]):
            assert math.isfinite(row[name]), name
    assert len({row["policy/loss"] for row in rows}) == 3
    explained = documented()
    assert [name for name in rows[-1] if "/" in name and not any(fnmatch(name, known) for known in explained)] == []
    assert rows[-1]["policy/sampler_gap"] > 0
    memory = tmp_path / "run" / "checkpoints" / "step_000003" / "memory"
    assert memory.is_dir() == (memory / "hf" / "config.json").is_file() == ("dlc" in methods)
    if "dlc" in methods:
        _assert_learner_and_engine_hold_one_memory(tmp_path / "run", rows)


def _assert_learner_and_engine_hold_one_memory(folder: Path, rows: list[dict[str, float]]) -> None:
    """The cross-entropy, at temperature 1, is that of the log-probs that the engine recorded when it sampled."""
    for row in rows:
        table = pq.read_table(folder / "rollouts" / f"step_{int(row['step']):06d}.parquet").to_pydict()
        sums = [
            length * mean for length, mean in zip(table["length"], table["mean_memory_logp"], strict=True) if length
        ]
        assert row["memory/cross_entropy"] == pytest.approx(-sum(sums) / sum(table["length"]), abs=2e-6)


@pytest.mark.long("runs")
def test_run_with_a_memory_resumes_to_the_last_digit(command: Command) -> None:
    """Weights, moments and the sampler's distance from the policy are those of an uninterrupted run."""
    dlc = ("recipe.methods=[grpo,dlc]", "recipe.dlc.mu=0.5", "recipe.dlc.memory.lr=1e-3", *STEPS[1:])
    halves = (*dlc, "checkpoint.every=2", "name=halves")
    command.run(*command.train(*halves, "steps=2", "policy.optimizer.decay=constant"))
    command.run(*command.train(*halves, "steps=4", "policy.optimizer.decay=constant", "--resume"))
    both = ("eval.suites=[countdown_dev]", "eval.n=2", "eval.k=[1,2]", "eval.with_memory=true")
    out = command.run(*command.train(*dlc, *both, "steps=4", "policy.optimizer.decay=constant", "name=constant"))
    _assert_shown_with_and_without(command.runs / "constant", out)
    _assert_another_run_begins_with_its_memory(command, dlc)
    keys = ("policy/loss", "memory/cross_entropy", "memory/grad_norm", "rollout/sampler_policy_gap", "reward/mean")
    assert min(row["rollout/sampler_policy_gap"] for row in command.rows("constant")) > 0.05
    for one, two in zip(command.rows("constant"), command.rows("halves"), strict=True):
        assert {key: two[key] for key in keys} == {key: one[key] for key in keys}
    for step in range(1, 5):
        table = pq.read_table(command.runs / "halves" / "rollouts" / f"step_{step:06d}.parquet")
        for spans, length in zip(table["versions"].to_pylist(), table["length"].to_pylist(), strict=True):
            assert spans == [{"start": 0, "end": length, "policy": step - 1, "memory": step - 1}]


def _assert_another_run_begins_with_its_memory(command: Command, dlc: tuple[str, ...]) -> None:
    """Its first step's cross-entropy is not that of the memory network that the first run began with."""
    checkpoint = command.runs / "halves" / "checkpoints" / "step_000004"
    path = f"recipe.dlc.memory.path={checkpoint}"
    command.run(*command.train(*dlc, path, "steps=1", "policy.optimizer.decay=constant", "name=second"))
    command.run("convert", "verify", str(checkpoint / "memory"), str(checkpoint / "memory"), "--no-logits")
    first, second = command.rows("constant")[0], command.rows("second")[0]
    assert second["memory/cross_entropy"] < 0.9 * first["memory/cross_entropy"]


def _assert_shown_with_and_without(folder: Path, out: str) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    stored = json.loads((folder / "evals" / "step_000004" / "countdown_dev+memory.json").read_text())
    for name in ("pass_at_k", "distinct_correct"):
        found = summary[name]["countdown_dev"]
        assert list(found) == ["before", "after", "with memory"]
        assert found["with memory"] == stored[name] != found["after"]
    assert re.search(r"before .* after .* change .* with memory", out)
    assert re.search(rf"distinct correct .* {stored['distinct_correct']:.3f} ", out)


@pytest.mark.long("runs")
def test_a_memory_network_that_replays_and_was_frozen_resumes_to_the_last_digit(command: Command) -> None:
    """It begins cold, takes two steps a step after the first, and replays what its checkpoint holds."""
    keys = "start: cold, steps: 2, replay: 2, freeze_until: 1, warmup_steps: 2"
    dlc = ("recipe.methods=[grpo,dlc]", f"recipe.dlc.memory={{path: examples/quickstart/memory, {keys}}}", *STEPS[1:])
    fixed = (*dlc, "policy.optimizer.decay=constant")
    command.run(*command.train(*fixed, "steps=4", "name=whole"))
    halves = (*fixed, "checkpoint.every=2", "name=halves")
    command.run(*command.train(*halves, "steps=2"))
    command.run(*command.train(*halves, "steps=4", "--resume"))
    whole, resumed = command.rows("whole"), command.rows("halves")
    memory = sorted(name for name in whole[-1] if name.startswith("memory/"))
    for one, two in zip(whole, resumed, strict=True):
        for key in ("policy/loss", "reward/mean", "rollout/sampler_policy_gap", *memory):
            assert one.get(key) == two.get(key), (one["step"], key)
    assert [row["memory/optimizer_steps"] for row in whole] == [0, 2, 2, 2]
    tokens = [row["memory/tokens"] - row["memory/replayed_tokens"] for row in whole]
    assert [row["memory/replayed_tokens"] for row in whole[2:]] == [
        row["memory/replayed_tokens"] for row in resumed[2:]
    ]
    assert whole[3]["memory/replayed_tokens"] == tokens[1] + tokens[2]
    # Two steps of warm-up, of which the first is at 0.
    rate = 10 * 3e-4
    assert [row.get("memory/learning_rate", 0.0) for row in whole] == pytest.approx([0.0, rate / 2, rate, rate])
    assert (command.runs / "halves" / "checkpoints" / "step_000002" / "memory" / "replay.parquet").is_file()


@pytest.mark.long("runs")
def test_the_memory_network_follows_at_its_default_rate_and_lags_at_the_policys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a cold start, which no shift of the sampler hides: the share of its distance to the policy that it makes."""
    monkeypatch.chdir(REPOSITORY)
    made = {}
    for name, rate in (("default", ()), ("paper", ("recipe.dlc.memory.lr=null",))):
        cold = ("recipe.methods=[grpo,dlc]", "recipe.dlc.memory.start=cold", "steps=15", "eval.suites=[]")
        rows = run(tmp_path / name, *cold, *rate)
        first, *_, last = [row["memory/cross_entropy"] - row["entropy/policy"] for row in rows]
        made[name] = 1 - last / first
    assert made["default"] > 0.4 > 0.25 > made["paper"]


@pytest.mark.long("runs")
def test_four_ranks_train_policy_and_memory_alike(command: Command) -> None:
    recipe = ("recipe.methods=[dapo,iac,dlc]", "recipe.dlc.window=6", "steps=2")
    command.run(*command.train(*recipe, "name=one"))
    command.run(*command.train(*recipe, "name=four", "policy.tp=2", "policy.pp=2"))
    for one, four in zip(command.rows("one"), command.rows("four"), strict=True):
        for key in ("policy/loss", "policy/grad_norm", "memory/cross_entropy", "memory/grad_norm", "entropy/policy"):
            assert four[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key


@pytest.mark.long("runs")
def test_schedule_resets_and_ramps_through_a_resume(command: Command) -> None:
    """Two steps of GRPO, then CaSP with a growing penalty to a reference that is reset after step 3."""
    recipe = (
        "recipe.schedule=[{until: 2, methods: [grpo]}]",
        "recipe.methods=[grpo,casp,kl]",
        "recipe.kl.coefficient={start: 0.0, end: 0.1, steps: 4}",
        "recipe.reset.every=3",
        "data.prompts_per_step=24",
        "policy.optimizer.decay=constant",
        "checkpoint.every=1",
    )
    command.run(*command.train(*recipe, "steps=6", "name=whole"))
    command.run(*command.train(*recipe, "steps=4", "name=halves"))
    command.run(*command.train(*recipe, "steps=6", "name=halves", "--resume"))
    whole, halves = command.rows("whole"), command.rows("halves")
    assert ["policy/kl_ref" in row for row in whole] == [False, False, True, True, True, True]
    assert [row["policy/reset"] for row in whole] == [0, 0, 0, 1, 0, 0]
    # Before the update of step 4: in that step the policy is its reference.
    assert whole[2]["policy/kl_ref"] > 1e-4 > whole[3]["policy/kl_ref"]
    checkpoints = command.runs / "halves" / "checkpoints"
    assert (checkpoints / "step_000004" / "reference").is_dir()
    for key in ("policy/loss", "policy/grad_norm", "policy/kl_ref", "reward/mean"):
        assert [row.get(key) for row in halves] == [row.get(key) for row in whole], key
