"""Starts the parts of a run and brings each to the point from which the run continues.

A function's arguments are what must be there before it: no prompts without learners whose state is restored, no
rollouts without the prompts that they continue. Where an order cannot be seen from the arguments, a comment gives it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from megasharp.checkpoint.attempts import AttemptLog, read_attempts
from megasharp.checkpoint.manifest import Inputs
from megasharp.checkpoint.run_folder import RunFolder
from megasharp.common.exit_codes import Say
from megasharp.common.random_state import seed_generators
from megasharp.common.watchdog import Budget, Watchdog, Watched
from megasharp.config.core import dump_yaml
from megasharp.metrics.clock import StageClock
from megasharp.rollout.sglang.client.external import take_key
from megasharp.rollout.step_request import Engine
from megasharp.tasks.stream import DataCursor, PromptStream
from megasharp.trainer.checkpoints import Checkpoints
from megasharp.trainer.engine_setup import (
    Collector,
    Serving,
    VersionedSync,
    open_serving,
    serve_in_ranks,
)
from megasharp.trainer.factories import Learners, make_learners
from megasharp.trainer.loop import Phases
from megasharp.trainer.placement import Placement, open_placement
from megasharp.trainer.resolve.resolved_run import ResolvedRun
from megasharp.trainer.reward_judge import TRIED_ROWS, RewardJudge, judged_tasks, own_rewards


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts of one run, each at the point from which the run continues."""

    engine: Engine
    judge: RewardJudge
    learners: Learners
    prompts: PromptStream
    rollouts: Collector
    phases: Phases
    sync: VersionedSync


def assemble(
    resolved: ResolvedRun,
    folder: RunFolder,
    attempt: AttemptLog,
    checkpoints: Checkpoints,
    inputs: Inputs,
    clock: StageClock,
    *,
    note: Say,
    say: Say,
    stack: ExitStack,
) -> Assembly:
    """Start and restore everything; `stack` ends it, in the opposite order.

    `inputs` are digests of what this attempt reads. `note` gets what engines report while the run goes on, `say` one
    line for the user. Raises UserError where a part does not start or cannot continue from the checkpoint.
    """
    # Before anything starts that would inherit it.
    key = take_key() if resolved.config.rollout.external else ""
    with clock.stage("start"):
        placement = open_placement(resolved)
        stack.callback(placement.close)
        stack.enter_context(watch_over(resolved, placement, folder, attempt, clock))
        # A reward that does not work is found before anything large is loaded.
        tasks = judged_tasks(resolved.config, resolved.suites)
        own = own_rewards(resolved.config.reward, resolved.config.data.mix)
        judge = RewardJudge(resolved.config.reward, tasks, folder.logs / "verifiers.log", say, own)
        stack.callback(judge.close)
        judge.try_function(resolved.prompts.first(TRIED_ROWS))
        serving: Serving | None = None
        if not resolved.samples_in_ranks:
            # Engines before learners: those that share devices sleep when they have started, which makes room.
            serving = open_serving(resolved, placement, folder.root, folder.logs, note, key)
            stack.callback(serving.close)
        learners = make_learners(resolved, placement, folder.logs)
        stack.callback(learners.policy.close)
        if serving is None:
            serving = serve_in_ranks(resolved, learners)
            stack.callback(serving.close)
        tell_attention(learners, folder, attempt, say)
    prompts = restore(resolved, checkpoints, learners, clock)
    rollouts = continue_rollouts(serving, judge, checkpoints, prompts, inputs, say)
    # All that was saved has been read under this configuration, so from here on it is the run's own.
    folder.store_config(dump_yaml(resolved.config))
    start = checkpoints.start
    phases = serving.phases([*learners.all])
    # The first push brings the weights of the versions that the checkpoint was at.
    sync = serving.sync(start.policy_version - 1, start.memory_version - 1)
    serving.go_on_with(learners.policy, learners.memory)
    return Assembly(
        engine=serving.engine,
        judge=judge,
        learners=learners,
        prompts=prompts,
        rollouts=rollouts,
        phases=phases,
        sync=sync,
    )


def tell_attention(learners: Learners, folder: RunFolder, attempt: AttemptLog, say: Say) -> None:
    """Record the kernels of attention; say on GPUs which they are, and anywhere that they have changed."""
    kernels = learners.policy.attention()
    before = [record.attention for record in read_attempts(folder.logs.parent).values() if record is not None]
    last = next((name for name in reversed(before) if name is not None), kernels.name)
    attempt.attends(kernels.name)
    if kernels.name != "blocks" or last != kernels.name:
        say(f"attention: {kernels}")
    if last != kernels.name:
        say(
            f"attention was {last} in the attempt before: from here on steps round differently, and agree with what "
            "they would have been to bfloat16's precision, not bit for bit"
        )


def watch_over(
    resolved: ResolvedRun, placement: Placement, folder: RunFolder, attempt: AttemptLog, clock: StageClock
) -> Watchdog:
    """Return the run's watchdog: a context manager that ends the run where a stage exceeds its `guard` budget."""
    guard = resolved.config.guard
    long_stages = guard.long_stages.model_dump()
    return Watchdog(
        Watched(clock.present, folder.logs, placement.processes(resolved.layout.world), placement.there),
        Budget(guard.stage_timeout_s, "guard.stage_timeout_s"),
        {stage: Budget(seconds, f"guard.long_stages.{stage}") for stage, seconds in long_stages.items()},
        attempt.end,
    )


def restore(resolved: ResolvedRun, checkpoints: Checkpoints, learners: Learners, clock: StageClock) -> PromptStream:
    """Bring learners and random generators to the checkpoint, if there is one; return the prompts from there on."""
    # Making the learners drew from these generators, so they are seeded only now; a checkpoint has their later states.
    seed_generators(resolved.config.seed)
    data = resolved.config.data
    prompts = PromptStream(resolved.prompts, resolved.config.seed, data.prompts_per_step, data.weights)
    if checkpoints.exists:
        with clock.stage("start"):
            checkpoints.load(learners)
        start = checkpoints.start
        cursor = DataCursor(start.cursor_epoch, start.cursor_position)
        prompts.restore(cursor, [DataCursor(*place) for place in start.pending], start.sources)
    return prompts


def continue_rollouts(
    serving: Serving, judge: RewardJudge, checkpoints: Checkpoints, prompts: PromptStream, inputs: Inputs, say: Say
) -> Collector:
    """Make the rollouts, with the responses that the checkpoint holds of prompts that no step has trained on."""
    # A save that is written must not wait for the step's end to become a checkpoint.
    rollouts = serving.rollouts(judge.judge, checkpoints.poll)
    unfinished, before = checkpoints.load_unfinished(), checkpoints.start.inputs
    if (before.problems, before.tokenizer) == (inputs.problems, inputs.tokenizer):
        useless = rollouts.take_up(prompts, unfinished)
    else:
        useless = len(unfinished)
    if useless:
        say(
            f"what the checkpoint has sampled of {useless} prompts was sampled for other prompts or seeds, or without "
            "experts (data.path, model.path, data.responses_per_prompt, seed or policy.experts.replay has changed): "
            "they are sampled again"
        )
    return rollouts
