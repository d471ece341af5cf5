"""Resolves a configuration into a run that can start; what is refused, is refused here in one line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megasharp.algos.base import Needs
from megasharp.algos.recipe import RecipeSchedule
from megasharp.cluster.ray_runtime.slot_layout import Layout
from megasharp.common.errors import UserError
from megasharp.common.records import ParallelLayout
from megasharp.config.rollout import RolloutConfig
from megasharp.config.run_config import RunConfig
from megasharp.convert.architecture import Architecture
from megasharp.convert.model_folder import ModelFolder
from megasharp.evals.suites import Suite, load_suite
from megasharp.metrics.trackers.watch import check_installed
from megasharp.rollout.sglang.client.health import check_engines
from megasharp.tasks.stream import TokenizedPrompts, tokenize_prompts
from megasharp.tasks.tokenizer import TextTokenizer, load_tokenizer
from megasharp.trainer.resolve.engine_settings import (
    check_context,
    check_engine_keys,
    check_window,
    cluster_layout,
    fleet_settings,
    longest,
    longest_keys,
)
from megasharp.trainer.resolve.models import open_memory, open_model, training_problems
from megasharp.trainer.resolve.precision import check_precision
from megasharp.trainer.resolve.recipes import build_recipes, check_prolonged, resolved_config
from megasharp.trainer.reward_judge import check_judging, judged_tasks, training_items


@dataclass(frozen=True, slots=True)
class MemoryFolder:
    """The folder of DLC's memory network, and the learning rate that it trains with."""

    model: ModelFolder
    architecture: Architecture
    lr: float


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A configuration that can start, with what was read on the way.

    Nothing in it changes while a run trains, so that one of these starts any number of equal runs.
    """

    config: RunConfig
    model: ModelFolder
    architecture: Architecture
    tokenizer: TextTokenizer
    recipes: RecipeSchedule
    prompts: TokenizedPrompts
    suites: tuple[Suite, ...]
    layout: ParallelLayout
    memory: MemoryFolder | None
    cluster_layout: Layout | None = None


def check(config: RunConfig, where: str) -> ResolvedRun:
    """Read all that a run needs, and refuse what cannot run. `where` names the configuration file.

    Raises UserError in one line.
    """
    check_installed(config.log.trackers, where)
    check_rollout(config.rollout, where)
    check_deterministic(config, where)
    check_engine_keys(config, where)
    recipes = build_recipes(config, where)
    check_prolonged(config, recipes.needs, where)
    if config.eval.with_memory and recipes.needs.memory is None:
        raise UserError(f"{where}: eval.with_memory needs a memory network, which only dlc in recipe.methods brings")
    model, architecture = _open_policy(config, recipes.needs, where)
    memory = _open_memory(config, recipes.needs, architecture, where)
    if config.rollout.engine == "sglang":
        check_context(config, architecture.max_positions, where)
        for network in (architecture, *((memory.architecture,) if memory else ())):
            check_window(config, network.smallest_window, where)
        check_engines(fleet_settings(config, model, memory.model if memory else None, Path()), where)
    tokenizer = load_tokenizer(model.description)
    suites = tuple(load_suite(name) for name in config.eval.suites)
    check_judging(config.reward, judged_tasks(config, suites), where)
    items = training_items(training_problems(config.data, where), config.reward)
    policy = config.policy
    return ResolvedRun(
        config=resolved_config(config, recipes),
        model=model,
        architecture=architecture,
        tokenizer=tokenizer,
        recipes=recipes,
        prompts=tokenize_prompts(items, tokenizer, config.data.max_prompt_tokens),
        suites=suites,
        layout=ParallelLayout(policy.dp, policy.tp, policy.pp, policy.cp, policy.vpp),
        memory=memory,
        cluster_layout=cluster_layout(config) if config.cluster.backend == "ray" else None,
    )


def check_rollout(rollout: RolloutConfig, where: str) -> None:
    """Refuse keys of rollouts that contradict each other, or that an engine cannot follow."""
    if rollout.engine == "inprocess":
        for key in ("oversample", "max_staleness", "stragglers", "request_limit_s"):
            if getattr(rollout, key) != RolloutConfig.model_fields[key].default:
                raise UserError(
                    f"{where}: rollout.{key} needs engines that sample while something else happens; "
                    "set rollout.engine=sglang or leave this key at its default"
                )
    if rollout.stragglers == "keep" and rollout.max_staleness == 0:
        raise UserError(
            f"{where}: rollout.stragglers=keep lets responses go on under new weights, which rollout.max_staleness=0 "
            "forbids; raise max_staleness or set stragglers=abort"
        )
    # SGLang would call it greedy, and leave the temperature out.
    if rollout.top_k == 1:
        raise UserError(
            f"{where}: rollout.top_k=1 samples one response again and again, which teaches nothing; "
            "use 0 (off) or at least 2"
        )


def check_deterministic(config: RunConfig, where: str) -> None:
    """Refuse, in a deterministic run, keys by which the order of events decides what a step trains on."""
    for key in ("max_staleness", "oversample") if config.deterministic else ():
        if getattr(config.rollout, key):
            raise UserError(
                f"{where}: deterministic: with rollout.{key} above 0 what a step trains on depends on how fast its "
                f"responses were sampled; set rollout.{key}=0 or deterministic=false"
            )


def _open_policy(config: RunConfig, needs: Needs, where: str) -> tuple[ModelFolder, Architecture]:
    """Open the model that is trained, as far as it can be checked without Megatron's own model."""
    model, architecture = open_model(config.model.path)
    architecture.check_parallel(config.policy.tp, config.policy.pp, vpp=config.policy.vpp)
    _check_length(config, architecture, where)
    check_precision(config, architecture, where)
    if config.policy.megatron:
        # Imported here: Megatron takes seconds to import, and most runs pass nothing through.
        from megasharp.learner.model import sort_options

        sort_options(config.policy.megatron)
    candidates = max(config.log.candidates, needs.topn)
    if candidates > architecture.vocab:
        raise UserError(
            f"{where}: {candidates} candidates (a method's topn, or log.candidates) of a vocabulary of "
            f"{architecture.vocab} tokens; lower it"
        )
    return model, architecture


def _open_memory(config: RunConfig, needs: Needs, policy: Architecture, where: str) -> MemoryFolder | None:
    """Open the memory network that some stage's recipe asks for; it is split over ranks as the policy is."""
    need = needs.memory
    if need is None:
        return None
    model, architecture = open_memory(need.path)
    architecture.check_parallel(config.policy.tp, config.policy.pp, vpp=config.policy.vpp)
    _check_length(config, architecture, where)
    if architecture.vocab != policy.vocab:
        raise UserError(
            f"{where}: the memory network {model.path} has a vocabulary of {architecture.vocab} tokens, the policy "
            f"{config.model.path} one of {policy.vocab}: DLC subtracts logits, so they must be the same"
        )
    check_precision(config, architecture, where)
    return MemoryFolder(model, architecture, need.lr or config.policy.optimizer.lr)


def _check_length(config: RunConfig, architecture: Architecture, where: str) -> None:
    if longest(config) > architecture.max_positions:
        raise UserError(
            f"{where}: {longest_keys(config)} = {longest(config)} is more than the "
            f"{architecture.max_positions} positions of {architecture.folder or config.model.path}; lower one of the "
            "two keys"
        )
