"""The watchdog of a run: which stages have which budget, and where its ranks are."""

from __future__ import annotations

from pathlib import Path

from megasharp.checkpoint.run_folder import AttemptLog
from megasharp.common.watchdog import Budget, Watchdog, Watched
from megasharp.metrics.clock import StageClock
from megasharp.trainer.placement import Placement
from megasharp.trainer.resolve.resolved_run import ResolvedRun


def make_watchdog(
    checked: ResolvedRun, clock: StageClock, placement: Placement, logs: Path, attempt: AttemptLog
) -> Watchdog:
    """A context manager: what runs inside is watched."""
    guard = checked.config.guard
    long_stages = guard.long_stages.model_dump()
    return Watchdog(
        Watched(clock.present, logs, placement.processes(checked.layout.world), placement.there),
        Budget(guard.stage_timeout_s, "guard.stage_timeout_s"),
        {stage: Budget(seconds, f"guard.long_stages.{stage}") for stage, seconds in long_stages.items()},
        attempt.end,
    )
