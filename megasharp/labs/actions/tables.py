"""The tables of the actions study."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from megasharp.labs.actions.experiments import (
    BASE,
    FIGURE_1,
    FOUR,
    GROUP_SIZES,
    OPTIMAL,
    OPTIMIZERS,
    REWARDS,
    START,
    TEMPERATURES,
    Result,
    Results,
)
from megasharp.labs.actions.theory import RULES, theorem_ratio
from megasharp.labs.study import Cell, Table

_STAGES = ("peak a1", "at step", "a2 there", "lowest a2", "step a2 > .5", "seeds a2 > .5")


def tabulate(results: Results) -> tuple[Table, ...]:
    """All tables, in the paper's order."""
    return (_theorem(), _figure_1(results), _group_sizes(results), _temperatures(results), _four(results))


def _theorem() -> Table:
    lines: list[tuple[Cell, ...]] = []
    for rule in RULES:
        ratios = [theorem_ratio(rule, np.array(START), np.array(REWARDS), size) for size in GROUP_SIZES]
        lines.append((rule, *(factor for factor, _ in ratios), max(rest for _, rest in ratios)))
    title = (
        f"Algorithm 1's expected update over Theorem 1's, by enumeration (r {slashed(REWARDS)}, pi {slashed(START)})"
    )
    columns = ("advantage of a sample", *(f"G={size}" for size in GROUP_SIZES), "not proportional by")
    return Table("theorem", title, columns, tuple(lines))


def _stages(result: Result) -> tuple[Cell, ...]:
    step = result.takeover_step
    return (
        result.peak,
        result.peak_step,
        result.at_peak(OPTIMAL),
        result.lowest_optimal,
        int(step) if np.isfinite(step) else "none",
        result.optimal_wins,
    )


def slashed(numbers: Iterable[float]) -> str:
    """Numbers as ".5/1/0"."""
    return "/".join(f"{number:g}".removeprefix("0") or "0" for number in numbers)


def _figure_1(results: Results) -> Table:
    lines: list[tuple[Cell, ...]] = []
    for optimizer in OPTIMIZERS:
        for negative_only in (False, True):
            for setting in FIGURE_1:
                result = results[replace(setting, optimizer=optimizer, negative_only=negative_only)]
                variant = "< 0" if negative_only else "all"
                head = (optimizer, variant, slashed(setting.rewards), slashed(setting.start))
                lines.append((*head, *_stages(result)))
    title = "two stages (G=2), medians over seeds: a1's peak ends exploitation; A < 0: negative samples only"
    return Table("stages", title, ("update", "A", "r", "start", *_STAGES), tuple(lines))


def _group_sizes(results: Results) -> Table:
    lines: list[tuple[Cell, ...]] = []
    for optimizer in OPTIMIZERS:
        for size in GROUP_SIZES:
            result = results[replace(BASE, optimizer=optimizer, group_size=size)]
            lines.append((optimizer, size, *_stages(result), result.spread))
    columns = ("update", "G", *_STAGES, "spread of a1")
    return Table("group_sizes", "number of rollouts; spread: standard deviation over seeds", columns, tuple(lines))


def _temperatures(results: Results) -> Table:
    lines: list[tuple[Cell, ...]] = []
    for optimizer in OPTIMIZERS:
        for temperature in TEMPERATURES:
            result = results[replace(BASE, optimizer=optimizer, temperature=temperature)]
            lines.append((optimizer, temperature, *_stages(result), result.sampling_entropy))
    columns = ("update", "T", *_STAGES, "sampling entropy")
    return Table("temperatures", "training temperature T (G=2); probabilities at temperature 1", columns, tuple(lines))


def _four(results: Results) -> Table:
    lines: list[tuple[Cell, ...]] = []
    for optimizer in OPTIMIZERS:
        policy_RTV = results[replace(FOUR, optimizer=optimizer)].policy_RTV
        for action, (reward, start) in enumerate(zip(FOUR.rewards, FOUR.start, strict=True)):
            path_RT = policy_RTV[:, :, action]
            peak, step = float(np.median(path_RT.max(axis=1))), int(np.median(path_RT.argmax(axis=1)))
            lines.append((optimizer, f"a{action + 1}", reward, start, peak, step, float(np.median(path_RT[:, -1]))))
    columns = ("update", "action", "r", "start", "peak", "at step", "end")
    return Table("four_actions", "four actions (G=2), medians over seeds", columns, tuple(lines))
