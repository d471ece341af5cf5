"""Experiments of the tree study: the tree of 2510.14807 figure 5, and policies that GRPO, a bonus or CaSP train on it.

In reading order: the tree; training, all seeds and all settings at once; the settings and the result of each.

The tree has three actions in a row out of A, B, C, D; six of the 64 sequences are rewarded. The policy is a table of
logits, one row per decision state: the root, then the 4 states after one action, then the 16 after two. Suffixes beside
those of `megasharp.studies.softmax`: `_D` decision states (21), `_L` the actions of a sequence (3), `_64` all sequences
in alphabetical order.

Plain NumPy: the sweep is hundreds of policies of 84 numbers each, for thousands of steps. The gradients are written out
(with one update per batch of rollouts the ratio is 1 and no clip is active); the tests take them by autograd, from the
objectives as 2510.14807 prints them and from the hooks of `casp`, `clip` and `entropy_bonus`.

    GRPO      A (e_y - p)
    entropy   + beta dH/dz, with dH/dz_v = -p_v (log p_v + H)
    CaSP      A > 0: A ((1 - alpha w) e_y + alpha w / N sum_n e_v(n) - p);  A < 0: lambda A (e_y - p) at a gated top-1
    gate      w = 1 where the entropy is above the q-quantile of the response's (all where q = 0)

each averaged over the 3 G actions of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megasharp.studies.softmax import Adam, Ascent, Bools, Counts, Floats, Optimizer, entropy, softmax, uniforms

ACTIONS = "ABCD"
HORIZON = 3
MODES = ("ACD", "ACB", "BDC", "BDA", "CAB", "DBA")
# The first decision state of each level.
_FIRST_STATE = (0, 1, 5)
STATES = 21


def sequence_index(sequence: str) -> int:
    """Return a sequence's place among all 64 in alphabetical order: `sequence_index("BDC") == 30`."""
    return sum(ACTIONS.index(action) * 4 ** (HORIZON - 1 - level) for level, action in enumerate(sequence))


MODE_INDEX = np.array([sequence_index(mode) for mode in MODES])
REWARD_64 = np.isin(np.arange(64), MODE_INDEX).astype(np.float64)


def descend(policy_RDV: Floats, uniform_RGL: Floats) -> tuple[Counts, Counts, Counts]:
    """Sample sequences by inversion: the states met and the actions taken [R, G, L], and the sequences' indices [R, G].

    `policy_RDV` holds probabilities, `uniform_RGL` one number in [0, 1) per action.
    """
    # The last column is left out: rounding may leave it just below 1.
    cumulative_RDV = np.cumsum(policy_RDV, axis=-1)[..., :-1]
    run_R1 = np.arange(len(policy_RDV))[:, None]
    prefix_RG = np.zeros(uniform_RGL.shape[:2], dtype=np.int64)
    states, actions = [], []
    for level, first in enumerate(_FIRST_STATE):
        states.append(first + prefix_RG)
        passed_RGV = uniform_RGL[..., level, None] > cumulative_RDV[run_R1, states[-1]]
        actions.append(passed_RGV.sum(axis=-1, dtype=np.int64))
        prefix_RG = 4 * prefix_RG + actions[-1]
    return np.stack(states, axis=-1), np.stack(actions, axis=-1), prefix_RG


def sequence_probability(policy_RDV: Floats) -> Floats:
    """Return the exact probability of every sequence, [R, 64]."""
    first_RA, second_RAB, third_RABC = policy_RDV[:, 0], policy_RDV[:, 1:5], policy_RDV[:, 5:].reshape(-1, 4, 4, 4)
    joint_RABC = first_RA[:, :, None, None] * second_RAB[..., None] * third_RABC
    return np.asarray(joint_RABC.reshape(-1, 64))


# GRPO's guard on the standard deviation, as in megasharp.algos.grpo.
STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Setting:
    """GRPO and what is added to it. `beta`: the entropy bonus; `negative`: a factor on negative advantages.

    The rest is CaSP's, named as in the paper.
    """

    lr: float
    beta: float = 0.0
    alpha: float = 0.0
    topn: int = 4
    quantile: float = 0.0
    lambda_top1: float = 1.0
    negative: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One group of rollouts per run: states, actions [R, G, L] and the sequences' advantages [R, G]."""

    state_RGL: Counts
    action_RGL: Counts
    advantage_RG: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The settings of all runs side by side, each [R]."""

    lr_R: Floats
    beta_R: Floats
    alpha_R: Floats
    topn_R: Floats
    quantile_R: Floats
    lambda_R: Floats
    negative_R: Floats


def train(
    settings: Sequence[Setting],
    seeds: Sequence[int],
    steps: int,
    group_size: int,
    optimizer: Optimizer,
) -> Floats:
    """Train every setting with every seed from uniform policies; returns the policies [settings * seeds, D, V].

    A seed draws the same random numbers in every setting. `optimizer` has a learning rate of 1, which each setting's
    own then multiplies.
    """
    columns = tabulate(settings, len(seeds))
    uniform_RTK = uniforms(seeds, steps, group_size * HORIZON)
    logit_RDV = np.zeros((len(settings) * len(seeds), STATES, 4))
    for step in range(steps):
        uniform_RGL = np.tile(uniform_RTK[:, step].reshape(len(seeds), group_size, HORIZON), (len(settings), 1, 1))
        policy_RDV = softmax(logit_RDV)
        batch = collect(policy_RDV, uniform_RGL)
        change_RDV = optimizer.change(gradient(policy_RDV, batch, columns), logit_RDV)
        logit_RDV = logit_RDV + columns.lr_R[:, None, None] * change_RDV
    return softmax(logit_RDV)


def tabulate(settings: Sequence[Setting], seeds: int) -> Columns:
    """Lay out each setting's values, repeated for every seed."""

    def column(name: str) -> Floats:
        return np.repeat([float(getattr(setting, name)) for setting in settings], seeds)

    return Columns(*(column(name) for name in ("lr", "beta", "alpha", "topn", "quantile", "lambda_top1", "negative")))


def collect(policy_RDV: Floats, uniform_RGL: Floats) -> Batch:
    """Sample one group per run, with GRPO's advantages."""
    state_RGL, action_RGL, sequence_RG = descend(policy_RDV, uniform_RGL)
    return Batch(state_RGL, action_RGL, group_advantages(REWARD_64[sequence_RG]))


def group_advantages(reward_RG: Floats) -> Floats:
    """Return (r - mean) / (std + 1e-6), unbiased std; zero in a group of equal rewards."""
    centred_RG = reward_RG - reward_RG.mean(axis=-1, keepdims=True)
    return np.asarray(centred_RG / (reward_RG.std(axis=-1, ddof=1, keepdims=True) + STD_EPSILON))


def gradient(policy_RDV: Floats, batch: Batch, columns: Columns) -> Floats:
    """Return the gradient of the objective, which is maximised, with respect to the logits, [R, D, V]."""
    rank_RDV = ranks(policy_RDV)
    entropy_RD = entropy(policy_RDV)
    # Per action: the weight of its update, and the part of it that goes to the candidates.
    run_R11 = np.arange(len(policy_RDV))[:, None, None]
    scaled_RG = np.where(batch.advantage_RG < 0, columns.negative_R[:, None], 1.0) * batch.advantage_RG
    advantage_RGL = np.broadcast_to(scaled_RG[..., None], batch.state_RGL.shape)
    gate_RGL = gate(entropy_RD[run_R11, batch.state_RGL], columns.quantile_R)
    is_top1_RGL = rank_RDV[run_R11, batch.state_RGL, batch.action_RGL] == 0
    punished_RGL = gate_RGL & is_top1_RGL & (advantage_RGL < 0)
    weight_RGL = np.where(punished_RGL, columns.lambda_R[:, None, None], 1.0) * advantage_RGL
    spread_RGL = np.where(gate_RGL & (advantage_RGL > 0), columns.alpha_R[:, None, None], 0.0) * weight_RGL
    state_RGL = run_R11 * STATES + batch.state_RGL
    sampled_RDV = _total(4 * state_RGL + batch.action_RGL, weight_RGL - spread_RGL, policy_RDV.shape)
    spread_RD = _total(state_RGL, spread_RGL, entropy_RD.shape)
    visits_RD = _total(state_RGL, np.ones_like(weight_RGL), entropy_RD.shape)
    candidate_RDV = (rank_RDV < columns.topn_R[:, None, None]) / columns.topn_R[:, None, None]
    target_RDV = sampled_RDV + spread_RD[..., None] * candidate_RDV
    # -p is weighted by all that is pulled up: sampled actions and candidates.
    pulled_RDV = target_RDV - target_RDV.sum(axis=-1, keepdims=True) * policy_RDV
    bonus_RD = columns.beta_R[:, None] * visits_RD
    # dH/dz_v = -p_v (log p_v + H).
    log_RDV = np.log(np.maximum(policy_RDV, np.finfo(np.float64).tiny))
    entropy_gradient_RDV = -policy_RDV * (log_RDV + entropy_RD[..., None])
    total_RDV = pulled_RDV + bonus_RD[..., None] * entropy_gradient_RDV
    return np.asarray(total_RDV / (batch.advantage_RG.shape[1] * HORIZON))


def ranks(policy_RDV: Floats) -> Counts:
    """Return each action's rank by probability, 0 for the most probable; of equal ones the earlier is ahead."""
    rank_RDV = np.zeros(policy_RDV.shape, dtype=np.int64)
    actions_V = np.arange(policy_RDV.shape[-1])
    for action in actions_V:
        rival_RD1 = policy_RDV[..., action, None]
        rank_RDV += (rival_RD1 > policy_RDV) | ((rival_RD1 == policy_RDV) & (action < actions_V))
    return np.asarray(rank_RDV, dtype=np.int64)


def gate(entropy_RGL: Floats, quantile_R: Floats) -> Bools:
    """Select entropies above the response's q-quantile (linear interpolation); all of them with q = 0."""
    ordered_RGL = np.sort(entropy_RGL, axis=-1)
    place_R = quantile_R * (HORIZON - 1)
    below_R = np.minimum(place_R.astype(np.int64), HORIZON - 2)
    share_R1 = (place_R - below_R)[:, None]
    run_R = np.arange(len(entropy_RGL))
    low_RG, high_RG = ordered_RGL[run_R, :, below_R], ordered_RGL[run_R, :, below_R + 1]
    threshold_RG = low_RG + share_R1 * (high_RG - low_RG)
    return np.asarray((entropy_RGL > threshold_RG[..., None]) | (quantile_R == 0.0)[:, None, None])


def _total(cell: Counts, value: Floats, shape: tuple[int, ...]) -> Floats:
    """Sum `value` over equal `cell`s, which are flat indices into an array of `shape`."""
    total = np.bincount(cell.ravel(), weights=value.ravel(), minlength=int(np.prod(shape)))
    return np.asarray(total, dtype=np.float64).reshape(shape)


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
# Factors on negative advantages, at the main rate and at lower ones, which leave GRPO more modes to lose.
NEGATIVES = (2.0, 8.0)
NEGATIVE_RATES = (1.0, 5.0, LEARNING_RATE)
ADAM_RATES = (0.03, 0.3)


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Per seed: exact probability of each mode [R, 6] and of each first action [R, 4]; results of 1,000 draws [R]."""

    mode_probability_RM: Floats
    root_RA: Floats
    modes_R: Floats
    accuracy_R: Floats

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
        """Number of seeds whose draws showed all six modes."""
        return int((self.modes_R == len(MODES)).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """`sgd`: every setting; `adam`: the main ones at Adam's learning rates."""

    sgd: Mapping[Setting, Result]
    adam: Mapping[Setting, Result]


def at_entropy(beta: float) -> Setting:
    """Return GRPO with another entropy coefficient."""
    return replace(GRPO, beta=beta)


def casp(topn: int, alpha: float) -> Setting:
    """Return CaSP with another N and alpha."""
    return replace(CASP, topn=topn, alpha=alpha)


def amplified(factor: float, lr: float) -> Setting:
    """Return GRPO at `lr` with negative advantages times `factor`."""
    return Setting(lr, negative=factor)


def at_rate(setting: Setting, lr: float) -> Setting:
    """Return the setting at another learning rate."""
    return replace(setting, lr=lr)


def run_all(seeds: Sequence[int]) -> Results:
    """Train and judge everything."""
    settings = [
        *MAIN.values(),
        *(at_entropy(beta) for beta in BETAS),
        *(casp(topn, alpha) for topn in TOPNS for alpha in ALPHAS),
        *VARIANTS.values(),
        *(at_rate(setting, lr) for setting in MAIN.values() for lr in RATES),
        *(amplified(factor, lr) for factor in NEGATIVES for lr in NEGATIVE_RATES),
    ]
    adam = [at_rate(setting, lr) for setting in MAIN.values() for lr in ADAM_RATES]
    sgd_policy = train(list(dict.fromkeys(settings)), seeds, STEPS, GROUP_SIZE, Ascent(1.0))
    adam_policy = train(adam, seeds, STEPS, GROUP_SIZE, Adam(1.0))
    return Results(_judged(list(dict.fromkeys(settings)), seeds, sgd_policy), _judged(adam, seeds, adam_policy))


def _judged(settings: Sequence[Setting], seeds: Sequence[int], policy_RDV: Floats) -> dict[Setting, Result]:
    parts = policy_RDV.reshape(len(settings), len(seeds), *policy_RDV.shape[1:])
    return {setting: judge(part, seeds) for setting, part in zip(settings, parts, strict=True)}


def judge(policy_RDV: Floats, seeds: Sequence[int]) -> Result:
    """Draw 1,000 sequences from each policy; `seeds` are those of the runs."""
    probability_R64 = sequence_probability(policy_RDV)
    # Not the stream of the training, which starts from the seed itself.
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
