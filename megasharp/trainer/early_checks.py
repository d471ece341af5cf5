"""Refusals before a run waits in a queue: those of `resolved_run.check` that are cheap, in its words.

No prompt is tokenized, no engine's keys are compared, and nothing is fetched from the hub. This machine's hardware says
nothing of the nodes, so it is not looked at; nor is what a container or another Python may have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megasharp.checkpoint.recorded import check_checkpoints
from megasharp.checkpoint.run_folder import holds_no_run
from megasharp.common.errors import UserError
from megasharp.common.exit_codes import Say
from megasharp.config.core import find
from megasharp.config.data import DataSource, MixedSource
from megasharp.config.hub import is_hub_id
from megasharp.config.run_config import RunConfig, run_tree
from megasharp.convert.model_folder import model_folder
from megasharp.evals.suites import load_suite, suite_source
from megasharp.metrics.trackers.watch import check_installed
from megasharp.reporting.history import read_run
from megasharp.trainer.hub_inputs import sets_read
from megasharp.trainer.resolve.engine_python import check_packages, engine_python, starts_engines
from megasharp.trainer.resolve.models import check_named, open_model, source_problems
from megasharp.trainer.resolve.prompt_format import asking_of
from megasharp.trainer.resolve.recipes import build_recipes, resolved_config
from megasharp.trainer.resolve.resolved_run import check_deterministic, check_methods, check_rollout
from megasharp.trainer.resume import check_resume
from megasharp.trainer.reward_judge import check_judging, judging_task, training_items
from megasharp.trainer.stored_config import resumed_config

_REMEDY = (
    "choose another name= for it, or continue it once by hand: megasharp train with --resume and --allow-change KEY"
)


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes as this machine knows them.

    `sees` says of a path whether this machine sees what they do. They may work in a `container`, their packages not be
    this Python's (`other_python`), and their engines' Python not be the one that is found here (`other_engines`).
    `waits`: another job may write what is missing now.
    """

    sees: Callable[[Path], bool]
    container: bool
    other_python: bool
    other_engines: bool
    waits: bool


def refuse_early(file: Path, overrides: Sequence[str], root: Path, nodes: Nodes, say: Say) -> RunConfig:
    """Return the configuration that the run would start or, in its folder `root`, go on with.

    Raises UserError for a run that could do neither.
    """
    where = str(file)
    config = resumed_config(root, run_tree(file, overrides), where, say)
    check_rollout(config.rollout, where)
    check_deterministic(config, where)
    suites = [name for name in config.eval.suites if not nodes.container or _is_known(name)]
    check_named(config.model_copy(update={"eval": config.eval.model_copy(update={"suites": suites})}), where)
    recipes = build_recipes(config, where)
    check_methods(config, recipes.needs, where)
    if not nodes.other_python:
        check_installed(config.log.trackers, where)
    if not nodes.waits:
        _check_resumes(root, resolved_config(config, recipes))
        _check_files(config, suites, where, nodes)
    tasks = {judging_task(source, config.reward) for source in config.data.sources} if not nodes.other_python else set()
    check_judging(config.reward, tasks, where, elsewhere=True)
    return config


def _check_resumes(root: Path, config: RunConfig) -> None:
    """Refuse another experiment under a run's name, and a run whose checkpoints are missing, unless it is running."""
    if holds_no_run(root):
        return
    check_resume(root, config, remedy=_REMEDY)
    refuse_without_checkpoints(root)


def refuse_without_checkpoints(root: Path) -> None:
    """Raise UserError for a run whose checkpoints are missing, unless it is running."""
    if not holds_no_run(root) and read_run(root).state != "running":
        check_checkpoints(root)


def _is_known(suite: str) -> bool:
    """Return whether this machine has a suite's file, and its data where that is a file."""
    try:
        suite_source(suite)
    except UserError:
        return False
    return True


def _check_files(config: RunConfig, suites: Sequence[str], where: str, nodes: Nodes) -> None:
    """Refuse a model, data, suites and an engines' Python that are missing or wrong, of what the nodes see too."""
    model = find(config.model.path)
    at_hand = model.exists() and not model_folder(model).is_megatron
    if nodes.sees(model) and (at_hand or not (model.exists() or is_hub_id(config.model.path))):
        open_model(config.model.path, config.model.revision)
    for source in config.data.sources:
        place = find(source.path) if source.path is not None else None
        if _is_local(source, place, nodes):
            mixed = source if isinstance(source, MixedSource) else None
            rows = source_problems(source, f"{where}: data.mix: {mixed.own_name}" if mixed else f"{where}: data")
            if not nodes.other_python:
                training_items(rows, config.reward, where, mixed)
    for name in suites:
        if _is_local(*suite_source(name), nodes):
            load_suite(name, asking=asking_of(config))
    if starts_engines(config):
        _check_engines_python(config, nodes)


def _check_engines_python(config: RunConfig, nodes: Nodes) -> None:
    """Refuse an engines' Python that is missing or lacks what engines need, where the nodes have this machine's."""
    if nodes.other_engines and config.rollout.python is None:
        return
    if nodes.sees(engine_python(config).path):
        check_packages(config)


def _is_local(source: DataSource, place: Path | None, nodes: Nodes) -> bool:
    """Return whether a source is all in files that this machine sees as the nodes do."""
    return (place is None or nodes.sees(place)) and not any(sets_read(source, place))
