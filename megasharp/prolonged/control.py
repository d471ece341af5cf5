"""What a run decides in its course: a state that checkpoints carry, and the rules that move it.

The state changes only by what is told (a step's figures, an evaluation's), each step's once, so a run that is stopped
and resumed decides as one that was not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megasharp.prolonged.best import BestFigure, with_evaluation
from megasharp.prolonged.lengths import LengthStage, LengthState
from megasharp.prolonged.resets import Reset, ResetRule, ResetState
from megasharp.prolonged.spikes import SpikeRule, SpikeState


@dataclass(frozen=True, slots=True)
class Rules:
    """When to reset, how long responses may be in which stage, which gradients are too large, and when it is enough.

    The last stage has no end. `token_budget` counts response tokens; None: the number of steps alone ends the run.
    """

    reset: ResetRule
    stages: tuple[LengthStage, ...]
    spike: SpikeRule | None = None
    token_budget: int | None = None


@dataclass(frozen=True, slots=True)
class ControlState:
    """Everything that was decided so far; `evaluated_step` is the last one whose evaluation the rules were told.

    `tokens` counts what was sampled for all steps.
    """

    resets: ResetState = field(default_factory=ResetState)
    lengths: LengthState = field(default_factory=LengthState)
    best: Mapping[str, BestFigure] = field(default_factory=dict)
    evaluated_step: int = -1
    spikes: SpikeState = field(default_factory=SpikeState)
    tokens: int = 0


class Control:
    """Applies the rules to the state, which is where a run left it."""

    def __init__(self, rules: Rules, state: ControlState) -> None:
        self._rules = rules
        self.state = state

    def response_limit(self, step: int) -> int:
        """How many tokens a response of `step` may have; asked before its rollouts."""
        lengths = self.state.lengths.before(self._rules.stages, step)
        spikes = self.state.spikes if lengths.stage == self.state.lengths.stage else SpikeState()
        self.state = replace(self.state, lengths=lengths, spikes=spikes)
        return self._rules.stages[lengths.stage].max_response_tokens

    def reset(self, step: int) -> Reset | None:
        """What is to be reset before the update of `step`; stays so until `carried_out`."""
        return self.state.resets.before(self._rules.reset, step)

    def carried_out(self, reset: Reset) -> None:
        """A reset is done. Gradients after it are of another size, so those before it set them no limit."""
        self.state = replace(self.state, resets=self.state.resets.carried_out(reset), spikes=SpikeState())

    def norm_limit(self) -> float | None:
        """The largest gradient norm that the next update may have; None: any that is finite."""
        return None if self._rules.spike is None else self.state.spikes.limit(self._rules.spike)

    def updated(self, norms: Sequence[float]) -> None:
        """The gradient norms of a step's updates."""
        if self._rules.spike is not None:
            self.state = replace(self.state, spikes=self.state.spikes.seen(self._rules.spike, norms))

    def trained(self, figures: Mapping[str, float]) -> None:
        """A step's figures, before its checkpoint."""
        lengths = self.state.lengths.trained(self._rules.stages, figures)
        tokens = self.state.tokens + int(figures.get("rollout/tokens", 0.0))
        self.state = replace(self.state, lengths=lengths, tokens=tokens)

    def over(self) -> bool:
        """Whether the run has sampled what it may."""
        return self._rules.token_budget is not None and self.state.tokens >= self._rules.token_budget

    def evaluated(self, step: int, figures: Mapping[str, float], *, scheduled: bool) -> None:
        """All figures of the evaluations after `step`; told twice, they count once.

        Only what the schedule of evaluations asks for moves resets and stages: an evaluation because the run's end was
        set earlier would make it another run.
        """
        self.state = replace(self.state, best=with_evaluation(self.state.best, step, figures))
        if scheduled and step > self.state.evaluated_step:
            self.state = replace(
                self.state,
                resets=self.state.resets.evaluated(self._rules.reset, step, figures),
                lengths=self.state.lengths.evaluated(self._rules.stages, step, figures),
                evaluated_step=step,
            )
