"""Describes a resolved run in a few lines, for --dry-run and the head of a log."""

from __future__ import annotations

from megasharp.convert.lora import trained_parameters
from megasharp.planner.memory import run_text, runs_of_layers
from megasharp.trainer.resolve.devices import device_of
from megasharp.trainer.resolve.engine_settings import choose_transport
from megasharp.trainer.resolve.resolved_run import ResolvedRun


def describe(checked: ResolvedRun) -> str:
    """Return ranks and their parts, batch sizes, engine and recipe, one fact a line."""
    config, arch, layout = checked.config, checked.architecture, checked.layout
    responses = config.data.prompts_per_step * config.data.responses_per_prompt
    device = "GPUs" if device_of(config) == "cuda" else "the CPU"
    limits = [*(stage.max_response_tokens for stage in config.data.stages), config.data.max_response_tokens]
    lines = [
        f"model      {arch.family}, {arch.parameter_count():,} parameters, {config.model.dtype}",
        *_adapters(checked),
        f"policy     {layout.world} rank(s) = dp {layout.dp} x tp {layout.tp} x pp {layout.pp} x cp {layout.cp} on "
        f"{device}, " + _processes(checked),
        *(_stage(checked, stage) for stage in range(layout.pp)),
        f"step       {config.data.prompts_per_step} prompts x {config.data.responses_per_prompt} = {responses} "
        f"responses, {config.recipe.mini_batches} optimizer step(s), <= {config.policy.micro_batch_tokens} tokens "
        "a micro-batch",
        f"rollouts   {_engines(checked)}, temperature {config.rollout.temperature}, <= "
        f"{', then '.join(map(str, limits))} tokens",
        f"recipe     {', '.join(checked.recipes.final.methods)}; {checked.recipes.final.reduction.value}",
        f"data       {len(checked.prompts)} prompts of {config.data.name}; evaluation on "
        + (", ".join(suite.name for suite in checked.suites) or "nothing"),
    ]
    return "\n".join([*lines, *_notes(checked)])


def _adapters(checked: ResolvedRun) -> list[str]:
    lora, arch = checked.config.policy.lora, checked.architecture
    if lora is None:
        return []
    return [
        f"lora       rank {lora.rank}, alpha {lora.alpha:g} on {', '.join(lora.targets)}: "
        f"{trained_parameters(lora, arch):,} parameters are trained, the others stay"
    ]


def _notes(checked: ResolvedRun) -> list[str]:
    """Return notes on stale tokens that no method corrects for, and on keys that are set and never read.

    Such keys are legal, because an override of the methods leaves other methods' tables behind.
    """
    section, recipes = checked.config.recipe, checked.recipes
    behind = checked.config.rollout.max_staleness
    stale = [
        f"note       tokens up to {behind} version(s) old are trained on as if the present policy had sampled them; "
        "truncated_is or bypass in recipe.methods corrects for that"
    ]
    corrected = behind == 0 or set(recipes.final.methods) & {"truncated_is", "bypass"}
    read = {name for recipe in recipes.all for name in recipe.methods}
    tables = [name for name, params in section.params().items() if params.model_fields_set and name not in read]
    stages = checked.config.data.stages
    beyond = [stage.until for stage in section.schedule if stage.until >= checked.config.steps]
    longer = [stage.until for stage in stages if stage.until is not None and stage.until >= checked.config.steps]
    return [
        *([] if corrected else stale),
        *(f"note       recipe.{name} is set, but no method of the recipe reads it" for name in tables),
        *(f"note       recipe.schedule: the run ends before what follows step {until}" for until in beyond),
        *(f"note       data.stages: the run ends before what follows step {until}" for until in longer),
    ]


def _processes(checked: ResolvedRun) -> str:
    over = "NCCL" if device_of(checked.config) == "cuda" else "gloo"
    if checked.config.cluster.backend == "ray":
        return f"Ray actors over {over}"
    return "in this process" if checked.layout.world == 1 else f"processes over {over}"


def _engines(checked: ResolvedRun) -> str:
    """Return the engines, their placement, and the transport of weights."""
    config = checked.config
    if config.rollout.engine == "inprocess":
        return "engine in this process"
    memory = " with a memory network" if checked.memory else ""
    transport = choose_transport(config, "sync.transport")
    return (
        f"{config.rollout.engines} SGLang engine(s) x tp {config.rollout.tp}{memory}, {config.cluster.placement}, "
        f"weights by {transport}"
    )


def _stage(checked: ResolvedRun, stage: int) -> str:
    layout = checked.layout
    width = layout.tp * layout.cp * layout.dp
    first = stage * width
    ranks = f"rank {first}" if width == 1 else f"ranks {first}-{first + width - 1}"
    ends = [name for name, there in (("embedding", stage == 0), ("head", stage == layout.pp - 1)) if there]
    extra = f" + {' and '.join(ends)}" if ends else ""
    held = ", ".join(map(run_text, runs_of_layers(checked.architecture.num_layers, layout, stage)))
    return f"  stage {stage}  {ranks}: layers {held}{extra}"
