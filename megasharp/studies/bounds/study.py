"""Study `bounds`: runs the trials, measures a model's gradients, and compares both with the paper's claims.

The picture shows group size, the bound of Z, violations of Theorem 3.4, and gradient alignment.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.random import default_rng

from megasharp.config.core import SHIPPED
from megasharp.reporting.style import COLOURS, INK, LOSS, MUTED, dress, new_figure
from megasharp.studies.bounds import coupling, gradients, sharpening, transfer
from megasharp.studies.bounds.accuracy import ByAccuracy, accuracy_claims, accuracy_tables, by_accuracy
from megasharp.studies.bounds.coupling import uniform_suppression_ratio
from megasharp.studies.bounds.gradients import READINGS, Alignment, GradientKernel
from megasharp.studies.bounds.sharpening import Sharing
from megasharp.studies.bounds.transfer import Transfer, transfer_claims, transfer_tables
from megasharp.studies.claims import COLUMNS, Check, pooled
from megasharp.studies.softmax import Floats
from megasharp.studies.study import Claim, Findings, Options, Outcome, Study, Table

SEEDS = 5
POLICY_TRIALS = 4000
KERNEL_TRIALS = 2000
SHARING_TRIALS = 4000
SHARING_GROUPS = (2, 4, 8, 16, 32, 64, 256, 1024, 10**4, 10**5, 10**6, sharpening.LARGE_GROUP)
DEFAULT_MODEL = SHIPPED / "examples" / "quickstart" / "base"
PAPER_MEAN, PAPER_DEVIATION = 1467.50, 363.97
# Two policies are taken for the same below this mean total variation.
SAME_POLICY = 0.02
ALIGNMENT = 10.0
ACCURACIES = (0.25, 0.5, 0.75)
RATIO_GROUPS = (8, 16, 32, 64)
# The fields of `Alignment`, in order.
_ALIGNMENT_ROWS = (
    "different questions: mean",
    "standard deviation",
    "standard error of the mean",
    "share > 0",
    "mean cosine",
    "mean with the advantages' signs",
    "one question: mean diagonal",
    "mean between distinct responses",
    "share of questions with a_min > b_max",
)


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """Everything that was measured; `kernel` and `transfer` are None where there was no model to measure."""

    checks: dict[tuple[str, str], Check]
    sharing: tuple[Sharing, ...]
    accuracy: ByAccuracy
    kernel: GradientKernel | None
    transfer: Transfer | None
    alignments: dict[str, Alignment]

    def check(self, where: str, statement: str) -> Check:
        """Return the check of that name."""
        return self.checks[where, statement]


def run(options: Options) -> Findings:
    """Run the study. `options.seeds` blocks of trials; `options.model` a Hugging Face folder for Appendix F.

    Raises UserError where `options.model` is given and cannot be loaded.
    """
    rng = default_rng(options.seed)
    folder = options.model or (DEFAULT_MODEL if DEFAULT_MODEL.is_dir() else None)
    kernel, moved = None, None
    if folder is not None:
        samples = gradients.sample_responses(folder, options.seed)
        kernel = gradients.measure(samples, options.seed)
        moved = transfer.measure_transfer(samples, kernel, options.seed)
    alignments = {reading: gradients.summarise(kernel, reading) for reading in READINGS} if kernel else {}
    seeds = options.seeds or SEEDS
    blocks = [
        [
            *sharpening.policy_checks(POLICY_TRIALS, rng),
            *coupling.kernel_checks(KERNEL_TRIALS, rng),
            coupling.ratio_check(KERNEL_TRIALS, rng),
        ]
        for _ in range(seeds)
    ]
    checks = {(check.where, check.statement): check for check in map(pooled, zip(*blocks, strict=True))}
    sharing = tuple(sharpening.over_sharpening(group, SHARING_TRIALS, rng) for group in SHARING_GROUPS)
    results = Results(checks, sharing, by_accuracy(default_rng(options.seed)), kernel, moved, alignments)
    judged = (_policy_claims, _accuracy_claims, _kernel_claims, _gradient_claims)
    return Findings(
        settings=_settings(seeds, folder, kernel),
        tables=_tables(results),
        claims=tuple(claim for judge in judged for claim in judge(results)),
        figure=draw(
            results.sharing, sharpening.partition_cases(SHARING_TRIALS, rng), list(results.checks.values()), kernel
        ),
    )


def _settings(seeds: int, folder: Path | None, kernel: GradientKernel | None) -> str:
    trials = (
        f"{seeds} blocks of {POLICY_TRIALS} random policies of {sharpening.MODES} modes and {KERNEL_TRIALS} random "
        f"kernels of {coupling.GROUP} responses. The paper runs no trials: sizes and ranges are ours, and so is "
        "the reading of formulas whose symbols are lost (their docstrings say which)."
    )
    if kernel is None:
        return f"{trials}\nAppendix F is left out: no {DEFAULT_MODEL} here, and no --model was given."
    size = f"{kernel.parameters:,} parameters"
    if kernel.parameters > gradients.SKETCH:
        size += f", gradients as count sketches of {gradients.SKETCH:,}"
    return (
        f"{trials}\nAppendix F on {folder} ({size}), {gradients.QUESTIONS} Countdown questions x {gradients.RESPONSES} "
        "responses at temperature 1: another model and another task than the paper's, so sizes are not comparable."
    )


def _tables(results: Results) -> tuple[Table, ...]:
    checks = Table("trials", "random trials", COLUMNS, tuple(check.row for check in results.checks.values()))
    sharing = Table(
        "group_size",
        "over-sharpened queries, and total variation from Theorem 3.1's optimum, by group size",
        ("G", "batch-optimal (3.2)", "importance ratio", "distance (3.2)", "distance (ratio)"),
        tuple((s.group, s.batch, s.ratio, s.batch_distance, s.ratio_distance) for s in results.sharing),
    )
    ratio = Table(
        "corollary_3_2",
        f"Corollary 3.2's R at a/b = {ALIGNMENT:g} with GRPO's advantages at batch accuracy p",
        ("p", "G", "R, mode seen once", "R, mode seen G/8 times"),
        tuple((p, g, _ratio(g, p, 1), _ratio(g, p, g / 8)) for p in ACCURACIES for g in RATIO_GROUPS),
    )
    theory = (checks, sharing, *accuracy_tables(results.accuracy), ratio)
    if not results.alignments:
        return theory
    rows = tuple(zip(_ALIGNMENT_ROWS, *map(astuple, results.alignments.values()), strict=True))
    columns = ("logit of a response:", *results.alignments)
    gradient = Table("gradients", "Appendix F: inner products of responses' gradients", columns, rows)
    return (*theory, gradient, *(transfer_tables(results.transfer) if results.transfer else ()))


def _ratio(group: int, accuracy: float, seen: float) -> float:
    return coupling.grpo_ratio(ALIGNMENT, group, accuracy, seen)


def _policy_claims(results: Results) -> tuple[Claim, ...]:
    check = results.check
    linear = check("Thm 3.2", "maximises the linear surrogate sum n A pi / G - beta KL")
    surrogate = check("Thm 3.2", "maximises the importance-ratio surrogate")
    functional = check("Thm C.1", "equals a step along the functional (natural) gradient")
    plain = check("Thm C.1", "equals a small plain gradient step on softmax logits")
    return (
        check("Thm 3.1", "maximises equation 1").claim("the closed form maximises equation 1", "always"),
        check("Cor 3.1", "the optimum sharpens moderately (binary advantages)").claim(
            "every correct mode gains in the infinite-sample optimum", "always"
        ),
        _both("Thm 3.2", "the batch-optimal policy is where the empirical objective comes to rest", linear, surrogate),
        _large_batch(results),
        check("sec 3.2", "sampled correct modes gain").claim("sampled modes move by the advantage's sign", "always"),
        _both("Thm C.1", "a gradient step interpolates geometrically", functional, plain),
        check("Thm 3.3", "Z >= first bound").claim("first lower bound of Z", "always"),
        check("Thm 3.3", "Z >= 1 + (s / beta) gap").claim("lower bound of Z for normalised advantages", "always"),
        check("Thm 3.3", "gap > 0 shrinks every unsampled mode").claim("gap > 0 shrinks all unsampled modes", "always"),
        check("Thm 3.3", "gap < 0 leaves Z <= 1 (the converse)").claim(
            "suppression is governed by the gap (read as: none where it is negative)", "when the model is confident"
        ),
        check("sec 4.1", "Z >= 1 under the idealised A / pi_ref").claim(
            "idealised A / pi_ref: Z >= 1", "lower bound 1"
        ),
        check("sec 4.1", "the idealised A / pi_ref lowers Z").claim(
            "idealised calibration counters over-sharpening: it lowers Z where gap > 0", "motivates IAC"
        ),
    )


def _both(where: str, statement: str, narrow: Check, wide: Check) -> Claim:
    """Judge a claim by the proof's reading (`narrow`) and by what training does (`wide`)."""
    outcomes = {(True, True): Outcome.REPRODUCED, (True, False): Outcome.PARTLY}
    outcome = outcomes.get((narrow.violations == 0, wide.violations == 0), Outcome.DIFFERS)
    ours = f"{narrow.statement}: {narrow.violations} violations; {wide.statement}: {wide.share:.1%} violated"
    return Claim(where, statement, "always", ours, outcome)


def _large_batch(results: Results) -> Claim:
    last = results.sharing[-1]
    same = last.batch_distance < SAME_POLICY and last.batch < SAME_POLICY
    return Claim(
        "sec 3.2",
        "over-sharpening comes from the finite batch (read as: it vanishes as G grows)",
        "analogous to the exact case",
        f"G = {last.group:.0e}: batch-optimal policy over-sharpens {last.batch:.0%} of queries, is "
        f"{last.batch_distance:.2f} from Thm 3.1; importance-ratio policy {last.ratio:.1%}, {last.ratio_distance:.3f}",
        Outcome.REPRODUCED if same else Outcome.DIFFERS,
    )


def _accuracy_claims(results: Results) -> tuple[Claim, ...]:
    return accuracy_claims(results.accuracy)


def _kernel_claims(results: Results) -> tuple[Claim, ...]:
    one, two = "Thm 3.4 case 1", "Thm 3.4 case 2"
    check = results.check
    repeats = coupling.REPEATS
    return (
        check(one, "uniform kernel, all rho b").claim("unseen mode bounded, all alignments rho b", "always"),
        check(one, "uniform kernel, any in [0, rho b]").claim("unseen mode bounded, alignments <= rho b", "always"),
        check(one, "spectral bounds, any in [0, rho b_max]").claim("unseen mode bounded, general kernel", "always"),
        check(two, "spectral bounds, one sample").claim("seen mode (n = 1) bounded, general kernel", "always"),
        check(two, f"uniform kernel, {repeats} distinct samples").claim(
            f"seen mode (n = {repeats}, distinct gradients) bounded, uniform kernel", "always"
        ),
        check(two, f"uniform kernel, one sample {repeats} times").claim(
            f"seen mode (the same response {repeats} times) bounded, uniform kernel", "always"
        ),
        check(two, f"spectral bounds, {repeats} distinct samples").claim(
            f"seen mode (n = {repeats}, distinct gradients) bounded, general kernel", "always"
        ),
        check("Cor 3.2", "ratio of the bounds = its uniform formula").claim("R's uniform formula", "exact"),
        _group_size_claim(),
    )


def _group_size_claim() -> Claim:
    """Judge Corollary 3.2's third bullet, with a fixed share and with the share that GRPO's advantages give."""
    group = np.array(RATIO_GROUPS, dtype=np.float64)
    share, seen, alignment = (np.full_like(group, value) for value in (0.25, 1.0, ALIGNMENT))
    fixed = _grows(list(uniform_suppression_ratio(share, alignment, group, seen)))
    once = [p for p in ACCURACIES if _grows([_ratio(g, p, 1) for g in RATIO_GROUPS])]
    same_share = [p for p in ACCURACIES if _grows([_ratio(g, p, g / 8) for g in RATIO_GROUPS])]
    every = len(once) == len(same_share) == len(ACCURACIES)
    return Claim(
        "Cor 3.2",
        "a larger group amplifies over-sharpening (R grows with G)",
        "always",
        f"share and n held: {'grows' if fixed else 'does not grow'}; GRPO's share, mode seen once: grows for p in "
        f"{once}; seen G/8 times: for p in {same_share} (of {list(ACCURACIES)})",
        Outcome.REPRODUCED if fixed and every else Outcome.PARTLY if fixed else Outcome.DIFFERS,
    )


def _grows(values: list[float]) -> bool:
    return all(later > earlier * (1 + 1e-12) for earlier, later in pairwise(values))


def _gradient_claims(results: Results) -> tuple[Claim, ...]:
    if results.kernel is None:
        return ()
    paper = f"{PAPER_MEAN:.2f} +- {PAPER_DEVIATION:.2f} (Qwen3-0.6B, GSM8K)"
    aligned, dominated = [], []
    for reading, a in results.alignments.items():
        statement = f"responses of different questions have aligned gradients ({reading})"
        ours = (
            f"{a.mean:.1f} +- {a.deviation:.1f}, s.e. {a.standard_error:.1f}, {a.positive:.0%} positive "
            "(different model: sizes not comparable)"
        )
        # The paper says "strongly and consistently": its mean is four standard deviations above zero.
        strongly = Outcome.REPRODUCED if a.mean > 2 * a.deviation else Outcome.PARTLY
        outcome = Outcome.DIFFERS if a.mean < 3 * a.standard_error else strongly
        aligned.append(Claim("App F, Ass 3.1", statement, paper, ours, outcome))
        statement = f"self-alignment exceeds cross-alignment ({reading})"
        ours = (
            f"mean diagonal {a.self_alignment:.0f}, mean cross {a.cross_alignment:.0f}; a_min > b_max in "
            f"{a.dominated:.0%} of questions; {gradients.repeated_share(results.kernel):.0%} have a repeated response "
            "(K singular)"
        )
        larger = a.self_alignment > 2 * abs(a.cross_alignment)
        every = Outcome.REPRODUCED if a.dominated == 1 else Outcome.PARTLY
        words = "diagonal substantially larger; a_min > b_max"
        dominated.append(Claim("App F, Ass 3.3", statement, words, ours, every if larger else Outcome.DIFFERS))
    return (*aligned, *dominated, *(transfer_claims(results.transfer) if results.transfer else ()))


STUDY = Study(
    "bounds",
    "2601.15609",
    "theorems 3.1 to 3.4 and C.1 on random cases; gradient alignment of a model",
    run,
    takes_model=True,
)


_BLUE, _ORANGE = COLOURS[1], COLOURS[2]
_POINTS = 1500


def draw(
    sharing: tuple[Sharing, ...],
    partition: tuple[Floats, Floats],
    checks: list[Check],
    kernel: GradientKernel | None,
) -> Figure:
    """Draw four panels, 10 x 8 inches."""
    figure = new_figure(10.5, 8.2)
    axes = figure.subplots(2, 2)
    for panel in axes.flat:
        dress(panel)
    groups, over = [s.group for s in sharing], axes[0, 0]
    over.plot(groups, [s.batch for s in sharing], color=_BLUE, marker="o", ms=4, label="batch-optimal (Thm 3.2)")
    over.plot(groups, [s.ratio for s in sharing], color=_ORANGE, marker="s", ms=4, label="importance ratio (GRPO's)")
    over.axhline(0, color=MUTED, linestyle="--", linewidth=1.2, label="infinite-sample optimum (Thm 3.1)")
    over.set_xscale("log")
    over.set_ylim(-0.03, 1)
    over.set_xlabel("group size G", fontsize=9, color=MUTED)
    over.set_ylabel("share of queries", fontsize=9, color=MUTED)
    over.legend(fontsize=8, frameon=False, loc="upper right")
    _title(over, "Over-sharpened queries")
    _partition(axes[0, 1], *partition)
    _violations(axes[1, 0], [c for c in checks if c.where.startswith("Thm 3.4 case") and "entry" not in c.statement])
    _gradients(axes[1, 1], kernel)
    figure.tight_layout(h_pad=3.0, w_pad=2.5)
    return figure


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10, fontweight="bold", color=INK)


def _partition(axes: Axes, bound: Floats, partition: Floats) -> None:
    bound, partition = bound[:_POINTS], partition[:_POINTS]
    shown = (bound > 0) & (partition < 30)
    suppressed = shown & (bound <= 1) & (partition > 1)
    axes.scatter(bound[shown], partition[shown], s=5, color=_BLUE, alpha=0.4, linewidths=0, label="a batch")
    axes.scatter(
        bound[suppressed], partition[suppressed], s=5, color=LOSS, alpha=0.6, linewidths=0, label="Z > 1 though gap < 0"
    )
    ends = np.array([0.1, 20])
    axes.plot(ends, ends, color=INK, linewidth=1, label="Z = bound")
    axes.set(xscale="log", yscale="log", xlim=(0.1, 20), ylim=(0.1, 30))
    axes.axhline(1, color=MUTED, linewidth=0.8, linestyle=":")
    axes.axvline(1, color=MUTED, linewidth=0.8, linestyle=":")
    axes.set_xlabel("lower bound 1 + (s / β) gap", fontsize=9, color=MUTED)
    axes.set_ylabel("Z", fontsize=9, color=MUTED)
    axes.legend(fontsize=8, frameon=False, loc="lower right", markerscale=2.5)
    _title(axes, "Theorem 3.3: Z against its bound")


def _violations(axes: Axes, checks: list[Check]) -> None:
    # A label on two lines leaves more room for the bars.
    statements = [check.statement.replace(", ", ",\n", 1) for check in checks]
    labels = [f"{check.where.removeprefix('Thm 3.4 ')}: {text}" for check, text in zip(checks, statements, strict=True)]
    shares = [100 * check.share for check in checks]
    rows = np.arange(len(checks))[::-1]
    axes.barh(rows, shares, color=[LOSS if share > 0 else _BLUE for share in shares], height=0.6)
    for row, share in zip(rows, shares, strict=True):
        axes.text(share + 0.3, row, f"{share:.2g}%" if share else "0", va="center", fontsize=8, color=INK)
    axes.set_yticks(rows, labels, fontsize=7.5)
    axes.set_xlim(0, max(5.0, 1.2 * max(shares)))
    axes.set_xlabel("% of trials that violate the bound", fontsize=9, color=MUTED)
    _title(axes, "Theorem 3.4's bounds")


def _gradients(axes: Axes, kernel: GradientKernel | None) -> None:
    _title(axes, "Gradient alignment between questions")
    if kernel is None:
        axes.text(0.5, 0.5, "no model was measured", transform=axes.transAxes, ha="center", color=MUTED)
        return
    apart_RR = kernel.question_R[:, None] != kernel.question_R[None, :]
    bins = np.linspace(-1, 1, 81).tolist()
    for reading, colour in zip(READINGS, (_BLUE, _ORANGE), strict=True):
        gram_RR = kernel.gram_RR[reading]
        length_R = np.sqrt(np.diagonal(gram_RR))
        cosine = (gram_RR / length_R / length_R[:, None])[apart_RR]
        label = f"{reading}: mean {cosine.mean():+.3f}, {(cosine > 0).mean():.0%} positive"
        axes.hist(cosine, bins=bins, density=True, color=colour, alpha=0.55, label=label)
    axes.axvline(0, ymax=0.8, color=INK, linewidth=0.8)
    axes.set_xlim(-1, 1)
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])
    axes.set_xlabel("cosine", fontsize=9, color=MUTED)
    axes.set_ylabel("density", fontsize=9, color=MUTED)
    axes.legend(fontsize=8, frameon=False, loc="upper right")
