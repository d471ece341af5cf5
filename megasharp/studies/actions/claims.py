"""Claims of 2510.04028 about its toy example and the theory behind it, judged on this run, and their picture.

Each claim is a function that returns the paper's sentence, our numbers and a verdict. The picture has a panel for: the
two stages, starts, rewards, theory, group sizes, temperatures, four actions, and -N.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

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
    OPTIMIZERS,
    REWARDS,
    STARTS,
    TEMPERATURES,
    WORTHLESS,
    Result,
    Results,
    Rule,
    Setting,
    expected_dynamics,
    probability_change,
    theorem_1,
    theorem_ratio,
)
from megasharp.studies.claims import clearly_above, clearly_below, clearly_rarer, outcome
from megasharp.studies.softmax import Floats
from megasharp.studies.study import Claim, Outcome

# The word "remains almost unchanged" is granted up to this change of probability.
UNCHANGED = 0.05
# "Most seeds": not clearly fewer than this share.
MOST = 0.9
# Two exact numbers agree.
EXACT = 1e-10
# A middle action's two stages: it rises by this much, and ends below half of its peak.
RISE = 0.02
TRIALS = 2000


def judge(results: Results) -> tuple[Claim, ...]:
    """Judge all claims, in the paper's order."""
    policies = list(_random_policies())
    of_training = (_first_stage, _second_stage, _relative_negative, _group_sizes, _temperatures)
    return (
        _remark_2(policies),
        _theorem(policies, "fixed", "with an advantage that belongs to the action", 1.0),
        _theorem(policies, "mean", "with Algorithm 1's r - mean of the group", 1.0),
        *(claim(results) for claim in of_training),
        _extremes(policies),
        *(claim(results) for claim in (_middle_actions, _negative_only)),
    )


def _random_policies() -> Iterator[tuple[Floats, Floats]]:
    """Policies of three to five actions, uniform on the simplex, and rewards in [0, 1]; the same in every run."""
    rng = np.random.default_rng(0)
    for _ in range(TRIALS):
        actions = int(rng.integers(3, 6))
        yield rng.dirichlet(np.ones(actions)), rng.random(actions)


def _remark_2(policies: list[tuple[Floats, Floats]]) -> Claim:
    falls = total = 0
    for policy_V, _ in policies:
        for sampled in range(len(policy_V)):
            others_V = np.delete(probability_change(policy_V, sampled), sampled)
            falls += int((others_V < 0).sum())
            total += len(others_V)
    ours = (
        f"true of all logits; of probabilities in {falls / total:.0%} of {total:,} pairs of random policies' actions: "
        "when a rare action is pushed down a frequent one takes its share and more, and other rare ones lose too"
    )
    statement = "A < 0 raises the probability of all actions that were not sampled, A > 0 lowers them"
    return Claim("remark 2", statement, "for all u != v", ours, outcome(falls, total))


def _theorem(policies: list[tuple[Floats, Floats]], rule: Rule, how: str, paper: float) -> Claim:
    """Judge whether the factor is `paper`; PARTLY where it is proportional with another factor for each G."""
    factors, rest = {}, 0.0
    for size in GROUP_SIZES:
        ratios = [theorem_ratio(rule, policy_V, reward_V, size) for policy_V, reward_V in policies[:50]]
        factors[size] = float(np.mean([factor for factor, _ in ratios]))
        rest = max(rest, *(left for _, left in ratios), float(np.ptp([factor for factor, _ in ratios])))
    right = sum(abs(factor - paper) < EXACT for factor in factors.values()) if rest < EXACT else 0
    verdict = outcome(right, len(factors)) if right or rest >= EXACT else Outcome.PARTLY
    shown = ", ".join(f"{factor:.3f} at G={size}" for size, factor in factors.items())
    ours = f"factor {shown}; proportional to within {rest:.0e} (50 random policies, all groups enumerated)"
    return Claim("theorem 1", f"the expected logit update, {how}", "factor 1", ours, verdict)


def _cases(results: Results) -> list[Result]:
    return [results[replace(setting, optimizer=optimizer)] for optimizer in OPTIMIZERS for setting in FIGURE_1]


def _first_stage(results: Results) -> Claim:
    moves = [
        [result.at_peak(action) - result.setting.start[action] for action in (EXPLORED, OPTIMAL, WORTHLESS)]
        for result in _cases(results)
    ]
    holds = 0
    for result in _cases(results):
        # a1 clearly rises, a3 clearly falls, and a2 does not clearly move by more than UNCHANGED.
        start, best_R = result.setting.start, result.at_peak_R(OPTIMAL)
        rises = clearly_above(result.peak_R, start[EXPLORED])
        falls = clearly_below(result.at_peak_R(WORTHLESS), start[WORTHLESS])
        moved = clearly_above(best_R, start[OPTIMAL] + UNCHANGED) or clearly_below(best_R, start[OPTIMAL] - UNCHANGED)
        holds += rises and falls and not moved
    a1, a2, a3 = ([min(column), max(column)] for column in zip(*moves, strict=True))
    ours = (
        f"up to a1's peak a1 moves by {a1[0]:+.2f} to {a1[1]:+.2f}, a3 by {a3[0]:+.2f} to {a3[1]:+.2f}, a2 by "
        f"{a2[0]:+.3f} to {a2[1]:+.3f}; all as said (a2 within {UNCHANGED}) in {holds} of {len(moves)} settings"
    )
    statement = "exploitation: pi(a1) rises, pi(a3) falls, pi(a2) hardly moves"
    return Claim("3.2, fig 1", statement, "almost unchanged", ours, outcome(holds, len(moves)))


def _second_stage(results: Results) -> Claim:
    cases = _cases(results)
    holds = sum(not clearly_rarer(result.optimal_wins_R, MOST) for result in cases)
    fewest = min(cases, key=lambda result: result.optimal_wins)
    ours = (
        f"a2 has more than half at the end for {MOST:.0%} of seeds (or not clearly fewer) in {holds} of "
        f"{len(cases)} settings; fewest "
        f"{fewest.optimal_wins:.0%} ({fewest.setting.optimizer}, r(a1) = {fewest.setting.rewards[EXPLORED]:g}, start "
        f"{fewest.setting.start[OPTIMAL]:g}, {fewest.setting.steps} steps)"
    )
    statement = "exploration: trained on, pi(a1) falls and pi(a2) rises"
    return Claim("3.2, fig 1", statement, "will decrease, increases", ours, outcome(holds, len(cases)))


def _relative_negative(results: Results) -> Claim:
    cases = _cases(results)
    holds = sum(not clearly_rarer(result.explored_turns_negative_R, MOST) for result in cases)
    ours = (
        f"r(a1) less the mean reward goes from positive to negative for {MOST:.0%} of seeds in {holds} of {len(cases)} "
        "settings"
    )
    statement = "the relative negative action changes: first a3, later a1"
    return Claim("3.2", statement, "initially a3 and later a1", ours, outcome(holds, len(cases)))


def _group_sizes(results: Results) -> Claim:
    steadier, staged, shown = 0, 0, []
    for optimizer in OPTIMIZERS:
        sizes = [results[replace(BASE, optimizer=optimizer, group_size=size)] for size in GROUP_SIZES]
        steadier += clearly_below(sizes[-1].log_deviation_R - sizes[0].log_deviation_R)
        staged += all(
            clearly_above(r.peak_R, r.setting.start[EXPLORED] + RISE) and not clearly_rarer(r.optimal_wins_R, MOST)
            for r in sizes
        )
        shown.append(f"{optimizer} {'/'.join(f'{result.spread:.3f}' for result in sizes)}")
    of = 2 * len(OPTIMIZERS)
    ours = (
        f"spread of pi(a1) over seeds at G={'/'.join(map(str, GROUP_SIZES))}: {'; '.join(shown)}; both stages at "
        f"every G with {staged} of {len(OPTIMIZERS)} optimizers"
    )
    statement = "a larger G is more stable and leaves the two stages as they are"
    return Claim("C.4, fig 5", statement, "more stable", ours, outcome(steadier + staged, of))


def _temperatures(results: Results) -> Claim:
    rising, shown = 0, []
    for optimizer in OPTIMIZERS:
        found = [results[replace(BASE, optimizer=optimizer, temperature=t)] for t in TEMPERATURES]
        entropies, steps = [r.sampling_entropy for r in found], [r.takeover_step for r in found]
        rising += _rises([r.sampling_entropy_R for r in found]) and _rises([r.mean_optimal_R for r in found])
        shown.append(
            f"{optimizer}: entropy {'/'.join(f'{e:.2f}' for e in entropies)}, a2 > .5 at step "
            f"{'/'.join(f'{step:g}' for step in steps)}"
        )
    ours = f"at temperature {'/'.join(f'{t:g}' for t in TEMPERATURES)}: {'; '.join(shown)}"
    statement = "a higher training temperature samples more diversely and is advisable"
    return Claim("C.4, fig 6", statement, "enhances diversity", ours, outcome(rising, len(OPTIMIZERS)))


def _rises(values_CR: list[Floats]) -> bool:
    """Return True where the last is clearly above the first and no step in between clearly falls."""
    ends = clearly_above(values_CR[-1] - values_CR[0])
    return ends and not any(clearly_below(later_R - earlier_R) for earlier_R, later_R in pairwise(values_CR))


def _extremes(policies: list[tuple[Floats, Floats]]) -> Claim:
    best = min(float(theorem_1(p, r)[r.argmax()]) for p, r in policies)
    worst = max(float(theorem_1(p, r)[r.argmin()]) for p, r in policies)
    ours = f"lowest of the best {best:+.1e}, highest of the worst {worst:+.1e} in {len(policies):,} random policies"
    statement = "the expected update is never negative for the best action, always negative for the worst"
    return Claim("C.4", statement, ">= 0, < 0", ours, outcome((best >= 0) + (worst < 0), 2))


def _middle_actions(results: Results) -> Claim:
    holds, shown = 0, []
    middle = [a for a, r in enumerate(FOUR.rewards) if min(FOUR.rewards) < r < max(FOUR.rewards)]
    for optimizer in OPTIMIZERS:
        policy_RTV = results[replace(FOUR, optimizer=optimizer)].policy_RTV
        for action in middle:
            start, path_RT = FOUR.start[action], policy_RTV[:, :, action]
            peak_R, end_R = path_RT.max(axis=1), path_RT[:, -1]
            holds += clearly_above(peak_R, start + RISE) and clearly_below(end_R - peak_R / 2)
            shown.append(f"{optimizer} a{action + 1} {start:g}, {np.median(peak_R):.2f}, {np.median(end_R):.2f}")
    ours = f"start, peak, end: {'; '.join(shown)}"
    statement = "of four actions, those between worst and best generally rise, then fall"
    return Claim("C.4, fig 7", statement, "generally", ours, outcome(holds, len(OPTIMIZERS) * len(middle)))


def _negative_only(results: Results) -> Claim:
    holds, shown = 0, []
    for optimizer in OPTIMIZERS:
        everything = [results[replace(s, optimizer=optimizer)] for s in FIGURE_1]
        negative = [results[replace(s, optimizer=optimizer, negative_only=True)] for s in FIGURE_1]
        holds += sum(
            clearly_below(n.peak_R - e.peak_R) and not clearly_rarer(n.optimal_wins_R, MOST)
            for e, n in zip(everything, negative, strict=True)
        )
        shown.append(
            f"{optimizer}: peak of a1 {_mean_peak(everything):.2f} to {_mean_peak(negative):.2f}, seeds that reach a2 "
            f"{_mean_wins(everything):.0%} to {_mean_wins(negative):.0%}"
        )
    ours = f"means over figure 1's settings, all samples to negative only; {'; '.join(shown)}"
    statement = "updating on relative negatives alone (-N) exploits less and keeps exploration going"
    return Claim("4.1", statement, "preserves diversity", ours, outcome(holds, len(OPTIMIZERS) * len(FIGURE_1)))


def _mean_peak(found: list[Result]) -> float:
    return float(np.mean([result.peak for result in found]))


def _mean_wins(found: list[Result]) -> float:
    return float(np.mean([result.optimal_wins for result in found]))


ACTION_COLOURS = (COLOURS[1], COLOURS[2], COLOURS[0], COLOURS[3])
SHOWN_SEEDS = 8
# Adam is through both stages long before its last step.
ADAM_SHOWN = 300


def draw(results: Results) -> Figure:
    """Draw eight panels, one for each subject."""
    figure = new_figure(15.5, 7.4)
    above = (_draw_seeds, _draw_starts, _draw_rewards, _draw_expected)
    below = (_draw_group_sizes, _draw_temperatures, _draw_four, _draw_negative_only)
    for index, draw_panel in enumerate((*above, *below)):
        axes = figure.add_subplot(2, 4, index + 1)
        dress(axes)
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlim(0, ADAM_SHOWN)
        draw_panel(axes, results)
    figure.tight_layout(pad=1.4, w_pad=1.6, h_pad=2.2)
    return figure


def _finish(axes: Axes, title: str, subject: str, place: str) -> None:
    axes.set_title(title, fontsize=10, fontweight="bold", color=INK, loc="left", pad=17)
    axes.text(0, 1.03, subject, transform=axes.transAxes, fontsize=8, color=MUTED)
    axes.set_xlabel("step", fontsize=8, color=MUTED)
    axes.legend(fontsize=7.5, loc=place, frameon=True, framealpha=0.9, edgecolor="none")


def _median(results: Results, setting: Setting, action: int) -> Floats:
    return np.asarray(np.median(results[setting].policy_RTV[:, :, action], axis=0))


def _draw_seeds(axes: Axes, results: Results) -> None:
    names = ("a1, explored, r = .5", "a2, best, r = 1", "a3, r = 0")
    for action, (name, colour) in enumerate(zip(names, ACTION_COLOURS, strict=False)):
        axes.plot(results[BASE].policy_RTV[:SHOWN_SEEDS, :, action].T, color=colour, linewidth=0.6, alpha=0.4)
        axes.plot(_median(results, BASE, action), color=colour, linewidth=2.2, label=name)
    _finish(axes, "two stages", "Adam, G=2: median, and single seeds", "center right")


def _draw_pair(axes: Axes, results: Results, setting: Setting, colour: str, label: str) -> None:
    """Draw a1 as a solid line and a2 as a dashed one."""
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
