"""The rules by which a run decides in its course, from its configuration."""

from __future__ import annotations

from megasharp.algos.base import Needs
from megasharp.common.control import LengthStage, ResetRule, Rules, SpikeRule, StagnationRule, Threshold, What
from megasharp.config.data import LengthStageConfig, StagnationConfig
from megasharp.config.run_config import RunConfig
from megasharp.trainer.resolve.resolved_run import ResolvedRun


def make_rules(checked: ResolvedRun) -> Rules:
    """What a checked run decides by."""
    config = checked.config
    last = LengthStage(config.data.max_response_tokens)
    reset, guard = config.recipe.reset, config.guard
    return Rules(
        ResetRule(reset.every, _stagnation(reset.stagnation), what_is_reset(config, checked.recipes.needs)),
        (*map(_stage, config.data.stages), last),
        None if guard.spike_sigma is None else SpikeRule(guard.spike_sigma, guard.spike_window),
        config.token_budget,
    )


def what_is_reset(config: RunConfig, needs: Needs) -> tuple[What, ...]:
    """The reference where a method reads one, the optimizer where it is not to be kept."""
    reference: tuple[What, ...] = ("reference",) if needs.ref_logp else ()
    return (*reference, "optimizer") if config.recipe.reset.optimizer == "reinit" else reference


def _stage(stage: LengthStageConfig) -> LengthStage:
    above = stage.above
    return LengthStage(
        stage.max_response_tokens,
        stage.until,
        None if above is None else Threshold(above.metric, above.value, above.steps),
        _stagnation(stage.stagnation),
    )


def _stagnation(rule: StagnationConfig | None) -> StagnationRule | None:
    return None if rule is None else StagnationRule(rule.metric, rule.patience, rule.min_improvement)
