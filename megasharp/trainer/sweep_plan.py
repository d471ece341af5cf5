"""The cost of a sweep by plan: seconds of a run's training and evaluations, and GPU-hours of all runs, row by row.

Every number is a prediction by `planner`, with the ranges in which it expects steps and rollouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megasharp.common.errors import UserError
from megasharp.config.run_config import RunConfig
from megasharp.evals.suites import suite_source
from megasharp.planner.formulas import Lengths
from megasharp.planner.records import DEFAULT, Batch, Plan, Request, range_text, span
from megasharp.planner.suggest import make_plan
from megasharp.tasks.sets import SETS
from megasharp.trainer.plan import Options, ask, evaluations_of
from megasharp.trainer.resolve.derived import derived
from megasharp.trainer.resolve.engine_settings import check_context
from megasharp.trainer.resolve.recipes import build_recipes

_HOUR, _DAY = 3600.0, 24 * 3600.0
Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class RunCost:
    """One run by plan, on `plan.gpus` GPUs. `evaluation`: seconds of all its evaluations.

    `uncounted`: suites whose number of problems is not known. `drops`: groups that the recipe drops are sampled anew,
    which no plan counts.
    """

    plan: Plan
    steps: int
    evaluation: Range
    uncounted: tuple[str, ...]
    drops: bool

    @property
    def step(self) -> Range:
        """The range of a step's seconds."""
        assert self.plan.step_range is not None
        return self.plan.step_range

    @property
    def training(self) -> Range:
        """The range of the seconds of all steps."""
        return self.steps * self.step[0], self.steps * self.step[1]

    @property
    def gpu_hours(self) -> Range:
        """The range of GPU-hours of training and evaluations."""
        low, high = (self.plan.gpus * sum(ends) / _HOUR for ends in zip(self.training, self.evaluation, strict=True))
        return low, high


def cost_of(config: RunConfig, where: str, options: Options) -> RunCost:
    """Plan a run and its evaluations.

    Raises UserError where no times are predicted, for lengths beyond the model's positions, and as `ask` does.
    """
    request = ask(config, where, options).request
    plan = make_plan(request)
    if plan.step_range is None:
        raise UserError(f"{where}: only runs on GPUs with rollout.engine=sglang have a cost by plan")
    architecture = request.policy.architecture
    config, _ = derived(config, architecture, (), options.gpu)
    check_context(config, architecture.max_positions, where)
    seconds, uncounted = _evaluation(config, request, options)
    drops = build_recipes(config, where).needs.refill_rounds > 0
    return RunCost(plan, config.steps, span("rollout", seconds), tuple(uncounted), drops)


def _evaluation(config: RunConfig, request: Request, options: Options) -> tuple[float, list[str]]:
    """Return the seconds that engines sample for a run's evaluations, and the suites that are not counted."""
    asked, seconds, uncounted = config.eval, 0.0, []
    longest = asked.max_response_tokens or config.data.largest_response
    mean = min(options.response or longest / 2, longest)
    lengths = Lengths(config.data.max_prompt_tokens / 2, config.data.max_prompt_tokens, mean, longest)
    networks = [None, request.memory] if asked.with_memory else [None]
    for suite in asked.suites:
        problems = _problems(suite)
        if problems is None:
            uncounted.append(suite)
            continue
        # A greedy response of each problem beside the samples.
        batch = Batch(problems, asked.n + 1, 1, 0.0, lengths)
        for memory in networks:
            plan = make_plan(dataclasses.replace(request, memory=memory, batch=batch))
            seconds += sum(time.seconds or 0.0 for time in plan.times if time.name == "rollout")
    return evaluations_of(config) * seconds, uncounted


def _problems(suite: str) -> int | None:
    """Return the number of a suite's problems as far as its file and its set's entry tell."""
    entry, _ = suite_source(suite)
    whole = SETS[entry.set].expected if entry.set in SETS else None
    return entry.limit if whole is None else min(whole, entry.limit or whole)


def cost_text(name: str, costs: Sequence[tuple[str, int, RunCost]], options: Options) -> str:
    """Print a sweep's table of (row, number of its runs, cost of one), the sum, and what is not in it."""
    lines = [
        "| case | runs | s a step | steps | training, h | evaluations, h | GPU-hours a run | in all |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, runs, cost in costs:
        hours = [range_text((low / _HOUR, high / _HOUR)) for low, high in (cost.training, cost.evaluation)]
        whole = range_text((runs * cost.gpu_hours[0], runs * cost.gpu_hours[1]))
        cells = [f"`{row}`", str(runs), range_text(cost.step), f"{cost.steps:,}", *hours, range_text(cost.gpu_hours)]
        lines.append(f"| {' | '.join([*cells, whole])} |")
    runs = sum(count for _, count, _ in costs)
    low, high = (sum(count * cost.gpu_hours[end] for _, count, cost in costs) for end in (0, 1))
    gpus = max(cost.plan.gpus for _, _, cost in costs)
    days = range_text((low * _HOUR / gpus / _DAY, high * _HOUR / gpus / _DAY))
    disk = sum(count * cost.plan.disk.total for _, count, cost in costs) / 1e12
    gpu = (options.gpu or DEFAULT).lower()
    lengths = f"{options.response:,} tokens" if options.response else "half of their limit"
    lines += [
        "",
        f"{name}: {runs} runs, {range_text((low, high))} GPU-hours of {gpu}, one after the other on {gpus} GPUs "
        f"{days} days; {disk:.1f} TB on disk",
        f"predicted, not measured; responses of {lengths} on average are assumed",
    ]
    # Each once, in the order of the cases.
    notes = dict.fromkeys(note for row, _, cost in costs for note in _notes(row, cost))
    return "\n".join([*lines, *notes])


def _notes(row: str, cost: RunCost) -> list[str]:
    notes = [f"not counted: evaluations on {suite}, whose size is not known" for suite in cost.uncounted]
    if cost.drops:
        notes.append(f"not counted: groups of {row} that are dropped and sampled anew")
    return notes + [f"error: {row}: {each.text}" for each in cost.plan.problems if each.level == "error"]
