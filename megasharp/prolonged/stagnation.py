"""When a figure of the evaluations has stopped growing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StagnationRule:
    """`metric` stagnates when `patience` evaluations in a row are not above the best by more than `min_improvement`."""

    metric: str
    patience: int
    min_improvement: float = 0.0


@dataclass(frozen=True, slots=True)
class Watch:
    """What a rule has seen: the best value and its step, the last value and its step, evaluations since the best."""

    best: float | None = None
    best_step: int = 0
    last: float | None = None
    last_step: int = 0
    waited: int = 0

    def seen(self, rule: StagnationRule, step: int, figures: Mapping[str, float]) -> Watch:
        """With the evaluation after `step`; one that does not give the metric says nothing."""
        value = figures.get(rule.metric)
        if value is None:
            return self
        if self.best is None or value > self.best + rule.min_improvement:
            return Watch(value, step, value, step, 0)
        return replace(self, last=value, last_step=step, waited=self.waited + 1)

    def anew(self) -> Watch:
        """Counting begins again: what is to be beaten now is the last evaluation, not the best one."""
        return Watch(self.last, self.last_step, self.last, self.last_step, 0)

    def stagnates(self, rule: StagnationRule) -> str | None:
        """The reason in words, where the metric stagnates."""
        if self.waited < rule.patience:
            return None
        return (
            f"{rule.metric} is {self.last:.4g}, and was not above the {self.best:.4g} of step {self.best_step} "
            f"in {self.waited} evaluations"
        )
