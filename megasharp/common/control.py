"""Decisions that a run takes in its course: a state that checkpoints carry, and the rules that move it.

The state changes only by metrics of training steps and evaluations, each step's once. So a run that is stopped and
resumed decides as an uninterrupted one. It decides on four things, each with a rule and a state below:

- Stagnation: a metric of the evaluations has stopped growing. The best value of every metric is kept, with its step.
- Spikes: the gradient norm above which an update is left out, as in OLMo-core's optimizer: mean + 6 standard deviations
  over the last 128 steps. A norm above the limit is counted as twice the limit at most: norms that have grown somewhat
  for good pass after a few steps, and one huge norm does not let the next one through.
- Length stages: the response limit of each step, as in ProRL (8k, then 16k) and DeepScaleR (8k, 16k, 24k). A stage ends
  after a step, when a training metric is above a value, or when an evaluation stagnates; the last one has no end. A
  stage may change the number of responses to a prompt and the shares of a mixture too.
- Resets: the present weights become the reference, and the optimizer restarts (ProRL, arXiv 2505.24864). The paper
  resets both when validation stagnates or degrades; the authors' later account is every 200 to 500 steps with the
  optimizer kept. The numbers of `StagnationRule` are ours. After a reset the value to beat is that of the last
  evaluation, so that a policy which has degraded gets as much time as any other.
  A reset by steps comes `every` steps after the last reset of either kind, and one by stagnation never in the step
  after another: it would throw away what one step has just begun.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field

from megasharp.common.section import Section


class StagnationRule(Section):
    """True when a metric of the evaluations, such as `eval/<suite>/pass@1`, has stopped growing.

    That is: `patience` scheduled evaluations in a row are not above the best by more than `min_improvement`.
    """

    metric: str = Field(
        description="Evaluation metric to watch, as eval/SUITE/pass@1. Allowed are pass@k of every k in eval.k, "
        "avg@n, pass@n, greedy and distinct_correct.",
    )
    patience: int = Field(
        default=4,
        ge=1,
        description="Number of scheduled evaluations in a row without improvement after which the metric counts as "
        "stagnating.",
    )
    min_improvement: float = Field(
        default=0.0,
        ge=0.0,
        description="Smallest gain over the best value that counts as an improvement, in the unit of the metric. 0: "
        "any gain counts.",
    )


@dataclass(frozen=True, slots=True)
class Watch:
    """The evaluations that a rule has seen: best and last value with their steps, and how many came since the best."""

    best: float | None = None
    best_step: int = 0
    last: float | None = None
    last_step: int = 0
    waited: int = 0

    def seen(self, rule: StagnationRule, step: int, figures: Mapping[str, float]) -> Watch:
        """Return the watch with the evaluation after `step`; one without the metric changes nothing."""
        value = figures.get(rule.metric)
        if value is None:
            return self
        if self.best is None or value > self.best + rule.min_improvement:
            return Watch(value, step, value, step, 0)
        return replace(self, last=value, last_step=step, waited=self.waited + 1)

    def restarted(self) -> Watch:
        """Return a watch that counts from zero and has the last evaluation to beat, not the best one."""
        return Watch(self.last, self.last_step, self.last, self.last_step, 0)

    def stagnates(self, rule: StagnationRule) -> str | None:
        """Return the reason in words where the metric stagnates, else None."""
        if self.waited < rule.patience:
            return None
        return (
            f"{rule.metric} is {self.last:.4g}, and was not above the {self.best:.4g} of step {self.best_step} "
            f"in {self.waited} evaluations"
        )


# Metrics of an evaluation of which more is better, besides pass@k for every k; their names begin `eval/<suite>/`.
GROWING = ("avg@n", "pass@n", "greedy", "distinct_correct")


@dataclass(frozen=True, slots=True)
class BestFigure:
    """The highest value of a metric, and the step after which it was first reached."""

    value: float
    step: int


def is_growing(name: str) -> bool:
    """Return whether more of this metric is better, by its name."""
    figure = name.rpartition("/")[2]
    return name.startswith("eval/") and (figure in GROWING or figure.startswith("pass@"))


def with_evaluation(best: Mapping[str, BestFigure], step: int, figures: Mapping[str, float]) -> dict[str, BestFigure]:
    """Return `best` with the evaluation after `step`; the model that training starts from (step 0) does not count."""
    found = dict(best)
    for name, value in figures.items():
        if step > 0 and is_growing(name) and (name not in found or value > found[name].value):
            found[name] = BestFigure(value, step)
    return found


_MOST_LIMITS = 2.0
# With fewer norms the deviation says little, and a run's first steps vary most.
_FEWEST = 20


@dataclass(frozen=True, slots=True)
class SpikeRule:
    """`sigma` standard deviations above the mean of the last `window` optimizer steps."""

    sigma: float
    window: int = 128


@dataclass(frozen=True, slots=True)
class SpikeState:
    """The gradient norms of the last optimizer steps, oldest first."""

    norms: tuple[float, ...] = ()

    def limit(self, rule: SpikeRule) -> float | None:
        """Return the largest norm that is applied; None while too few are known."""
        if len(self.norms) < _FEWEST:
            return None
        mean = statistics.fmean(self.norms)
        return mean + rule.sigma * statistics.pstdev(self.norms, mean)

    def seen(self, rule: SpikeRule, norms: Sequence[float]) -> SpikeState:
        """Return the state with the norms of a training step's optimizer steps; non-finite and zero ones do not count.

        Zero is a step whose groups are all right or all wrong. Where rewards are rare most steps are such; if they
        counted, every step with a gradient would be a spike.
        """
        state = self
        for norm in norms:
            if math.isfinite(norm) and norm > 0.0:
                limit = state.limit(rule)
                counted = norm if limit is None else min(norm, _MOST_LIMITS * limit)
                state = SpikeState((*state.norms, counted)[-rule.window :])
        return state


class Threshold(Section):
    """True when the mean of a training metric over the last `steps` steps is above `value`."""

    metric: Literal["rollout/truncated", "rollout/length_mean"] = Field(
        description="Training metric to watch: rollout/truncated, the share of responses cut off at the limit, or "
        "rollout/length_mean, the mean response length in tokens.",
    )
    value: float = Field(
        ge=0.0,
        description="Threshold that the mean of the metric must exceed: a share from 0 to 1 for rollout/truncated, "
        "tokens for rollout/length_mean.",
    )
    steps: int = Field(
        default=10,
        ge=1,
        description="Number of the latest training steps over which the metric is averaged. With fewer steps in the "
        "stage, the threshold is never met.",
    )


class LengthStage(Section):
    """A limit on responses until the first of its ends: a step, a threshold, an evaluation that stagnates.

    A stage may also have a number of responses to a prompt, and shares of a mixture's sources, of its own.
    """

    until: int | None = Field(
        default=None,
        ge=1,
        description="Last training step of the stage. It must grow from stage to stage. null: no step ends the stage.",
    )
    above: Threshold | None = Field(
        default=None,
        description="Ends the stage when a training metric exceeds a threshold, for example when many responses are "
        "truncated. null: no such end.",
    )
    stagnation: StagnationRule | None = Field(
        default=None,
        description="Ends the stage when an evaluation metric stops improving. null: no such end.",
    )
    max_response_tokens: int = Field(ge=1, description="Longest response of this stage, in tokens.")
    responses_per_prompt: int | None = Field(
        default=None,
        ge=1,
        description="Number of responses to each prompt in this stage. null: data.responses_per_prompt.",
    )
    weights: dict[str, Annotated[float, Field(ge=0.0)]] | None = Field(
        default=None,
        description="Shares of the sources of data.mix in this stage, by their names; a source that is not named has "
        "none. null: those of data.mix.",
    )


@dataclass(frozen=True, slots=True)
class LengthChange:
    """A change of the limit: after `step` responses may have `max_response_tokens`."""

    step: int
    max_response_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class LengthState:
    """The present stage's number, the values its ends have seen, why it is over if it is, and the changes so far."""

    stage: int = 0
    recent: tuple[float, ...] = ()
    watch: Watch = field(default_factory=Watch)
    over: str | None = None
    changes: tuple[LengthChange, ...] = ()

    def trained(self, stages: Sequence[LengthStage], figures: Mapping[str, float]) -> LengthState:
        """Return the state with a training step's metrics."""
        above = stages[self.stage].above
        if above is None or above.metric not in figures:
            return self
        recent = (*self.recent, figures[above.metric])[-above.steps :]
        mean = sum(recent) / len(recent)
        if len(recent) < above.steps or mean <= above.value:
            return replace(self, recent=recent)
        words = f"{above.metric} is {mean:.4g} over {above.steps} steps, above {above.value:g}"
        return replace(self, recent=recent, over=self.over or words)

    def evaluated(self, stages: Sequence[LengthStage], step: int, figures: Mapping[str, float]) -> LengthState:
        """Return the state with the evaluation after `step`."""
        rule = stages[self.stage].stagnation
        if rule is None:
            return self
        watch = self.watch.seen(rule, step, figures)
        return replace(self, watch=watch, over=self.over or watch.stagnates(rule))

    def before(self, stages: Sequence[LengthStage], step: int) -> LengthState:
        """Return the state for step `step`, in which the next stage has begun where one is over."""
        state = self
        while (reason := state._end(stages[state.stage], step)) is not None:
            following = stages[state.stage + 1]
            change = LengthChange(step - 1, following.max_response_tokens, reason)
            # An evaluation under one limit does not measure the next stage, which so begins with nothing seen.
            state = LengthState(state.stage + 1, changes=(*state.changes, change))
        return state

    def _end(self, stage: LengthStage, step: int) -> str | None:
        if self.over is not None:
            return self.over
        return f"step {stage.until} is done" if stage.until is not None and step > stage.until else None


What = Literal["reference", "optimizer"]


@dataclass(frozen=True, slots=True)
class ResetRule:
    """A reset falls due `every` steps after the last one, and where `stagnation` says so; `what` is reset."""

    every: int | None = None
    stagnation: StagnationRule | None = None
    what: tuple[What, ...] = ("reference", "optimizer")


@dataclass(frozen=True, slots=True)
class Reset:
    """One reset: the weights after `step` became the reference, before the next update."""

    step: int
    reason: str
    what: tuple[What, ...]


@dataclass(frozen=True, slots=True)
class ResetState:
    """`due` is the reason of a reset that is decided and not carried out yet; `done` are those carried out."""

    watch: Watch = field(default_factory=Watch)
    due: str | None = None
    done: tuple[Reset, ...] = ()

    def evaluated(self, rule: ResetRule, step: int, figures: Mapping[str, float]) -> ResetState:
        """Return the state with the evaluation after `step`."""
        if rule.stagnation is None:
            return self
        watch = self.watch.seen(rule.stagnation, step, figures)
        return replace(self, watch=watch, due=watch.stagnates(rule.stagnation))

    def before(self, rule: ResetRule, step: int) -> Reset | None:
        """Return the reset to carry out before the update of `step`, if any."""
        last = self.done[-1].step if self.done else 0
        since = step - 1 - last
        # Stagnation found by the evaluation of the one step since a reset waits for another step.
        reason = self.due if since > 1 or not self.done else None
        if reason is None and rule.every is not None and since >= rule.every:
            reason = f"every {rule.every} steps"
        return None if reason is None else Reset(step - 1, reason, rule.what)

    def carried_out(self, reset: Reset) -> ResetState:
        """Return the state after a reset that `before` asked for."""
        return ResetState(self.watch.restarted(), None, (*self.done, reset))


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a run: resets, response limits by stage, gradient spikes, and the token budget.

    The last stage has no end. `token_budget` counts response tokens; None: the number of steps alone ends the run.
    """

    reset: ResetRule
    stages: tuple[LengthStage, ...]
    spike: SpikeRule | None = None
    token_budget: int | None = None


@dataclass(frozen=True, slots=True)
class ControlState:
    """Everything decided so far; `evaluated_step` is the last step whose evaluation the rules have seen.

    `tokens` counts the response tokens sampled for all steps.
    """

    resets: ResetState = field(default_factory=ResetState)
    lengths: LengthState = field(default_factory=LengthState)
    best: Mapping[str, BestFigure] = field(default_factory=dict)
    evaluated_step: int = -1
    spikes: SpikeState = field(default_factory=SpikeState)
    tokens: int = 0


class Control:
    """Applies the rules to the state; a resumed run starts from the stored one."""

    def __init__(self, rules: Rules, state: ControlState) -> None:
        self._rules = rules
        self.state = state

    def stage(self, step: int) -> LengthStage:
        """Return the stage that `step` is in; called before its rollouts."""
        lengths = self.state.lengths.before(self._rules.stages, step)
        spikes = self.state.spikes if lengths.stage == self.state.lengths.stage else SpikeState()
        self.state = replace(self.state, lengths=lengths, spikes=spikes)
        return self._rules.stages[lengths.stage]

    def reset(self, step: int) -> Reset | None:
        """Return the reset due before the update of `step`, if any; the answer stays the same until `carried_out`."""
        return self.state.resets.before(self._rules.reset, step)

    def carried_out(self, reset: Reset) -> None:
        """Record a reset. Gradients after it are of another size, so the norms before it no longer limit them."""
        self.state = replace(self.state, resets=self.state.resets.carried_out(reset), spikes=SpikeState())

    def norm_limit(self) -> float | None:
        """Return the largest gradient norm that the next update may have; None: any that is finite."""
        return None if self._rules.spike is None else self.state.spikes.limit(self._rules.spike)

    def updated(self, norms: Sequence[float]) -> None:
        """Record the gradient norms of a step's updates."""
        if self._rules.spike is not None:
            self.state = replace(self.state, spikes=self.state.spikes.seen(self._rules.spike, norms))

    def trained(self, figures: Mapping[str, float]) -> None:
        """Record a step's metrics, before its checkpoint."""
        lengths = self.state.lengths.trained(self._rules.stages, figures)
        tokens = self.state.tokens + int(figures.get("rollout/tokens", 0.0))
        self.state = replace(self.state, lengths=lengths, tokens=tokens)

    def over(self) -> bool:
        """Return whether the run has used up its token budget."""
        return self._rules.token_budget is not None and self.state.tokens >= self._rules.token_budget

    def evaluated(self, step: int, figures: Mapping[str, float], *, scheduled: bool) -> None:
        """Record all metrics of the evaluations after `step`; given twice, they count once.

        Only scheduled evaluations move resets and stages. A run whose `steps` was lowered evaluates at its new end,
        and must not decide otherwise than the longer run at that step.
        """
        self.state = replace(self.state, best=with_evaluation(self.state.best, step, figures))
        if scheduled and step > self.state.evaluated_step:
            self.state = replace(
                self.state,
                resets=self.state.resets.evaluated(self._rules.reset, step, figures),
                lengths=self.state.lengths.evaluated(self._rules.stages, step, figures),
                evaluated_step=step,
            )
