"""Whole runs through the real command, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from quickstart import QUICKSTART, REPOSITORY, Command
from waiting import HANG_S, wait_until

from megasharp.checkpoint.attempts import read_attempts
from megasharp.metrics.writers import read_metrics

# What must not differ between a run and the same run interrupted: everything but times.
SAME = ("policy/loss", "policy/grad_norm", "reward/mean", "entropy/policy", "rollout/tokens")


def test_dry_run_prints_config_and_layout_and_starts_nothing(command: Command) -> None:
    out = command.run(*command.train("--dry-run", "policy.tp=2", "policy.pp=2"))
    assert "prompts_per_step: 8" in out
    assert "4 rank(s) = dp 1 x tp 2 x pp 2 x cp 1" in out
    assert "ranks 0-1: layers 0-1 + embedding" in out
    assert "ranks 2-3: layers 2-3 + head" in out
    assert not command.runs.exists()


def test_a_run_leaves_what_the_readme_lists(command: Command) -> None:
    suite = "eval.suites=[countdown_dev]"
    fast = ("policy.optimizer.lr=1e-3", "policy.optimizer.warmup_steps=0")
    evaluation = (suite, "eval.n=2", "eval.k=[1,2]")
    given, begun = time.time(), list[float]()
    arguments = command.train("steps=3", "checkpoint.every=2", *evaluation, *fast, "name=a")
    out = command.run(*arguments, meanwhile=lambda _: begun.append(time.time()))
    took = time.time() - begun[0]
    folder = command.runs / "a"
    record = read_attempts(folder / "logs")[1]
    assert record is not None and record.ended is not None
    # Nearly all that the user waited: what is missing is the interpreter's own end.
    assert given - 0.02 <= record.started <= begun[0] + 0.02 and record.ended - record.started > 0.6 * took
    assert sum(record.seconds.values()) == pytest.approx(record.ended - record.started, rel=0.4)
    assert str(folder / "pass_at_k_countdown_dev.png") in out
    assert (folder / "pass_at_k_countdown_dev.png").read_bytes().startswith(b"\x89PNG")
    assert [row["step"] for row in command.rows("a")] == [1, 2, 3]
    _told_apart(folder, record.seconds)
    assert sorted(p.name for p in (folder / "checkpoints").glob("step_*")) == ["step_000002", "step_000003"]
    assert (folder / "checkpoints" / "latest").read_text() == "step_000003\n"
    responses = pq.read_table(folder / "rollouts" / "step_000002.parquet").to_pylist()
    tokens = pq.read_table(folder / "rollout_tokens" / "step_000002.parquet").to_pylist()
    assert len(responses) == len(tokens) == 64
    # The shipped tokenizer has a token for each character.
    assert ["".join(row["token_texts"]).removesuffix("<eos>") for row in tokens] == [row["text"] for row in responses]
    first, last = (pq.read_table(folder / "probe" / f"step_{step:06d}.parquet").to_pylist() for step in (0, 3))
    assert [row["token"] for row in first] == [row["token"] for row in last]
    assert [row["logp"] for row in first] != [row["logp"] for row in last]
    summary = json.loads((folder / "summary.json").read_text())
    assert {"rollout", "reward", "annotate", "update", "sync"} <= summary["seconds"].keys()
    assert 100e6 < summary["peak_rss_bytes"] < 4e9
    before, after = (summary["pass_at_k"]["countdown_dev"][when] for when in ("before", "after"))
    assert 0.0 < before["1"] < 0.4
    assert before != after
    metrics = (folder / "metrics.jsonl").read_text()
    command.run(*command.train("steps=3", "checkpoint.every=2", *evaluation, *fast, "name=a", "--resume"))
    assert (folder / "metrics.jsonl").read_text() == metrics, "there is nothing left to train or to evaluate"
    again = json.loads((folder / "summary.json").read_text())
    assert again["last"] == summary["last"] and again["last"]["step"] == 3
    assert again["seconds"]["rollout"] == summary["seconds"]["rollout"] > 0


def _told_apart(folder: Path, spent: Mapping[str, float]) -> None:
    """Evaluations and saves are seconds of the step after which they came, and of no step's throughput."""
    rows = read_metrics(folder)
    for stage, steps in (("eval", [0, 3]), ("checkpoint", [2, 3])):
        found = {row["step"]: row[f"time/{stage}"] for row in rows if f"time/{stage}" in row}
        assert list(found) == steps
        assert sum(seconds or 0.0 for seconds in found.values()) == pytest.approx(spent[stage], abs=0.1)
    for row in (row for row in rows if (row.get("time/step") or 0.0) > 0):
        stages = {name: value for name, value in row.items() if name.startswith("time/") and name != "time/step"}
        assert stages.keys() & {"time/eval", "time/checkpoint"} == set()
        assert sum(value or 0.0 for value in stages.values()) == pytest.approx(row["time/step"])


@pytest.mark.long("runs")
def test_what_a_run_reads_may_not_change_unseen(command: Command, tmp_path: Path) -> None:
    """The configuration of a start that came to nothing is not the run's."""
    data = tmp_path / "train.jsonl"
    lines = (REPOSITORY / "examples" / "quickstart" / "data" / "train.jsonl").read_text().splitlines()
    data.write_text("\n".join(lines[:400]))
    first = ("name=a", f"data.path={data}", "checkpoint.every=2")
    command.run(*command.train("steps=2", *first))
    config = (command.runs / "a" / "config.yaml").read_text()

    data.write_text("\n".join(lines[:399]))
    error = command.run(*command.train("steps=3", *first, "--resume"), code=2)
    assert f"the problems in {data} are not those that the run began with" in error
    assert (command.runs / "a" / "config.yaml").read_text() == config
    data.write_text("\n".join(lines[:10]))
    error = command.run(*command.train("steps=3", *first, "--resume", "--allow-change", "data.path"), code=2)
    assert "cannot resume at prompt 16 of epoch 0, the file has 10 usable prompts" in error
    assert (command.runs / "a" / "config.yaml").read_text() == config

    data.write_text("\n".join(lines[:399]))
    out = command.run(*command.train("steps=3", *first, "--resume", "--allow-change", "data.path"))
    assert f"changed since the last attempt: the problems in {data}" in out
    assert [row["step"] for row in command.rows("a")] == [1, 2, 3]
    assert "steps: 3" in (command.runs / "a" / "config.yaml").read_text()


@pytest.mark.long("runs")
def test_an_engine_that_samples_another_policy_is_told(command: Command) -> None:
    """Two programs round differently; with a limit that small the alarm must sound, and with the usual one not."""
    output = command.run(*command.train("name=gap", "steps=1", "guard.engine_gap=1.0e-12"))
    assert "step 1: the engine's log-probs are" in output and "guard.engine_gap is 1e-12" in output
    (row,) = command.rows("gap")
    assert 0 < row["policy/engine_gap"] <= row["policy/engine_gap_max"] < 1e-4
    assert "log-probs are" not in command.run(*command.train("name=usual", "steps=1"))


@pytest.mark.long("runs")
@pytest.mark.parametrize("keys", [("policy.dp=1",), ("policy.dp=2", "recipe.methods=[grpo,entropy_bonus]")])
def test_a_filter_that_leaves_nothing_out_changes_nothing(command: Command, keys: tuple[str, ...]) -> None:
    """It asks for one more pass, whose log-probs the loss does not see.

    With a penalty two ranks are dealt the same groups with the filter and without it: none is silent.
    """
    command.run(*command.train("name=plain", "steps=2", "deterministic=true", *keys))
    command.run(*command.train("name=filter", "steps=2", "deterministic=true", *keys, "guard.engine_gap_filter=0.1"))
    for plain, filtered in zip(command.rows("plain"), command.rows("filter"), strict=True):
        assert filtered["policy/engine_gap_filtered"] == 0
        for name in ("policy/loss", "policy/grad_norm", "policy/ratio", "reward/mean", "policy/advantage_positive"):
            assert plain[name] == filtered[name]


@pytest.mark.long("runs")
@pytest.mark.parametrize(
    ("limit", "steps", "line"),
    [
        ("guard.engine_gap_stop=1.0e-12", 1, "nats off the learner's on average (guard.engine_gap_stop is 1e-12)"),
        ("guard.engine_gap_filter=1.0e-12", 2, "every response left out by guard.engine_gap_filter"),
    ],
)
def test_a_run_that_its_gap_stops_is_saved_and_not_repeated(
    command: Command, limit: str, steps: int, line: str
) -> None:
    """At a step that was just saved, which is the last one, and with restarts allowed."""
    options = ("name=gap", f"steps={steps}", "checkpoint.every=1", "guard.nan_limit=2", limit)
    process = command.start(*command.train(*options), "--retries", "3")
    _, error = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    (told,) = error.splitlines()
    assert line in told and f"stopped at step {steps} with a checkpoint" in told
    run = command.runs / "gap"
    assert (run / "checkpoints" / "latest").read_text() == f"step_{steps:06d}\n"
    (attempt,) = read_attempts(run / "logs").values()
    assert attempt is not None and attempt.gave_up and attempt.exit_code == 1
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "policy/skipped" in row][-1]
    assert last["policy/engine_gap"] > 0 and last["policy/skipped"] == ("filter" in limit)
    assert last.get("policy/engine_gap_filtered", 64) == 64


def test_a_killed_run_resumes_and_ends_like_an_uninterrupted_one(command: Command) -> None:
    killed_and_resumed(command)


@pytest.mark.long("runs")
def test_a_killed_run_of_two_ranks_that_sample_resumes_exactly(command: Command) -> None:
    killed_and_resumed(command, always=("policy.dp=2",))


@pytest.mark.long("runs")
def test_the_curves_of_a_killed_run_go_on_in_a_tracker(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    out, whole = killed_and_resumed(command, "log.mlflow=countdown")
    assert "log.mlflow" not in out
    (loss,) = (tmp_path / "mlflow").glob("*/*/metrics/policy/loss")
    points = [line.split() for line in loss.read_text().splitlines()]
    assert [(int(step), float(value)) for _, value, step in points] == [
        (row["step"], row["policy/loss"]) for row in whole
    ]


def killed_and_resumed(
    command: Command, *options: str, always: tuple[str, ...] = ()
) -> tuple[str, list[dict[str, float]]]:
    """Kill a run after its first checkpoint and resume it; returns what that printed and the undisturbed run's rows.

    The two runs must have the same figures. The undisturbed one has the options `always` alone.
    """
    steps = ("steps=6", "checkpoint.every=2", *always)
    command.run(*command.train(*steps, "name=whole"))
    first = command.runs / "killed" / "checkpoints" / "step_000002" / "manifest.json"

    def kill(pid: int) -> None:
        wait_until(first.exists)
        os.kill(pid, signal.SIGKILL)

    command.run(*command.train(*steps, *options, "name=killed"), code=-signal.SIGKILL, meanwhile=kill)
    out = command.run(*command.train(*steps, *options, "name=killed", "--resume"))
    assert "resuming" in out
    whole, resumed = command.rows("whole"), command.rows("killed")
    assert [row["step"] for row in resumed] == [1, 2, 3, 4, 5, 6]
    for expected, found in zip(whole, resumed, strict=True):
        assert {key: found[key] for key in SAME} == {key: expected[key] for key in SAME}
    return out, whole


@pytest.mark.long("ranks")
def test_ranks_train_the_same_policy_whoever_samples(command: Command) -> None:
    """With tensor and pipeline ranks the driver samples; data-parallel ranks sample themselves, each a share."""
    command.run(*command.train("steps=3", "name=one"))
    command.run(*command.train("steps=3", "name=four", "policy.tp=2", "policy.pp=2"))
    out = command.run(*command.train("steps=3", "name=two", "policy.dp=2"))
    assert "engine in each rank" in out
    for one, *others in zip(*map(command.rows, ("one", "two", "four")), strict=True):
        for key in ("policy/loss", "policy/grad_norm", "entropy/policy"):
            assert [other[key] for other in others] == pytest.approx([one[key]] * 2, rel=1e-4, abs=1e-7), key
    tables = [pq.read_table(command.runs / name / "rollout_tokens" / "step_000001.parquet") for name in ("one", "two")]
    sampled = [[table[column].to_pylist() for column in ("group_id", "index", "token_texts")] for table in tables]
    assert sampled[0] == sampled[1]


@pytest.mark.long("runs")
def test_a_checkpoint_converts_and_evaluates(command: Command, tmp_path: Path) -> None:
    command.run(*command.train("steps=1", "name=a"))
    checkpoint = command.runs / "a" / "checkpoints" / "step_000001"
    command.run("convert", "megatron-to-hf", str(checkpoint), str(tmp_path / "hf"))
    options = ["--suite", "countdown_dev", "--n", "2", "--k", "1,2", "--out"]
    from_hf = command.run("eval", str(tmp_path / "hf"), *options, str(tmp_path / "one"))
    from_run = command.run("eval", str(command.runs / "a"), *options, str(tmp_path / "{checkpoint}"))
    assert from_hf.splitlines()[0].startswith("countdown_dev of hf: 128 problems x 2 samples")
    assert from_hf.splitlines()[1:-1] == from_run.splitlines()[1:-1]
    assert "pass@1" in from_hf
    assert json.loads((tmp_path / "step_000001" / "countdown_dev.json").read_text())["label"] == "a step 1"


@pytest.mark.long("runs")
def test_converting_there_and_back_is_bit_exact(command: Command, tmp_path: Path) -> None:
    base = Path("examples/quickstart/base")
    command.run("convert", "hf-to-megatron", str(base), str(tmp_path / "megatron"))
    command.run("convert", "megatron-to-hf", str(tmp_path / "megatron"), str(tmp_path / "back"))
    from safetensors.torch import load_file

    there, back = load_file(base / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert there.keys() == back.keys()
    assert all(there[name].equal(back[name]) for name in there)
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_quickstart_file_is_what_the_readme_describes(command: Command) -> None:
    out = command.run("train", QUICKSTART, "--dry-run")
    assert "48 prompts x 8 = 384 responses" in out


@pytest.mark.long("runs")
def test_a_disk_that_fills_up_while_training_goes_on(command: Command) -> None:
    """The save in the background fails: one line, and what was saved before is what the run continues from."""
    often = ("checkpoint.every=1", "checkpoint.keep_last=1", "name=full")
    process = command.start(*command.train("steps=500", *often))
    wait_until((command.runs / "full" / "checkpoints" / "latest").exists)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1_500_000, 1_500_000))
    _, error = process.communicate(timeout=HANG_S)
    assert process.returncode == 2, error
    line = error.splitlines()[-1]
    assert "no space left" in line and "this checkpoint was not written" in line
    newest = int(re.search(r"newest complete step: (\d+)", line)[1])  # type: ignore[index]
    checkpoints = command.runs / "full" / "checkpoints"
    assert (checkpoints / "latest").read_text() == f"step_{newest:06d}\n"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", f"step_{newest:06d}"]
    out = command.run(*command.train(f"steps={newest + 2}", *often, "--resume"))
    assert f"after step {newest}\n" in out
    assert [row["step"] for row in command.rows("full")] == list(range(1, newest + 3))


@pytest.mark.long("runs")
def test_a_reward_that_does_not_work_ends_a_run_before_it_loads_or_with_a_checkpoint(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns None, or fails on about one response of eight."""
    (tmp_path / "late_reward.py").write_text(
        "def none(text, answer): pass\ndef some(text, answer): return 1 / (sum(map(ord, text)) % 8 != 3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def ended(name: str, code: int, *more: str) -> list[str]:
        options = ("steps=9", f"name={name}", f"reward.function=late_reward:{name}", "checkpoint.every=4", *more)
        process = command.start(*command.train(*options), "--retries", "2")
        out, error = process.communicate(timeout=HANG_S)
        assert process.returncode == code, out + error
        return [out, *error.splitlines()]

    out, line = ended("none", 2)
    assert "reward     late_reward:none: " in out
    log = command.runs / "none" / "logs" / "attempt_1" / "verifiers.log"
    assert "late_reward:none gives no reward for row " in line and "returned None" in line and f"more in {log}" in line
    assert not (log.parent / "rank_0.log").exists() and "returned None" in log.read_text()

    out, line = ended("some", 1)
    log = command.runs / "some" / "logs" / "attempt_1" / "verifiers.log"
    assert "reward.function fails (ZeroDivisionError: division by zero)" in out and "in some" in out
    assert "the third step in a row (guard.reward_errors is 0.05)" in line and "with a checkpoint" in line
    assert "line 2, in some: def some" in line and f"more in {log}" in line
    rows = command.rows("some")
    assert [row["step"] for row in rows] == [1, 2, 3] and all(0.05 < row["reward/errors"] < 1 for row in rows)
    assert " more: ZeroDivisionError at " in log.read_text() and log.read_text().count("Traceback") == 1
    (attempt,) = read_attempts(command.runs / "some" / "logs").values()
    assert attempt is not None and attempt.gave_up and attempt.exit_code == 1
    shown = command.run("runs", "show", str(command.runs / "some"))
    assert "of the last rewards failed" in shown

    ended("some", 0, "guard.reward_errors=null", "name=kept", "steps=4")


@pytest.mark.long("runs")
def test_a_run_that_ends_itself_leaves_the_checkpoint_it_speaks_of(command: Command) -> None:
    """Answers of one token are all wrong, so dynamic sampling drops every group."""
    arguments = command.train(
        "steps=9", "name=a", "recipe.methods=[grpo,dynamic_sampling]", "data.max_response_tokens=1", "guard.nan_limit=2"
    )
    line = command.run(*arguments, code=1).splitlines()[-1]
    assert "2 steps in a row were not applied" in line and "stopped at step 2 with a checkpoint" in line
    assert (command.runs / "a" / "checkpoints" / "latest").read_text() == "step_000002\n"


@pytest.mark.long("runs")
def test_a_damaged_checkpoint_is_passed_over_by_name(command: Command) -> None:
    command.run(*command.train("steps=2", "checkpoint.every=1", "name=a"))
    shard = next((command.runs / "a" / "checkpoints" / "step_000002" / "policy").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    out = command.run(*command.train("steps=2", "checkpoint.every=1", "name=a", "--resume"))
    assert "passing over a damaged checkpoint" in out
    assert str(shard) in out
    assert "resuming" in out and "after step 1" in out
    assert [row["step"] for row in command.rows("a")] == [1, 2]


@pytest.mark.long("runs")
def test_a_run_cannot_be_resumed_to_an_earlier_end(command: Command) -> None:
    command.run(*command.train("steps=2", "name=a"))
    line = command.run(*command.train("steps=1", "name=a", "--resume"), code=2)
    assert "step 2 is done already" in line


@pytest.mark.long("runs")
def test_a_pool_of_workers_gives_the_identical_run(command: Command) -> None:
    evaluation = ("eval.suites=[countdown_dev]", "eval.n=1", "eval.k=[1]", "eval.at_start=false")
    command.run(*command.train("steps=2", *evaluation, "name=here"))
    command.run(*command.train("steps=2", *evaluation, "name=pool", "reward.workers=2"))
    here, pool = command.rows("here"), command.rows("pool")
    assert [{name: row[name] for name in SAME} for row in here] == [{name: row[name] for name in SAME} for row in pool]
    counts = {"reward/killed": 0.0, "reward/died": 0.0, "reward/retried": 0.0}
    assert [{name: row[name] for name in counts} for row in pool] == [counts] * 2
    tables = [
        [pq.read_table(command.runs / run / "rollouts" / f"step_{step:06d}.parquet") for step in (1, 2)]
        for run in ("here", "pool")
    ]
    assert tables[0] == tables[1]
    evaluated = [command.runs / run / "evals" / "step_000002" / "countdown_dev.parquet" for run in ("here", "pool")]
    assert pq.read_table(evaluated[0]) == pq.read_table(evaluated[1])
    assert (command.runs / "pool" / "logs" / "attempt_1" / "verifiers.log").read_text() == ""
