"""Keys of a mixture of experts that a run refuses, each by its name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from cases import each_case
from upcycled import upcycle

from megasharp.common.errors import UserError
from megasharp.config.run_config import load_run
from megasharp.convert.architecture import Architecture, Experts
from megasharp.convert.hf_folder import read_config
from megasharp.trainer.resolve.experts_choice import check_experts
from megasharp.trainer.resolve.resolved_run import check

REPOSITORY = Path(__file__).resolve().parents[3]
QUICKSTART = REPOSITORY / "examples" / "quickstart" / "run.yaml"
DENSE: Architecture = read_config(REPOSITORY / "examples" / "quickstart" / "base")[2]
MIXTURE = dataclasses.replace(DENSE, experts=Experts(8, 2, 64, True))


@each_case(
    ("overrides", "message"),
    [
        (["policy.lora={rank: 4}"], r"policy.lora.targets: fc1 is in the experts.*set it to \[qkv, proj\]"),
        (["policy.experts.dispatcher=allgather", "policy.dp=2", "policy.ep=2"], "must divide tp x cp = 1"),
        (["policy.experts.dispatcher=deepep", "policy.device=cpu"], "deepep needs GPUs"),
        (["policy.experts.dispatcher=deepep", "policy.device=cuda"], "policy.ep and policy.etp are 1"),
        (["policy.experts.replay=true", "policy.pp=2", "policy.recompute=selective"], "set policy.recompute to full"),
    ],
)
def test_what_experts_cannot_have_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=f"^run.yaml: .*{message}"):
        check_experts(load_run(QUICKSTART, overrides), MIXTURE, "run.yaml", here=False)


@each_case(
    "overrides",
    [
        [],
        ["policy.lora={rank: 4, targets: [qkv, proj]}"],
        ["policy.experts.dispatcher=allgather", "policy.tp=2", "policy.ep=2"],
        ["policy.experts.dispatcher=deepep", "policy.device=cuda", "policy.dp=2", "policy.ep=2"],
        ["policy.experts.replay=true", "policy.recompute=selective"],
        ["policy.experts.replay=true", "policy.pp=2", "policy.recompute=full"],
        ["policy.experts.balance_loss=model"],
    ],
)
def test_what_they_can_have_is_not(overrides: list[str]) -> None:
    check_experts(load_run(QUICKSTART, overrides), MIXTURE, "run.yaml", here=False)


def test_keys_of_the_policys_experts_leave_a_dense_memory_network_alone(tmp_path: Path) -> None:
    """DLC's memory beside a mixture has no experts, and needs none."""
    model = upcycle(REPOSITORY / "examples/quickstart/base", tmp_path / "mixture")
    overrides = [f"model.path={model}", "policy.experts.replay=true", "policy.experts.balance_loss=0.1"]
    overrides += ["recipe.methods=[grpo,dlc]", "recipe.dlc.memory={path: examples/quickstart/memory}"]
    resolved = check(load_run(QUICKSTART, overrides), "run.yaml")
    assert resolved.memory is not None and resolved.memory.architecture.experts is None


def test_a_load_balancing_loss_is_not_negative() -> None:
    with pytest.raises(UserError, match=r"policy\.experts\.balance_loss"):
        load_run(QUICKSTART, ["policy.experts.balance_loss=-0.1"])


@each_case("key", ["replay=true", "balance_loss=0.001", "dispatcher=allgather"])
def test_a_dense_model_has_no_use_for_them(key: str) -> None:
    check_experts(load_run(QUICKSTART), DENSE, "run.yaml", here=False)
    with pytest.raises(UserError, match=f"policy.experts.{key.partition('=')[0]}=.* has no effect: the model has no"):
        check_experts(load_run(QUICKSTART, [f"policy.experts.{key}"]), DENSE, "run.yaml", here=False)
