"""Whole runs over real engines: the shipped example, short, and refusals before a start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import psutil
import pytest
from example_runs import GAP, REPOSITORY, all_gone, engine_leaders, finish, rows, running, wait_for
from transformers import AutoModelForCausalLM

from megasharp.checkpoint.run_folder import open_run

pytestmark = pytest.mark.long("fleet-runs")


def test_the_example_trains_and_resumes(tmp_path: Path) -> None:
    mu = "recipe.dlc.mu={start: 0.3, end: 0.1, steps: 2}"
    with running(tmp_path, "steps=2", "checkpoint.every=1", mu) as process:
        wait_for(process, "step 1/2")
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(engine_leaders(process)) == 2
        finish(process)
    assert all_gone(family)
    first, second = rows(tmp_path)
    # Two programs, one policy: SGLang's log-probs against Megatron's.
    assert first["policy/engine_gap_max"] < GAP and second["policy/engine_gap_max"] < GAP
    # Two networks were at work, and the memory learns.
    assert first["memory/calibration_kl"] > 0 and first["policy/sampler_gap"] > 1e-3
    assert second["memory/cross_entropy"] > 0
    manifest = json.loads((tmp_path / "fleet_on_cpu/checkpoints/step_000002/manifest.json").read_text())
    assert (manifest["policy_version"], manifest["memory_version"]) == (2, 2)
    sampled = pd.read_parquet(tmp_path / "fleet_on_cpu/rollouts/step_000002.parquet")
    assert len(sampled) == 4 * 8 and set(sampled["policy_version"]) == {1}

    with running(tmp_path, "steps=3", "--resume", mu) as process:
        finish(process)
    third = rows(tmp_path)[2]
    assert [row["memory/mu"] for row in rows(tmp_path)] == pytest.approx([0.3, 0.2, 0.1])
    # Engines did as asked: the calibrated distributions' distance from the policy's goes with the square of mu.
    assert second["memory/calibration_kl"] < first["memory/calibration_kl"] / 2
    assert third["memory/calibration_kl"] < first["memory/calibration_kl"] / 6
    assert third["policy/engine_gap_max"] < GAP
    assert set(pd.read_parquet(tmp_path / "fleet_on_cpu/rollouts/step_000003.parquet")["policy_version"]) == {2}


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("rollout.sglang={pp_size: 2}", "run.yaml: rollout.sglang.pp_size 2 is refused: weight updates are checked"),
        ("rollout.sglang={attention_backend: fa3}", "SGLang's only one on a CPU is torch_native"),
        ("rollout.sglang={max_total_token: 5}", "max_total_token is no flag of the installed SGLang; did you mean"),
        ("rollout.sglang={log_level: info}", "SGLang would write the run's key into its log"),
        ("rollout.sglang={weight_version: '5'}", "versions are the run's to count"),
        ("rollout.python=nowhere/python", "build the engines' Python with `make fleet`"),
    ],
)
def test_refused_when_the_config_is_read(tmp_path: Path, override: str, reason: str) -> None:
    with running(tmp_path, override) as process:
        output = finish(process, code=2)
    assert reason in output.splitlines()[-1]
    assert not (tmp_path / "fleet_on_cpu").exists()


def test_a_memory_network_with_another_vocabulary(tmp_path: Path) -> None:
    memory = Path(shutil.copytree(REPOSITORY / "examples/quickstart/memory", tmp_path / "memory"))
    model = AutoModelForCausalLM.from_pretrained(memory, dtype="float32")
    model.resize_token_embeddings(64)
    model.save_pretrained(memory)
    with running(tmp_path / "runs", f"recipe.dlc.memory.path={memory}") as process:
        output = finish(process, code=2)
    assert "has a vocabulary of 64 tokens" in output.splitlines()[-1]


def test_where_an_engine_does_not_start_no_run_stands_in_the_way(tmp_path: Path) -> None:
    with running(tmp_path, "rollout.sglang={mem_fraction_static: 1.0e-5}") as process:
        output = finish(process, code=2)
    last = output.splitlines()[-1]
    assert "did not start: it lacks memory" in last
    log = tmp_path / "fleet_on_cpu/logs/attempt_1/engine_0.log"
    assert str(log.parent) in last and log.exists()
    again = open_run(tmp_path / "fleet_on_cpu", "", resume=False)
    again.close()
    assert again.attempt == 2


def test_each_source_of_a_mixture_has_its_limits_share_and_judge(tmp_path: Path) -> None:
    (tmp_path / "judging.py").write_text("def brief(text, answer):\n    return 1.0 if len(text) < 5 else 0.25\n")
    lines = (json.dumps({"sum": f"{number} {number}=", "answer": 2 * number}) for number in range(1, 8))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    numbers = "{source: numbers, task: countdown, path: examples/quickstart/data/train.jsonl, weight: 3}"
    own = (
        f"{{source: own, path: {tmp_path / 'rows.jsonl'}, prompt_key: sum, weight: 1, max_response_tokens: 4, "
        f"responses_per_prompt: 3, reward: '{tmp_path / 'judging.py'}:brief'}}"
    )
    mixture = ["data.task=null", "data.path=null", f"data.mix=[{numbers}, {own}]"]
    small = ["cluster.backend=local", "rollout.engines=1", "policy.tp=1", "recipe.methods=[grpo]", "steps=3"]
    # Prompts of both sources are in flight across a push.
    with running(tmp_path, *mixture, *small, "rollout.max_staleness=1", "deterministic=false") as process:
        finish(process)
    for row in rows(tmp_path):
        assert (row["group/numbers/prompts"], row["group/own/prompts"]) == (3, 1)
        assert row["policy/engine_gap_max"] < GAP
    sampled = pd.concat(map(pd.read_parquet, sorted((tmp_path / "fleet_on_cpu/rollouts").glob("*.parquet"))))
    sampled["source"] = sampled["prompt_id"].str.partition("/")[0]
    found = sampled.groupby("source")
    sizes = sampled.groupby(["source", "step", "group_id"]).size().groupby("source")
    assert sizes.unique().map(list).to_dict() == {"numbers": [8], "own": [3]}
    assert sizes.size().to_dict() == {"numbers": 9, "own": 3}
    assert 4 < found["length"].max()["numbers"] <= 20 and found["length"].max()["own"] == 4
    assert {*sampled[sampled["source"] == "own"]["reward"]} <= {0.25, 1.0}
    assert {*sampled[sampled["source"] == "numbers"]["reward"]} == {0.0, 1.0}
