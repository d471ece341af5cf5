"""When the present weights become the reference, and the optimizer begins anew (ProRL, arXiv 2505.24864).

Printed: reference and optimizer are reset when validation stagnates or degrades. The authors' later account: every 200
to 500 steps, the optimizer kept. What "stagnates" means in numbers is ours: `StagnationRule`. After a reset the value
to beat is that of the last evaluation, so that a policy which has degraded gets as much time as any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from megasharp.prolonged.stagnation import StagnationRule, Watch

What = Literal["reference", "optimizer"]


@dataclass(frozen=True, slots=True)
class ResetRule:
    """A reset falls due every `every` steps, and where `stagnation` says so; `what` is reset."""

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
        """With the evaluation after `step`."""
        if rule.stagnation is None:
            return self
        watch = self.watch.seen(rule.stagnation, step, figures)
        return replace(self, watch=watch, due=watch.stagnates(rule.stagnation))

    def before(self, rule: ResetRule, step: int) -> Reset | None:
        """The reset that is to be carried out before the update of `step`."""
        reason = self.due
        if reason is None and rule.every is not None and step > 1 and (step - 1) % rule.every == 0:
            reason = f"every {rule.every} steps"
        return None if reason is None else Reset(step - 1, reason, rule.what)

    def carried_out(self, reset: Reset) -> ResetState:
        """With a reset that `before` asked for."""
        return ResetState(self.watch.anew(), None, (*self.done, reset))
