"""The bundle is its parts with its values, and a user's values win."""

from __future__ import annotations

import dataclasses

from megasharp.algos.base import Reduction
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.clip import ClipParams
from megasharp.algos.dynamic_sampling import DynamicSamplingParams
from megasharp.algos.soft_overlong import SoftOverlongParams
from megasharp.common.records import Denominators

PARTS = ["grpo", "clip", "dynamic_sampling", "soft_overlong"]
VALUES = {
    "clip": ClipParams(low=0.2, high=0.28, dual=10.0),
    "soft_overlong": SoftOverlongParams(factor=0.5, max_tokens=4, cache_tokens=2),
}
DENOMINATORS = Denominators(tokens=9.0, sequences=3.0, constant=4.0)


def build(names: list[str], params):
    return build_recipe(names, params, reduction=None, constant=4.0, mini_batches=2)


def test_parts_by_hand_are_the_bundle(make_micro, make_group) -> None:
    lengths = {"soft_overlong": SoftOverlongParams(max_tokens=4, cache_tokens=2)}
    bundle, parts = build(["dapo"], lengths), build(PARTS, VALUES)
    assert bundle.reduction is parts.reduction is Reduction.TOKEN_MEAN
    assert bundle.needs == parts.needs and bundle.needs.refill_rounds == 9
    assert {name: m.params for name, m in bundle.methods.items() if name != "dapo"} == {
        name: m.params for name, m in parts.methods.items()
    }
    # Responses have 1 to 4 tokens: the third and the fourth are on the ramp.
    groups = [make_group(rewards) for rewards in ([1.0, 0.0, 1.0, 0.0], [1.0] * 4, [0.0] * 3)]
    expected, got = (recipe.advantages(recipe.select(groups)) for recipe in (parts, bundle))
    assert [s.advantage_T.tolist() for s in got] == [s.advantage_T.tolist() for s in expected]
    assert len(got) == 4 and len({float(s.advantage_T[0]) for s in got}) == 4
    micro = make_micro(bundle.needs)
    x = dataclasses.replace(micro.inputs, old_logp_T=micro.inputs.logp_T - 0.25)
    assert float(bundle.loss(micro, x, DENOMINATORS, ())[0]) == float(parts.loss(micro, x, DENOMINATORS, ())[0])


def test_users_values_win() -> None:
    recipe = build(["dapo"], {"clip": ClipParams(dual=None), "dynamic_sampling": DynamicSamplingParams(max_rounds=3)})
    assert recipe.methods["clip"].params == ClipParams(low=0.2, high=0.28, dual=None)
    assert recipe.methods["soft_overlong"].params == SoftOverlongParams(max_tokens=4, cache_tokens=1, factor=0.5)
    assert recipe.needs.refill_rounds == 2
