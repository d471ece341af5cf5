"""The cost of a sweep by plan: what is counted, the sum, and runs that it refuses or says would not work."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from megasharp.cli.main import app
from megasharp.common.errors import UserError
from megasharp.config.run_config import RunConfig, load_run
from megasharp.planner.suggest import make_plan
from megasharp.trainer.plan import Options, ask
from megasharp.trainer.sweep_plan import RunCost, cost_of, cost_text

ROW = "algo/paper/casp_math_qwen2.5-math-7b_grpo.yaml"
SWEEP = f"""
name: costs
run: cluster/8xh200.yaml
seeds: [1, 2, 3]
set: {{eval.at_start: false}}
cases:
  grpo: {{include: [{ROW}]}}
  dapo: {{include: [{ROW}], set: {{recipe.methods: [dapo]}}}}
"""


def run_of_row(folder: Path, *overrides: str) -> RunConfig:
    file = folder / "run.yaml"
    file.write_text(f"include: [cluster/8xh200.yaml, {ROW}]\nname: row\n")
    return load_run(file, overrides)


def cost(folder: Path, *overrides: str, response: int | None = None) -> RunCost:
    return cost_of(run_of_row(folder, *overrides), "run.yaml", Options(response=response))


def test_training_is_the_plans_step_and_evaluations_are_added(tmp_path: Path) -> None:
    one = cost(tmp_path, "eval.at_start=false")
    plan = make_plan(ask(run_of_row(tmp_path), "run.yaml", Options()).request)
    assert plan.step_range is not None
    assert one.training == pytest.approx([run_of_row(tmp_path).steps * end for end in plan.step_range])
    assert one.gpu_hours[1] == pytest.approx(8 * (one.training[1] + one.evaluation[1]) / 3600)
    four = cost(tmp_path, "steps=120", "eval.every=50")
    assert four.evaluation[0] == pytest.approx(4 * one.evaluation[0]), "before the first step, after 50, 100 and 120"
    assert cost(tmp_path, "eval.suites=[]").evaluation == (0.0, 0.0)
    assert cost(tmp_path, response=700).training[0] < 0.6 * one.training[0]


def test_a_suites_problems_are_its_sets_or_those_it_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.yaml").write_text("set: mmlu_pro\nlimit: 128\n")
    (tmp_path / "rows.jsonl").write_text('{"problem": "1 + 1", "answer": "2"}\n')
    (tmp_path / "own.yaml").write_text("task: math\npath: rows.jsonl\n")
    whole, few, own = (cost(tmp_path, f"eval.suites=[{name}]") for name in ("mmlu_pro", "few.yaml", "own.yaml"))
    assert whole.evaluation[0] > 50 * few.evaluation[0] > 0.0
    assert own.evaluation == (0.0, 0.0) and own.uncounted == ("own.yaml",)
    text = cost_text("costs", [("grpo", 3, own)], Options())
    assert text.endswith("not counted: evaluations on own.yaml, whose size is not known")


def test_a_memory_network_is_evaluated_where_the_run_asks_for_it(tmp_path: Path) -> None:
    keys = ["model.path=Qwen/Qwen3-8B", "recipe.methods=[grpo, dlc]", "recipe.dlc.memory.path=Qwen/Qwen3-1.7B"]
    alone, both = (cost(tmp_path, *keys, f"eval.with_memory={flag}") for flag in ("false", "true"))
    assert both.evaluation[0] > 2 * alone.evaluation[0]


def test_a_length_that_a_run_derives_is_that_of_its_plan(tmp_path: Path) -> None:
    (tmp_path / "few.yaml").write_text("set: mmlu_pro\nlimit: 128\n")
    keys = [f"eval.suites=[{tmp_path / 'few.yaml'}]", "eval.max_response_tokens=null"]
    one = cost(tmp_path, *keys, "data.max_prompt_tokens=null", "data.max_response_tokens=1024")
    assert one.evaluation[0] > 0.0


def test_runs_on_cpus_have_no_cost(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run.yaml: only runs on GPUs with rollout.engine=sglang have a cost by plan"):
        cost(tmp_path, "policy.device=cpu", "policy.offload=[]", "cluster.gpus_per_node=0")


def test_lengths_beyond_the_models_positions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"= 5114, but the number of positions of Qwen/Qwen2.5-Math-7B is 4096"):
        cost(tmp_path, "eval.max_response_tokens=4096")


def test_the_command_prints_the_sum_of_all_runs(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    runs = tmp_path / "runs"
    command = ["sweep", str(tmp_path / "sweep.yaml"), "--plan", "--runs", str(runs)]
    done = CliRunner().invoke(app, command)
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and not runs.exists()
    assert [line.split(" | ")[:2] for line in lines[2:4]] == [["| `grpo`", "3"], ["| `dapo`", "3"]]
    assert lines[5].startswith("costs: 6 runs, ") and "GPU-hours of h200, one after the other on 8 GPUs" in lines[5]
    assert lines[-1] == "not counted: groups of dapo that are dropped and sampled anew"
    done = CliRunner().invoke(app, [*command, "slurm.gpu=h100", "set.policy.micro_batch_tokens=20480"])
    assert done.exit_code == 1 and "error: grpo: " in done.stdout and "GPU-hours of h100" in done.stdout
