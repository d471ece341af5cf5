"""DLC as a recipe sees it: what it asks of sampling, and that it changes nothing else."""

from __future__ import annotations

import pytest
from cases import each_case

from megasharp.algos.base import MemoryNeed, Ramp, overridden_hooks
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.dlc import DLC, DLCParams, MemoryParams, PlausibleParams
from megasharp.common.errors import UserError
from megasharp.common.records import Plausible
from megasharp.config.core import validate


def test_it_fills_no_hook_and_asks_for_a_memory() -> None:
    assert overridden_hooks(DLC) == ()
    params = DLCParams(mu=0.4, plausible=PlausibleParams(top_k=20), memory=MemoryParams(path="m", lr=1e-3), window=64)
    recipe = build_recipe(["grpo", "dlc"], {"dlc": params}, reduction=None, constant=8.0, mini_batches=1)
    assert recipe.needs.memory == MemoryNeed(MemoryParams(path="m", lr=1e-3), 0.4, Plausible(top_k=20), 64)


@each_case(
    ("written", "message"),
    [
        ({}, "plausible: give one of min_p and top_k"),
        ({"min_p": 0.1, "top_k": 3}, "plausible: give one of min_p and top_k"),
        ({"min_p": 0.0}, "plausible.min_p: "),
        ({"min_p": 1.5}, "plausible.min_p: "),
        ({"top_k": 0}, "plausible.top_k: "),
        ({"top_k": 2.5}, "plausible.top_k: "),
        ({"top_p": 0.9}, "plausible.top_p: unknown key"),
        (0.1, "plausible: "),
    ],
)
def test_the_guard_has_one_form(written: object, message: str) -> None:
    with pytest.raises(UserError, match=f"run.yaml: {message}"):
        validate(DLCParams, {"plausible": written}, "run.yaml")


def test_the_guard_as_it_is_written() -> None:
    assert validate(DLCParams, {}, "run.yaml").plausible is None
    for written in ({"min_p": 0.1}, {"top_k": 20}, {"min_p": None, "top_k": 1}):
        assert validate(DLCParams, {"plausible": written}, "run.yaml").plausible == PlausibleParams(**written)


def test_mu_may_change_with_the_step() -> None:
    params = {"dlc": DLCParams(mu=Ramp(start=0.0, end=0.3, steps=3))}
    recipe = build_recipe(["grpo", "dlc"], params, reduction=None, constant=8.0, mini_batches=1)
    needs = [recipe.at(step).needs.memory for step in (1, 2, 4, 9)]
    assert [need.mu for need in needs if need] == pytest.approx([0.0, 0.1, 0.3, 0.3])


@each_case(
    ("written", "rate"),
    [({}, 2e-2), ({"lr": None}, 2e-3), ({"lr": "3x"}, 6e-3), ({"lr": "0.5x"}, 1e-3), ({"lr": 1e-4}, 1e-4)],
)
def test_the_memorys_rate_beside_a_policys_of_2e_3(written: dict[str, object], rate: float) -> None:
    assert validate(MemoryParams, written, "run.yaml").rate(2e-3) == pytest.approx(rate)


@each_case("written", ["0x", "x", "-1x", "10", "1e-3x", 0.0, -1.0, "policy"])
def test_no_other_rate_of_the_memory(written: object) -> None:
    with pytest.raises(UserError, match=r"run.yaml: lr: (give a number, a multiple of policy.optimizer.lr|it must be)"):
        validate(MemoryParams, {"lr": written}, "run.yaml")
