"""A whole run: check and open its folder, assemble its parts, evaluate, train, evaluate, and sum up.

`assembly` makes the parts, `loop` trains, and around the loop each has one owner: `evaluator`, `step_log`,
`Saver` in `checkpoints`, `run_summary`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megasharp.checkpoint.attempts import AttemptLog
from megasharp.checkpoint.manifest import Inputs
from megasharp.checkpoint.recorded import has_begun
from megasharp.checkpoint.run_folder import RunFolder, open_run
from megasharp.common import output, signals
from megasharp.common.control import Control
from megasharp.common.errors import RankDied, RunFailed, TrainingStopped, UserError
from megasharp.common.exit_codes import Say
from megasharp.common.random_state import compute_deterministically
from megasharp.common.records import Group
from megasharp.config.core import dump_yaml
from megasharp.metrics.clock import StageClock
from megasharp.metrics.console import Progress
from megasharp.metrics.response_table import leave_pandas_out
from megasharp.trainer import loop
from megasharp.trainer.assembly import Assembly, assemble
from megasharp.trainer.checkpoints import Checkpoints, ReplicaCheck, Saver
from megasharp.trainer.evaluator import Evaluator
from megasharp.trainer.factories import pack_layout, recorded_routing
from megasharp.trainer.guards import Guards
from megasharp.trainer.placement import check_placement
from megasharp.trainer.resolve.devices import limit_threads
from megasharp.trainer.resolve.models import check_content
from megasharp.trainer.resolve.recipes import make_rules
from megasharp.trainer.resolve.resolved_run import ResolvedRun
from megasharp.trainer.resume import check_inputs, check_resume, inputs_of
from megasharp.trainer.step_log import StepLog, open_step_log


def train(
    resolved: ResolvedRun,
    root: Path,
    *,
    resume: bool,
    say: Say,
    allowed: Sequence[str] = (),
    start_over: bool = False,
    began: float | None = None,
) -> Path:
    """Run to the end; returns the run's folder. `say` prints one line for the user.

    `allowed` are keys that a resumed run may change though it is another experiment then; with `start_over` an existing
    run's folder gets another name first. The run's time counts from
    `began`, in seconds since 1970, on: from when its command was given, where that is known.

    Raises UserError for what the user can fix, TrainingStopped when the run ended itself.
    """
    try:
        _check_and_train(resolved, root, resume, start_over, allowed, say, began)
    except BaseException:
        number, failure = signals.arrived(), signals.failure()
        if number is not None:
            raise signals.Stopped(number, _how_to_go_on(root)) from None
        if failure is not None:
            raise failure from None
        raise
    return root


def _how_to_go_on(root: Path) -> str:
    if "SLURM_JOB_ID" in os.environ:
        return "submit it again, or by hand continue with --resume"
    return "continue with --resume" if has_begun(root) else "no step was finished, so the same command restarts it"


def _check_and_train(
    resolved: ResolvedRun,
    root: Path,
    resume: bool,
    start_over: bool,
    allowed: Sequence[str],
    say: Say,
    began: float | None,
) -> None:
    check_placement(resolved)
    _check_tables(resolved)
    deterministic = resolved.config.deterministic
    limit_threads(resolved.architecture, deterministic)
    if deterministic:
        compute_deterministically()
    changes = check_resume(root, resolved.config, allowed) if resume else []
    for model in (resolved.model, *([resolved.memory.model] if resolved.memory else [])):
        check_content(model)
    numbers = signals.save_numbers(ray=resolved.config.cluster.backend == "ray")
    with signals.save_heard(numbers), signals.ClosingStack() as stack:
        # Ranks, which write checkpoints and logs, may run in another folder.
        readers = resolved.config.log.readable_by
        folder = open_run(
            root.absolute(), dump_yaml(resolved.config), resume=resume, start_over=start_over, readers=readers
        )
        stack.callback(folder.close)
        # First of all: an attempt without a record that has left anything else may have saved.
        attempt = stack.enter_context(AttemptLog(folder.logs, began=began))
        output.log_to(folder.logs)
        for line in [*changes, *([folder.note] if folder.note else [])]:
            say(line)
        _make_run(resolved, folder, attempt, allowed, say, stack).train()


def _check_tables(resolved: ResolvedRun) -> None:
    """Prepare pyarrow where the run writes Parquet files. Raises UserError where it is not installed."""
    without = _without_tables(resolved)
    if not without:
        return
    if find_spec("pyarrow") is None:
        raise UserError(
            "this run writes Parquet files, and pyarrow is not installed: pip install pyarrow, or train without them "
            f"({' '.join(without)})"
        )
    leave_pandas_out()


def _without_tables(resolved: ResolvedRun) -> list[str]:
    """Return the settings by which the run would write no Parquet files; none where it writes none."""
    config, memory = resolved.config, resolved.memory
    writes = {
        "log.rollouts=null": config.log.rollouts is not None,
        # The probe is of the first suite.
        "eval.suites=[]": bool(resolved.suites),
        # A checkpoint has the tokens that a later step trains on.
        "rollout.max_staleness=0": config.rollout.max_staleness > 0,
        "recipe.dlc.memory.replay=0": memory is not None and memory.params.replay > 0,
    }
    return [setting for setting, written in writes.items() if written]


def _make_run(
    resolved: ResolvedRun, folder: RunFolder, attempt: AttemptLog, allowed: Sequence[str], say: Say, stack: ExitStack
) -> _Run:
    """Make a run that continues from its newest checkpoint; `stack` ends its parts."""
    clock = StageClock(before={"start": attempt.age}, apart=("eval", "checkpoint"))
    checkpoints, inputs = _open_checkpoints(resolved, folder, attempt, allowed, clock, say)
    stack.callback(checkpoints.abandon)
    start = checkpoints.start
    attempt.resumed(start.step)
    control = Control(make_rules(resolved.config, resolved.recipes.needs), start.control)
    progress = Progress(resolved.config.steps, start.step + 1)

    def note(text: str) -> None:
        # After a signal, engines and trackers only report that they end too.
        if signals.arrived() is None:
            progress.note(text)

    parts = assemble(resolved, folder, attempt, checkpoints, inputs, clock, note=note, say=say, stack=stack)
    if folder.resumed:
        folder.supersede_steps(start.step)
        if resolved.config.log.keep_superseded is not None:
            folder.prune_superseded(resolved.config.log.keep_superseded)
    log = open_step_log(
        resolved.config,
        folder,
        resumed_step=start.step if folder.resumed else None,
        token_texts=resolved.tokenizer.token_texts,
        judge=parts.judge,
        control=control,
        clock=clock,
        progress=progress,
        note=note,
        stack=stack,
    )
    if folder.superseded.exists():
        say(f"what was recorded of steps after {start.step} is now in {folder.superseded}")
    evaluator = Evaluator(
        resolved, folder, parts.engine, parts.judge.judge, parts.phases, control, checkpoints, log, clock
    )
    replicas = ReplicaCheck(resolved, checkpoints, parts.learners, clock)
    saver = Saver(
        resolved,
        checkpoints,
        parts.learners,
        parts.prompts,
        parts.rollouts,
        parts.sync,
        control,
        inputs,
        log,
        clock,
        replicas,
    )
    return _Run(resolved, folder, attempt, clock, control, progress, parts, log, evaluator, saver, replicas, say)


def _open_checkpoints(
    resolved: ResolvedRun, folder: RunFolder, attempt: AttemptLog, allowed: Sequence[str], clock: StageClock, say: Say
) -> tuple[Checkpoints, Inputs]:
    """Read where the run continues; return its checkpoints, and digests of what this attempt reads.

    Raises UserError where the attempt reads other inputs than the run began with, and `allowed` does not name them.
    """
    with clock.stage("start"):
        # Every file of the newest checkpoint is read and compared.
        checkpoints = Checkpoints(resolved, folder.checkpoints, say, attempt.saved)
        inputs = inputs_of(resolved)
    if folder.resumed:
        start = checkpoints.start
        say(f"resuming {folder.root} after step {start.step}")
        if start.step and not start.inputs.problems:
            say(
                "its checkpoint is older than 2026-11-22 10:55 and has no digests of problems, tokenizer and first "
                "weights: edits of them since then are not seen"
            )
        for line in check_inputs(start.inputs, inputs, resolved, allowed):
            say(line)
    return checkpoints, inputs


@dataclass(frozen=True, slots=True)
class _Run:
    """A run with all that it is made of; `train` is everything that happens from here to its end."""

    resolved: ResolvedRun
    folder: RunFolder
    attempt: AttemptLog
    clock: StageClock
    control: Control
    progress: Progress
    parts: Assembly
    log: StepLog
    evaluator: Evaluator
    saver: Saver
    replicas: ReplicaCheck
    say: Say

    def train(self) -> None:
        """Evaluate, train, evaluate, sum up."""
        start = self.saver.start
        state = loop.LoopState(start.step, start.skipped_in_a_row, start.step if self.saver.is_resumed else None)
        self.evaluator.protect_best()
        self.parts.phases.handover()
        with self.clock.stage("sync"):
            self.parts.sync.push(self.parts.learners.policy, self.parts.learners.memory)
        try:
            # An attempt that was interrupted may have missed the evaluation of the step that this one starts from.
            if self.evaluator.is_due(start.step):
                self.evaluator.evaluate(start.step, only_missing=True)
            else:
                self.evaluator.recall(start.step)
            self.clock.take()
            with self.progress:
                loop.run(self._components(), self.resolved.config, state)
            self.evaluator.evaluate(state.step, only_missing=True)
        except TrainingStopped:
            # Its message says that there is a checkpoint, so that must be complete.
            self.saver.finish()
            raise
        except RunFailed:
            # The learner is well, so what it was saving is worth the wait; the failure is what the user must read.
            with suppress(UserError, RankDied):
                self.saver.finish()
            raise
        except signals.SaveAsked:
            self.parts.phases.training()
            if state.step > 0 and state.last_saved != state.step:
                self.saver.save(state.step, state.skipped_in_a_row, wait=True)
            self.saver.finish()
            saved = f"saved after step {state.step}; " if state.step > 0 else ""
            asked = signals.save_asked() or signals.SAVE
            raise signals.TimeIsUp(f"{asked.name}: {saved}{_how_to_go_on(self.folder.root)}") from None
        self._sum_up(state.step)

    def _components(self) -> loop.Components:
        return loop.Components(
            prompts=self.parts.prompts,
            rollouts=self.parts.rollouts,
            recipes=self.resolved.recipes,
            control=self.control,
            layout=pack_layout(self.resolved, self.resolved.architecture, routing=recorded_routing(self.resolved)),
            learner=self.parts.learners.policy,
            memory=self.parts.learners.memory,
            sync=self.parts.sync,
            phases=self.parts.phases,
            clock=self.clock,
            guards=Guards(
                self.resolved.config.guard, self.parts.judge.blame, self.resolved.config.rollout.request_limit_s
            ),
            check_replicas=self.replicas.around_update,
            after_step=self._after_step,
            checkpoint=self.saver.save,
            evaluate=self.evaluator.evaluate,
        )

    def _after_step(self, step: int, groups: Sequence[Group], values: Mapping[str, float]) -> None:
        """Record a step that is done, and let a signal that arrived meanwhile end the run."""
        self.log.responses(step, groups, memory_ahead=self.parts.sync.memory_version - self.parts.sync.version)
        with self.clock.stage("checkpoint"):
            self.saver.poll()
        row = self.log.step(step, values)
        self.control.trained(values)
        self.attempt.finished(step, self.clock.totals)
        self.log.announce(step, groups, row)
        self.saver.step_done()
        signals.check()
        signals.check_save()

    def _sum_up(self, last: int) -> None:
        # Imported here: a run's first step need not wait for what reads the run's files back.
        from megasharp.trainer.run_summary import summarize_run

        self.clock.take()
        self.attempt.spent(self.clock.totals)
        summarize_run(
            self.folder,
            self.resolved.suites,
            self.control.state,
            self.log.totals,
            first=self.saver.start.step,
            last=last,
            stage_seconds=self.clock.totals,
            say=self.say,
        )
