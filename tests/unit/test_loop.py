"""The loop with stand-in parts (named as such): the order of the verbs, what falls due when, and the guard."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from cases import each_case
from torch import Tensor

from megasharp.algos.base import Needs
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.recipe import Recipe, RecipeSchedule
from megasharp.batching.packing import PackLayout
from megasharp.common.control import Control, ControlState, LengthStage, Reset, ResetRule, Rules, SpikeRule
from megasharp.common.errors import TrainingStopped
from megasharp.common.records import (
    Completion,
    FinishReason,
    Group,
    Mean,
    Metrics,
    Outcome,
    Prompt,
    Response,
    SamplingParams,
    StepBatch,
    StepStats,
    TaskAnswer,
    Verdict,
    VersionSpan,
)
from megasharp.config.run_config import GuardConfig, RunConfig
from megasharp.metrics.clock import StageClock
from megasharp.rollout.step_request import Collected, PromptSource, StepRequest
from megasharp.trainer import loop
from megasharp.trainer.guards import Guards
from megasharp.weight_sync.endpoints import WeightSource


class StandIn:
    """Stream, rollouts, learner and sync in one, writing down what is asked of it."""

    def __init__(self, skipped: Mapping[int, int]) -> None:
        self.calls: list[str] = []
        self.phase_at: list[tuple[str, str]] = []
        self._phase = "training"
        self.saved: list[tuple[int, int]] = []
        self.saved_in: set[str] = set()
        self.evaluated: list[int] = []
        self.best: set[int] = set()
        self.orders: list[StepRequest] = []
        self.weighed: list[Mapping[str, float] | None] = []
        self.values: list[Mapping[str, float]] = []
        self.limits: list[float | None] = []
        self.gaps: dict[int, float] = {}
        self.version = 0
        self._skipped = skipped
        self._steps = 0

    def sampling(self) -> None:
        self._phase = "sampling"

    def training(self) -> None:
        self._phase = "training"

    def handover(self) -> None:
        self._phase = "handover"

    def take(self, count: int) -> list[Prompt]:
        return [Prompt(str(i), "t", "", (1, 2), TaskAnswer(), "s", 0, i) for i in range(count)]

    def weigh(self, weights: Mapping[str, float] | None) -> None:
        self.weighed.append(weights)

    def collect(self, source: PromptSource, order: StepRequest) -> Collected:
        self.calls.append("collect")
        self.phase_at.append((self.calls[-1], self._phase))
        self.orders.append(order)
        groups = [self.group(order.step, prompt) for prompt in source.take(order.wanted)]
        return Collected(order.select(groups), {"rollout": 2.0, "reward": 0.5}, {"rollout/aborted": 3.0})

    def group(self, step: int, prompt: Prompt) -> Group:
        return Group(f"{step}-{prompt.id}", prompt, (_response(1.0), _response(0.0)), self.version)

    def observe(self, groups: Sequence[Group], step: int, seed: int) -> Metrics:
        self.calls.append(f"observe {len(groups)}")
        self.phase_at.append((self.calls[-1], self._phase))
        return {"memory/cross_entropy": Mean(1.5, 1.0)}

    def annotate(self, batch: StepBatch, needs: Needs, returned: Needs | None = None) -> StepBatch:
        self.calls.append("annotate")
        self.phase_at.append((self.calls[-1], self._phase))
        return batch

    def step(self, batch: StepBatch, recipe: Recipe, norm_limit: float | None = None) -> StepStats:
        self.calls.append("step")
        self.limits.append(norm_limit)
        self.phase_at.append((self.calls[-1], self._phase))
        self._steps += 1
        skipped, gap = self._skipped.get(self._steps, 0), Mean(self.gaps.get(self._steps, 0.01), 1.0)
        metrics = {"policy/engine_gap": gap}
        return StepStats(0.0, 1.0, 1e-3, skipped, metrics, norms=(1.0,), spikes=self._steps // 25)

    def push(self, source: WeightSource, memory: WeightSource | None = None) -> int:
        self.calls.append("push" if memory is None else "push both")
        self.phase_at.append((self.calls[-1], self._phase))
        self.version += 1
        return self.version

    def forget(self) -> None:
        self.calls.append("forget")

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def set_reference(self) -> None:
        self.calls.append("set_reference")

    def reset_optimizer(self) -> None:
        self.calls.append("reset_optimizer")

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def close(self) -> None: ...

    def check_replicas(self, step: int, updated: bool) -> None:
        self.calls.append(f"check {step}{' again' if updated else ''}")

    def after_step(self, step: int, groups: Sequence[Group], values: Mapping[str, float]) -> None:
        self.calls.append(f"after {step}")
        self.values.append(values)

    def checkpoint(self, step: int, skipped: int) -> None:
        self.saved.append((step, skipped))
        self.saved_in.add(self._phase)

    def evaluate(self, step: int) -> bool:
        self._phase = "sampling"
        self.evaluated.append(step)
        return step in self.best


def _response(reward: float) -> Response:
    logp = torch.zeros(2)
    completion = Completion(torch.tensor([3, 1]), logp, logp, None, (VersionSpan(0, 0, 2),), FinishReason.STOP, seed=0)
    return Response(completion, "", Verdict(Outcome.CORRECT if reward else Outcome.WRONG, reward))


def _run(
    stand_in: StandIn,
    config: RunConfig,
    state: loop.LoopState | None = None,
    methods: Sequence[str] = ("grpo",),
    clock: StageClock | None = None,
    control: Control | None = None,
    micro_batch_tokens: int = 64,
) -> None:
    parts = loop.Components(
        prompts=stand_in,
        rollouts=stand_in,
        control=control or Control(Rules(ResetRule(), (LengthStage(max_response_tokens=4),)), ControlState()),
        recipes=RecipeSchedule([], build_recipe(methods, {}, reduction=None, constant=4.0, mini_batches=1)),
        layout=PackLayout(dp=1, micro_batch_tokens=micro_batch_tokens, mini_batches=1, row_multiple=1, constant=4.0),
        learner=stand_in,
        memory=stand_in if "dlc" in methods else None,
        sync=stand_in,
        phases=stand_in,
        clock=clock or StageClock(),
        guards=Guards(config.guard, lambda: "7 failed"),
        check_replicas=stand_in.check_replicas,
        after_step=stand_in.after_step,
        checkpoint=stand_in.checkpoint,
        evaluate=stand_in.evaluate,
    )
    loop.run(parts, config, state or loop.LoopState())


def _config(steps: int, checkpoint_every: int = 4, evaluate_every: int = 3, **guard: float) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "loop",
            "steps": steps,
            "seed": 1,
            "model": {"path": "none"},
            "data": {"task": "countdown", "path": "none", "prompts_per_step": 2},
            "checkpoint": {"every": checkpoint_every},
            "eval": {"every": evaluate_every},
            "guard": {"nan_limit": 3, **guard},
        }
    )


def test_each_verb_finds_the_devices_in_its_phase() -> None:
    stand_in = StandIn({})
    _run(stand_in, _config(2, checkpoint_every=10, evaluate_every=0), methods=("grpo", "dlc"))
    step = [
        ("collect", "sampling"),
        ("annotate", "training"),
        ("step", "training"),
        ("observe 2", "training"),
        ("push both", "handover"),
    ]
    assert stand_in.phase_at == step + step


def test_verbs_come_in_the_order_of_the_page() -> None:
    stand_in = StandIn({})
    _run(stand_in, _config(1))
    assert stand_in.calls == ["collect", "check 1", "annotate", "step", "push", "check 1 again", "after 1"]


def test_checkpoints_fall_due_and_the_last_step_always_writes_one() -> None:
    stand_in = StandIn({})
    _run(stand_in, _config(10))
    assert stand_in.saved == [(4, 0), (8, 0), (10, 0)]


def test_a_run_is_over_after_the_step_that_used_its_tokens_up() -> None:
    """8 tokens a step; that step writes the last checkpoint, and its evaluation is left to the run."""
    rules = Rules(ResetRule(), (LengthStage(max_response_tokens=4),), token_budget=17)
    control, stand_in = Control(rules, ControlState()), StandIn({})
    told = stand_in.after_step

    def after_step(step: int, groups: Sequence[Group], values: Mapping[str, float]) -> None:
        control.trained(values)
        told(step, groups, values)

    stand_in.after_step = after_step  # type: ignore[method-assign]
    state = loop.LoopState()
    _run(stand_in, _config(10), state, control=control)
    assert (state.step, stand_in.saved, stand_in.evaluated) == (3, [(3, 0)], [])
    assert control.state.tokens == 24
    resumed = Control(rules, control.state)
    _run(stand_in, _config(10), state, control=resumed)
    assert state.step == 3


def test_evaluations_fall_due_but_the_end_is_left_to_the_run() -> None:
    stand_in = StandIn({})
    _run(stand_in, _config(9))
    assert stand_in.evaluated == [3, 6]


def test_a_resumed_run_continues_at_the_next_step() -> None:
    stand_in = StandIn({})
    _run(stand_in, _config(6), loop.LoopState(step=4))
    assert [call for call in stand_in.calls if call.startswith("after")] == ["after 5", "after 6"]


def test_a_finished_run_does_nothing() -> None:
    stand_in = StandIn({})
    _run(stand_in, _config(4), loop.LoopState(step=4))
    assert stand_in.calls == []


def test_skipped_steps_in_a_row_stop_the_run_with_a_checkpoint() -> None:
    stand_in = StandIn(dict.fromkeys(range(3, 9), 1))
    with pytest.raises(TrainingStopped, match="3 steps in a row were not applied"):
        _run(stand_in, _config(10))
    # Step 4 is due anyway and knows of two skipped steps; step 5 is saved because the run stops there.
    assert stand_in.saved == [(4, 2), (5, 3)]


def test_an_applied_step_resets_the_count() -> None:
    stand_in = StandIn({1: 1, 2: 1, 4: 1, 5: 1})
    _run(stand_in, _config(6))
    assert stand_in.saved == [(4, 1), (6, 0)]


def test_the_count_survives_a_resume() -> None:
    stand_in = StandIn({1: 1})
    with pytest.raises(TrainingStopped):
        _run(stand_in, _config(8), loop.LoopState(step=5, skipped_in_a_row=2))
    assert stand_in.saved == [(6, 3)]


@pytest.mark.parametrize("step", [3, 4, 6])
def test_an_engine_that_samples_another_policy_stops_the_run_with_one_checkpoint(step: int) -> None:
    """In a step of its own, in one that is saved anyway, and in the last one; a gap that is no number stops it too."""
    for gap in (1.25, float("nan")):
        stand_in = StandIn({})
        stand_in.gaps = {2: 0.9, step: gap}
        line = rf"log-probs are {gap:g} nats off .*engine_gap_stop is 1\).* stopped at step {step} with a checkpoint"
        with pytest.raises(TrainingStopped, match=line):
            _run(stand_in, _config(6, engine_gap_stop=1.0))
        assert stand_in.saved == [(4, 0)] * (step > 4) + [(step, 0)]


@each_case(
    ("shares", "limit", "stops"),
    [
        ([0.0, 1.0], 0.05, "2: the reward failed on every response of a step"),
        ([1.0], 1.0, "1: the reward failed on every response"),
        ([0.1, 0.06, 0.2], 0.05, "3: the reward failed on 20.0% of a step's responses, the third step in a row"),
        ([0.1, 0.1, 0.05, 0.1, 0.1, 0.0], 0.05, None),
        ([0.5, 0.5, 0.5, 1.0], None, None),
        ([0.5, 0.5, 0.5], 0.6, None),
    ],
)
def test_rewards_that_fail_stop_the_run(shares: list[float], limit: float | None, stops: str | None) -> None:
    guards = Guards(GuardConfig(reward_errors=limit), lambda: "7 failed")
    reasons = [guards.after_step(0, {"reward/errors": share}) for share in shares]
    found = [f"{step}: {reason.cause}" for step, reason in enumerate(reasons, 1) if reason is not None]
    assert len(found) == (stops is not None)
    if stops is not None:
        assert found[0].startswith(stops) and found[0].endswith(f"(guard.reward_errors is {limit:g}): 7 failed")


@each_case(
    ("lost", "responses", "limit", "stops"),
    [
        # One of 16 is chance, and stays so as long as others do not join it.
        ([1, *[0] * 15] * 3, 16, 0.02, None),
        ([1] * 16, 16, 0.02, "6: engines ended or refused 6 of 96 responses of the latest 6 steps"),
        ([16], 16, 0.02, "1: engines ended or refused 16 of 16 responses of this step"),
        ([5, 0, 0, 1], 64, 0.02, "4: engines ended or refused 6 of 256 responses of the latest 4 steps"),
        ([5, 0, 0, 0, 1], 64, 0.02, None),
        ([20] * 9, 1024, 0.02, None),
        ([20, 21], 1024, 0.02, "2: engines ended or refused 21 of 1024 responses of this step"),
        # A long sound past does not help a step of which most is lost.
        ([*[0] * 9, 15], 16, 0.9, "10: engines ended or refused 15 of 16 responses of this step"),
        ([2] * 9, 2, 0.5, "3: engines ended or refused 6 of 6 responses of the latest 3 steps"),
        ([512], 512, None, None),
    ],
)
def test_responses_that_engines_lose_stop_the_run(
    lost: list[int], responses: int, limit: float | None, stops: str | None
) -> None:
    guards, sound = Guards(GuardConfig(infra_rate=limit), request_limit_s=1800.0), _response(1.0)
    ended = replace(sound, completion=replace(sound.completion, finish_reason=FinishReason.ABORT))
    prompt = Prompt("p", "t", "", (1, 2), TaskAnswer(), "s", 0, 0)

    def step(count: int) -> str | None:
        group = Group("g", prompt, (*[ended] * count, *[sound] * (responses - count)), 0)
        reason = guards.after_step(0, {}, [group])
        return None if reason is None else reason.cause

    found = [f"{number}: {cause}" for number, cause in enumerate(map(step, lost), 1) if cause is not None]
    assert bool(found) == (stops is not None)
    if stops is not None:
        assert found[0].startswith(f"{stops} (guard.infra_rate is {limit:g}), ")
        assert found[0].endswith("for this: ended after the first token, as rollout.request_limit_s (1800 s) does")


def test_the_most_frequent_cause_of_lost_responses_is_named() -> None:
    sampling, prompt = SamplingParams(4), Prompt("p", "t", "", (1, 2), TaskAnswer(), "s", 0, 0)
    words = ["it has 90 tokens", "given up", "it has 91 tokens", "given up", "it has 92 tokens", ""]
    lost = [replace(_response(0.0), completion=Completion.unsampled(0, sampling, cause)) for cause in words]
    reason = Guards(GuardConfig()).after_step(0, {}, [Group("g", prompt, tuple(lost), 0)])
    assert reason is not None and reason.cause.endswith("3 of them for this: it has 90 tokens")


def test_a_run_whose_responses_are_lost_stops_with_a_checkpoint() -> None:
    class Losing(StandIn):
        def group(self, step: int, prompt: Prompt) -> Group:
            group = super().group(step, prompt)
            ends = [replace(r.completion, finish_reason=FinishReason.ABORT) for r in group.responses]
            verdict = Verdict(Outcome.INFRA, 0.0)
            return replace(group, responses=tuple(Response(completion, "", verdict) for completion in ends))

    stand_in = Losing({})
    with pytest.raises(TrainingStopped, match=r"8 of 8 .*; stopped at step 2 with a checkpoint; mend that, then"):
        _run(stand_in, _config(9))
    assert stand_in.saved[0][0] == 2


def test_no_gap_stops_a_run_that_was_not_asked_to() -> None:
    stand_in = StandIn({})
    stand_in.gaps = {2: 50.0}
    _run(stand_in, _config(3))
    assert stand_in.saved == [(3, 0)]


def test_with_dlc_the_sampler_is_told_mu_and_the_memory_observes_and_is_pushed() -> None:
    stand_in = StandIn({})
    _run(stand_in, _config(1), methods=("grpo", "dlc"))
    assert stand_in.orders[0].memory is not None and stand_in.orders[0].memory.mu == 0.2
    assert stand_in.values[0]["memory/mu"] == 0.2
    assert stand_in.calls == [
        *("collect", "check 1", "annotate", "step", "observe 2", "push both", "check 1 again", "after 1")
    ]
    plain = StandIn({})
    _run(plain, _config(1))
    assert plain.orders[0].memory is None and "memory/mu" not in plain.values[0]


def test_the_rollouts_are_told_what_the_step_wants_and_their_figures_and_seconds_are_kept() -> None:
    stand_in, clock = StandIn({}), StageClock()
    _run(stand_in, _config(2), methods=("grpo", "dynamic_sampling"), clock=clock)
    told = [(order.step, order.wanted, order.refill_rounds > 0, order.last) for order in stand_in.orders]
    assert told == [(1, 2, True, False), (2, 2, True, True)]
    assert [values["rollout/aborted"] for values in stand_in.values] == [3.0, 3.0]
    seconds = clock.take()
    assert (seconds["rollout"], seconds["reward"]) == (4.0, 1.0)


def _control(*stages: LengthStage, **reset: object) -> Control:
    return Control(Rules(ResetRule(**reset), stages or (LengthStage(max_response_tokens=4),)), ControlState())  # type: ignore[arg-type]


def test_a_reset_comes_before_the_next_update_and_is_written_down_when_done() -> None:
    stand_in, control = StandIn({}), _control(every=2)
    _run(stand_in, _config(5), control=control)
    resets = [i for i, call in enumerate(stand_in.calls) if call == "set_reference"]
    before_and_after = [(stand_in.calls[i - 1], *stand_in.calls[i + 1 : i + 3]) for i in resets]
    assert before_and_after == [(f"check {step}", "reset_optimizer", "annotate") for step in (3, 5)]
    assert [values["policy/reset"] for values in stand_in.values] == [0, 0, 1, 0, 1]
    what = ("reference", "optimizer")
    assert control.state.resets.done == (Reset(2, "every 2 steps", what), Reset(4, "every 2 steps", what))


def test_only_what_is_named_is_reset() -> None:
    keeping = StandIn({})
    _run(keeping, _config(3), control=_control(every=2, what=("reference",)))
    assert "set_reference" in keeping.calls and "reset_optimizer" not in keeping.calls


def test_annotation_goes_on_while_engines_sample_except_before_a_new_reference() -> None:
    """The third step resets the reference between sampling and update, so what it annotates must come after."""

    class Ahead(StandIn):
        def collect(self, source: PromptSource, order: StepRequest) -> Collected:
            found = super().collect(source, order)
            if order.meanwhile is not None:
                for group in found.groups:
                    order.meanwhile.finished(group)
                while order.meanwhile.work():
                    pass
            return found

        def annotate(self, batch: StepBatch, needs: Needs, returned: Needs | None = None) -> StepBatch:
            super().annotate(batch, needs, returned)
            (mini,) = batch.mini_batches
            ((micro,),) = mini.per_rank
            inputs = replace(micro.inputs, ref_logp_T=torch.zeros_like(micro.inputs.mask_T))
            return replace(batch, mini_batches=(replace(mini, per_rank=((replace(micro, inputs=inputs),),)),))

        def step(self, batch: StepBatch, recipe: Recipe, norm_limit: float | None = None) -> StepStats:
            assert batch.mini_batches[0].per_rank[0][0].inputs.ref_logp_T is not None
            return super().step(batch, recipe, norm_limit)

    stand_in, config = Ahead({}), _config(3, checkpoint_every=10, evaluate_every=0)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"overlap_annotation": True})})
    resets = _control(every=2, what=("reference",))
    # The two groups of a step have 6 rows each, and fill a micro-batch.
    _run(stand_in, config, methods=("grpo", "kl"), control=resets, micro_batch_tokens=12)
    assert [phase for call, phase in stand_in.phase_at if call == "annotate"] == ["sampling", "sampling", "training"]
    assert [values.get("rollout/annotated_ahead") for values in stand_in.values] == [1.0, 1.0, None]


def test_an_update_gets_the_limit_that_the_ones_before_it_make() -> None:
    stand_in = StandIn({})
    control = Control(Rules(ResetRule(), (LengthStage(max_response_tokens=4),), SpikeRule(6.0)), ControlState())
    _run(stand_in, _config(25), control=control)
    assert stand_in.limits == [None] * 20 + [1.0] * 5
    assert [values["policy/spikes"] for values in stand_in.values] == [0.0] * 24 + [1.0]


def test_a_step_has_the_limit_the_shares_and_the_number_of_responses_of_its_stage() -> None:
    stand_in, weights = StandIn({}), {"math": 1.0}
    first = LengthStage(max_response_tokens=8, until=2, weights=weights, responses_per_prompt=3)
    _run(stand_in, _config(4), control=_control(first, LengthStage(max_response_tokens=16)))
    assert [order.max_tokens for order in stand_in.orders] == [8, 8, 16, 16]
    assert [order.responses for order in stand_in.orders] == [3, 3, None, None]
    assert stand_in.weighed == [weights, weights, None, None]
    assert [values["rollout/length_limit"] for values in stand_in.values] == [8, 8, 16, 16]


def test_the_best_weights_get_a_checkpoint_of_their_own_unless_they_have_one() -> None:
    stand_in = StandIn({})
    stand_in.best = {3, 12}
    _run(stand_in, _config(13))
    assert stand_in.evaluated == [3, 6, 9, 12]
    assert stand_in.saved == [(3, 0), (4, 0), (8, 0), (12, 0), (13, 0)]
    # Never while the engines have the devices, as they do in an evaluation.
    assert stand_in.saved_in == {"handover"}


def test_a_step_whose_groups_are_all_dropped_leaves_the_policy_alone() -> None:
    """Three such steps in a row end the run; nothing is packed or stepped, and no loss is told of."""

    class Uniform(StandIn):
        def group(self, step: int, prompt: Prompt) -> Group:
            return dataclasses.replace(super().group(step, prompt), responses=(_response(1.0), _response(1.0)))

        def after_step(self, step: int, groups: Sequence[Group], values: Mapping[str, float]) -> None:
            assert values["policy/skipped"] == 1.0 and values["group/dropped_uniform"] > 0
            assert "policy/loss" not in values

    stand_in = Uniform({})
    with pytest.raises(TrainingStopped, match="every group dropped by selection"):
        _run(stand_in, _config(9), methods=("grpo", "dynamic_sampling"))
    assert "step" not in stand_in.calls and stand_in.calls.count("push") == stand_in.calls.count("forget") == 3
