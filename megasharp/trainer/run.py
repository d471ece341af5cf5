"""A whole run: open its folder, build its parts, evaluate, train, evaluate, and leave a summary and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

from megasharp.algos.base import MemoryNeed
from megasharp.checkpoint.run_folder import AttemptLog, RunFolder, has_begun, open_run, read_attempts, seconds_of_all
from megasharp.checkpoint.store import RunState, complete_steps
from megasharp.cluster.slurm.gpus import open_telemetry
from megasharp.common import signals
from megasharp.common.control import Control
from megasharp.common.errors import RankDied, RunFailed, TrainingStopped, UserError
from megasharp.common.exit_codes import Say
from megasharp.common.files import write_text
from megasharp.common.random_state import compute_deterministically, generator_states, seed_generators
from megasharp.common.records import Group
from megasharp.config.core import dump_yaml, read_tree
from megasharp.evals.evaluate import WITH_MEMORY, evaluate
from megasharp.evals.result import EvalResult
from megasharp.evals.result_files import save, stored_figures
from megasharp.evals.suites import Suite
from megasharp.metrics.clock import StageClock, peak_rss_bytes
from megasharp.metrics.console import (
    AFTER,
    BEFORE,
    Progress,
    RunSummary,
    StepLine,
    SuiteChange,
    SuiteFigures,
    print_summary,
)
from megasharp.metrics.response_table import TokenColumns, leave_pandas_out, write_rollouts
from megasharp.metrics.trackers.watch import Trackers
from megasharp.metrics.writers import MetricLog, read_metrics
from megasharp.reporting.history import evaluations, find_peak
from megasharp.tasks.stream import DataCursor, PromptStream
from megasharp.trainer import loop
from megasharp.trainer.checkpoints import REFERENCE, Checkpoints, DriverState
from megasharp.trainer.control_rules import make_rules
from megasharp.trainer.engine_setup import open_serving
from megasharp.trainer.eval_source import Probes
from megasharp.trainer.factories import make_learners, pack_layout
from megasharp.trainer.placement import check_placement, open_placement
from megasharp.trainer.resolve.devices import limit_threads
from megasharp.trainer.resolve.models import check_content
from megasharp.trainer.resolve.resolved_run import ResolvedRun
from megasharp.trainer.resume import check_inputs, check_resume, inputs_of
from megasharp.trainer.reward_judge import Judging, judged_tasks
from megasharp.trainer.watchdog_setup import make_watchdog

_TRACKERS_END_S = 30.0


def train(
    checked: ResolvedRun,
    root: Path,
    *,
    resume: bool,
    say: Say,
    allowed: Sequence[str] = (),
    began: float | None = None,
) -> Path:
    """Run to the end; returns the run's folder. `say` prints one line for the user.

    `allowed` are keys that a resumed run may change though it is another experiment then. The run's time counts from
    `began`, in seconds since 1970, on: from when its command was given, where that is known.

    Raises UserError for what the user can mend, TrainingStopped when the run ended itself.
    """
    try:
        _train(checked, root, resume, allowed, say, began)
    except BaseException:
        number, failure = signals.arrived(), signals.failure()
        if number is not None:
            raise signals.Stopped(number, _how_to_go_on(root)) from None
        if failure is not None:
            raise failure from None
        raise
    return root


def _how_to_go_on(root: Path) -> str:
    return "continue with --resume" if has_begun(root) else "no step was finished, so the same command starts anew"


def _train(
    checked: ResolvedRun, root: Path, resume: bool, allowed: Sequence[str], say: Say, began: float | None
) -> None:
    check_placement(checked)
    leave_pandas_out()
    deterministic = checked.config.deterministic
    limit_threads(checked.architecture, deterministic)
    if deterministic:
        compute_deterministically()
    for change in check_resume(root, checked.config, allowed) if resume else []:
        say(change)
    prompts, data = checked.prompts, checked.config.data
    if prompts.skipped:
        total = len(prompts) + prompts.skipped
        say(
            f"{prompts.skipped} of {total} prompts in {data.path or data.set} are left out: "
            f"empty, or longer than data.max_prompt_tokens ({data.max_prompt_tokens})"
        )
    for model in (checked.model, *([checked.memory.model] if checked.memory else [])):
        check_content(model)
    with signals.save_heard(), signals.ClosingStack() as stack:
        # Ranks, which write checkpoints and logs, may run in another folder.
        folder = open_run(root.absolute(), dump_yaml(checked.config), resume=resume)
        stack.callback(folder.close)
        attempt = stack.enter_context(AttemptLog(folder.logs, began=began))
        _Run(checked, folder, attempt, allowed, say, stack).train()


class _Run:
    """The parts of one run and what happens around the loop."""

    def __init__(
        self,
        checked: ResolvedRun,
        folder: RunFolder,
        attempt: AttemptLog,
        allowed: Sequence[str],
        say: Say,
        stack: ExitStack,
    ) -> None:
        config = checked.config
        self._checked = checked
        self._folder = folder
        self._attempt = attempt
        self._say = say
        self._clock = StageClock(before={"start": attempt.age}, apart=("eval", "checkpoint"))
        with self._clock.stage("start"):
            # Every file of the newest checkpoint is read and compared.
            self._checkpoints = Checkpoints(checked, folder.checkpoints, say)
            self._inputs = inputs_of(checked)
        stack.callback(self._checkpoints.abandon)
        self._start = self._checkpoints.start
        resumed = folder.resumed
        if resumed:
            say(f"resuming {folder.root} after step {self._start.step}")
            for line in check_inputs(self._start.inputs, self._inputs, checked, allowed):
                say(line)
            folder.forget_steps(self._start.step)
        attempt.resumed(self._start.step)
        self._control = Control(make_rules(checked), self._start.control)
        self._told = len(self._start.control.lengths.changes)
        self._protect_best()
        self._progress = Progress(config.steps, self._start.step + 1)
        with self._clock.stage("start"):
            placement = open_placement(checked)
            stack.callback(placement.close)
            stack.enter_context(make_watchdog(checked, self._clock, placement, folder.logs, attempt))
            serving = open_serving(checked, placement, folder.root, folder.logs, self._note)
            stack.callback(serving.close)
            self._judging = stack.enter_context(closing(self._open_judging(say)))
            learners = make_learners(checked, placement, folder.logs)
            stack.callback(learners.policy.close)
        self._engine = serving.engine
        self._learners = learners
        seed_generators(config.seed)
        self._stream = PromptStream(checked.prompts, config.seed)
        if self._checkpoints.exists:
            with self._clock.stage("start"):
                self._checkpoints.load(learners)
            cursor = DataCursor(self._start.cursor_epoch, self._start.cursor_position)
            self._stream.restore(cursor, [DataCursor(*place) for place in self._start.pending])
        # A save that is written must not wait for the step's end to become a checkpoint.
        self._rollouts = serving.rollouts(self._judging.judge, self._checkpoints.poll)
        self._take_up()
        folder.store_config(dump_yaml(config))
        self._phases = serving.phases([*learners.all])
        # The first push brings the weights of the versions the checkpoint was at.
        self._sync = serving.sync(self._start.policy_version - 1, self._start.memory_version - 1)
        self._log = MetricLog(
            folder.root, tensorboard=config.log.tensorboard, resumed_step=self._start.step if resumed else None
        )
        stack.callback(self._log.close)
        self._trackers = Trackers(config.log.trackers, folder.root, folder.logs, self._note)
        stack.callback(self._close_trackers)
        self._telemetry = open_telemetry(stack)
        limit = config.log.rollout_tokens
        self._probes = self._make_probes()
        self._token_columns = TokenColumns(checked.tokenizer.token_texts, limit) if limit else None
        # Where they stood after the last step, also when the next one has begun.
        self._generators = generator_states()
        self._tokens = 0.0

    def _make_probes(self) -> Probes | None:
        checked, asked = self._checked, self._checked.config.eval
        if not asked.probe or not checked.suites:
            return None
        longest = asked.max_response_tokens or checked.config.data.largest_response
        return Probes(self._folder.root, checked.suites[0], checked.tokenizer, asked.probe, longest)

    def _open_judging(self, say: Say) -> Judging:
        config = self._checked.config
        tasks = judged_tasks(config, self._checked.suites)
        return Judging(config.reward, tasks, self._folder.logs / "verifiers.log", say)

    def _take_up(self) -> None:
        """Go on with what the checkpoint has sampled of prompts that no step has trained on."""
        unfinished = self._checkpoints.load_unfinished()
        before, now = self._start.inputs, self._inputs
        if (before.problems, before.tokenizer) == (now.problems, now.tokenizer):
            useless = self._rollouts.take_up(self._stream, unfinished)
        else:
            useless = len(unfinished)
        if useless:
            self._say(
                f"what the checkpoint has sampled of {useless} prompts was sampled for other prompts or seeds "
                "(data.path, model.path, data.responses_per_prompt or seed has changed): they are sampled anew"
            )

    def _note(self, text: str) -> None:
        """What engines tell; after a signal it is only that they end, too."""
        if signals.arrived() is None:
            self._progress.note(text)

    def _close_trackers(self) -> None:
        """At a run's end the last figures may take a while; who sends a signal does not want to wait."""
        self._trackers.close(_TRACKERS_END_S if signals.arrived() is None else 0.0)

    def train(self) -> None:
        """Evaluate, train, evaluate, sum up."""
        start = self._start.step
        standing = loop.LoopState(start, self._start.skipped_in_a_row, start if self._checkpoints.exists else None)
        self._phases.handover()
        with self._clock.stage("sync"):
            self._sync.push(self._learners.policy, self._learners.memory)
        try:
            if self._evaluation_is_due(start):
                self._evaluate(start, only_missing=True)
            else:
                self._control.evaluated(start, self._stored(start), scheduled=False)
            self._clock.take()
            with self._progress:
                loop.run(self._parts(), self._plan(), standing)
            self._evaluate(standing.step, only_missing=True)
        except TrainingStopped:
            # It said that there is a checkpoint.
            self._finish_saving()
            raise
        except RunFailed:
            # The learner is well, so what it was saving is worth the wait; the failure is what the user must read.
            with suppress(UserError, RankDied):
                self._finish_saving()
            raise
        except signals.SaveAsked:
            raise self._saved(standing) from None
        self._finish(standing.step)

    def _saved(self, standing: loop.LoopState) -> signals.TimeIsUp:
        """Save where the run stands, unless it is saved already."""
        self._phases.training()
        if standing.step > 0 and standing.last_saved != standing.step:
            self._checkpoint(standing.step, standing.skipped_in_a_row, wait=True)
        self._finish_saving()
        return signals.TimeIsUp(f"SIGUSR1: saved after step {standing.step}; {_how_to_go_on(self._folder.root)}")

    def _finish_saving(self) -> None:
        with self._clock.stage("checkpoint"):
            self._checkpoints.finish()

    def _evaluation_is_due(self, step: int) -> bool:
        """Whether the step a run starts from wants an evaluation: an interrupted attempt may have missed it."""
        evaluation = self._checked.config.eval
        if step == 0:
            return evaluation.at_start
        return evaluation.every > 0 and step % evaluation.every == 0

    def _plan(self) -> loop.Plan:
        config = self._checked.config
        return loop.Plan(
            steps=config.steps,
            prompts_per_step=config.data.prompts_per_step,
            checkpoint_every=config.checkpoint.every,
            evaluate_every=config.eval.every,
            nan_limit=config.guard.nan_limit,
            seed=config.seed,
        )

    def _parts(self) -> loop.Components:
        return loop.Components(
            stream=self._stream,
            rollouts=self._rollouts,
            recipes=self._checked.recipes,
            control=self._control,
            layout=pack_layout(self._checked, self._checked.architecture),
            learner=self._learners.policy,
            memory=self._learners.memory,
            sync=self._sync,
            phases=self._phases,
            clock=self._clock,
            after_step=self._after_step,
            checkpoint=partial(self._checkpoint, wait=False),
            evaluate=self._evaluate,
        )

    def _after_step(self, step: int, groups: Sequence[Group], values: Mapping[str, float]) -> None:
        if self._checked.config.log.rollouts:
            with self._clock.stage("log"):
                ahead = self._sync.memory_version - self._sync.version
                write_rollouts(self._folder.root, step, groups, memory_ahead=ahead, tokens=self._token_columns)
        with self._clock.stage("checkpoint"):
            self._checkpoints.poll()
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
            **self._judging.take(),
        }
        self._log.write(step, row)
        self._trackers.look()
        self._control.trained(values)
        self._tell_decisions(step, values)
        self._attempt.finished(step, self._clock.totals)
        if groups and all(group.dropped_reason is not None for group in groups):
            dropped = {name.removeprefix("group/dropped_"): n for name, n in values.items() if "group/dropped_" in name}
            reasons = ", ".join(f"{count:.0f} {reason}" for reason, count in dropped.items())
            self._progress.note(f"step {step}: every group was dropped ({reasons}); the policy was not updated")
        self._watch_gap(step, values)
        self._progress.update(StepLine(step, row.get("reward/mean", 0.0), row["rollout/tokens_per_second"]))
        self._tokens += tokens
        self._generators = generator_states()
        signals.check()
        signals.check_save()

    def _tell_decisions(self, step: int, values: Mapping[str, float]) -> None:
        """Say what was reset before this step's update, and which limit responses have from this step on."""
        resets, changes = self._control.state.resets.done, self._control.state.lengths.changes
        if values.get("policy/reset"):
            self._progress.note(f"step {step}: {' and '.join(resets[-1].what)} reset first: {resets[-1].reason}")
        for change in changes[self._told :]:
            self._progress.note(f"step {step}: responses of up to {change.max_response_tokens} tokens: {change.reason}")
        self._told = len(changes)

    def _watch_gap(self, step: int, values: Mapping[str, float]) -> None:
        limit, gap = self._checked.config.guard.engine_gap, values.get("policy/engine_gap", 0.0)
        if limit is not None and gap > limit:
            self._progress.note(
                f"step {step}: the engine's log-probs are {gap:.3g} nats off the learner's on average "
                f"(guard.engine_gap is {limit:g}): it samples another policy than the one that is trained; look at "
                "sync.verify, sync.in_flight, rollout.max_staleness and the dtypes of both"
            )

    def _checkpoint(self, step: int, skipped_in_a_row: int, *, wait: bool) -> None:
        # A resumed run leaves out steps that it has a checkpoint of: their rows must be there.
        self._log.sync()
        stream = self._stream
        unfinished = self._rollouts.unfinished()
        waiting = [(place.epoch, place.position) for place in stream.pending]
        state = RunState(
            step=step,
            policy_version=self._sync.version,
            memory_version=max(self._sync.memory_version, 0),
            cursor_epoch=stream.cursor.epoch,
            cursor_position=stream.cursor.position,
            pending=(*(prompt.place for prompt in unfinished), *waiting),
            reference=REFERENCE if self._reference_moved() else str(self._checked.model.path),
            skipped_in_a_row=skipped_in_a_row,
            control=self._control.state,
            inputs=self._inputs,
        )
        with self._clock.stage("checkpoint"):
            driver = DriverState(self._generators, unfinished)
            self._checkpoints.save(state, self._learners, driver, wait=wait or self._is_last(step))
        self._log_apart(step, "checkpoint")

    def _log_apart(self, step: int, stage: str) -> None:
        """What came after a step is logged for that step, in a row of its own: the step's has been written."""
        self._log.write(step, {f"time/{stage}": self._clock.take_apart(stage)})

    def _is_last(self, step: int) -> bool:
        return step == self._checked.config.steps or self._control.over()

    def _reference_moved(self) -> bool:
        """Whether a reset has made other weights than the run's first ones the reference."""
        resets = self._control.state.resets.done
        return self._start.reference == REFERENCE or any("reference" in reset.what for reset in resets)

    def _evaluate(self, step: int, only_missing: bool = False) -> bool:
        """Evaluate the weights after `step`; returns whether they are the best so far by `checkpoint.keep_best`."""
        with self._clock.stage("eval"):
            self._phases.sampling()
        memory = self._checked.recipes.at(max(step, 1)).needs.memory if self._checked.config.eval.with_memory else None
        uses = [(None, "")] if memory is None else [(None, ""), (memory, WITH_MEMORY)]
        figures: dict[str, float] = {}
        evaluated = False
        for suite in self._checked.suites:
            for use, ending in uses:
                path = self._folder.evals(step) / f"{suite.name}{ending}.json"
                if only_missing and path.exists():
                    figures |= self._logged(step, stored_figures(path))
                else:
                    figures |= self._evaluate_suite(step, suite, use)
                    evaluated = True
        if self._probes is not None and (self._probes.missing(step) or not only_missing):
            with self._clock.stage("eval"):
                self._probes.take(self._engine, step)
            evaluated = True
        if evaluated:
            self._log_apart(step, "eval")
        self._control.evaluated(step, figures, scheduled=self._evaluation_is_due(step))
        return self._protect_best() == step

    def _stored(self, step: int) -> dict[str, float]:
        """All figures of evaluations after `step` that an earlier attempt made."""
        paths = sorted(self._folder.evals(step).glob("*.json"))
        return {name: value for path in paths for name, value in stored_figures(path).items()}

    def _logged(self, step: int, figures: dict[str, float]) -> dict[str, float]:
        """Stored figures, written to the log where the attempt that made them did not come to it."""
        rows = read_metrics(self._folder.root)
        if not any(row["step"] == step and figures.keys() <= row.keys() for row in rows):
            self._log.write(step, figures)
        return figures

    def _protect_best(self) -> int | None:
        """Keep the checkpoint of the best evaluation from retention; returns its step."""
        metric = self._checked.config.checkpoint.keep_best
        best = self._control.state.best.get(metric) if metric else None
        step = best.step if best else None
        self._checkpoints.protect(step)
        return step

    def _evaluate_suite(self, step: int, suite: Suite, memory: MemoryNeed | None) -> dict[str, float]:
        config = self._checked.config
        with self._clock.stage("eval"), signals.interruptible():
            result = evaluate(
                self._engine,
                suite,
                self._checked.tokenizer,
                n=config.eval.n,
                ks=config.eval.k,
                temperature=config.eval.temperature,
                top_p=config.eval.top_p,
                max_tokens=config.eval.max_response_tokens or config.data.largest_response,
                seed=config.seed,
                label=config.name,
                step=step,
                memory=memory,
                judge=self._judging.judge,
            )
            save(result, self._folder.evals(step))
        figures = result.figures()
        self._log.write(step, figures)
        self._progress.note(f"step {step}: {_eval_line(result)}")
        return figures

    def _finish(self, last: int) -> None:
        """Summary, pictures and table of a run whose last step is `last`."""
        # matplotlib takes a second that a run's first step need not wait for.
        from megasharp.reporting.curves import plot_training

        root = self._folder.root
        self._clock.take()
        self._attempt.spent(self._clock.totals)
        peak = peak_rss_bytes()
        changes = [self._change(suite.name, last) for suite in self._checked.suites]
        pictures = [self._picture(change) for change in changes if change.evaluations]
        rows = read_metrics(root)
        pictures.append(plot_training(rows, root / "curves.png"))
        peak_of = find_peak(read_tree(root / "config.yaml"), rows, complete_steps(self._folder.checkpoints))
        summary = {
            "steps": last,
            "seconds": seconds_of_all(read_attempts(self._folder.logs.parent)),
            "peak_rss_bytes": peak,
            "peak": peak_of.tree(evaluations(rows)) if peak_of else None,
            "last": next((row for row in reversed(rows) if "time/step" in row), {}),
            "pass_at_k": {c.suite: {name: e.pass_at_k for name, e in c.evaluations.items()} for c in changes},
            "distinct_correct": {
                c.suite: {name: e.distinct_correct for name, e in c.evaluations.items()} for c in changes
            },
        }
        write_text(root / "summary.json", json.dumps(summary, indent=1))
        here = [row for row in rows if (row["step"] or 0) > self._start.step]
        padding, imbalance = (_mean(here, f"batch/{name}") for name in ("padding", "imbalance"))
        steps = last - self._start.step
        print_summary(RunSummary(steps, changes, self._clock.totals, self._tokens, peak, padding, imbalance))
        if peak_of is not None:
            self._say(peak_of.line)
        for picture in pictures:
            self._say(f"picture: {picture}")

    def _change(self, suite: str, last: int) -> SuiteChange:
        """A suite's evaluations, read back from disk: an earlier attempt may have made them."""
        places = {BEFORE: (suite, 0), AFTER: (suite, last), "with memory": (f"{suite}{WITH_MEMORY}", last)}
        found = {name: self._figures(*place) for name, place in places.items()}
        return SuiteChange(suite, {name: figures for name, figures in found.items() if figures})

    def _figures(self, suite: str, step: int) -> SuiteFigures | None:
        path = self._folder.evals(step) / f"{suite}.json"
        if not path.exists():
            return None
        stored = json.loads(path.read_text(encoding="utf-8"))
        return SuiteFigures({int(k): value for k, value in stored["pass_at_k"].items()}, stored["distinct_correct"])

    def _picture(self, change: SuiteChange) -> Path:
        from megasharp.reporting.passk import plot_pass_at_k

        path = self._folder.root / f"pass_at_k_{change.suite}.png"
        curves = {name: figures.pass_at_k for name, figures in change.evaluations.items()}
        distinct = {name: figures.distinct_correct for name, figures in change.evaluations.items()}
        return plot_pass_at_k(curves, path, change.suite, distinct)


def _mean(rows: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    """Over the rows that have the figure."""
    values = [value for row in rows if (value := row.get(name)) is not None]
    return sum(values) / len(values) if values else None


def _eval_line(result: EvalResult) -> str:
    figures = "  ".join(f"pass@{k} {value:.3f}" for k, value in result.pass_at_k.items())
    greedy = "" if result.greedy_accuracy is None else f"  greedy {result.greedy_accuracy:.3f}"
    entropy = "" if result.answer_entropy is None else f"  answer entropy {result.answer_entropy:.3f}"
    tokens = result.token_entropy if result.token_entropy is not None else result.token_entropy_sampled
    spread = "" if tokens is None else f"  token entropy {tokens:.3f}"
    return f"{result.suite}: {figures}{greedy}{entropy}{spread}"
