"""Recipes: what is refused, and how the methods are put together."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import each_case

from megasharp.algos import METHODS
from megasharp.algos.base import MemoryNeed, MethodParams, Needs, OldLogp, Ramp, Reduction
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.clip import Clip
from megasharp.algos.dlc import MemoryParams
from megasharp.algos.grpo import GRPO, GRPOParams
from megasharp.algos.kl import KLParams
from megasharp.algos.recipe import Recipe, training_sequence
from megasharp.common.errors import UserError
from megasharp.common.records import (
    Completion,
    Denominators,
    Episode,
    FinishReason,
    Group,
    MicroBatch,
    MiniBatch,
    Outcome,
    Prompt,
    Response,
    StepBatch,
    TaskAnswer,
    Turn,
    Verdict,
)


class Doubled(GRPO):
    """Another estimator; prescribes a reduction and doubles advantages before the step."""

    reduction = Reduction.SEQ_MEAN_TOKEN_SUM

    def calibrate(self, adv_T, x):
        return 2.0 * adv_T, {}


class OtherClip(Clip):
    """Another surrogate; prescribes another reduction."""

    reduction = Reduction.SEQ_MEAN_TOKEN_MEAN

    def weight(self, x, adv_T, stats):
        return torch.full_like(adv_T, 3.0), {}

    def correction(self, x):
        return torch.full_like(x.mask_T, 0.5), {}

    def log_ratio(self, logr_T, x, adv_T):
        return logr_T + 0.1

    def direction(self, logp_T, x, adv_T):
        return logp_T - 0.05, {}

    def prepare(self, adv_T, x):
        return {"count": torch.tensor(float(adv_T.numel()))}


class Misspelt(GRPO):
    """Fills a hook that does not exist."""

    def penality(self, x):
        return x.mask_T, {}


class MisspeltTwice(GRPO):
    """Has the same hook that does not exist, with a variable of its name."""

    def penality(self, x):
        penality = x.mask_T
        return penality, {}


class Helped(GRPO):
    """Has helpers with names near hooks': two are called, one is static, one private, one takes other values."""

    def calibrate(self, adv_T, x):
        return self.weights(x, adv_T, {}), {}

    def described(self, x):
        return f"{self.penaltys(x)} in a formatted text only"

    def penaltys(self, x):
        return x

    def weights(self, x, adv_T, stats):
        return adv_T

    @staticmethod
    def corrections(first, x):
        return first

    @property
    def directions(self):
        return self.params

    def _select(self, groups):
        return []

    def prepared(self):
        return self.params


@pytest.fixture(autouse=True)
def more_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "doubled", Doubled)
    monkeypatch.setitem(METHODS, "other_clip", OtherClip)
    monkeypatch.setitem(METHODS, "misspelt", Misspelt)
    monkeypatch.setitem(METHODS, "misspelt_twice", MisspeltTwice)
    monkeypatch.setitem(METHODS, "helped", Helped)


def build(*names: str, mini_batches: int = 1, reduction: Reduction | None = None, **params: MethodParams) -> Recipe:
    return build_recipe(names, params, reduction=reduction, constant=8.0, mini_batches=mini_batches)


@each_case(
    ("names", "message"),
    [
        (["grpo", "doubled"], "'grpo' and 'doubled' are both the estimator; keep one"),
        (["grpo", "clip", "other_clip"], "'clip' and 'other_clip' are both the surrogate; keep one"),
        (["grpo", "no_such"], "unknown method 'no_such'; known are: grpo"),
        (["grpo", "kl", "kl"], "named twice in \\[grpo, kl, kl\\]"),
        (["kl"], "no estimator in \\[kl, clip\\]; add one of: grpo"),
        ([], "no estimator"),
        (
            ["misspelt"],
            "nothing in test_recipe.py calls penality of 'misspelt'; the hook is named penalty: rename it, or",
        ),
        (["misspelt_twice"], "nothing in test_recipe.py calls penality of 'misspelt_twice'; the hook is named penalty"),
        (["doubled", "other_clip"], "'doubled' and 'other_clip' prescribe different reductions: set recipe.reduction"),
    ],
)
def test_refused_in_one_line(names: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        build(*names)
    assert "\n" not in str(refused.value) and str(refused.value).startswith("recipe.methods: ")


def test_helpers_with_names_near_hooks_are_no_mistake() -> None:
    assert list(build("helped").methods) == ["helped", "clip"]


def test_default_surrogate_and_reduction() -> None:
    assert list(build("grpo").methods) == ["grpo", "clip"]
    assert list(build("grpo", "other_clip").methods) == ["grpo", "other_clip"]
    assert build("grpo").reduction is Reduction.TOKEN_MEAN
    assert build("doubled").reduction is Reduction.SEQ_MEAN_TOKEN_SUM
    assert build("doubled", "other_clip", reduction=Reduction.TOKEN_MEAN).reduction is Reduction.TOKEN_MEAN


def test_old_logp_pass_is_left_out_for_a_single_mini_batch() -> None:
    assert build("grpo").needs.old_logp is OldLogp.IN_LOSS
    assert build("grpo").annotation.old_logp is OldLogp.NONE
    assert build("grpo", mini_batches=2).annotation.old_logp is OldLogp.IN_LOSS
    assert build("grpo", "kl").annotation.ref_logp


def test_needs_join() -> None:
    memory = MemoryNeed(MemoryParams(path="folder"), 0.5, None)
    joined = Needs(topn=2, memory=memory) | Needs(topn=5, entropy=True) | Needs(old_logp=OldLogp.BEFORE_STEP)
    assert joined == Needs(OldLogp.BEFORE_STEP, entropy=True, topn=5, memory=memory)


def test_infra_failures_are_masked_and_never_scored(make_group) -> None:
    rewards = [1.0, 0.0, 99.0, 0.0]
    outcomes = [Outcome.CORRECT, Outcome.WRONG, Outcome.INFRA, Outcome.TIMEOUT]
    sequences = build("grpo").advantages([make_group(rewards, outcomes)])
    scored = GRPO(GRPOParams()).advantages(torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), make_group([]))
    got = [s.advantage_T.unique().tolist() for s in sequences]
    assert got == [[pytest.approx(scored[0])], [pytest.approx(scored[1])], [0.0], [pytest.approx(scored[2])]]
    assert [s.mask_T.unique().tolist() for s in sequences] == [[1.0], [1.0], [0.0], [1.0]]


def test_sequences_follow_the_responses(make_group) -> None:
    sequences = build("grpo").advantages([make_group([1.0, 0.0])])
    assert [s.tokens.tolist() for s in sequences] == [[5, 6, 0], [5, 6, 0, 1]]
    assert [(s.group_id, s.index, s.prompt_length, s.correct, s.reward) for s in sequences] == [
        ("g0", 0, 2, True, 1.0),
        ("g0", 1, 2, False, 0.0),
    ]
    assert sequences[1].sampler_logp_T.tolist() == [-1.0] * 2
    assert sequences[1].policy_logp_T.tolist() == [-1.5] * 2


@each_case("outcome", [Outcome.CORRECT, Outcome.INFRA])
def test_group_of_one(make_group, outcome: Outcome) -> None:
    (sequence,) = build("grpo").advantages([make_group([1.0], [outcome])])
    assert sequence.advantage_T.tolist() == [0.0]
    assert sequence.mask_T.tolist() == [float(outcome is Outcome.CORRECT)]


def test_dropped_groups_are_left_out(make_group) -> None:
    dropped = dataclasses.replace(make_group([1.0, 0.0]), dropped_reason="too easy")
    assert build("grpo").advantages([dropped]) == []


def test_hooks_are_composed_in_their_order(make_micro) -> None:
    """Direction and log_ratio act inside the exponential, weight and correction outside, the penalty is added."""
    recipe = build(
        "grpo", "other_clip", "kl", mini_batches=2, reduction=Reduction.TOKEN_MEAN, kl=KLParams(coefficient=0.4)
    )
    micro = make_micro(recipe.needs)
    loss, metrics = loss_of(recipe, micro)
    x = micro.inputs
    ratio_T = (x.logp_T - 0.05 - x.old_logp_T + 0.1).exp()
    surrogate_T = torch.maximum(-micro.advantage_T * ratio_T, -micro.advantage_T * ratio_T.clamp(0.8, 1.2))
    difference_T = x.ref_logp_T - x.logp_T
    token_T = 3.0 * 0.5 * surrogate_T + 0.4 * (difference_T.exp() - difference_T - 1.0)
    assert float(loss) == pytest.approx(float((token_T * x.mask_T).sum() / 50.0), rel=1e-12)
    assert metrics["policy/ratio"].value == pytest.approx(float(ratio_T[x.mask_T > 0].mean()), rel=1e-12)


def test_without_old_logp_the_ratio_is_one_and_keeps_its_gradient(make_micro) -> None:
    recipe = build("grpo")
    micro = make_micro(Needs())
    logp_T = micro.inputs.logp_T.clone().requires_grad_()
    loss, metrics = loss_of(recipe, micro, dataclasses.replace(micro.inputs, logp_T=logp_T))
    loss.backward()
    assert metrics["policy/ratio"].value == 1.0
    torch.testing.assert_close(logp_T.grad, -micro.advantage_T * micro.inputs.mask_T / 50.0)


def test_calibrate_changes_every_micro_batch(make_micro) -> None:
    micros = [make_micro(Needs(), seed=seed) for seed in (0, 1, 2)]
    mini = MiniBatch(((micros[0], micros[1]), (micros[2],)), DENOMINATORS)
    batch = StepBatch((mini,), ("g",), 0)
    calibrated = build("doubled").calibrate(batch)[0].mini_batches[0].per_rank
    got = [calibrated[0][0], calibrated[0][1], calibrated[1][0]]
    for micro, changed in zip(micros, got, strict=True):
        torch.testing.assert_close(changed.advantage_T, 2.0 * micro.advantage_T * micro.inputs.mask_T)
    assert build("grpo").calibrate(batch) == (batch, {})


DENOMINATORS = Denominators(tokens=50.0, sequences=7.0, constant=8.0)


def loss_of(recipe: Recipe, micro: MicroBatch, x=None):
    stats = recipe.prepare(MiniBatch(((micro,),), DENOMINATORS))
    return recipe.loss(micro, x or micro.inputs, DENOMINATORS, stats)


@each_case(
    ("names", "message"),
    [
        (["grpo", "kl_cov", "casp"], "'kl_cov' and 'casp' cannot be combined: lambda_top1"),
        (["grpo", "entropy_bonus", "entropy_penalty"], "'entropy_penalty' and 'entropy_bonus' cannot be combined"),
        (["grpo", "kl_cov", "bypass"], "'kl_cov' and 'bypass' cannot be combined"),
        (["grpo", "gspo", "forking_tokens"], "'gspo' and 'forking_tokens' cannot be combined"),
        (["grpo", "clip_cov", "gspo"], "'gspo' and 'clip_cov' cannot be combined"),
        (["psr", "negative_only"], "'negative_only' and 'psr' cannot be combined: .* nothing would train"),
        (["nsr", "iac"], "'iac' and 'nsr' cannot be combined"),
        (["grpo", "negative_only", "iac"], "'iac' and 'negative_only' cannot be combined"),
    ],
)
def test_pairs_without_sense_are_refused_naming_both(names: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(*names, reduction=Reduction.TOKEN_MEAN)


def test_ends_of_a_ramp_keep_the_bounds_of_the_number() -> None:
    for bad in ({"start": -1.0, "end": 0.0}, {"start": 0.0, "end": float("nan")}):
        with pytest.raises(ValueError, match=r"start|end"):
            KLParams(coefficient=Ramp(steps=3, **bad))


def routed_group(experts: torch.Tensor | None, turns: tuple[Turn, ...] = ()) -> Group:
    """One response of 6 tokens after a prompt of 2."""
    logp = torch.zeros(6)
    episode = Episode(turns) if turns else None
    completion = Completion(
        torch.arange(6), logp, logp, None, (), FinishReason.STOP, 0, episode=episode, experts=experts
    )
    response = Response(completion, "", Verdict(Outcome.CORRECT, 1.0))
    return Group("g", Prompt("p", "t", "", (8, 9), TaskAnswer(), "s", 0, 0), (response,), 0)


@each_case(
    ("read", "turns"),
    [
        (7, ()),
        (7, (Turn(0, 2, 4),)),
        # The last answer of an environment was not read, in whole or in part.
        (4, (Turn(0, 3, 6),)),
        (5, (Turn(0, 3, 6),)),
    ],
)
def test_a_sequence_has_the_experts_of_the_tokens_that_were_read(read: int, turns: tuple[Turn, ...]) -> None:
    """They are the completion's own: a copy of all responses' would be gigabytes."""
    found = torch.arange(read * 4, dtype=torch.uint8).reshape(read, 2, 2)
    assert training_sequence(routed_group(found, turns), 0, torch.ones(1)).experts is found


def test_where_nothing_was_recorded_a_sequence_has_no_experts() -> None:
    for nothing in (None, torch.empty(0, dtype=torch.uint8)):
        assert training_sequence(routed_group(nothing), 0, torch.ones(1)).experts is None


@each_case(("read", "turns"), [(6, ()), (8, ()), (3, (Turn(0, 3, 6),)), (6, (Turn(0, 2, 4),))])
def test_experts_of_other_tokens_are_an_error(read: int, turns: tuple[Turn, ...]) -> None:
    with pytest.raises(ValueError, match=f"^{read} tokens have experts, of a prompt of 2 and 6 others$"):
        training_sequence(routed_group(torch.zeros(read, 2, 2, dtype=torch.uint8), turns), 0, torch.ones(1))
