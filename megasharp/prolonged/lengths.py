"""How long responses may be at which step: stages, as in ProRL (8k, then 16k) and DeepScaleR (8k, 16k, 24k).

A stage ends after a step, when a figure of the training steps is above a value (responses meet the limit), or when an
evaluation stagnates, whichever comes first; the last one lasts to the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megasharp.prolonged.stagnation import StagnationRule, Watch


@dataclass(frozen=True, slots=True)
class Threshold:
    """True when the mean of `metric` over the last `steps` steps is above `value`."""

    metric: str
    value: float
    steps: int


@dataclass(frozen=True, slots=True)
class LengthStage:
    """Responses of at most `max_response_tokens` until one of the ends comes; none of them: for the rest of the run."""

    max_response_tokens: int
    until: int | None = None
    above: Threshold | None = None
    stagnation: StagnationRule | None = None


@dataclass(frozen=True, slots=True)
class LengthChange:
    """After `step` responses may have `max_response_tokens`."""

    step: int
    max_response_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class LengthState:
    """The present stage's number, what its ends have seen, why it is over if it is, and the changes so far."""

    stage: int = 0
    recent: tuple[float, ...] = ()
    watch: Watch = field(default_factory=Watch)
    over: str | None = None
    changes: tuple[LengthChange, ...] = ()

    def trained(self, stages: Sequence[LengthStage], figures: Mapping[str, float]) -> LengthState:
        """With a step's figures."""
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
        """With the evaluation after `step`."""
        rule = stages[self.stage].stagnation
        if rule is None:
            return self
        watch = self.watch.seen(rule, step, figures)
        return replace(self, watch=watch, over=self.over or watch.stagnates(rule))

    def before(self, stages: Sequence[LengthStage], step: int) -> LengthState:
        """As it is for step `step`: stages that are over have given way to the next ones."""
        state = self
        while (reason := state._end(stages[state.stage], step)) is not None:
            following = stages[state.stage + 1]
            change = LengthChange(step - 1, following.max_response_tokens, reason)
            # What an evaluation under one limit gave is no measure for the next stage: it begins with nothing seen.
            state = LengthState(state.stage + 1, changes=(*state.changes, change))
        return state

    def _end(self, stage: LengthStage, step: int) -> str | None:
        if self.over is not None:
            return self.over
        return f"step {stage.until} is done" if stage.until is not None and step > stage.until else None
