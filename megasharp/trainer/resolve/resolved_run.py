"""Resolve a configuration into a run that can start, or refuse it in one line.

Refusals that need no other file follow: of collection, determinism, sampling, and of the precision of linear layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from megasharp.algos.base import Needs
from megasharp.algos.dlc import MemoryParams
from megasharp.algos.recipe import RecipeSchedule
from megasharp.cluster.ray_runtime.slot_layout import Layout
from megasharp.common.errors import UserError
from megasharp.common.layout import ParallelLayout
from megasharp.config.rollout import RolloutConfig
from megasharp.config.run_config import RunConfig
from megasharp.convert.architecture import Architecture
from megasharp.convert.model_folder import ModelFolder
from megasharp.evals.suites import Suite, load_suite
from megasharp.metrics.trackers.watch import check_installed
from megasharp.rollout.episodes.trial import try_turn
from megasharp.rollout.sglang.client.health import check_engines
from megasharp.tasks.environment import plays
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.problems import prompt_of
from megasharp.tasks.sets.row_sources import commit_read
from megasharp.tasks.stream import TokenizedPrompts, tokenize_prompts
from megasharp.tasks.tokenizer import TextTokenizer, load_tokenizer
from megasharp.trainer.resolve.attention_choice import check_attention
from megasharp.trainer.resolve.derived import derived
from megasharp.trainer.resolve.devices import device_of
from megasharp.trainer.resolve.engine_settings import (
    check_context,
    check_engine_keys,
    check_window,
    cluster_layout,
    fleet_settings,
    longest,
    longest_keys,
)
from megasharp.trainer.resolve.experts_choice import check_experts
from megasharp.trainer.resolve.models import (
    DATA_KEY,
    MEMORY_KEY,
    MODEL_KEY,
    check_named,
    open_memory,
    open_model,
    training_problems,
)
from megasharp.trainer.resolve.prompt_format import asking_of, check_mark, check_markers, check_words
from megasharp.trainer.resolve.recipes import build_recipes, check_prolonged, resolved_config
from megasharp.trainer.reward_judge import check_judging, judged_tasks


@dataclass(frozen=True, slots=True)
class MemoryFolder:
    """The folder of DLC's memory network, how the network learns, and `MemoryNeed.window`."""

    model: ModelFolder
    architecture: Architecture
    params: MemoryParams
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A configuration that can start, with what was read on the way.

    Training changes nothing in it, so that one of these starts any number of equal runs; sections are frozen, their
    lists are not copied. `derived` are clauses on values that the file left open, `data_commit` is
    that of own rows on the hub.
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
    derived: tuple[str, ...] = ()
    data_commit: str | None = None

    @property
    def items(self) -> Iterator[TaskItem]:
        """The problems of training and of the suites."""
        return chain((item for item, _ in self.prompts.prompts), *(suite.items for suite in self.suites))

    @property
    def has_episodes(self) -> bool:
        """True where some task, of training or a suite, is an environment."""
        return plays(self.items)

    @property
    def samples_in_ranks(self) -> bool:
        """True where the policy's ranks sample: on CPUs of this machine, where each holds the whole model."""
        return (
            self.config.rollout.engine == "inprocess"
            and self.config.cluster.backend == "local"
            and device_of(self.config) == "cpu"
            and self.layout.world == self.layout.dp > 1
        )


def check(
    config: RunConfig, where: str, begun: bool = False, commits: Mapping[str, str] = {}, weights: bool = True
) -> ResolvedRun:
    """Read all that a run needs, and refuse what cannot run. `where` names the configuration file.

    A run that has `begun` goes on with the prompts it has, special tokens of another model included, and at the
    `commits` of the hub's models and set that it has. Without `weights`, those of a hub's model are not fetched. Raises
    UserError in one line: NotAtHand where a model or a set is neither here nor to be had from the hub.
    """
    check_installed(config.log.trackers, where)
    check_rollout(config.rollout, where)
    check_deterministic(config, where)
    check_engine_keys(config, where)
    check_named(config, where)
    model, architecture = open_model(config.model.path, config.model.revision, commits.get(MODEL_KEY), weights)
    tokenizer = load_tokenizer(model.description).with_bos(config.data.bos)
    check_mark(config.reward.answer_after, tokenizer, f"{where}: reward.answer_after")
    for source in config.data.sources if not begun else ():
        check_words(source, tokenizer, where)
    # Before all prompts are tokenized, whose lengths say how long a response may be at most.
    longest_one = config.data.max_response_tokens or architecture.max_positions
    data = config.data.model_copy(update={"max_response_tokens": longest_one})
    check_methods(config, build_recipes(config.model_copy(update={"data": data}), where).needs, where)
    names = [source.own_name for source in config.data.mix]
    read = config.data
    if DATA_KEY in commits:
        if config.data.path is not None and Path(config.data.path).exists():
            raise UserError(
                f"{where}: data.path: {config.data.path} is on this machine, and the run began with the hub's data set "
                "of that name; rename what is here, or resume from another folder"
            )
        read = read.model_copy(update={"revision": commits[DATA_KEY]})
    problems = training_problems(config.model_copy(update={"data": read}), where)
    prompts = tokenize_prompts(problems, tokenizer, sources=names)
    config, clauses = derived(config, architecture, prompts.lengths)
    recipes = build_recipes(config, where)
    _check_policy(config, architecture, recipes.needs, where)
    memory = _open_memory(config, recipes.needs, architecture, where, commits, weights)
    if config.rollout.engine == "sglang":
        check_context(config, architecture.max_positions, where)
        for network in (architecture, *((memory.architecture,) if memory else ())):
            check_window(config, network.smallest_window, where)
        its_model, window = (memory.model, memory.window) if memory else (None, None)
        if config.rollout.engines:
            check_engines(fleet_settings(config, model, its_model, Path(), window), where)
    asking = asking_of(config)
    suites = tuple(load_suite(name, asking=asking) for name in config.eval.suites)
    if not begun:
        check_markers(map(prompt_of, config.data.sources), suites, tokenizer, where)
    check_judging(config.reward, judged_tasks(config, suites), where)
    policy = config.policy
    resolved = ResolvedRun(
        config=resolved_config(config, recipes),
        model=model,
        architecture=architecture,
        tokenizer=tokenizer,
        recipes=recipes,
        prompts=prompts.within(config.data.max_prompt_tokens, architecture.max_positions),
        suites=suites,
        layout=policy.layout,
        memory=memory,
        cluster_layout=cluster_layout(config) if config.cluster.backend == "ray" else None,
        derived=tuple(clauses),
        data_commit=commit_read(read.path, read.revision),
    )
    if resolved.has_episodes and memory is not None and memory.window is not None:
        raise UserError(
            f"{where}: recipe.dlc.window={memory.window} with an environment: engines read the turns before as a "
            "prompt, all of which the memory network would see, and the learner would not; leave the window out"
        )
    if resolved.has_episodes:
        try_turn(resolved.items, tokenizer, config.rollout.episodes, where)
    return resolved


def check_methods(config: RunConfig, needs: Needs, where: str) -> None:
    """Refuse rules and evaluations that the methods of a run cannot follow."""
    check_prolonged(config, needs, where)
    if config.eval.with_memory and needs.memory is None:
        raise UserError(f"{where}: eval.with_memory needs a memory network, which only dlc in recipe.methods brings")


def check_rollout(rollout: RolloutConfig, where: str) -> None:
    """Refuse keys of rollouts that contradict each other, or that an engine cannot follow."""
    if rollout.engine == "inprocess":
        for key in ("oversample", "max_staleness", "stragglers", "request_limit_s", "first_token_limit_s"):
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
    if rollout.oversample and rollout.max_staleness == 0 and not rollout.allow_length_bias:
        raise UserError(
            f"{where}: rollout.oversample={rollout.oversample:g} with max_staleness=0 throws away what is slow, so "
            "long responses train too seldom; set rollout.max_staleness=1, which keeps them as partial rollouts, or "
            "rollout.allow_length_bias=true"
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


def _check_policy(config: RunConfig, architecture: Architecture, needs: Needs, where: str) -> None:
    """Refuse what the model that is trained cannot do, as far as that shows without Megatron's own model."""
    architecture.check_layout(config.policy.layout)
    _check_length(config, architecture, where)
    check_precision(config, architecture, where)
    check_experts(config, architecture, where, here=True)
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


def _open_memory(
    config: RunConfig, needs: Needs, policy: Architecture, where: str, commits: Mapping[str, str], weights: bool
) -> MemoryFolder | None:
    """Open the memory network that some stage's recipe asks for; it is split over ranks as the policy is."""
    need = needs.memory
    if need is None:
        return None
    network, commit = need.network, commits.get(MEMORY_KEY)
    model, architecture = open_memory(network.path, network.start == "cold", network.revision, commit, weights)
    layout = config.policy.layout
    architecture.check_layout(layout if architecture.experts else replace(layout, ep=1, etp=1))
    _check_length(config, architecture, where)
    if architecture.vocab != policy.vocab:
        raise UserError(
            f"{where}: the memory network {model.path} has a vocabulary of {architecture.vocab} tokens, the policy "
            f"{config.model.path} one of {policy.vocab}: DLC subtracts logits, so they must be the same"
        )
    check_precision(config, architecture, where)
    check_attention(config, architecture, where, here=True, response_window=need.window)
    if need.window is not None:
        _check_memory_window(config, need.window, model, architecture, where)
    if config.policy.lora is not None and isinstance(need.network.lr, str):
        raise UserError(
            f"{where}: recipe.dlc.memory.lr={need.network.lr} is a multiple of policy.optimizer.lr, which with "
            "policy.lora is a rate for adapters, and the memory network is trained whole; give a number, such as 1e-5"
        )
    return MemoryFolder(model, architecture, need.network, need.window)


def _check_memory_window(
    config: RunConfig, window: int, model: ModelFolder, architecture: Architecture, where: str
) -> None:
    if architecture.smallest_window is not None:
        raise UserError(
            f"{where}: recipe.dlc.window={window}: layers of {model.path} have sliding windows of their own "
            f"({architecture.smallest_window} positions), which hide prompts; leave recipe.dlc.window out, or take a "
            "memory network without them"
        )
    if config.rollout.engine == "sglang" and device_of(config) == "cuda":
        raise UserError(
            f"{where}: recipe.dlc.window={window} is refused by SGLang engines on GPUs, whose attention has no such "
            "mask; leave it out"
        )


def _check_length(config: RunConfig, architecture: Architecture, where: str) -> None:
    if longest(config) > architecture.max_positions:
        raise UserError(
            f"{where}: {longest_keys(config)} = {longest(config)} is more than the "
            f"{architecture.max_positions} positions of {architecture.folder or config.model.path}; lower one of the "
            "two keys"
        )


# Transformer Engine multiplies matrices in FP8 whose dimensions are multiples of this.
_FP8_MULTIPLE = 16


def check_precision_keys(config: RunConfig, architecture: Architecture, where: str) -> None:
    """Raise UserError, in one line, for keys without effect, and for what this model or the run's device cannot do.

    Says nothing of the machine that this runs on.
    """
    policy, fields = config.policy, type(config.policy).model_fields
    if policy.fp8 is None and policy.fp8_recipe != fields["fp8_recipe"].default:
        raise UserError(f"{where}: policy.fp8_recipe has no effect while policy.fp8 is null; set policy.fp8 too")
    # Runs begun before 06e5159 (2026-11-25) have stored another default.
    idle = (fields["recompute_modules"].default, ["core_attn"])
    if policy.recompute != "selective" and policy.recompute_modules not in idle:
        raise UserError(
            f"{where}: policy.recompute_modules has no effect with policy.recompute={policy.recompute}; set "
            "policy.recompute=selective too"
        )
    if len(set(policy.recompute_modules)) < len(policy.recompute_modules):
        raise UserError(f"{where}: policy.recompute_modules names one twice")
    if policy.recompute == "selective" and not policy.recompute_modules:
        raise UserError(f"{where}: policy.recompute_modules is empty; name one, or set policy.recompute=none")
    check_attention(config, architecture, where, here=False)
    if policy.fp8 is not None:
        _check_fp8(config, architecture, f"{where}: policy.fp8={policy.fp8}")
    elif policy.transformer_engine is True and device_of(config) != "cuda":
        raise UserError(f"{where}: policy.transformer_engine=true needs a GPU; on a CPU leave it at auto, or set false")


def check_precision(config: RunConfig, architecture: Architecture, where: str) -> None:
    """Raise UserError as `check_precision_keys`, and where this Python lacks what is asked for."""
    policy = config.policy
    check_precision_keys(config, architecture, where)
    check_attention(config, architecture, where, here=True)
    if policy.fp8 is not None or policy.transformer_engine is True:
        # Imported here: Megatron takes seconds to import.
        from megasharp.learner.layer_spec import require_transformer_engine

        key = "transformer_engine=true" if policy.fp8 is None else f"fp8={policy.fp8}"
        remedy = "leave policy.transformer_engine at auto" if policy.fp8 is None else "leave policy.fp8 null"
        require_transformer_engine(f"{where}: policy.{key}", remedy)


def _check_fp8(config: RunConfig, architecture: Architecture, key: str) -> None:
    policy = config.policy
    if policy.transformer_engine is False:
        raise UserError(f"{key}: Transformer Engine does it, which policy.transformer_engine=false leaves out")
    if config.model.dtype != "bfloat16":
        raise UserError(f"{key} rounds products of bfloat16 weights; set model.dtype=bfloat16")
    if device_of(config) != "cuda":
        raise UserError(f"{key} needs a GPU (Hopper or later); leave it null on a CPU")
    joined = architecture.query_size + 2 * architecture.kv_size
    experts = architecture.experts
    ffn = ("ffn", architecture.ffn, "tp") if experts is None else ("experts' ffn", experts.ffn, "etp")
    for name, size, cut in (("hidden", architecture.hidden, "tp"), ("query, key and value", joined, "tp"), ffn):
        parts = getattr(policy, cut)
        if size % (parts * _FP8_MULTIPLE):
            model = architecture.folder or config.model.path
            raise UserError(
                f"{key}: the {name} size {size} of {model} over {cut} {parts} is no multiple of {_FP8_MULTIPLE}; "
                f"lower policy.{cut} or leave policy.fp8 null"
            )
