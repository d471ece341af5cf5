"""`policy.optimizer_offload` and `policy.recompute_modules` in a plan: GPU, host, seconds, the text, the JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megasharp.planner.formulas import optimizer_bytes, staging_bytes
from megasharp.planner.records import Plan
from megasharp.planner.suggest import make_plan
from megasharp.planner.text import plan_text, plan_tree
from tests.unit.trainer.plans import REPOSITORY, asked


@pytest.fixture(autouse=True)
def _at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def planned(folder: Path, *overrides: str) -> tuple[Plan, str, str]:
    question = asked(folder, "qwen3-8b+qwen3-1.7b", *overrides)
    plan = make_plan(question.request)
    tree = json.dumps(plan_tree(question.request, plan, (), ()))
    return plan, " ".join(plan_text(question.request, plan, ()).split()), tree


def test_the_optimizer_leaves_the_gpu_for_its_host(tmp_path: Path) -> None:
    there, _, _ = planned(tmp_path)
    host, text, tree = planned(tmp_path, "policy.optimizer_offload=true")
    ((before,), (after,)) = (plan.stages for plan in (there, host))
    shards = asked(tmp_path, "qwen3-8b+qwen3-1.7b").request.layout.shards
    counts = (before.trained, before.memory_parameters)
    state = [int(optimizer_bytes(count, 2, shards)) for count in counts]
    assert (before.optimizer, after.optimizer) == (state[0], 0)
    assert before.memory_network - after.memory_network == state[1]
    assert after.optimizer_on_host == sum(state) and after.staging == staging_bytes(max(counts) // shards)
    for phase in ("annotation", "training", "handover"):
        if phase in before.totals:
            assert before.totals[phase] - after.totals[phase] == sum(state), phase
    # What was copied there while engines sampled is there all the time.
    assert host.host == there.host
    offload, optimizer = ({time.name: time.seconds or 0.0 for time in plan.times} for plan in (there, host))
    assert "optimizer" not in offload and optimizer["optimizer"] == pytest.approx(sum(state) / 50e9)
    assert offload["offload"] - optimizer["offload"] == pytest.approx(2 * sum(state) / 50e9)
    assert "the optimizer's state on the host" in text
    assert f'"optimizer_on_host_bytes": {sum(state)}' in tree and '"optimizer_offload": true' in tree


def test_recomputed_modules_are_planned(tmp_path: Path) -> None:
    kept = {}
    for modules in ("core_attn", "mlp", "core_attn, mlp"):
        plan, text, _ = planned(tmp_path, "policy.recompute=selective", f"policy.recompute_modules=[{modules}]")
        seconds = {time.name: time.seconds or 0.0 for time in plan.times}
        kept[modules] = (plan.stages[0].activations, seconds["update"])
        assert f"recompute selective ({modules})" in text
    both = kept.pop("core_attn, mlp")
    assert all(both[0] < memory and both[1] > seconds for memory, seconds in kept.values())
