"""The picture of the actions study: two stages, starts, rewards, theory, rollouts, temperature, four actions, -N."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megasharp.reporting.style import COLOURS, INK, MUTED, dress, new_figure
from megasharp.studies.actions.experiments import (
    BASE,
    EXPLORED,
    EXPLORED_REWARDS,
    FIGURE_1,
    FOUR,
    GROUP_SIZES,
    OPTIMAL,
    REWARDS,
    STARTS,
    TEMPERATURES,
    Results,
)
from megasharp.studies.actions.training import Setting, expected_dynamics
from megasharp.studies.softmax import Array

ACTION_COLOURS = (COLOURS[1], COLOURS[2], COLOURS[0], COLOURS[3])
SHOWN_SEEDS = 8
# Adam is through both stages long before its last step.
ADAM_SHOWN = 300


def draw(results: Results) -> Figure:
    """Eight panels."""
    figure = new_figure(15.5, 7.4)
    panels = [figure.add_subplot(2, 4, index + 1) for index in range(8)]
    for axes in panels:
        dress(axes)
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlim(0, ADAM_SHOWN)
    _draw_seeds(panels[0], results)
    _draw_starts(panels[1], results)
    _draw_rewards(panels[2], results)
    _draw_expected(panels[3], results)
    _draw_group_sizes(panels[4], results)
    _draw_temperatures(panels[5], results)
    _draw_four(panels[6], results)
    _draw_negative_only(panels[7], results)
    figure.tight_layout(pad=1.4, w_pad=1.6, h_pad=2.2)
    return figure


def _finish(axes: Axes, title: str, subject: str, place: str) -> None:
    axes.set_title(title, fontsize=10, fontweight="bold", color=INK, loc="left", pad=17)
    axes.text(0, 1.03, subject, transform=axes.transAxes, fontsize=8, color=MUTED)
    axes.set_xlabel("step", fontsize=8, color=MUTED)
    axes.legend(fontsize=7.5, loc=place, frameon=True, framealpha=0.9, edgecolor="none")


def _median(results: Results, setting: Setting, action: int) -> Array:
    return np.asarray(np.median(results[setting].policy_RTV[:, :, action], axis=0))


def _draw_seeds(axes: Axes, results: Results) -> None:
    names = ("a1, explored, r = .5", "a2, best, r = 1", "a3, r = 0")
    for action, (name, colour) in enumerate(zip(names, ACTION_COLOURS, strict=False)):
        axes.plot(results[BASE].policy_RTV[:SHOWN_SEEDS, :, action].T, color=colour, linewidth=0.6, alpha=0.4)
        axes.plot(_median(results, BASE, action), color=colour, linewidth=2.2, label=name)
    _finish(axes, "two stages", "Adam, G=2: median, and single seeds", "center right")


def _draw_pair(axes: Axes, results: Results, setting: Setting, colour: str, label: str) -> None:
    """a1 solid, a2 dashed."""
    axes.plot(_median(results, setting, EXPLORED), color=colour, linewidth=1.6, label=label)
    axes.plot(_median(results, setting, OPTIMAL), "--", color=colour, linewidth=1.6)


def _draw_starts(axes: Axes, results: Results) -> None:
    for start, colour in zip(STARTS, COLOURS[1:], strict=False):
        label = f"start {start[0]:g}, {start[1]:g}, {start[2]:g}"
        _draw_pair(axes, results, replace(BASE, start=start), colour, label)
    _finish(axes, "other starts", "Adam, r .5/1/0: a1 solid, a2 dashed", "center right")


def _draw_rewards(axes: Axes, results: Results) -> None:
    for reward, colour in zip(EXPLORED_REWARDS, COLOURS[1:], strict=False):
        _draw_pair(axes, results, replace(BASE, rewards=(reward, *REWARDS[1:])), colour, f"r(a1) = {reward:g}")
    _finish(axes, "other rewards", "Adam, start .6/.05/.35: a1 solid, a2 dashed", "center right")


def _draw_expected(axes: Axes, results: Results) -> None:
    plain = replace(BASE, optimizer="plain")
    expected_TV = expected_dynamics(plain)
    for action, colour in enumerate(ACTION_COLOURS[:3]):
        mean_T = results[plain].policy_RTV[:, :, action].mean(axis=0)
        axes.plot(mean_T, color=colour, linewidth=2.2, alpha=0.6, label=f"a{action + 1}, mean of seeds")
        axes.plot(expected_TV[:, action], ":", color=INK, linewidth=1.3)
    axes.plot([], [], ":", color=INK, label="Theorem 1 times (1 - 1/G)")
    axes.set_xlim(0, 3500)
    _finish(axes, "plain gradient and the theorem", "G=2, lr .1", "center right")


def _draw_group_sizes(axes: Axes, results: Results) -> None:
    for size, colour in zip(GROUP_SIZES, COLOURS[1:], strict=False):
        _draw_pair(axes, results, replace(BASE, group_size=size), colour, f"G = {size}")
    _finish(axes, "rollouts", "Adam: a1 solid, a2 dashed", "center right")


def _draw_temperatures(axes: Axes, results: Results) -> None:
    for temperature, colour in zip(TEMPERATURES, COLOURS[1:], strict=False):
        _draw_pair(axes, results, replace(BASE, temperature=temperature), colour, f"temperature {temperature:g}")
    _finish(axes, "training temperature", "Adam, pi at temperature 1: a1 solid, a2 dashed", "center right")


def _draw_four(axes: Axes, results: Results) -> None:
    for action, (reward, colour) in enumerate(zip(FOUR.rewards, ACTION_COLOURS, strict=True)):
        axes.plot(_median(results, FOUR, action), color=colour, linewidth=2.0, label=f"a{action + 1}, r = {reward:g}")
    _finish(axes, "four actions", "Adam, G=2: median over seeds", "center right")


def _draw_negative_only(axes: Axes, results: Results) -> None:
    rare = FIGURE_1[2]
    for setting, colour, line, label in (
        (rare, COLOURS[1], "-", "Adam, all samples"),
        (replace(rare, negative_only=True), COLOURS[1], "--", "Adam, negative only"),
        (replace(rare, optimizer="plain"), COLOURS[2], "-", "plain, all samples"),
        (replace(rare, optimizer="plain", negative_only=True), COLOURS[2], "--", "plain, negative only"),
    ):
        path_T = _median(results, setting, OPTIMAL)
        axes.plot(np.arange(1, len(path_T) + 1), path_T, line, color=colour, linewidth=1.8, label=label)
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xlim(10, replace(rare, optimizer="plain").steps)
    axes.set_ylim(-0.02, 1.5)
    axes.set_yticks(np.linspace(0.0, 1.0, 6))
    _finish(axes, "relative negatives alone (-N)", "p(a2), start .6/.02/.38: median over seeds", "upper left")
