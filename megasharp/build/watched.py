"""Figures that a run file names, stages and resets: what cannot come true is refused before anything starts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from megasharp.algos.base import Needs
from megasharp.config.run import RunConfig
from megasharp.errors import UserError
from megasharp.evals.evaluate import WITH_MEMORY
from megasharp.prolonged.best import GROWING


def check_prolonged(config: RunConfig, needs: Needs, where: str) -> None:
    """Refuse figures that no evaluation gives, stages out of order, resets of nothing. Raises UserError."""
    untils = [stage.until for stage in config.data.stages if stage.until is not None]
    if any(later <= earlier for earlier, later in pairwise(untils)):
        raise UserError(f"{where}: data.stages: each `until` must be above the one before it, found {untils}")
    reset = config.recipe.reset
    asked = reset.every is not None or reset.stagnation is not None
    if asked and reset.optimizer == "keep" and not needs.ref_logp:
        raise UserError(
            f"{where}: recipe.reset has nothing to reset: no method reads a reference, and the optimizer is kept; "
            "add kl to recipe.methods, set optimizer=reinit or leave recipe.reset out"
        )
    for key, metric in watched(config).items():
        _check_metric(config, metric, f"{where}: {key}")


def watched(config: RunConfig) -> dict[str, str]:
    """Figures of evaluations that something depends on, by the key that names them."""
    rules = {
        "recipe.reset.stagnation": config.recipe.reset.stagnation,
        **{f"data.stages[{number}].stagnation": stage.stagnation for number, stage in enumerate(config.data.stages)},
    }
    found = {f"{key}.metric": rule.metric for key, rule in rules.items() if rule is not None}
    return found | ({"checkpoint.keep_best": config.checkpoint.keep_best} if config.checkpoint.keep_best else {})


def _check_metric(config: RunConfig, metric: str, where: str) -> None:
    if config.eval.every == 0:
        raise UserError(f"{where}: {metric} needs evaluations during the run; set eval.every")
    suites = [Path(suite).stem for suite in config.eval.suites]
    if config.eval.with_memory:
        suites += [f"{suite}{WITH_MEMORY}" for suite in suites]
    figures = [*(f"pass@{k}" for k in sorted(set(config.eval.k))), *GROWING]
    known = [f"eval/{suite}/{figure}" for suite in suites for figure in figures]
    if metric not in known:
        raise UserError(f"{where}: no evaluation gives {metric!r}; eval gives: {', '.join(known) or 'nothing'}")
