"""Records and prints each step of a run: a row of metrics, a table of responses, lines for the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from megasharp.checkpoint.run_folder import RunFolder
from megasharp.cluster.slurm.gpus import Telemetry, open_telemetry
from megasharp.common import signals
from megasharp.common.control import Control
from megasharp.common.errors import one_line
from megasharp.common.records import Group
from megasharp.config.log import RolloutTablesConfig
from megasharp.config.run_config import RunConfig
from megasharp.metrics.clock import StageClock, peak_rss_bytes
from megasharp.metrics.console import Progress, StepLine
from megasharp.metrics.response_table import TableRetention, TokenColumns, write_rollouts
from megasharp.metrics.trackers.watch import Trackers
from megasharp.metrics.writers import MetricLog
from megasharp.rollout.tally import lost_responses
from megasharp.trainer.guards import about_experts
from megasharp.trainer.reward_judge import RewardJudge

ENGINE_GAP = "policy/engine_gap"
TokenTexts = Callable[[Sequence[int]], Sequence[str]]

_TRACKERS_END_S = 30.0


@dataclass(slots=True)
class AttemptTotals:
    """Response tokens of the steps of this attempt, and counters for means of some of their metrics."""

    tokens: float = 0.0
    largest_gap: float | None = None
    _sums: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, row: Mapping[str, float]) -> None:
        """Count a step's row; as in metrics.jsonl, what is not finite is no value."""
        self.tokens += row.get("rollout/tokens", 0.0)
        for name in ("batch/padding", "batch/imbalance", "reward/errors", ENGINE_GAP):
            value = row.get(name)
            if value is not None and math.isfinite(value):
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value, count + 1
                if name == ENGINE_GAP:
                    self.largest_gap = max(value, self.largest_gap or value)

    def mean(self, name: str) -> float | None:
        """Return the mean over the steps that have the metric; None without one."""
        total, count = self._sums.get(name, (0.0, 0))
        return total / count if count else None


class StepLog:
    """The log of a run's steps; `totals` are of this attempt."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        *,
        metrics: MetricLog,
        trackers: Trackers,
        telemetry: Telemetry | None,
        token_columns: TokenColumns | None,
        judge: RewardJudge,
        control: Control,
        clock: StageClock,
        progress: Progress,
    ) -> None:
        self._config = config
        self._folder = folder
        self._metrics = metrics
        self._trackers = trackers
        self._telemetry = telemetry
        self._token_columns = token_columns
        self._judge = judge
        self._control = control
        self._clock = clock
        self._progress = progress
        tables = config.log.rollouts
        self._retention = None if tables is None else TableRetention(folder.root, tables)
        self._noted_changes = len(control.state.lengths.changes)
        self.totals = AttemptTotals()

    def responses(self, step: int, groups: Sequence[Group], memory_ahead: int) -> None:
        """Write the step's table of responses, where `log.rollouts` asks for one, and remove those it keeps no more.

        `memory_ahead`: by how many versions the engines' memory network is ahead of their policy.
        """
        if self._retention is None:
            return
        with self._clock.stage("log"):
            root = self._folder.root
            write_rollouts(root, step, groups, memory_ahead=memory_ahead, tokens=self._token_columns)
            try:
                self._retention.written(step)
            except OSError as error:
                # The next attempt tries again.
                self._retention = TableRetention(root, RolloutTablesConfig(keep_last=None))
                self.note(f"step {step}: older tables of responses stay, they cannot be removed ({one_line(error)})")

    def step(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Write the row of a step, which ends here for the clock, and return it: `values`, and times and memory."""
        seconds = self._clock.take()
        total = sum(seconds.values())
        tokens = values.get("rollout/tokens", 0.0)
        row = {
            **values,
            **{f"time/{stage}": value for stage, value in seconds.items()},
            "time/step": total,
            "rollout/tokens_per_second": tokens / total if total else 0.0,
            "mem/peak_rss_mb": peak_rss_bytes() / 2**20,
            **(self._telemetry.take(tokens) if self._telemetry else {}),
            **self._judge.take(),
        }
        self.write(step, row)
        self._trackers.look()
        self.totals.add(row)
        return row

    def announce(self, step: int, groups: Sequence[Group], row: Mapping[str, float]) -> None:
        """Print what was decided in this step, what went wrong in it, and how far the run is."""
        # A reset came before this step's update, and a new limit of lengths holds from this step on.
        resets, changes = self._control.state.resets.done, self._control.state.lengths.changes
        if row.get("policy/reset"):
            self.note(f"step {step}: {' and '.join(resets[-1].what)} reset first: {resets[-1].reason}")
        for number, change in enumerate(changes[self._noted_changes :], start=self._noted_changes + 1):
            self.note(f"step {step}: {self._in_stage(number)}: {change.reason}")
        self._noted_changes = len(changes)
        if groups and all(group.dropped_reason is not None for group in groups):
            dropped = {name.removeprefix("group/dropped_"): n for name, n in row.items() if "group/dropped_" in name}
            reasons = ", ".join(f"{count:.0f} {reason}" for reason, count in dropped.items())
            self.note(f"step {step}: every group was dropped ({reasons}); the policy was not updated")
        lost = lost_responses(groups, self._config.rollout.request_limit_s)
        for cause, times in lost.causes.most_common(1):
            self.note(
                f"step {step}: {lost.who} {lost.count} of {lost.responses} responses, which are not trained on, "
                f"{times} for this: {cause}"
            )
        limit, gap = self._config.guard.engine_gap, row.get("policy/engine_gap", 0.0)
        if limit is not None and gap > limit:
            self.note(
                f"step {step}: the engine's log-probs are {gap:.3g} nats off the learner's on average "
                f"(guard.engine_gap is {limit:g}): it samples another policy than the one that is trained; look at "
                f"sync.verify, sync.in_flight, rollout.max_staleness and the dtypes of both{about_experts(row)}"
            )
        self._progress.update(StepLine(step, row.get("reward/mean", 0.0), row["rollout/tokens_per_second"]))

    def _in_stage(self, number: int) -> str:
        """Say what holds in a stage of `data.stages`, of which the last has no entry."""
        data, after = self._config.data, number == len(self._config.data.stages)
        stage = None if after else data.stages[number]
        said = [f"responses of up to {(stage or data).max_response_tokens} tokens"]
        if any(each.responses_per_prompt for each in data.stages):
            said.append(f"{(stage and stage.responses_per_prompt) or data.responses_per_prompt} to a prompt")
        if any(each.weights for each in data.stages):
            weights = stage.weights if stage and stage.weights else data.weights
            shares = ", ".join(f"{name} {weight:g}" for name, weight in (weights or {}).items())
            said.append(f"sources by {shares or 'their rows'}")
        return "; ".join(said)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a row of metrics for `step`."""
        self._metrics.write(step, metrics)

    def write_apart(self, step: int, stage: str) -> None:
        """Log the seconds of a stage that came after a step in a row of its own: the step's has been written."""
        self.write(step, {f"time/{stage}": self._clock.take_apart(stage)})

    def sync(self) -> None:
        """Wait until all rows are on the disk."""
        self._metrics.sync()

    def note(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._progress.note(text)


def open_step_log(
    config: RunConfig,
    folder: RunFolder,
    *,
    resumed_step: int | None,
    token_texts: TokenTexts,
    judge: RewardJudge,
    control: Control,
    clock: StageClock,
    progress: Progress,
    note: Callable[[str], None],
    stack: ExitStack,
) -> StepLog:
    """Open the log; `stack` closes it. Rows after `resumed_step` are superseded: those steps are trained again.

    `token_texts` gives each token's own text; `note` gets what trackers report.
    """
    metrics = MetricLog(
        folder.root, tensorboard=config.log.tensorboard, resumed_step=resumed_step, superseded=folder.superseded
    )
    stack.callback(metrics.close)
    trackers = Trackers(config.log.trackers, folder.root, folder.logs, note)
    # At a run's end the last metrics may take a while; who sends a signal does not want to wait.
    stack.callback(lambda: trackers.close(_TRACKERS_END_S if signals.arrived() is None else 0.0))
    limit = config.log.rollouts.tokens if config.log.rollouts else 0
    return StepLog(
        config,
        folder,
        metrics=metrics,
        trackers=trackers,
        telemetry=open_telemetry(stack),
        token_columns=TokenColumns(token_texts, limit) if limit else None,
        judge=judge,
        control=control,
        clock=clock,
        progress=progress,
    )
