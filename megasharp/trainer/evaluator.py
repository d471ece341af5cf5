"""The evaluations of a run: its suites and its probe, on the weights that the engines have after a step."""

from __future__ import annotations

from dataclasses import dataclass

from megasharp.algos.base import MemoryNeed
from megasharp.checkpoint.run_folder import RunFolder
from megasharp.common import signals
from megasharp.common.control import Control
from megasharp.common.files import free_name, set_aside
from megasharp.evals.evaluate import WITH_MEMORY, evaluate
from megasharp.evals.keeping import Keeping
from megasharp.evals.result import EvalSetting
from megasharp.evals.result_files import save, stored_figures
from megasharp.evals.sample_store import SampleStore
from megasharp.evals.stored_samples import FOLDER, journals, parts, samples_info
from megasharp.evals.suites import Suite
from megasharp.metrics.clock import StageClock
from megasharp.metrics.writers import rows_of
from megasharp.rollout.episodes.episode_engine import RoundEpisodes
from megasharp.rollout.step_request import Engine
from megasharp.tasks.environment import plays
from megasharp.tasks.judge import Judge, digest_of
from megasharp.trainer.checkpoints import Checkpoints
from megasharp.trainer.eval_source import Probes
from megasharp.trainer.loop import Phases
from megasharp.trainer.resolve.resolved_run import ResolvedRun
from megasharp.trainer.reward_judge import own_rewards
from megasharp.trainer.step_log import StepLog

# Characters of a digest that tell two sets of problems apart.
_DIGEST = 16


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
        # Episodes are no text of the policy's alone: of those a probe has the first turn.
        engine = self.engine.turns if isinstance(self.engine, RoundEpisodes) else self.engine
        with self.clock.stage("eval"):
            probes.take(engine, step)
        return True

    def _evaluate_suite(self, step: int, suite: Suite, memory: MemoryNeed | None) -> dict[str, float]:
        setting = self._setting(step, suite, memory)
        own = own_rewards(self.resolved.config.reward).get(suite.task)
        with self.clock.stage("eval"), signals.interruptible():
            store = self._store(step, setting)
            result = evaluate(
                self.engine,
                suite,
                self.resolved.tokenizer,
                setting,
                memory=memory,
                judge=self.judge,
                store=store,
                together=own is not None and own.compares,
                say=self.log.note,
            )
            save(result, self.folder.evals(step))
            store.finish()
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

    def _setting(self, step: int, suite: Suite, memory: MemoryNeed | None) -> EvalSetting:
        config = self.resolved.config
        asked = config.eval
        longest = asked.max_response_tokens or config.data.largest_response
        # The weights are those after the step: evaluations of steps that are done again are set aside.
        identity = {
            "model": f"{config.model.path} {config.model.revision or ''}",
            "engine": config.rollout.engine,
            "problems": digest_of(suite.items)[:_DIGEST],
            "n": str(asked.n),
            "temperature": str(asked.temperature),
            "top_p": str(asked.top_p),
            "top_k": str(asked.top_k),
            "min_p": str(asked.min_p),
            "stop": repr([*asked.stop]),
            "max_tokens": str(longest),
            "seed": str(config.seed),
            "memory": "" if memory is None else f"{memory.mu} {memory.plausible}",
        }
        episodes = config.rollout.episodes if plays(suite.items) else None
        if episodes is not None:
            identity |= episodes.identity
        return EvalSetting(
            suite.name if memory is None else suite.name + WITH_MEMORY,
            config.name,
            step,
            asked.n,
            tuple(asked.k),
            asked.temperature,
            config.seed,
            asked.top_p,
            longest,
            identity,
            asked.top_k,
            asked.min_p,
            tuple(asked.stop),
            None if episodes is None else episodes.max_turns,
            None if episodes is None else episodes.turn_tokens,
        )

    def _store(self, step: int, setting: EvalSetting) -> SampleStore:
        """Open the store of an evaluation; what an attempt with other settings left of it unfinished is set aside."""
        config, folder = self.resolved.config.eval, self.folder.evals(step)
        found = samples_info(folder, setting.suite)
        if found is not None and found.identity != setting.identity:
            self.log.note(f"step {step}: {setting.suite}: begun with other settings, so it is sampled anew")
            target = self.folder.superseded / folder.relative_to(self.folder.root) / FOLDER
            for path in (*parts(folder, setting.suite), *journals(folder, setting.suite)):
                set_aside(path, free_name(target / path.name))
        return Keeping(folder.parent, config.keep, config.keep_mb).open(folder, setting, self.log.note)
