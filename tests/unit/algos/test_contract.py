"""The contract that every method must keep: shapes, gradients, masking, metrics, declared needs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import each_case
from torch import Tensor

from megasharp.algos import METHODS
from megasharp.algos.base import HOOKS, Method, MethodParams, overridden_hooks
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.casp import CaSPParams
from megasharp.algos.clip_cov import ClipCovParams
from megasharp.algos.kl import KLParams
from megasharp.algos.off_policy_mask import OffPolicyMaskParams
from megasharp.algos.ratio_mask import RatioMaskParams
from megasharp.algos.recipe import Recipe
from megasharp.algos.soft_overlong import SoftOverlongParams
from megasharp.common.errors import nearest
from megasharp.common.records import Denominators, Metrics, MicroBatch, MiniBatch, StepBatch, TokenInputs

DENOMINATORS = Denominators(tokens=31.0, sequences=7.0, constant=16.0)
# Coefficients that are tiny by default would hide a method's part of the loss.
PARAMS: dict[str, MethodParams] = {
    "kl": KLParams(coefficient=0.5),
    "casp": CaSPParams(alpha=0.5, quantile=0.3, lambda_top1=1.5),
    "clip_cov": ClipCovParams(share=0.5, low=-10.0, high=10.0),
    "soft_overlong": SoftOverlongParams(max_tokens=3, cache_tokens=2),
    "ratio_mask": RatioMaskParams(level="token", low=0.5, high=2.0),
    "off_policy_mask": OffPolicyMaskParams(threshold=0.01),
}
# What a method needs but random inputs do not show: a draw that decides ties only, a term that cancels.
UNSEEN = {("kl_cov", "draw"), ("bypass", "old_logp")}
FIELDS = {
    "old_logp": ("old_logp_T",),
    "ref_logp": ("ref_logp_T",),
    "sampler_logp": ("sampler_logp_T",),
    "policy_logp": ("policy_logp_T",),
    "draw": ("draw_T",),
    "entropy": ("entropy_T",),
    "old_entropy": ("old_entropy_T",),
    "topn": ("topn_logp_TN", "is_top1_T"),
}
SPOILED = ("advantage_T", "reward_T", "correct_T", "logp_T", *(f for fields in FIELDS.values() for f in fields))
CONSTANTS = ("old_logp_T", "ref_logp_T", "sampler_logp_T", "policy_logp_T", "draw_T", "old_entropy_T")

each_method = each_case("name", METHODS)


def hooks_of(name: str) -> set[str]:
    """The hooks that a method fills, itself or through what it brings."""
    method = METHODS[name]
    return set(overridden_hooks(method)).union(*(hooks_of(brought) for brought in method.brings))


def recipe_with(name: str) -> Recipe:
    """The smallest recipe that has the method: an estimator is added if it brings none itself."""
    names = [name] if "advantages" in hooks_of(name) else ["grpo", name]
    return build_recipe(names, PARAMS, reduction=None, constant=16.0, mini_batches=2)


def calibrated(recipe: Recipe, micro: MicroBatch) -> tuple[MiniBatch, Metrics]:
    """The step of one micro-batch after the hooks before the update."""
    batch, metrics = recipe.calibrate(StepBatch((MiniBatch(((micro,),), DENOMINATORS),), ("g0", "g1"), 0))
    return batch.mini_batches[0], metrics


def loss_of(recipe: Recipe, micro: MicroBatch, x: TokenInputs | None = None) -> tuple[Tensor, Metrics]:
    mini, metrics = calibrated(recipe, micro)
    loss, more = recipe.loss(mini.per_rank[0][0], x or micro.inputs, DENOMINATORS, mini.statistics)
    return loss, {**metrics, **more}


def with_gradient(x: TokenInputs) -> TokenInputs:
    leaves = {
        name: value.detach().clone().requires_grad_()
        for name in ("logp_T", "entropy_T", "topn_logp_TN", *CONSTANTS)
        if (value := getattr(x, name)) is not None
    }
    return dataclasses.replace(x, **leaves)


@each_method
def test_what_is_public_is_a_hook_or_of_the_base(name: str) -> None:
    """A misspelt hook would never be called."""
    method = METHODS[name]
    assert method.options and method.status
    for member in vars(method):
        known = member.startswith("_") or member in Method.__annotations__ or hasattr(Method, member)
        assert known, f"{member} is no hook of a method; {nearest(member, HOOKS)}"


@each_method
@each_case("dtype", [torch.float32, torch.float64])
def test_loss_is_a_finite_scalar_of_the_inputs_dtype(make_micro, name: str, dtype: torch.dtype) -> None:
    recipe = recipe_with(name)
    loss, metrics = loss_of(recipe, make_micro(recipe.needs, dtype=dtype))
    assert loss.shape == () and loss.dtype == dtype and loss.isfinite()
    assert all(isinstance(value.value, float) for value in metrics.values())


@each_method
def test_hooks_over_groups_keep_shape_and_dtype(make_group, name: str) -> None:
    method = METHODS[name](PARAMS.get(name, METHODS[name].Params()))
    hooks = overridden_hooks(METHODS[name])
    assert hooks or method.brings or method.needs().memory, "a method fills some hook, or brings one that does"
    for rewards in ([1.0, 0.0, 0.0, 1.0], [1.0] * 4, [0.0] * 4, [0.3], []):
        rewards_G = torch.tensor(rewards, dtype=torch.float64)
        before_G = rewards_G.clone()
        for hook in {"rewards", "advantages"} & set(hooks):
            arguments = (make_group(rewards), rewards_G) if hook == "rewards" else (rewards_G, make_group(rewards))
            changed_G = getattr(method, hook)(*arguments)
            assert changed_G.shape == rewards_G.shape and changed_G.dtype == torch.float64
            assert changed_G.isfinite().all() and torch.equal(rewards_G, before_G)
        if "select" in hooks:
            reasons = method.select([make_group(rewards)] * 3)
            assert len(reasons) == 3 and all(reason is None or reason for reason in reasons)


@each_method
def test_whole_step_of_nothing(make_micro, name: str) -> None:
    """A rank's empty micro-batch, and a step in which every token is masked."""
    recipe = recipe_with(name)
    micro = make_micro(recipe.needs)
    masked = dataclasses.replace(micro.inputs, mask_T=torch.zeros_like(micro.inputs.mask_T))
    loss, _ = loss_of(recipe, dataclasses.replace(micro, inputs=masked))
    assert float(loss) == 0.0


@each_method
def test_gradient_reaches_unmasked_tokens_only(make_micro, name: str) -> None:
    recipe = recipe_with(name)
    micro = make_micro(recipe.needs)
    x = with_gradient(micro.inputs)
    micro = dataclasses.replace(micro, advantage_T=micro.advantage_T.clone().requires_grad_())
    loss_of(recipe, micro, x)[0].backward()
    assert x.logp_T is not None and x.logp_T.grad is not None
    assert (x.logp_T.grad[x.mask_T == 0] == 0).all()
    assert (x.logp_T.grad[x.mask_T > 0] != 0).any()


@each_method
def test_no_gradient_into_constants(make_micro, name: str) -> None:
    recipe = recipe_with(name)
    micro = make_micro(recipe.needs)
    x = with_gradient(micro.inputs)
    micro = dataclasses.replace(micro, advantage_T=micro.advantage_T.clone().requires_grad_(), inputs=x)
    mini, _ = calibrated(recipe, micro)
    recipe.loss(mini.per_rank[0][0], x, DENOMINATORS, mini.statistics)[0].backward()
    leaves = {"advantage_T": micro.advantage_T, **{field: getattr(x, field) for field in CONSTANTS}}
    for field, leaf in leaves.items():
        assert leaf is None or leaf.grad is None or (leaf.grad == 0).all(), field


@each_method
@each_case("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_stands_at_masked_tokens_does_not_matter(make_micro, name: str, bad: float) -> None:
    """One field at a time, and all of them: a value that is masked in one place may hide it in another."""
    recipe = recipe_with(name)
    micro = make_micro(recipe.needs)
    loss, expected_metrics = loss_of(recipe, micro)
    held = [field for field in SPOILED if field == "advantage_T" or getattr(micro.inputs, field) is not None]
    for fields in (*([field] for field in held), held):
        x_micro = spoiled(micro, fields, bad)
        x = with_gradient(x_micro.inputs)
        spoiled_loss, metrics = loss_of(recipe, x_micro, x)
        spoiled_loss.backward()
        assert float(spoiled_loss.detach()) == pytest.approx(float(loss), rel=1e-12), fields
        assert x.logp_T is not None and x.logp_T.grad is not None and x.logp_T.grad.isfinite().all(), fields
        for key, metric in metrics.items():
            assert metric.value == pytest.approx(expected_metrics[key].value, rel=1e-9, abs=1e-12), key


def spoiled(micro: MicroBatch, fields: list[str], bad: float) -> MicroBatch:
    masked_T = micro.inputs.mask_T == 0

    def spoil(value: Tensor) -> Tensor:
        return value.masked_fill(masked_T.view(-1, *[1] * (value.dim() - 1)), bad)

    inputs = {field: spoil(getattr(micro.inputs, field)) for field in fields if field != "advantage_T"}
    advantage_T = spoil(micro.advantage_T) if "advantage_T" in fields else micro.advantage_T
    return dataclasses.replace(micro, advantage_T=advantage_T, inputs=dataclasses.replace(micro.inputs, **inputs))


@each_method
def test_metrics_weigh_the_unmasked_tokens(make_micro, name: str) -> None:
    recipe = recipe_with(name)
    first, second = make_micro(recipe.needs, seed=1), make_micro(recipe.needs, seed=2)
    _, metrics = loss_of(recipe, first)
    _, more = loss_of(recipe, second)
    assert metrics and metrics.keys() == more.keys()
    for key, metric in metrics.items():
        joined = metric + more[key]
        assert 0 < metric.weight <= float(first.inputs.mask_T.sum()), key
        low, high = sorted([metric.value, more[key].value])
        assert low - 1e-9 <= joined.value <= high + 1e-9, key


@each_method
def test_declared_needs_are_enough_and_are_used(make_micro, name: str) -> None:
    """The inputs hold the declared fields and no other; changing any of them changes what comes out."""
    recipe = recipe_with(name)
    micro = make_micro(recipe.needs)
    before = observed(recipe, micro)
    for need, fields in FIELDS.items():
        values = [getattr(micro.inputs, field) for field in fields]
        if not getattr(recipe.needs, need):
            assert values == [None] * len(fields)
            continue
        # In another order as well, as some methods ask for ranks alone.
        changed = [
            1.0 - value if field == "is_top1_T" else value.flip(0) - 0.3
            for field, value in zip(fields, values, strict=True)
        ]
        inputs = dataclasses.replace(micro.inputs, **dict(zip(fields, changed, strict=True)))
        if (name, need) not in UNSEEN:
            assert observed(recipe, dataclasses.replace(micro, inputs=inputs)) != before, need


def observed(recipe: Recipe, micro: MicroBatch) -> tuple[float, dict[str, float]]:
    loss, metrics = loss_of(recipe, micro)
    return float(loss), {key: metric.value for key, metric in metrics.items()}
