"""Experiments of the actions study: 2510.04028's theory by enumeration, and its Algorithm 1 for many seeds at once.

In reading order: Lemma 1 and Theorem 1, and the same expectations by exact enumeration of all groups; Algorithm 1, and
its expected dynamics without sampling; the settings that are run and the result of each; the tables.

Theorem 1 writes the advantage as a fixed number per action. Algorithm 1 takes A = r - mean of the sampled group, which
depends on the group. With A = r the two expectations differ by the factor 1 - 1/G, because a sample is the G-th part
of its own baseline. At G = 2 the factor is one half.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from megasharp.studies.softmax import (
    Adam,
    Ascent,
    Bools,
    Floats,
    Optimizer,
    entropy,
    groups,
    policy_gradient,
    sample,
    softmax,
    uniforms,
)
from megasharp.studies.study import Cell, Table

# The rule for a sampled action's advantage. "fixed": the action's own number, whatever else is in the group.
Rule = Literal["fixed", "mean", "leave one out", "mean and std", "mean, negative only"]
RULES: tuple[Rule, ...] = ("fixed", "mean", "leave one out", "mean and std", "mean, negative only")
STD_EPSILON = 1e-6


def theorem_1(policy_V: Floats, advantage_V: Floats) -> Floats:
    """Return E[dz_v] / lr = pi(v) [(1 - pi(v)) A(v) - sum over u != v of pi(u) A(u)], [V], for fixed advantages A."""
    mean = policy_V @ advantage_V
    others_V = mean - policy_V * advantage_V
    return np.asarray(policy_V * ((1.0 - policy_V) * advantage_V - others_V))


def group_advantages(rule: Rule, reward_V: Floats, count_KV: Floats) -> Floats:
    """Return each action's advantage in each group, [K, V]; that of an absent action is never used."""
    size = count_KV.sum(axis=-1, keepdims=True)
    centred_KV = reward_V - (count_KV @ reward_V)[:, None] / size
    match rule:
        case "fixed":
            return np.asarray(np.broadcast_to(reward_V, count_KV.shape))
        case "mean":
            return np.asarray(centred_KV)
        case "leave one out":
            return np.asarray(centred_KV * size / (size - 1.0))
        case "mean and std":
            variance_K1 = (count_KV * centred_KV**2).sum(axis=-1, keepdims=True) / (size - 1.0)
            return np.asarray(centred_KV / (np.sqrt(variance_K1) + STD_EPSILON))
        case "mean, negative only":
            return np.asarray(np.minimum(centred_KV, 0.0))


def enumerated_update(rule: Rule, policy_V: Floats, reward_V: Floats, group_size: int) -> Floats:
    """Return Algorithm 1's E[g / G], [V]: the exact mean over groups of `1/G sum_i A_i (one_hot(a_i) - pi)`."""
    count_KV, probability_K = groups(policy_V, group_size)
    weight_KV = count_KV * group_advantages(rule, reward_V, count_KV) / group_size
    gradient_KV = weight_KV - policy_V * weight_KV.sum(axis=-1, keepdims=True)
    return np.asarray(probability_K @ gradient_KV)


def probability_change(policy_V: Floats, sampled: int) -> Floats:
    """Return d pi / d(lr A), [V], for one Lemma 1 update with a small positive advantage of `sampled`.

    Lemma 1 moves logits by one_hot - pi; to first order pi(u) moves by pi(u) (dz_u - sum pi dz).
    """
    logit_V = np.eye(len(policy_V))[sampled] - policy_V
    return np.asarray(policy_V * (logit_V - policy_V @ logit_V))


def theorem_ratio(rule: Rule, policy_V: Floats, reward_V: Floats, group_size: int) -> tuple[float, float]:
    """Fit c in `enumerated_update = c * theorem_1`; return c and the largest misfit over the largest update."""
    exact_V, theorem_V = enumerated_update(rule, policy_V, reward_V, group_size), theorem_1(policy_V, reward_V)
    factor = float(exact_V @ theorem_V / (theorem_V @ theorem_V))
    return factor, float(np.abs(exact_V - factor * theorem_V).max() / np.abs(exact_V).max())


OptimizerName = Literal["Adam", "plain"]

# The paper's.
GROUP_SIZE, LR = 2, 0.1
# The paper gives no number of steps. These let most seeds go through both stages.
STEPS = {"Adam": 1000, "plain": 10_000}


@dataclass(frozen=True, slots=True)
class Setting:
    """One run. `rewards` and `start` (probabilities at temperature 1) are by action.

    `optimizer`: Algorithm 1 says "Apply Adam update" and writes the plain one. `negative_only`: the -N variant, where
    only samples of negative advantage count.
    """

    rewards: tuple[float, ...]
    start: tuple[float, ...]
    optimizer: OptimizerName = "Adam"
    group_size: int = GROUP_SIZE
    temperature: float = 1.0
    negative_only: bool = False
    lr: float = LR

    @property
    def steps(self) -> int:
        """Number of updates."""
        return STEPS[self.optimizer]


def simulate(setting: Setting, seeds: Sequence[int]) -> Floats:
    """Run Algorithm 1; return the sampling policy softmax(z / temperature) at every step, [R, T, V], start included.

    The update is the paper's at every temperature, without the factor 1 / temperature of the gradient. Logits start at
    the log of `start`. Were they to start at temperature * log(start), the sampling policy would start there and move
    as one of temperature 1 does with lr / temperature.
    """
    uniform_RTG = uniforms(seeds, setting.steps, setting.group_size)
    reward_V = np.array(setting.rewards)
    logit_RV = np.tile(np.log(setting.start), (len(seeds), 1))
    optimizer: Optimizer = Adam(setting.lr) if setting.optimizer == "Adam" else Ascent(setting.lr)
    policy_RTV = np.empty((len(seeds), setting.steps + 1, len(reward_V)))
    for step in range(setting.steps):
        policy_RV = policy_RTV[:, step] = softmax(logit_RV / setting.temperature)
        action_RG = sample(policy_RV, uniform_RTG[:, step])
        reward_RG = reward_V[action_RG]
        advantage_RG = reward_RG - reward_RG.mean(axis=-1, keepdims=True)
        if setting.negative_only:
            advantage_RG = np.minimum(advantage_RG, 0.0)
        logit_RV = logit_RV + optimizer.change(policy_gradient(policy_RV, action_RG, advantage_RG), logit_RV)
    policy_RTV[:, -1] = softmax(logit_RV / setting.temperature)
    return policy_RTV


def expected_dynamics(setting: Setting) -> Floats:
    """Run the plain update without sampling, [T, V]: a step adds lr (1 - 1/G) times Theorem 1, with A = r."""
    assert setting.optimizer == "plain" and not setting.negative_only
    factor = setting.lr * (1.0 - 1.0 / setting.group_size)
    logit_V = np.log(setting.start)
    policy_TV = np.empty((setting.steps + 1, len(setting.rewards)))
    for step in range(setting.steps + 1):
        policy_TV[step] = softmax(logit_V / setting.temperature)
        logit_V = logit_V + factor * theorem_1(policy_TV[step], np.array(setting.rewards))
    return policy_TV


def untempered(policy_RTV: Floats, temperature: float) -> Floats:
    """Recover softmax(z) from softmax(z / temperature)."""
    tiny = np.finfo(np.float64).tiny
    return softmax(temperature * np.log(np.maximum(policy_RTV, tiny)))


# By index: a1 explored and good, a2 unexplored and best, a3 explored and worthless.
EXPLORED, OPTIMAL, WORTHLESS = 0, 1, 2

# The paper gives r(a1) < r(a2), r(a3) = 0 and pi(a1) > pi(a2) at the start, no numbers.
REWARDS = (0.5, 1.0, 0.0)
START = (0.6, 0.05, 0.35)
STARTS = ((0.5, 0.1, 0.4), START, (0.6, 0.02, 0.38))
EXPLORED_REWARDS = (0.2, 0.5, 0.8)
OPTIMIZERS: tuple[OptimizerName, ...] = ("Adam", "plain")
GROUP_SIZES = (2, 3, 5, 10)
TEMPERATURES = (1.0, 2.0, 5.0, 20.0)
# Four actions: two that are good enough, the best one rare, the worst one frequent.
FOUR_REWARDS, FOUR_START = (0.3, 0.6, 1.0, 0.0), (0.55, 0.1, 0.05, 0.3)

BASE = Setting(REWARDS, START)
FOUR = Setting(FOUR_REWARDS, FOUR_START)

# Figure 1: other starts with the same rewards, other rewards with the same start.
FIGURE_1 = (
    *(replace(BASE, start=start) for start in STARTS),
    *(replace(BASE, rewards=(r, *REWARDS[1:])) for r in EXPLORED_REWARDS if r != REWARDS[EXPLORED]),
)


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """One setting. `policy_RTV` is at temperature 1, what is deployed; `entropy_RT` is the sampling policy's."""

    setting: Setting
    policy_RTV: Floats
    entropy_RT: Floats

    @property
    def peak(self) -> float:
        """Median over seeds of a1's highest probability: where exploitation ends."""
        return float(np.median(self.peak_R))

    @property
    def peak_R(self) -> Floats:
        """Each seed's highest probability of a1."""
        return np.asarray(self.policy_RTV[:, :, EXPLORED].max(axis=1))

    @property
    def peak_step(self) -> int:
        """Median step of that peak."""
        return int(np.median(self._peak_step_R))

    def at_peak(self, action: int) -> float:
        """Median of `at_peak_R`."""
        return float(np.median(self.at_peak_R(action)))

    def at_peak_R(self, action: int) -> Floats:
        """Probability of `action` at each seed's own peak of a1."""
        return np.asarray(self.policy_RTV[np.arange(len(self.policy_RTV)), self._peak_step_R, action])

    @property
    def lowest_optimal(self) -> float:
        """Median over seeds of the lowest probability that the best action had on the way."""
        return float(np.median(self.policy_RTV[:, :, OPTIMAL].min(axis=1)))

    @property
    def takeover_step(self) -> float:
        """Median step at which the best action first has more than half; infinite for seeds where it never does."""
        past_RT = self.policy_RTV[:, :, OPTIMAL] > 0.5
        step_R = np.where(past_RT.any(axis=1), past_RT.argmax(axis=1), np.inf)
        return float(np.sort(step_R)[len(step_R) // 2])

    @property
    def optimal_wins(self) -> float:
        """Share of seeds in which the best action has more than half at the end."""
        return float(self.optimal_wins_R.mean())

    @property
    def optimal_wins_R(self) -> Bools:
        """True for seeds in which the best action has more than half at the end."""
        return np.asarray(self.policy_RTV[:, -1, OPTIMAL] > 0.5)

    @property
    def explored_turns_negative_R(self) -> Bools:
        """True for seeds in which a1's expected advantage r(a1) - E[r] goes from positive to negative."""
        advantage_RT = self.setting.rewards[EXPLORED] - self.policy_RTV @ np.array(self.setting.rewards)
        return np.asarray((advantage_RT[:, 0] > 0) & (advantage_RT[:, -1] < 0))

    @property
    def spread(self) -> float:
        """Standard deviation over seeds of a1's probability, mean over steps."""
        return float(self.policy_RTV[:, :, EXPLORED].std(axis=0).mean())

    @property
    def log_deviation_R(self) -> Floats:
        """Log of each seed's own part in `spread`: the mean over steps of its a1's distance to the mean over seeds.

        It is a log because a few seeds that keep a1 for long would outweigh all others.
        """
        path_RT = self.policy_RTV[:, :, EXPLORED]
        deviation_R = np.abs(path_RT - path_RT.mean(axis=0)).mean(axis=1)
        return np.asarray(np.log(np.maximum(deviation_R, np.finfo(np.float64).tiny)))

    @property
    def mean_optimal_R(self) -> Floats:
        """The best action's probability, mean over steps: the larger, the earlier it takes over."""
        return np.asarray(self.policy_RTV[:, :, OPTIMAL].mean(axis=1))

    @property
    def sampling_entropy(self) -> float:
        """Mean over seeds and steps of the sampling policy's entropy, in nats."""
        return float(self.sampling_entropy_R.mean())

    @property
    def sampling_entropy_R(self) -> Floats:
        """Each seed's mean over steps of that entropy."""
        return np.asarray(self.entropy_RT.mean(axis=1))

    @property
    def _peak_step_R(self) -> Floats:
        return np.asarray(self.policy_RTV[:, :, EXPLORED].argmax(axis=1))


Results = Mapping[Setting, Result]


def settings() -> tuple[Setting, ...]:
    """List every setting of the study once."""
    adam = (
        *FIGURE_1,
        *(replace(setting, negative_only=True) for setting in FIGURE_1),
        *(replace(BASE, group_size=size) for size in GROUP_SIZES),
        *(replace(BASE, temperature=temperature) for temperature in TEMPERATURES),
        FOUR,
    )
    both = (replace(setting, optimizer=optimizer) for optimizer in OPTIMIZERS for setting in adam)
    return tuple(dict.fromkeys(both))


def run_all(seeds: Sequence[int]) -> Results:
    """Run every setting, for all seeds."""
    return {setting: measure(setting, simulate(setting, seeds)) for setting in settings()}


def measure(setting: Setting, policy_RTV: Floats) -> Result:
    """Return a simulation's result, with its probabilities at temperature 1."""
    return Result(setting, untempered(policy_RTV, setting.temperature), entropy(policy_RTV))


_STAGES = ("peak a1", "at step", "a2 there", "lowest a2", "step a2 > .5", "seeds a2 > .5")


def tabulate(results: Results) -> tuple[Table, ...]:
    """Make all tables, in the paper's order."""
    lines: list[tuple[Cell, ...]] = []
    for rule in RULES:
        ratios = [theorem_ratio(rule, np.array(START), np.array(REWARDS), size) for size in GROUP_SIZES]
        lines.append((rule, *(factor for factor, _ in ratios), max(rest for _, rest in ratios)))
    title = (
        f"Algorithm 1's expected update over Theorem 1's, by enumeration (r {slashed(REWARDS)}, pi {slashed(START)})"
    )
    columns = ("advantage of a sample", *(f"G={size}" for size in GROUP_SIZES), "not proportional by")
    theorem = Table("theorem", title, columns, tuple(lines))
    of_training = (_figure_1, _group_sizes, _temperatures, _four)
    return (theorem, *(table(results) for table in of_training))


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
    """Format numbers as ".5/1/0"."""
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
