"""The evaluations of a run: its suites and its probe, on the weights that the engines have after a step."""

from __future__ import annotations

from dataclasses import dataclass

from megasharp.algos.base import MemoryNeed
from megasharp.checkpoint.run_folder import RunFolder
from megasharp.common import signals
from megasharp.common.control import Control
from megasharp.evals.evaluate import WITH_MEMORY, evaluate
from megasharp.evals.result_files import save, stored_figures
from megasharp.evals.suites import Suite
from megasharp.metrics.clock import StageClock
from megasharp.metrics.writers import rows_of
from megasharp.rollout.step_request import Engine
from megasharp.tasks.judge import Judge
from megasharp.trainer.checkpoints import Checkpoints
from megasharp.trainer.eval_source import Probes
from megasharp.trainer.loop import Phases
from megasharp.trainer.resolve.resolved_run import ResolvedRun
from megasharp.trainer.step_log import StepLog

# Samples of a chunk where ranks sample one while this process judges another; the last is judged by itself.
_CHUNK_IN_RANKS = 2048


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates a run's weights, logs the results, and lets `control` decide by them."""

    resolved: ResolvedRun
    folder: RunFolder
    engine: Engine
    judge: Judge
    phases: Phases
    control: Control
    checkpoints: Checkpoints
    log: StepLog
    clock: StageClock

    def is_due(self, step: int) -> bool:
        """Return whether the schedule asks for an evaluation after `step`, where 0 is the initial model."""
        evaluation = self.resolved.config.eval
        if step == 0:
            return evaluation.at_start
        return evaluation.every > 0 and step % evaluation.every == 0

    def evaluate(self, step: int, only_missing: bool = False) -> bool:
        """Evaluate the weights after `step`; return whether they are the best so far by `checkpoint.keep_best`.

        With `only_missing`, results that an earlier attempt stored are used as they are.
        """
        # Where devices are shared the learner may have them: it has just trained, or saved.
        with self.clock.stage("eval"):
            self.phases.sampling()
        memory = self.resolved.recipes.at(max(step, 1)).needs.memory if self.resolved.config.eval.with_memory else None
        uses = [(None, "")] if memory is None else [(None, ""), (memory, WITH_MEMORY)]
        metrics: dict[str, float] = {}
        evaluated = False
        for suite in self.resolved.suites:
            for use, ending in uses:
                path = self.folder.evals(step) / f"{suite.name}{ending}.json"
                if only_missing and path.exists():
                    stored = stored_figures(path)
                    # The attempt that evaluated may have been killed before it logged what it had stored.
                    if not any(stored.keys() <= row.keys() for row in rows_of(self.folder.root, step)):
                        self.log.write(step, stored)
                    metrics |= stored
                else:
                    metrics |= self._evaluate_suite(step, suite, use)
                    evaluated = True
        evaluated |= self._probe(step, only_missing)
        if evaluated:
            self.log.write_apart(step, "eval")
        self.control.evaluated(step, metrics, scheduled=self.is_due(step))
        return self.protect_best() == step

    def recall(self, step: int) -> None:
        """Tell `control` the evaluations after `step` that an earlier attempt made beyond the schedule."""
        paths = sorted(self.folder.evals(step).glob("*.json"))
        stored = {name: value for path in paths for name, value in stored_figures(path).items()}
        self.control.evaluated(step, stored, scheduled=False)

    def protect_best(self) -> int | None:
        """Keep the checkpoint of the best evaluation from retention; return its step."""
        metric = self.resolved.config.checkpoint.keep_best
        best = self.control.state.best.get(metric) if metric else None
        step = best.step if best else None
        self.checkpoints.protect(step)
        return step

    def _probe(self, step: int, only_missing: bool) -> bool:
        """Probe the weights where the run asks for it; return whether that was done."""
        asked, suites = self.resolved.config.eval, self.resolved.suites
        if not asked.probe or not suites:
            return False
        longest = asked.max_response_tokens or self.resolved.config.data.largest_response
        probes = Probes(self.folder.root, suites[0], self.resolved.tokenizer, asked.probe, longest)
        if only_missing and not probes.missing(step):
            return False
        with self.clock.stage("eval"):
            probes.take(self.engine, step)
        return True

    def _evaluate_suite(self, step: int, suite: Suite, memory: MemoryNeed | None) -> dict[str, float]:
        config = self.resolved.config
        with self.clock.stage("eval"), signals.interruptible():
            result = evaluate(
                self.engine,
                suite,
                self.resolved.tokenizer,
                n=config.eval.n,
                ks=config.eval.k,
                temperature=config.eval.temperature,
                top_p=config.eval.top_p,
                top_k=config.eval.top_k,
                min_p=config.eval.min_p,
                stop=config.eval.stop,
                max_tokens=config.eval.max_response_tokens or config.data.largest_response,
                seed=config.seed,
                label=config.name,
                step=step,
                memory=memory,
                judge=self.judge,
                chunk_samples=_CHUNK_IN_RANKS if self.resolved.samples_in_ranks else None,
            )
            save(result, self.folder.evals(step))
        metrics = result.figures()
        self.log.write(step, metrics)
        token_entropy = result.token_entropy if result.token_entropy is not None else result.token_entropy_sampled
        shown = {
            **{f"pass@{k}": value for k, value in result.pass_at_k.items()},
            "greedy": result.greedy_accuracy,
            "answer entropy": result.answer_entropy,
            "token entropy": token_entropy,
        }
        line = "  ".join(f"{name} {value:.3f}" for name, value in shown.items() if value is not None)
        self.log.note(f"step {step}: {result.suite}: {line}")
        return metrics
