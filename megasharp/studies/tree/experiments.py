"""Which policies the tree study trains, and what it keeps of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megasharp.studies.softmax import Adam, Array, Ascent
from megasharp.studies.tree.training import MODE_INDEX, MODES, Setting, sequence_probability, train

SEEDS = 20
DRAWS = 1000

# The paper gives neither learning rate nor steps, group size, optimizer, coefficients or start for its tree. Ours: SGD
# from uniform policies; the group size of its math runs; a rate at which plain GRPO has collapsed when training ends.
LEARNING_RATE = 15.0
STEPS = 2000
GROUP_SIZE = 8
# Fitted to the paper's accuracy of .48: the coefficient is the free parameter there (the sweep shows its whole range).
BETA = 1.0
# Chosen from the sweep: the weakest smoothing that keeps all modes in all seeds, and no gate. N is the whole action
# set; lambda is the paper's for math.
ALPHA, TOPN, LAMBDA_TOP1 = 0.65, 4, 1.1

GRPO = Setting(LEARNING_RATE)
ENTROPY = replace(GRPO, beta=BETA)
CASP = replace(GRPO, alpha=ALPHA, topn=TOPN, lambda_top1=LAMBDA_TOP1)
MAIN: Mapping[str, Setting] = {"GRPO": GRPO, "GRPO + entropy": ENTROPY, "CaSP": CASP}

BETAS = (0.1, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)
ALPHAS = (0.1, 0.3, 0.5, 0.65, 0.8)
TOPNS = (2, 3, 4)
VARIANTS: Mapping[str, Setting] = {
    "values of the paper's language models": replace(GRPO, alpha=0.01, topn=3, quantile=0.8, lambda_top1=1.1),
    "gate q = 0.4": replace(CASP, quantile=0.4),
    "gate q = 0.8": replace(CASP, quantile=0.8),
    "smoothing only (lambda 1)": replace(CASP, lambda_top1=1.0),
    "penalty only (alpha 0)": replace(CASP, alpha=0.0),
    "penalty only, lambda 2": replace(CASP, alpha=0.0, lambda_top1=2.0),
}
RATES = (1.0, 5.0, 30.0)
ADAM_RATES = (0.03, 0.3)


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Per seed: exact probability of each mode [R, 6] and of each first action [R, 4]; what 1,000 draws showed [R]."""

    mode_probability_RM: Array
    root_RA: Array
    modes_R: Array
    accuracy_R: Array

    @property
    def median_modes(self) -> float:
        """Modes seen among the draws, median over seeds."""
        return float(np.median(self.modes_R))

    @property
    def accuracy(self) -> float:
        """Share of rewarded draws, mean over seeds."""
        return float(self.accuracy_R.mean())

    @property
    def seeds_with_all(self) -> int:
        """How many seeds showed all six modes."""
        return int((self.modes_R == len(MODES)).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """`sgd`: every setting; `adam`: the main ones at Adam's learning rates."""

    sgd: Mapping[Setting, Result]
    adam: Mapping[Setting, Result]


def at_entropy(beta: float) -> Setting:
    """GRPO with another entropy coefficient."""
    return replace(GRPO, beta=beta)


def casp(topn: int, alpha: float) -> Setting:
    """CaSP at another strength."""
    return replace(CASP, topn=topn, alpha=alpha)


def at_rate(setting: Setting, lr: float) -> Setting:
    """The same at another learning rate."""
    return replace(setting, lr=lr)


def run_all(seeds: Sequence[int]) -> Results:
    """Train and judge everything."""
    settings = [
        *MAIN.values(),
        *(at_entropy(beta) for beta in BETAS),
        *(casp(topn, alpha) for topn in TOPNS for alpha in ALPHAS),
        *VARIANTS.values(),
        *(at_rate(setting, lr) for setting in MAIN.values() for lr in RATES),
    ]
    adam = [at_rate(setting, lr) for setting in MAIN.values() for lr in ADAM_RATES]
    sgd_policy = train(list(dict.fromkeys(settings)), seeds, STEPS, GROUP_SIZE, Ascent(1.0))
    adam_policy = train(adam, seeds, STEPS, GROUP_SIZE, Adam(1.0))
    return Results(_judged(list(dict.fromkeys(settings)), seeds, sgd_policy), _judged(adam, seeds, adam_policy))


def _judged(settings: Sequence[Setting], seeds: Sequence[int], policy_RDV: Array) -> dict[Setting, Result]:
    parts = policy_RDV.reshape(len(settings), len(seeds), *policy_RDV.shape[1:])
    return {setting: judge(part, seeds) for setting, part in zip(settings, parts, strict=True)}


def judge(policy_RDV: Array, seeds: Sequence[int]) -> Result:
    """Draw 1,000 sequences from each policy; `seeds` are those of the runs."""
    probability_R64 = sequence_probability(policy_RDV)
    # Another stream than that of the training, which starts from the seed itself.
    counts_R64 = np.stack(
        [
            np.random.default_rng((seed, 1)).multinomial(DRAWS, probability_64 / probability_64.sum())
            for seed, probability_64 in zip(seeds, probability_R64, strict=True)
        ]
    )
    found_RM = counts_R64[:, MODE_INDEX]
    return Result(
        mode_probability_RM=probability_R64[:, MODE_INDEX],
        root_RA=policy_RDV[:, 0],
        modes_R=(found_RM > 0).sum(axis=-1).astype(np.float64),
        accuracy_R=found_RM.sum(axis=-1) / DRAWS,
    )
