"""DLC as a recipe sees it: what it asks of sampling, and that it changes nothing else."""

from __future__ import annotations

import pytest

from megasharp.algos.base import MemoryNeed, Ramp, overridden_hooks
from megasharp.algos.build import build_recipe
from megasharp.algos.dlc import DLC, DLCParams, MemoryParams


def test_it_fills_no_hook_and_asks_for_a_memory() -> None:
    assert overridden_hooks(DLC) == ()
    params = DLCParams(mu=0.4, plausible=0.1, memory=MemoryParams(path="m", lr=1e-3))
    recipe = build_recipe(["grpo", "dlc"], {"dlc": params}, reduction=None, constant=8.0, mini_batches=1)
    assert recipe.needs.memory == MemoryNeed("m", 1e-3, 0.4, 0.1)


def test_mu_may_change_with_the_step() -> None:
    params = {"dlc": DLCParams(mu=Ramp(start=0.0, end=0.3, steps=3))}
    recipe = build_recipe(["grpo", "dlc"], params, reduction=None, constant=8.0, mini_batches=1)
    needs = [recipe.at(step).needs.memory for step in (1, 2, 4, 9)]
    assert [need.mu for need in needs if need] == pytest.approx([0.0, 0.1, 0.3, 0.3])
