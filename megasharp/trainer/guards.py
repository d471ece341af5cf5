"""The limits at which a run ends itself: after each step its metrics go in, and a reason to stop may come out.

A run that stops here keeps its checkpoint and is not started again by `--retries`: another start would end the same.

Here too is the filter of responses that the engine did not sample from the policy (`guard.engine_gap_filter`). It is
decided by the driver on the whole step, so all ranks leave the same responses out.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch

from megasharp.algos.base import Needs, OldLogp
from megasharp.algos.recipe import Recipe
from megasharp.batching.delivery import with_annotations
from megasharp.batching.packing import PackLayout, pack
from megasharp.common.records import Group, Maximum, Mean, Metrics, Outcome, Response, StepBatch
from megasharp.config.run_config import GuardConfig
from megasharp.ops.segment import segment_sum
from megasharp.rollout.tally import Lost, lost_responses


@dataclass(frozen=True, slots=True)
class StopReason:
    """Cause of a stop, and where to look or what to change, each a clause without a full stop."""

    cause: str
    remedy: str


# Some failures in a step are chance; in so many steps in a row they are not.
_FAILING_STEPS = 3
# Fewer lost responses than this are chance, and a share is taken of at least so many responses where steps are small.
_LOST, _RESPONSES = 6, 256


class Guards:
    """Applies the limits of `guard` that end a run; one object sees all steps of an attempt.

    `failed_rewards` says how many rewards failed, and how the first did. `request_limit_s` is that of the rollouts.
    """

    def __init__(
        self, limits: GuardConfig, failed_rewards: Callable[[], str] = str, request_limit_s: float = 0.0
    ) -> None:
        self._limits = limits
        self._failed_rewards = failed_rewards
        self._request_limit_s = request_limit_s
        self._failing_steps = 0
        # Of the latest steps, the last one at the end.
        self._lost: list[Lost] = []

    def after_step(
        self, skipped_in_a_row: int, values: Mapping[str, float], groups: Sequence[Group] = ()
    ) -> StopReason | None:
        """Return why the run must end after this step, if it must; `values` are the step's metrics."""
        # Lost responses, and a reward that fails, make gradients vanish too, so they are the causes to name.
        return (
            self._infra(groups)
            or self._reward_errors(values)
            or self._not_applied(skipped_in_a_row)
            or self._engine_gap(values)
        )

    def _infra(self, groups: Sequence[Group]) -> StopReason | None:
        self._lost.append(lost_responses(groups, self._request_limit_s))
        while sum(step.responses for step in self._lost[1:]) >= _RESPONSES:
            del self._lost[0]
        for latest in (self._lost[-1:], self._lost):
            lost, limit = sum(latest, Lost()), self._limits.infra_rate
            if limit is not None and lost.count >= _LOST and lost.count > limit * lost.responses:
                (cause, times), *_ = lost.causes.most_common(1)
                steps = "this step" if len(latest) == 1 else f"the latest {len(latest)} steps"
                return StopReason(
                    f"{lost.who} {lost.count} of {lost.responses} responses of {steps} (guard.infra_rate is "
                    f"{limit:g}), {times} of them for this: {cause}",
                    "mend that, then continue with --resume",
                )
        return None

    def _reward_errors(self, values: Mapping[str, float]) -> StopReason | None:
        limit, share = self._limits.reward_errors, values.get("reward/errors", 0.0)
        every = share >= 1.0
        if limit is None or (share <= limit and not every):
            self._failing_steps = 0
            return None
        self._failing_steps += 1
        if self._failing_steps < _FAILING_STEPS and not every:
            return None
        where = "every response of a step" if every else f"{share:.1%} of a step's responses, the third step in a row"
        return StopReason(
            f"the reward failed on {where} (guard.reward_errors is {limit:g}): {self._failed_rewards()}",
            "mend the reward, then continue with --resume",
        )

    def needs(self, asked: Needs) -> Needs:
        """Return the passes before the update: those asked for, and the one whose log-probs the filter compares."""
        if self._limits.engine_gap_filter is None:
            return asked
        return replace(asked, old_logp=max(asked.old_logp, OldLogp.IN_LOSS))

    def filter(
        self, batch: StepBatch, recipe: Recipe, groups: Sequence[Group], layout: PackLayout
    ) -> tuple[StepBatch | None, Metrics]:
        """Leave responses out of an annotated step that are too far from the policy; None where nothing is left.

        Loss and gradient are those of the step in which these responses had failed without a verdict: they are masked
        and in no denominator, and advantages are estimated from the others of their group. With the filter,
        `policy/engine_gap` is of all responses, and `policy/engine_gap_filtered` counts those that are left out.
        """
        limit = self._limits.engine_gap_filter
        if limit is None:
            return batch, {}
        distant, metrics = too_far(batch, limit)
        kept = pack(recipe.advantages(_without(groups, distant)), layout, batch.seed) if distant else batch
        if not any(mini.denominators.tokens for mini in kept.mini_batches):
            return None, metrics
        return with_annotations(kept, batch, old_logp=recipe.annotation.old_logp is not OldLogp.NONE), metrics

    def _not_applied(self, skipped_in_a_row: int) -> StopReason | None:
        if skipped_in_a_row < self._limits.nan_limit:
            return None
        return StopReason(
            f"{skipped_in_a_row} steps in a row were not applied (a loss or gradient that is not finite or, by "
            "guard.spike_sigma, too large, every group dropped by selection, or every response left out by "
            "guard.engine_gap_filter)",
            "look at policy/grad_norm, policy/spikes, group/dropped and policy/engine_gap in metrics.jsonl, then lower "
            "policy.optimizer.lr or ease the selection or the filter",
        )

    def _engine_gap(self, values: Mapping[str, float]) -> StopReason | None:
        limit, gap = self._limits.engine_gap_stop, values.get("policy/engine_gap", 0.0)
        # Written so that a gap which is not a number is above every limit.
        if limit is None or gap <= limit:
            return None
        return StopReason(
            f"the engine's log-probs are {gap:.3g} nats off the learner's on average (guard.engine_gap_stop is "
            f"{limit:g}), so what is sampled is not what is trained",
            "look at policy/engine_gap of the steps before in metrics.jsonl, then at sync.verify, sync.in_flight, "
            f"rollout.max_staleness, the model folder of the engines and the dtypes of both{about_experts(values)}",
        )


def about_experts(values: Mapping[str, float]) -> str:
    """Return the end of a sentence on the engine gap: where a mixture of experts may have it from, too."""
    if "experts/load_max" not in values or "experts/moved" in values:
        return ""
    return ", and set policy.experts.replay: engines may send tokens to other experts than the learner"


def too_far(batch: StepBatch, limit: float) -> tuple[set[int], Metrics]:
    """Find the responses whose mean |old log-prob - the engine's record of it| is above `limit`, in nats, or no number.

    Returns their places in the step's flat order, and metrics of all responses. Masked tokens do not count.
    """
    distant: set[int] = set()
    total = tokens = largest = 0.0
    for micro in (micro for mini in batch.mini_batches for rank in mini.per_rank for micro in rank):
        x = micro.inputs
        assert x.policy_logp_T is not None
        gap_T = (x.before_T.double() - x.policy_logp_T.double()).abs().masked_fill(x.mask_T == 0, 0.0)
        mean_S = segment_sum(gap_T, x.seq_T, x.num_sequences) / micro.length_S.clamp(min=1.0)
        far = (~(mean_S <= limit)).tolist()
        distant.update(flat for flat, is_far in zip(micro.sequence_ids, far, strict=True) if is_far)
        total, tokens = total + float(gap_T.sum()), tokens + float(micro.length_S.sum())
        largest = max(largest, float(torch.cat([gap_T, gap_T.new_zeros(1)]).max()))
    return distant, {
        "policy/engine_gap": Mean(total, tokens),
        "policy/engine_gap_max": Maximum(largest),
        "policy/engine_gap_filtered": Mean(float(len(distant)), 1.0),
    }


def _without(groups: Sequence[Group], distant: Container[int]) -> list[Group]:
    """Return the groups with the responses at these places made failures that no method scores."""
    flat = count()

    def judged(response: Response) -> Response:
        if next(flat) not in distant:
            return response
        return replace(response, verdict=replace(response.verdict, outcome=Outcome.INFRA, reward=0.0))

    # Dropped groups have no place in the step.
    return [
        group if group.dropped_reason else replace(group, responses=tuple(map(judged, group.responses)))
        for group in groups
    ]
