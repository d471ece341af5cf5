"""Make the tables of the prolonged runs as prolonged.md plans them: `prolonged/tables.md`, and the picture beside it.

    python examples/frontier/prolonged.py

`prolonged/differences.csv` has the t tests; docs/claims.md is made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from records import TEST, UNTRAINED, WINDOW, counts, difference_text, t_test, table, values, write

from megasharp.evals.crossed import adjusted, crossed
from megasharp.evals.frontier import Values, area_above
from megasharp.reporting.style import COLOURS, INK, MUTED, dress, new_figure, save_figure

PROLONGED = Path(__file__).parent / "prolonged"
CASES = ("grpo", "grpo_n", "two_stage", "gspo", "gspo_n")
GRADED = "graded"
LATE, MIDDLE = (1800, 2000), (1000, 1200)
# Means of training metrics are over this many steps.
BLOCK = 100
COLUMNS = ("question", "case", "difference", "low", "high", "holm")
Series = Mapping[str, Values]


def main() -> None:
    """Write tables.md, differences.csv and curves.png."""
    seeds = sorted({line["run"].rpartition("_s")[2] for line in table("runs", PROLONGED)})
    evaluations = {case: _evaluations(case, seeds) for case in CASES}
    training = {case: _training(case, seeds) for case in (*CASES, GRADED)}
    peak = int(training[GRADED]["good"].mean(axis=0).argmax())
    tests = {
        "pass@64, late less middle": t_tests(_widening(evaluations)),
        "area above GRPO's frontier": t_tests(_areas(evaluations)),
        "entropy of the last 200 steps (nats)": t_tests(_entropy(training)),
        "share of responses": t_tests(_stages(training[GRADED], peak)),
    }
    text = [
        *(_t_table(head, found) for head, found in tests.items()),
        f"Graded: the good answers' share is largest in steps {peak * BLOCK + 1} to {(peak + 1) * BLOCK}.\n",
        _tested(seeds),
    ]
    (PROLONGED / "tables.md").write_text("\n".join(text), encoding="utf-8")
    write(PROLONGED / "differences.csv", COLUMNS, [(head, *one) for head, found in tests.items() for one in found])
    save_figure(picture(evaluations, training), PROLONGED / "curves.png")


def _evaluations(case: str, seeds: Sequence[str]) -> Series:
    """Return pass@1 and pass@64 of the evaluations, [seeds, evaluations], and their steps."""
    lines = table("curves", PROLONGED)
    by_seed = [[line for line in lines if line["run"] == f"prolonged_{case}_s{seed}"] for seed in seeds]
    if case != "grpo":
        start = [
            [line for line in lines if line["run"] == f"prolonged_grpo_s{seed}" and line["step"] == "0"]
            for seed in seeds
        ]
        by_seed = [first + rest for first, rest in zip(start, by_seed, strict=True)]
    return {
        "step": np.array([int(line["step"]) for line in by_seed[0]], dtype=np.float64),
        **{key: np.array([[float(line[key]) for line in each] for each in by_seed]) for key in ("pass@1", "pass@64")},
    }


def _training(case: str, seeds: Sequence[str]) -> Series:
    """Return training metrics as means over blocks of steps, [seeds, blocks]."""
    lines = table("training", PROLONGED)
    by_seed = [[line for line in lines if line["run"] == f"prolonged_{case}_s{seed}"] for seed in seeds]
    known = [key for key in ("entropy", "good", "better") if by_seed[0][0][key]]
    per_block = BLOCK // WINDOW
    return {
        key: np.array([[float(line[key]) for line in each] for each in by_seed])
        .reshape(len(seeds), -1, per_block)
        .mean(axis=2)
        for key in known
    }


def t_tests(rows: Mapping[str, Values]) -> list[tuple[str, float, float, float, float]]:
    """Test the mean of each row's values, one a seed: name, mean, interval, and Holm's p-value over the rows."""
    found = {name: t_test(values_R) for name, values_R in rows.items()}
    holm = adjusted([p for *_, p in found.values()])
    return [
        (name, mean, mean - half, mean + half, float(p))
        for (name, (mean, half, _)), p in zip(found.items(), holm, strict=True)
    ]


def _t_table(head: str, found: Sequence[tuple[str, float, float, float, float]]) -> str:
    lines = [f"| | {head} | 95 % | Holm's p |", "|---|---|---|---|"]
    lines += [f"| {name} | {mean:+.4f} | {low:+.4f} to {high:+.4f} | {p:.3f} |" for name, mean, low, high, p in found]
    return "\n".join(lines) + "\n"


def _widening(evaluations: Mapping[str, Series]) -> dict[str, Values]:
    def change(each: Series) -> Values:
        late_E, middle_E = (np.isin(each["step"], steps) for steps in (LATE, MIDDLE))
        found: Values = each["pass@64"][:, late_E].mean(axis=1) - each["pass@64"][:, middle_E].mean(axis=1)
        return found

    return {case: change(each) for case, each in evaluations.items()}


def _areas(evaluations: Mapping[str, Series]) -> dict[str, Values]:
    def points(each: Series, seed: int) -> list[tuple[float, float]]:
        return list(zip(each["pass@1"][seed].tolist(), each["pass@64"][seed].tolist(), strict=True))

    baseline = evaluations["grpo"]
    starts = [(float(baseline["pass@1"][:, 0].mean()), float(baseline["pass@64"][:, 0].mean()))] * len(
        baseline["pass@1"]
    )
    return {
        case: np.array(
            [area_above(points(each, seed)[1:], points(baseline, seed)[1:], start) for seed, start in enumerate(starts)]
        )
        for case, each in evaluations.items()
        if case != "grpo"
    }


def _tested(seeds: Sequence[str]) -> str:
    """Describe the last models on the test problems, less GRPO's."""
    lines = counts(TEST, folder=PROLONGED)
    rows = ["| | pass@1 | pass@16 | pass@256 |", "|---|---|---|---|"]
    for case in (UNTRAINED, *(f"prolonged_{case}" for case in (*CASES, GRADED))):
        own = [lines[f"{case}_s{seed}"] for seed in seeds]
        cells = []
        for metric in ("pass@1", "pass@16", "pass@256"):
            own_RP, other_RP = values(own, metric), values([lines[f"prolonged_grpo_s{seed}"] for seed in seeds], metric)
            found = None if case == "prolonged_grpo" else crossed(other_RP, own_RP, paired=True)
            cells.append(f"{own_RP.mean():.3f}" + (f"<br>{difference_text(found)}" if found else ""))
        rows.append(f"| {case.removeprefix('prolonged_')} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _entropy(training: Mapping[str, Series]) -> dict[str, Values]:
    late, middle = slice(-2, None), slice(9, 11)
    since: dict[str, Callable[[Values], Values]] = {
        "less 901 to 1,100": lambda entropy_RB: entropy_RB[:, middle].mean(axis=1),
        "less the first 100": lambda entropy_RB: entropy_RB[:, 0],
    }
    return {
        f"{case}, {name}": training[case]["entropy"][:, late].mean(axis=1) - earlier(training[case]["entropy"])
        for name, earlier in since.items()
        for case in CASES
    }


def _stages(graded: Series, peak: int) -> dict[str, Values]:
    """Shares of good and better answers around the block of steps in which the good ones' is largest."""
    good_RB, better_RB = graded["good"], graded["better"]
    return {
        "good, peak less first 100": good_RB[:, peak] - good_RB[:, 0],
        "good, last 200 less peak": good_RB[:, -2:].mean(axis=1) - good_RB[:, peak],
        "better, peak less first 100": better_RB[:, peak] - better_RB[:, 0],
        "better, last 200 less peak": better_RB[:, -2:].mean(axis=1) - better_RB[:, peak],
    }


def picture(evaluations: Mapping[str, Series], training: Mapping[str, Series]) -> Figure:
    """Draw the way of each case through pass@1 and pass@64, entropy by steps, and the graded shares; means of seeds."""
    figure = new_figure(10.0, 3.4)
    panels = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.06, right=0.985, bottom=0.16, top=0.86, wspace=0.25)
    for axes, title in zip(
        panels, ("pass@64 by pass@1", "token entropy (nats)", "graded: shares of answers"), strict=True
    ):
        dress(axes)
        axes.set_title(title, fontsize=9, color=INK, loc="left", fontweight="bold")
    for colour, case in zip(COLOURS, CASES, strict=False):
        each, entropy_RB = evaluations[case], training[case]["entropy"]
        panels[0].plot(
            each["pass@1"].mean(axis=0),
            each["pass@64"].mean(axis=0),
            color=colour,
            marker="o",
            markersize=2.5,
            label=case,
        )
        panels[1].plot(BLOCK * (np.arange(entropy_RB.shape[1]) + 1), entropy_RB.mean(axis=0), color=colour, label=case)
    for colour, kind in zip(COLOURS[1:], ("good", "better"), strict=False):
        share_RB = training[GRADED][kind]
        panels[2].plot(BLOCK * (np.arange(share_RB.shape[1]) + 1), share_RB.mean(axis=0), color=colour, label=kind)
    for axes, label in zip(panels, ("pass@1", "step", "step"), strict=True):
        axes.set_xlabel(label, fontsize=8, color=MUTED)
        axes.legend(fontsize=7, frameon=False)
    return figure


if __name__ == "__main__":
    main()
