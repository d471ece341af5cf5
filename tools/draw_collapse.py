"""Draw the pictures of the page "Why RLVR collapses": the four papers' mechanisms on models of a few numbers.

Every curve is computed here, by the code of `megasharp toy` and of the methods themselves; nothing is drawn by hand.
The PNG files are deterministic and take about 15 s on one core.

    python tools/draw_collapse.py --out docs/images/collapse
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megasharp.algos.ds import DS, DSParams
from megasharp.algos.iac import IAC, IACParams
from megasharp.algos.negative_only import NegativeOnly, NegativeOnlyParams
from megasharp.common.records import TokenInputs
from megasharp.reporting.style import COLOURS, GRID, INK, MUTED, dress, new_figure, save_figure
from megasharp.studies.actions.experiments import BASE, FIGURE_1, simulate
from megasharp.studies.cats.experiments import CALIBRATIONS, CAT, PERSIAN, PLAIN, train
from megasharp.studies.cats.experiments import advantages as group_advantages
from megasharp.studies.smoothing.policies import (
    estimated_reward,
    improvement_probability,
    smoothed_policy,
    vanilla_policy,
)
from megasharp.studies.softmax import Ascent, Floats, softmax
from megasharp.studies.squeeze.dynamics import REPEATED_STEPS, repeated_penalty
from megasharp.studies.tree import experiments as tree

GREY, BLUE, ORANGE, GREEN, PURPLE = COLOURS[:5]


def one_answer_wins() -> Figure:
    """Two equally right answers under policy gradient, and the same with IAC and DLC."""
    figure, (left, right) = _panels(2)
    policy_RTV = train(PLAIN, range(12)).policy_RTV
    for path_T in policy_RTV[:, :, CAT] / (policy_RTV[:, :, CAT] + policy_RTV[:, :, PERSIAN]):
        left.plot(path_T, color=BLUE if path_T[-1] > 0.5 else ORANGE, linewidth=1.0, alpha=0.8)
    _label(left, "Both answers are right; one of them wins", "answer 1's share of the two, 12 seeds", "step")
    rows = ("none", "IAC alpha 1", "DLC mu .5", "IAC alpha 1 + DLC mu .5")
    for name, colour in zip(rows, (GREY, BLUE, ORANGE, GREEN), strict=True):
        policy_RTV = train(CALIBRATIONS[name], range(128)).policy_RTV
        pair_RT2 = policy_RTV[:, :, [CAT, PERSIAN]]
        right.plot((pair_RT2.max(-1) / pair_RT2.sum(-1)).mean(0), color=colour, label=name.replace("none", "neither"))
    right.legend(fontsize=8, frameon=False, loc="center right", bbox_to_anchor=(1.0, 0.7), ncol=2)
    _label(right, "What IAC and DLC change", "the larger answer's share, mean of 128 seeds", "step")
    for axes in (left, right):
        axes.set_ylim(0.0 if axes is left else 0.5, 1.02)
    return figure


# Five correct trajectories and three incorrect ones; the first five are correct.
BASE_8 = np.array([0.30, 0.15, 0.06, 0.03, 0.01, 0.20, 0.15, 0.10])
CORRECT_8 = np.arange(8) < 5
DRAWS, BETA, GAMMA = 8, 0.4, 0.2


def selection() -> Figure:
    """The trajectories that a finite batch selects, and the optimum afterwards, with and without smoothing."""
    figure, (left, right) = _panels(2)
    base = np.logspace(-2.3, 0.0, 201)
    for draws, colour in ((4, ORANGE), (8, BLUE), (64, GREEN)):
        left.plot(base, 1.0 - (1.0 - base) ** draws, color=colour, label=f"{draws} samples")
    left.plot(BASE_8[:5], improvement_probability(BASE_8[:5], DRAWS), "o", color=BLUE, markersize=4)
    left.set_xscale("log")
    left.set_xticks([0.01, 0.1, 1.0], ["0.01", "0.1", "1"])
    left.legend(fontsize=8, frameon=False, loc="lower right")
    _label(
        left,
        "Selection: the probability to be reinforced",
        "dots: the correct trajectories on the right",
        "probability under the base model",
    )
    beta, positive, none = np.array(BETA), np.array(GAMMA), np.array(0.0)
    # The batch that holds every correct trajectory as often as expected: whatever was drawn at all is rewarded.
    seen_8 = np.floor(BASE_8 * DRAWS + 0.5).astype(np.int64)
    shown: tuple[tuple[str, Floats, str], ...] = (
        ("base", BASE_8, GREY),
        (
            f"RL, the {DRAWS} samples' rewards",
            vanilla_policy(BASE_8, estimated_reward(CORRECT_8, seen_8), beta),
            ORANGE,
        ),
        ("RL, all rewards known", vanilla_policy(BASE_8, CORRECT_8.astype(np.float64), beta), BLUE),
        ("the same with smoothing of the correct", smoothed_policy(BASE_8, CORRECT_8, beta, positive, none), GREEN),
    )
    for index, (name, policy_8, colour) in enumerate(shown):
        right.bar(np.arange(5) + 0.2 * index - 0.3, policy_8[:5], width=0.18, color=colour, label=name)
    right.set_xticks(range(5), [f"{value:g}" for value in BASE_8[:5]])
    right.legend(fontsize=8, frameon=False, loc="upper right")
    _label(right, "The optimum afterwards", f"probability; beta {BETA:g}, gamma {GAMMA:g}", "correct trajectory (base)")
    return figure


def candidates() -> Figure:
    """One decoding state: what a penalty, an ordinary positive update and CaSP's do to the candidates."""
    figure, (left, middle, right) = _panels(3)
    for rank, colour in ((1, BLUE), (2, ORANGE), (5, GREEN)):
        path_TV = repeated_penalty(rank)
        left.plot(path_TV[: REPEATED_STEPS + 1, :].max(-1), color=colour, label=f"rank {rank} is penalised")
    left.set_ylim(0.0, 1.02)
    left.legend(fontsize=8, frameon=False, loc="center right")
    _label(left, "The squeeze", "probability of the leading candidate", "step")
    start_5 = np.log(np.array([0.5, 0.2, 0.15, 0.1, 0.05]))
    for offset, (name, alpha, colour) in enumerate((("GRPO", 0.0, ORANGE), ("CaSP, alpha .2, N 3", 0.2, GREEN))):
        policy_5 = _reinforced(start_5, alpha)
        middle.bar(np.arange(5) + 0.3 * offset, policy_5, width=0.28, color=colour, label=name)
    middle.bar(np.arange(5) - 0.3, softmax(start_5), width=0.28, color=GREY, label="before")
    middle.set_xticks(range(5), [str(rank) for rank in range(1, 6)])
    middle.legend(fontsize=8, frameon=False, loc="upper right")
    _label(middle, "A positive update", "probability after 40 updates on rank 1", "rank at the start")
    settings = list(tree.MAIN.values())
    found = tree.train(settings, range(tree.SEEDS), tree.STEPS, tree.GROUP_SIZE, Ascent(1.0))
    parts = found.reshape(len(settings), tree.SEEDS, *found.shape[1:])
    for index, (part, colour) in enumerate(zip(parts, (ORANGE, PURPLE, GREEN), strict=True)):
        result = tree.judge(part, range(tree.SEEDS))
        right.bar(index - 0.2, result.modes_R.mean() / 6.0, width=0.38, color=colour)
        right.bar(index + 0.2, result.accuracy, width=0.38, color=colour, alpha=0.45)
    right.set_xticks(range(3), ["GRPO", "+ entropy", "CaSP"])
    _label(right, "A tree with six right sequences", "dark: share of the six found; light: accuracy", "")
    return figure


def _reinforced(logit_V: Floats, alpha: float) -> Floats:
    """Return the policy after 40 positive updates of rank 1, of which CaSP gives `alpha` to the top three."""
    for _ in range(40):
        target_V = (1.0 - alpha) * np.eye(len(logit_V))[0]
        target_V[:3] += alpha / 3.0
        logit_V = logit_V + 0.1 * (target_V - softmax(logit_V))
    return softmax(logit_V)


def two_stages() -> Figure:
    """A good answer that is explored, and a better one that is rare: shrinkage first, expansion later."""
    figure, (left, right) = _panels(2)
    names = ("explored, reward 0.5", "rare, reward 1", "explored, reward 0")
    policy_RTV = simulate(BASE, range(32))
    for action, (name, colour) in enumerate(zip(names, (BLUE, ORANGE, GREY), strict=True)):
        left.plot(policy_RTV[:8, :301, action].T, color=colour, linewidth=0.5, alpha=0.4)
        left.plot(np.median(policy_RTV[:, :301, action], 0), color=colour, linewidth=2.0, label=name)
    left.legend(fontsize=8, frameon=False, loc="center right")
    _label(left, "Exploitation, then exploration", "probability, Adam, G = 2: median and single seeds", "step")
    for setting, colour, line, name in (
        (FIGURE_1[2], BLUE, "-", "Adam"),
        (replace(FIGURE_1[2], negative_only=True), BLUE, "--", "Adam, negatives alone"),
        (replace(FIGURE_1[2], optimizer="plain"), ORANGE, "-", "plain gradient"),
        (replace(FIGURE_1[2], optimizer="plain", negative_only=True), ORANGE, "--", "plain, negatives alone"),
    ):
        path_T = np.median(simulate(setting, range(32))[:, :, 1], 0)
        right.plot(np.arange(1, len(path_T) + 1), path_T, line, color=colour, label=name)
    right.set_xscale("log")
    right.legend(fontsize=8, frameon=False, loc="center left")
    _label(right, "Training on relative negatives alone", "probability of the rare best answer (from 0.02)", "step")
    return figure


# A group of eight: six responses are correct. Log-probs per token, the first response the likeliest.
CORRECT_G = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
LOGP_G = torch.tensor([-0.1, -0.2, -0.3, -0.5, -0.9, -1.6, -0.2, -1.2], dtype=torch.float64)


def advantages() -> Figure:
    """The advantage that each method gives to the eight responses of one group, by the methods' own code."""
    figure, panels = _panels(4)
    adv_G = torch.from_numpy(group_advantages("normalised", CORRECT_G.numpy()))
    x = _one_group()
    shown = {
        "GRPO": adv_G,
        "IAC (alpha 1)": IAC(IACParams(alpha=1.0)).calibrate(adv_G, x)[0],
        "DS (gamma 0.3)": DS(DSParams(gamma_p=0.3, gamma_n=0.3, form="seq_mean")).calibrate(adv_G, x)[0],
        "GRPO-N": NegativeOnly(NegativeOnlyParams()).calibrate(adv_G, x)[0],
    }
    for axes, (name, values_G) in zip(panels, shown.items(), strict=True):
        colours = [BLUE if correct else ORANGE for correct in CORRECT_G.tolist()]
        axes.bar(range(8), values_G.tolist(), color=colours, width=0.8)
        axes.axhline(0.0, color=INK, linewidth=0.8)
        axes.set_ylim(-2.1, 1.1)
        axes.set_xticks(range(8), [f"{value:g}" for value in LOGP_G.tolist()], rotation=90)
        _label(axes, name, "advantage", "mean log-prob of the response")
    return figure


def _one_group() -> TokenInputs:
    """Return the group as a step of its own, a token a response."""
    one_G = torch.ones_like(CORRECT_G)
    return TokenInputs(
        mask_T=one_G,
        seq_T=torch.arange(8),
        group_T=torch.zeros(8, dtype=torch.int64),
        reward_T=CORRECT_G,
        correct_T=CORRECT_G,
        group_size_T=8.0 * one_G,
        group_correct_T=CORRECT_G.sum() * one_G,
        num_sequences=8,
        policy_logp_T=LOGP_G,
        old_logp_T=LOGP_G,
    )


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = new_figure(3.1 * max(count, 3) + (1.0 if count == 2 else 0.0), 3.2)
    panels = [figure.add_subplot(1, count, index + 1) for index in range(count)]
    for axes in panels:
        dress(axes)
        axes.grid(visible=True, color=GRID)
    return figure, panels


def _label(axes: Axes, title: str, subject: str, x: str) -> None:
    axes.set_title(title, fontsize=9.5, fontweight="bold", color=INK, loc="left", pad=17)
    axes.text(0, 1.03, subject, transform=axes.transAxes, fontsize=8, color=MUTED)
    axes.set_xlabel(x, fontsize=8, color=MUTED)


PICTURES: dict[str, Callable[[], Figure]] = {
    "one_answer_wins": one_answer_wins,
    "selection": selection,
    "candidates": candidates,
    "two_stages": two_stages,
    "advantages": advantages,
}


def main() -> None:
    """Write all pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        figure = draw()
        figure.tight_layout(pad=1.2, w_pad=2.0)
        print(save_figure(figure, out / f"{name}.png"))


if __name__ == "__main__":
    main()
