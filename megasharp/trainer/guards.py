"""The limits at which a run ends itself: after each step its metrics go in, and a reason to stop may come out.

A run that stops here keeps its checkpoint and is not started again by `--retries`: another start would end the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megasharp.config.run_config import GuardConfig


@dataclass(frozen=True, slots=True)
class StopReason:
    """Cause of a stop, and where to look or what to change, each a clause without a full stop."""

    cause: str
    remedy: str


class Guards:
    """Applies the limits of `guard` that end a run; one object sees all steps of an attempt."""

    def __init__(self, limits: GuardConfig) -> None:
        self._limits = limits

    def after_step(self, skipped_in_a_row: int, values: Mapping[str, float]) -> StopReason | None:
        """Return why the run must end after this step, if it must; `values` are the step's metrics."""
        return self._not_applied(skipped_in_a_row) or self._engine_gap(values)

    def _not_applied(self, skipped_in_a_row: int) -> StopReason | None:
        if skipped_in_a_row < self._limits.nan_limit:
            return None
        return StopReason(
            f"{skipped_in_a_row} steps in a row were not applied (a loss or gradient that is not finite or, by "
            "guard.spike_sigma, too large, or every group dropped by selection)",
            "look at policy/grad_norm, policy/spikes and group/dropped in metrics.jsonl, then lower "
            "policy.optimizer.lr or ease the selection",
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
            "rollout.max_staleness, the model folder of the engines and the dtypes of both",
        )
