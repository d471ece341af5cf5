"""The classifier of 2601.15609 section 3.4, its training for all seeds at once, the experiments, and their tables.

There are four labels, inputs with fixed features, a reward, and group advantages. The paper's feature vectors are lost
in its text. It says: Persian and Siamese align with the Cat superclass and differ in subclass dimensions; dimension 1
is Persian's, dimension 3 Siamese's; similarity moves mass from 1 to 3. Ours are the simplest that fit (the coordinates
are superclass cat, Persian, Dog, Siamese). Labels have no features here: a linear classifier has a row of weights for
each. That the paper's labels enter through their features cannot be excluded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from megasharp.studies.cats.reweighing import Reweighing, reweigh
from megasharp.studies.softmax import (
    Adam,
    Ascent,
    Counts,
    Floats,
    Optimizer,
    policy_gradient,
    sample,
    softmax,
    uniforms,
)
from megasharp.studies.study import Cell, Table

LABELS = ("Cat", "Dog", "Persian", "Siamese")
CAT, PERSIAN, SIAMESE = 0, 2, 3
CORRECT = (CAT, PERSIAN)

PERSIAN_INPUT = np.array([1.0, 1.0, 0.0, 0.0])
# Ours: how much of Persian's own coordinate the Siamese input has moved to its own.
SHIFTS = {"High": 0.2, "Mid": 0.5, "Low": 0.8}

# verl's constants: GRPO's guard on the standard deviation, and that of its batch whitening.
STD_EPSILON, VARIANCE_EPSILON = 1e-6, 1e-8

Estimator = Literal["raw", "mean-shifted", "normalised", "RLOO", "RF++-baseline"]
ESTIMATORS: tuple[Estimator, ...] = ("raw", "mean-shifted", "normalised", "RLOO", "RF++-baseline")
DISTINCT_ESTIMATORS = ESTIMATORS[:-1]
IACForm = Literal["normalized", "literal"]


def siamese_input(shift: float) -> Floats:
    """Return the features of the held-out Siamese input; `shift` 0 makes it Persian's, 1 as different as possible."""
    return np.array([1.0, 1.0 - shift, 0.0, shift])


def rewards(label_RG: Counts) -> Floats:
    """Return 1 for a correct label of a Persian input, the superclass or the subclass; else 0."""
    return np.isin(label_RG, CORRECT).astype(np.float64)


def advantages(estimator: Estimator, reward_RG: Floats) -> Floats:
    """Return group advantages along the last axis.

    raw: r. mean-shifted: r - mean. normalised: (r - mean) / (std + 1e-6), unbiased std (GRPO). RLOO: each reward less
    the mean of the others. RF++-baseline: r - mean, whitened over the batch; a step here is one group, so that it is
    the normalised estimator up to its epsilon. A group of equal rewards has zero advantages in all but raw.
    """
    centred_RG = reward_RG - reward_RG.mean(axis=-1, keepdims=True)
    group_size = reward_RG.shape[-1]
    match estimator:
        case "raw":
            return reward_RG
        case "mean-shifted":
            return np.asarray(centred_RG)
        case "normalised":
            return np.asarray(centred_RG / (reward_RG.std(axis=-1, ddof=1, keepdims=True) + STD_EPSILON))
        case "RLOO":
            return np.asarray(centred_RG * group_size / (group_size - 1))
        case "RF++-baseline":
            return np.asarray(centred_RG / np.sqrt(reward_RG.var(axis=-1, ddof=1, keepdims=True) + VARIANCE_EPSILON))


def calibrated_advantages(advantage_RG: Floats, reward_RG: Floats, alpha: float, form: IACForm) -> Floats:
    """Apply IAC: advantages of correct samples times (1 - share of correct)^alpha, or literally (number wrong)^alpha.

    The paper's formula is lost; which of the two forms it has is derived from its words (normalized) or from a third
    party's notes (literal). alpha = 0 changes nothing.
    """
    wrong_R1 = (1.0 - reward_RG).sum(axis=-1, keepdims=True)
    scale = reward_RG.shape[-1] if form == "normalized" else 1.0
    return np.where(reward_RG > 0, advantage_RG * (wrong_R1 / scale) ** alpha, advantage_RG)


OptimizerName = Literal["SGD", "momentum", "AdamW"]

STEPS = 500
# The paper gives none of these. 0.5 collapses raw rewards well within 500 steps at every group size of ours.
LR = 0.5
ADAMW_LR = 0.1
MOMENTUM_COEFFICIENT = 0.9
WEIGHT_DECAY = 0.01
MEMORY_LR = 0.5


@dataclass(frozen=True, slots=True)
class Setting:
    """One training. `alpha` None: no IAC. `mu` 0: no DLC. `importance_cap`: weights pi / sampler, truncated there.

    `reweighing`: one of section 4.1's rejected weights, after IAC.
    """

    estimator: Estimator = "raw"
    group_size: int = 8
    optimizer: OptimizerName = "SGD"
    lr: float = LR
    steps: int = STEPS
    alpha: float | None = None
    iac_form: IACForm = "normalized"
    mu: float = 0.0
    memory_lr: float = MEMORY_LR
    importance_cap: float | None = None
    reweighing: Reweighing = "none"


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """`policy_RTV`: the label probabilities of the Persian input, start included; `weight_RDV`: the trained weights."""

    policy_RTV: Floats
    weight_RDV: Floats

    def held_out(self, shift: float) -> Floats:
        """Return the label probabilities [R, V] of the Siamese input after training."""
        return softmax(siamese_input(shift) @ self.weight_RDV)


def train(setting: Setting, seeds: Sequence[int]) -> Trajectory:
    """Train by on-policy gradient ascent from weights 0, with one group of the Persian input per step.

    DLC samples from softmax(z - mu * z_memory); the memory is the same classifier, one cross-entropy step per step.
    """
    uniform_RTG = uniforms(seeds, setting.steps, setting.group_size)
    weight_RDV = np.zeros((len(seeds), len(PERSIAN_INPUT), len(LABELS)))
    memory_RDV = np.zeros_like(weight_RDV)
    optimizer, memory_optimizer = _optimizer(setting), Ascent(setting.memory_lr)
    policy_RTV = np.empty((len(seeds), setting.steps + 1, len(LABELS)))
    for step in range(setting.steps):
        policy_RV = policy_RTV[:, step] = softmax(PERSIAN_INPUT @ weight_RDV)
        memory_logit_RV = PERSIAN_INPUT @ memory_RDV
        sampler_RV = softmax(PERSIAN_INPUT @ weight_RDV - setting.mu * memory_logit_RV)
        label_RG = sample(sampler_RV, uniform_RTG[:, step])
        reward_RG = rewards(label_RG)
        weight_RG = advantages(setting.estimator, reward_RG)
        if setting.alpha is not None:
            weight_RG = calibrated_advantages(weight_RG, reward_RG, setting.alpha, setting.iac_form)
        if setting.reweighing != "none":
            probability_RG = np.take_along_axis(policy_RV, label_RG, axis=-1)
            weight_RG = weight_RG * reweigh(setting.reweighing, reward_RG, probability_RG, setting.alpha or 0.0)
        if setting.importance_cap is not None:
            ratio_RG = np.take_along_axis(policy_RV / sampler_RV, label_RG, axis=-1)
            weight_RG = weight_RG * np.minimum(ratio_RG, setting.importance_cap)
        gradient_RDV = _outer(policy_gradient(policy_RV, label_RG, weight_RG))
        weight_RDV = weight_RDV + optimizer.change(gradient_RDV, weight_RDV)
        if setting.mu:
            likelihood_RV = policy_gradient(softmax(memory_logit_RV), label_RG, np.ones_like(weight_RG))
            memory_RDV = memory_RDV + memory_optimizer.change(_outer(likelihood_RV), memory_RDV)
    policy_RTV[:, -1] = softmax(PERSIAN_INPUT @ weight_RDV)
    return Trajectory(policy_RTV, weight_RDV)


def _optimizer(setting: Setting) -> Optimizer:
    match setting.optimizer:
        case "SGD":
            return Ascent(setting.lr)
        case "momentum":
            return Ascent(setting.lr, MOMENTUM_COEFFICIENT)
        case "AdamW":
            return Adam(setting.lr, WEIGHT_DECAY)


def _outer(gradient_RV: Floats) -> Floats:
    """Return the gradient of the weights: the logits are linear in the features."""
    return np.asarray(PERSIAN_INPUT[:, None] * gradient_RV[:, None, :])


GROUP_SIZES = (2, 4, 8, 16, 32)
GROUP_SIZE = 8
LONG_STEPS = 5000
# Collapse: one of the two correct labels holds more than this.
COLLAPSED = 0.95
EARLY = 20

# One row of the big table each: optimizer and learning rate. The first is the main one.
OPTIMIZERS = (
    Setting(optimizer="SGD", lr=LR),
    Setting(optimizer="SGD", lr=0.1),
    Setting(optimizer="SGD", lr=2.0),
    Setting(optimizer="momentum", lr=LR),
    Setting(optimizer="AdamW", lr=LR),
    Setting(optimizer="AdamW", lr=ADAMW_LR),
)
PLAIN, _, _, MOMENTUM, FAST_ADAMW, ADAMW = OPTIMIZERS

_IAC = replace(PLAIN, alpha=1.0)
CALIBRATIONS: Mapping[str, Setting] = {
    "none": PLAIN,
    "IAC alpha .5": replace(PLAIN, alpha=0.5),
    "IAC alpha 1": _IAC,
    "IAC alpha 2": replace(PLAIN, alpha=2.0),
    "IAC alpha 1, literal": replace(_IAC, iac_form="literal"),
    "DLC mu .25": replace(PLAIN, mu=0.25),
    "DLC mu .5": replace(PLAIN, mu=0.5),
    "DLC mu 1": replace(PLAIN, mu=1.0),
    "DLC mu .5, memory lr 2": replace(PLAIN, mu=0.5, memory_lr=2.0),
    "DLC mu .5, pi/sampler up to 2": replace(PLAIN, mu=0.5, importance_cap=2.0),
    "IAC alpha 1 + DLC mu .25": replace(_IAC, mu=0.25),
    "IAC alpha 1 + DLC mu .5": replace(_IAC, mu=0.5),
    "IAC alpha 1 + DLC mu 1": replace(_IAC, mu=1.0),
}
# Under what the calibrations are tried: estimator, optimizer and learning rate.
BASES: Mapping[str, Setting] = {
    "SGD, raw": PLAIN,
    "SGD, normalised": replace(PLAIN, estimator="normalised"),
    "AdamW .1, raw": ADAMW,
    "AdamW .1, normalised": replace(ADAMW, estimator="normalised"),
    "AdamW .5, raw": FAST_ADAMW,
}


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """`collapse_step_R`: first step past COLLAPSED, infinite where there is none. `dominance_RT`: the larger of the two
    correct labels' share of both. `cat_wins_R`: 1 for seeds that end on Cat. `early_leader_wins_R`: 1 for seeds that
    end on the label that led after EARLY steps. `siamese_R`: probability of Siamese on the held-out input after
    training, by similarity.
    """

    collapse_step_R: Floats
    dominance_RT: Floats
    cat_wins_R: Floats
    early_leader_wins_R: Floats
    siamese_R: Mapping[str, Floats]

    @property
    def siamese(self) -> Mapping[str, float]:
        """Mean over seeds of `siamese_R`."""
        return {name: float(p_R.mean()) for name, p_R in self.siamese_R.items()}

    @property
    def mean_dominance_R(self) -> Floats:
        """Mean over the steps: how early and how far a seed collapsed, in one number."""
        return np.asarray(self.dominance_RT.mean(axis=1))

    @property
    def late_rise_R(self) -> Floats:
        """Change of dominance over the second half of the steps."""
        return np.asarray(self.dominance_RT[:, -1] - self.dominance_RT[:, self.dominance_RT.shape[1] // 2])

    @property
    def median_step(self) -> float:
        """Median first step past COLLAPSED; infinite where half of the seeds or more never are."""
        return float(np.sort(self.collapse_step_R)[len(self.collapse_step_R) // 2])

    @property
    def collapsed(self) -> float:
        """Share of seeds that were past COLLAPSED at some step."""
        return float(np.isfinite(self.collapse_step_R).mean())

    @property
    def dominance(self) -> float:
        """Mean over seeds at the end; 0.5 is even, 1 is collapse."""
        return float(self.dominance_RT[:, -1].mean())

    @property
    def dominance_halfway(self) -> float:
        """Mean over seeds after half of the steps."""
        return float(self.dominance_RT[:, self.dominance_RT.shape[1] // 2].mean())


Results = Mapping[Setting, Result]


def calibrated(base: Setting, calibration: Setting) -> Setting:
    """Combine `base`'s estimator and optimizer with `calibration`'s IAC and DLC."""
    return replace(calibration, estimator=base.estimator, optimizer=base.optimizer, lr=base.lr)


def long_setting(setting: Setting) -> Setting:
    """Return the same setting, trained for ten times as long."""
    return replace(setting, steps=LONG_STEPS)


def rows() -> Iterator[Setting]:
    """List estimators under every optimizer; RF++-baseline under the first only, where it equals `normalised`."""
    for optimizer in OPTIMIZERS:
        for estimator in ESTIMATORS if optimizer is PLAIN else DISTINCT_ESTIMATORS:
            yield replace(optimizer, estimator=estimator)


def settings() -> Iterator[Setting]:
    """List every setting of the study; some come twice."""
    for row in rows():
        yield from (replace(row, group_size=group_size) for group_size in GROUP_SIZES)
    for estimator in ESTIMATORS:
        yield long_setting(replace(PLAIN, estimator=estimator))
    for base in BASES.values():
        for calibration in CALIBRATIONS.values():
            yield calibrated(base, calibration)


def run_all(seeds: Sequence[int]) -> Results:
    """Train every setting once, for all seeds."""
    return {setting: measure(train(setting, seeds)) for setting in dict.fromkeys(settings())}


def measure(trajectory: Trajectory) -> Result:
    """Return the result of a training."""
    correct_RTV = trajectory.policy_RTV[:, :, list(CORRECT)]
    larger_RT = correct_RTV.max(axis=-1)
    past_RT = larger_RT > COLLAPSED
    collapse_step_R = np.where(past_RT.any(axis=1), past_RT.argmax(axis=1), np.inf)
    leads_RT = trajectory.policy_RTV[:, :, CAT] > trajectory.policy_RTV[:, :, PERSIAN]
    return Result(
        collapse_step_R=collapse_step_R,
        dominance_RT=larger_RT / correct_RTV.sum(axis=-1),
        cat_wins_R=leads_RT[:, -1].astype(np.float64),
        early_leader_wins_R=(leads_RT[:, : EARLY + 1][:, -1] == leads_RT[:, -1]).astype(np.float64),
        siamese_R={name: trajectory.held_out(shift)[:, SIAMESE] for name, shift in SHIFTS.items()},
    )


_BY_GROUP_SIZE = ("estimator", "optimizer", "lr", *(f"G={g}" for g in GROUP_SIZES))


def tabulate(results: Results) -> tuple[Table, ...]:
    """Make all tables, in the order of the paper's section and appendices."""
    return (
        _by_group_size(
            "collapse_steps",
            f"median step of the collapse (one correct label > .95), of {STEPS}",
            results,
            lambda r: steps_cell(r.median_step),
        ),
        _by_group_size("dominance", "larger correct label's share at the end", results, lambda r: r.dominance),
        *(table(results) for table in (_long, _siamese, _calibration)),
    )


def steps_cell(step: float) -> Cell:
    """Return the step, or "none" for an infinite one."""
    return int(step) if np.isfinite(step) else "none"


def _by_group_size(name: str, title: str, results: Results, cell: Callable[[Result], Cell]) -> Table:
    lines = (
        (row.estimator, row.optimizer, row.lr, *(cell(results[replace(row, group_size=g)]) for g in GROUP_SIZES))
        for row in rows()
    )
    return Table(name, title, _BY_GROUP_SIZE, tuple(lines))


def _long(results: Results) -> Table:
    lines: list[tuple[Cell, ...]] = []
    for estimator in ESTIMATORS:
        short = replace(PLAIN, estimator=estimator)
        brief, lasting = results[short], results[long_setting(short)]
        lines.append((estimator, brief.collapsed, lasting.collapsed, brief.dominance, lasting.dominance))
    columns = (
        "estimator",
        *(f"{what}, {n} steps" for what in ("collapsed seeds", "dominance") for n in (STEPS, LONG_STEPS)),
    )
    return Table("long", f"ten times as long: SGD, G={GROUP_SIZE}", columns, tuple(lines))


def _siamese(results: Results) -> Table:
    lines: tuple[tuple[Cell, ...], ...] = tuple(
        (estimator, g, *(results[replace(PLAIN, estimator=estimator, group_size=g)].siamese[s] for s in SHIFTS))
        for estimator in DISTINCT_ESTIMATORS
        for g in GROUP_SIZES
    )
    title = "probability of Siamese on the held-out Siamese input after training, by similarity (.25 before)"
    return Table("siamese", title, ("estimator", "G", *SHIFTS), lines)


def _calibration(results: Results) -> Table:
    lines: tuple[tuple[Cell, ...], ...] = tuple(
        (name, *(results[calibrated(base, calibration)].dominance for base in BASES.values()))
        for name, calibration in CALIBRATIONS.items()
    )
    title = f"IAC and DLC, G={GROUP_SIZE}: larger correct label's share at the end (.5 even, 1 collapse)"
    return Table("calibration", title, ("calibration", *BASES), lines)
