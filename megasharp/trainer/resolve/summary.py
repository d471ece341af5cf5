"""Describes a resolved run in a few lines, for --dry-run and the head of a log."""

from __future__ import annotations

import os
from statistics import median

from megasharp.common.group_environment import OVERRULING, QUEUES, compute_capability, out_of_order, overruled
from megasharp.common.layout import ParallelLayout
from megasharp.config.run_config import RunConfig
from megasharp.convert.lora import trained_parameters
from megasharp.planner.memory import run_text, runs_of_layers
from megasharp.trainer.resolve import engine_python
from megasharp.trainer.resolve.devices import device_of
from megasharp.trainer.resolve.engine_settings import choose_transport, group_variables
from megasharp.trainer.resolve.prompt_format import (
    left_out_note,
    prompt_differences,
    shown_prompts,
    trained_by,
    turn_end_note,
)
from megasharp.trainer.resolve.recipes import correction_notes
from megasharp.trainer.resolve.resolved_run import ResolvedRun
from megasharp.trainer.reward_judge import (
    TRIED_ROWS,
    described,
    judged_tasks,
    judging_task,
    own_rewards,
    workers_for,
)


def describe(resolved: ResolvedRun) -> str:
    """Return ranks and their parts, batch sizes, engine and recipe, one fact a line."""
    config, arch, layout = resolved.config, resolved.architecture, resolved.layout
    group = config.data.largest_group
    device = "GPUs" if device_of(config) == "cuda" else "the CPU"
    limits = [*(stage.max_response_tokens for stage in config.data.stages), config.data.max_response_tokens]
    lines = [
        f"model      {arch.family}, {arch.parameter_count():,} parameters, {config.model.dtype}",
        *_adapters(resolved),
        f"policy     {layout.world} rank(s) = dp {layout.dp} x tp {layout.tp} x pp {layout.pp} x cp {layout.cp} on "
        f"{device}, " + _processes(resolved),
        *_experts(resolved),
        *(_stage(resolved, stage) for stage in range(layout.pp)),
        f"step       {config.data.prompts_per_step} prompts x {group} = {config.data.prompts_per_step * group} "
        f"responses{' at most' if len(config.data.group_sizes) > 1 else ''}, {config.recipe.mini_batches} optimizer "
        f"step(s), <= {config.policy.micro_batch_tokens} tokens a micro-batch",
        f"rollouts   {_engines(resolved)}, temperature {config.rollout.temperature}, <= "
        f"{', then '.join(map(str, limits))} tokens"
        + (f" and {config.rollout.episodes.max_turns} turns" if resolved.has_episodes else ""),
        *engine_python.described(config),
        f"recipe     {', '.join(resolved.recipes.final.methods)}; {resolved.recipes.final.reduction.value}",
        f"data       {_prompts(resolved)}; "
        + (
            f"evaluation on {', '.join(suite.name for suite in resolved.suites)}"
            if resolved.suites
            else "no evaluation"
        ),
        *_sources(resolved),
        *(f"prompt     {line}" for line in shown_prompts(config, resolved.prompts, resolved.tokenizer)),
        *([f"derived    {', '.join(resolved.derived)}"] if resolved.derived else []),
        *_reward(resolved),
    ]
    return "\n".join([*lines, *_notes(resolved)])


def _prompts(resolved: ResolvedRun) -> str:
    """Return how many prompts there are, and how many of them are left out by their length."""
    prompts, data = resolved.prompts, resolved.config.data
    if not prompts.skipped:
        return f"{len(prompts)} prompts of {data.label}"
    left_out = []
    if empty := prompts.lengths.count(0):
        left_out.append(f"{empty} are empty")
    if too_long := prompts.skipped - empty:
        left_out.append(
            f"{too_long} are longer than {data.max_prompt_tokens} tokens (median {median(prompts.lengths):g}, "
            f"longest {max(prompts.lengths)}): data.max_prompt_tokens"
        )
    return f"{len(prompts)} of {len(prompts.lengths)} prompts of {data.label}; {'; '.join(left_out)}"


def _sources(resolved: ResolvedRun) -> list[str]:
    """Return a line for each source of a mixture: its prompts, its share, its judge, and limits of its own."""
    data, reward = resolved.config.data, resolved.config.reward
    counts = resolved.prompts.counts
    weights = data.weights or counts
    # Of each stage that has its own, and of what comes after the last.
    courses = [*(stage.weights for stage in data.stages if stage.weights is not None), weights]
    lines = []
    for source in data.mix:
        name = source.own_name
        shares = [100 * weights.get(name, 0.0) / sum(weights.values()) for weights in courses]
        judge = judging_task(source, reward)
        own = own_rewards(reward, data.mix).get(judge)
        by = ", ".join(each.path for each in own.functions) if own else judge
        limits = [
            *([f"<= {source.max_response_tokens} tokens"] if source.max_response_tokens else []),
            *([f"{source.responses_per_prompt} responses"] if source.responses_per_prompt else []),
        ]
        share = ", then ".join(f"{share:.3g} %" for share in shares)
        lines.append(
            f"  {name}: {counts[name]} prompts of {source.label}, {share} of a step, judged by {by}"
            + "".join(f", {limit}" for limit in limits)
        )
    return lines


def _reward(resolved: ResolvedRun) -> list[str]:
    reward, mix = resolved.config.reward, resolved.config.data.mix
    workers = workers_for(reward, judged_tasks(resolved.config, resolved.suites))
    where = f"in {workers} worker process(es)" if workers else "in this process"
    rows = resolved.prompts.first(1)
    lines = [
        line
        for task, own in own_rewards(reward, mix).items()
        for line in described(own, [row for row in rows if row.task == task])
    ]
    tried = [f"           {where}, called on {TRIED_ROWS} rows before a run loads anything"] if lines else []
    if reward.levels is not None:
        levels = "{correct:g} for a right answer, {well_formed:g} for a wrong one in its form, {other:g} for all else"
        tried.append(f"reward     {levels.format(**reward.levels.model_dump())}")
    return [f"reward     {line}" for line in lines] + tried


def _adapters(resolved: ResolvedRun) -> list[str]:
    lora, arch = resolved.config.policy.lora, resolved.architecture
    if lora is None:
        return []
    return [
        f"lora       rank {lora.rank}, alpha {lora.alpha:g} on {', '.join(lora.targets)}: "
        f"{trained_parameters(lora, arch):,} parameters are trained, the others stay"
    ]


def _notes(resolved: ResolvedRun) -> list[str]:
    """Return notes on samples of other distributions, and on keys that are set and never read.

    Such keys are legal, because an override of the methods leaves other methods' tables behind.
    """
    section, recipes = resolved.config.recipe, resolved.recipes
    read = {name for recipe in recipes.all for name in recipe.methods}
    tables = [name for name, params in section.params().items() if params.model_fields_set and name not in read]
    stages = resolved.config.data.stages
    beyond = [stage.until for stage in section.schedule if stage.until >= resolved.config.steps]
    longer = [stage.until for stage in stages if stage.until is not None and stage.until >= resolved.config.steps]
    training = trained_by(resolved.config, resolved.prompts)
    return [
        *(f"note       {text}" for text in prompt_differences(training, resolved.suites)),
        *(f"note       {text}" for text in left_out_note(resolved.prompts, resolved.tokenizer)),
        *(f"note       {text}" for text in turn_end_note(resolved.prompts, resolved.tokenizer)),
        *(f"note       {text}" for text in correction_notes(resolved.config, recipes)),
        *(f"note       recipe.{name} is set, but no method of the recipe reads it" for name in tables),
        *(f"note       recipe.schedule: the run ends before what follows step {until}" for until in beyond),
        *(f"note       data.stages: the run ends before what follows step {until}" for until in longer),
        *(f"note       {text}" for text in environment_notes(resolved.config, resolved.layout)),
    ]


def environment_notes(config: RunConfig, layout: ParallelLayout) -> list[str]:
    """Return notes on variables of the user's environment that cost speed, or that another key overrules."""
    notes = []
    if device_of(config) == "cuda":
        capability = compute_capability()
        queues = out_of_order(layout.splits_tensors, capability, os.environ)
        if queues is not None:
            where = "this GPU" if capability else "Hopper and older (no GPU is here to ask)"
            notes.append(
                f"{QUEUES}={queues} is kept, but on {where} tensor- and context-parallel collectives are hidden behind "
                "products only with 1; unset it"
            )
    if group_variables(config):
        flags = config.rollout.sglang
        asked = " and ".join(f"rollout.sglang.{name}" for name in OVERRULING if flags.get(name))
        notes += [
            f"{given} of the environment does not count: {asked} sets the other value in engines, and ranks that share "
            "a group with them need the same"
            for given in overruled(flags, os.environ)
        ]
    return notes


def _processes(resolved: ResolvedRun) -> str:
    over = "NCCL" if device_of(resolved.config) == "cuda" else "gloo"
    if resolved.config.cluster.backend == "ray":
        return f"Ray actors over {over}"
    return "in this process" if resolved.layout.world == 1 else f"processes over {over}"


def _engines(resolved: ResolvedRun) -> str:
    """Return the engines, their placement, and the transport of weights."""
    config = resolved.config
    if config.rollout.engine == "inprocess":
        return "engine in each rank" if resolved.samples_in_ranks else "engine in this process"
    memory = " with a memory network" if resolved.memory else ""
    transport = choose_transport(config, "sync.transport")
    urls = config.rollout.external
    external = f" and {len(urls)} started by hand ({', '.join(urls)})" if urls else ""
    return (
        f"{config.rollout.engines} SGLang engine(s){external} x tp {config.rollout.tp}{memory}, "
        f"{config.cluster.placement}, weights by {transport}"
    )


def _experts(resolved: ResolvedRun) -> list[str]:
    """Say how a mixture's experts are spread; nothing of a dense model."""
    experts, layout, keys = resolved.architecture.experts, resolved.layout, resolved.config.policy.experts
    if experts is None:
        return []
    replayed = ", routing replayed from the engines" if keys.replay else ""
    return [
        f"experts    {experts.count}, {experts.per_token} a token ({resolved.architecture.active_parameter_count():,} "
        f"active parameters), ep {layout.ep} x etp {layout.etp} by {keys.dispatcher}{replayed}"
    ]


def _stage(resolved: ResolvedRun, stage: int) -> str:
    layout = resolved.layout
    width = layout.tp * layout.cp * layout.dp
    first = stage * width
    ranks = f"rank {first}" if width == 1 else f"ranks {first}-{first + width - 1}"
    ends = [name for name, there in (("embedding", stage == 0), ("head", stage == layout.pp - 1)) if there]
    extra = f" + {' and '.join(ends)}" if ends else ""
    held = ", ".join(map(run_text, runs_of_layers(resolved.architecture.num_layers, layout, stage)))
    return f"  stage {stage}  {ranks}: layers {held}{extra}"
