"""`megasharp toy tree`: three actions in a row, six rewarded sequences; methods that keep all six, and their accuracy.

2510.14807 section 4.3, figure 5: GRPO, GRPO with an entropy bonus, and CaSP on a tabular tree-structured MDP. Next to
the paper's three results stand sweeps of what the paper leaves open.
"""

from __future__ import annotations

from megasharp.studies.study import Findings, Options, Study
from megasharp.studies.tree.claims import claims, draw, tables
from megasharp.studies.tree.experiments import (
    ALPHA,
    BETA,
    DRAWS,
    GROUP_SIZE,
    GRPO,
    LAMBDA_TOP1,
    LEARNING_RATE,
    RATES,
    SEEDS,
    STEPS,
    TOPN,
    at_rate,
    run_all,
)

SETTINGS = (
    "Not in the paper: start, optimizer, learning rate, steps, group size, all coefficients. Here: tabular softmax "
    f"from uniform, SGD lr {LEARNING_RATE:g} on the mean over the 3 G actions of a group, {STEPS} steps, "
    f"G {GROUP_SIZE}, one update per group (no clip active), no KL; entropy coefficient {BETA:g}; CaSP alpha "
    f"{ALPHA:g}, N {TOPN}, lambda {LAMBDA_TOP1:g}, no entropy gate. Modes and accuracy: {DRAWS:,} draws per seed.\n"
    "Chosen for the paper's picture, from the sweeps below: the entropy coefficient (fitted to .48); alpha, N and no "
    "gate (the weakest smoothing that keeps all six modes); the learning rate, at which GRPO has narrowed to one or "
    "two modes"
)


def run(options: Options) -> Findings:
    """Train every setting for `options.seeds` seeds (20 by default)."""
    seeds = range(options.seed, options.seed + (options.seeds or SEEDS))
    results = run_all(seeds)
    medians = ", ".join(f"{results.sgd[at_rate(GRPO, lr)].median_modes:g} at lr {lr:g}" for lr in RATES)
    settings = f"{len(seeds)} seeds. {SETTINGS} (at others its median is {medians})."
    return Findings(settings, tables(results), claims(results), draw(results))


STUDY = Study("tree", "2510.14807", "a tree with six right answers: GRPO, an entropy bonus, CaSP", run)
