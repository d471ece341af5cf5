"""Turns: advantages of each from a formula in plain NumPy, and a bandit of two turns whose gradient is known."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from cases import each_case
from harness import CUTS, VOCAB, Answer, Case, answered, check, clip, each_step, log_softmax, maximum, run

from megasharp.algos.base import Reduction
from megasharp.algos.turn_returns import TurnReturnsParams
from megasharp.common.records import Turn


def with_rewards(case: Case, seed: int) -> Case:
    """Give each turn of each response a reward; the last turn has the rest of the response's."""
    random = np.random.default_rng(seed)
    turns = {
        place: tuple(dataclasses.replace(turn, reward=float(random.choice([0.0, 0.5, -1.0]))) for turn in own)
        for place, own in case.turns.items()
    }
    return dataclasses.replace(case, turns=turns)


def spans(case: Case, answer: Answer) -> list[tuple[int, int]]:
    """Places of the policy's turns among the step's tokens."""
    turns, found, begun = case.turns.get((answer.group, answer.index), ()), [], 0
    for turn in turns:
        found.append((begun, turn.end))
        begun = turn.until
    if not turns or begun < answer.length:
        found.append((begun, answer.length))
    return [(answer.start + start, answer.start + end) for start, end in found]


def returns(case: Case, answer: Answer, gamma: float) -> list[float]:
    count = len(spans(case, answer))
    given = [turn.reward for turn in case.turns.get((answer.group, answer.index), ())][: count - 1]
    given.append(answer.reward - sum(given))
    return [sum(gamma ** (later - turn) * given[later] for later in range(turn, count)) for turn in range(count)]


@each_step
@each_case("gamma, normalize", [(1.0, True), (0.5, True), (0.0, False)])
def test_turn_returns(case: Case, gamma: float, normalize: bool) -> None:
    """Each turn has the return that is left at it, compared with those of the group's responses that have that turn."""
    longer, _ = answered(case, seed=11)
    longer = with_rewards(longer, seed=12)

    def oracle(c: Case, z):
        logp, old, loss, tokens = c.logp(z), c.logp(c.z_old), 0.0, 0
        for answer in c.scored:
            others = [returns(c, other, gamma) for other in c.group(answer.group)]
            for turn, (start, end) in enumerate(spans(c, answer)):
                have = np.array([each[turn] for each in others if len(each) > turn])
                A = returns(c, answer, gamma)[turn] - have.mean()
                if normalize:
                    A = A / (have.std(ddof=1) + 1e-6) if len(have) > 1 and np.ptp(have) else 0.0
                tokens += end - start
                for t in range(start, end):
                    rho = np.exp(logp[..., t] - old[t])
                    loss = loss + maximum(-A * rho, -A * clip(rho, 0.8, 1.2))
        return loss / tokens

    params = {"turn_returns": TurnReturnsParams(gamma=gamma, normalize=normalize)}
    whole = check(longer, oracle, ["turn_returns"], params)
    for title, cut in CUTS.items():
        found = run(longer, ["turn_returns"], params, cut=cut)
        assert found.loss == pytest.approx(whole.loss, rel=1e-10, abs=1e-12), title
        assert np.abs(found.gradient - whole.gradient).max() <= 1e-10, title


ARMS = 3
# Rewards of the first arm, and of the second one by the first; what the environment says depends on the first.
FIRST = np.array([0.0, 0.3, -0.2])
SECOND = np.array([[1.0, 0.0, 0.5], [0.0, 2.0, 0.0], [-1.0, 0.0, 0.25]])
SAYS = np.array([0, 1, 0])


def bandit(first: np.ndarray, second: np.ndarray) -> Case:
    """Every pair of episodes of a two-turn bandit as a group of its own; logits [arms] and [what was said, arms]."""
    episodes = [*itertools.product(range(ARMS), range(ARMS))]
    answers, target, logits, turns = [], [], [], {}
    for group, pair in enumerate(itertools.product(episodes, episodes)):
        for index, (a, b) in enumerate(pair):
            start = len(target)
            target += [a, int(SAYS[a]), b]
            logits += [first, np.zeros(ARMS), second[SAYS[a]]]
            turns[group, index] = (Turn(0, 1, 2, float(FIRST[a])),)
            answers.append(Answer(group, index, start, start + 3, float(FIRST[a] + SECOND[a, b]), True, 0))
    z = np.full((len(target), VOCAB), -80.0)
    z[:, :ARMS] = logits
    nothing = np.zeros(len(target))
    return Case(tuple(answers), np.array(target), z, z, z, nothing, nothing, temperature=1.0, turns=turns)


@each_case(
    "name, gamma, share",
    [("rloo", 1.0, 1.0), ("dr_grpo", 1.0, 0.5), ("turn_returns", 1.0, 0.5), ("turn_returns", 0.4, 0.5)],
)
def test_bandit_of_two_turns(name: str, gamma: float, share: float) -> None:
    """The mean gradient over all groups of two is that of the expected return; `share` of it with their own mean."""
    first, second = np.array([0.2, -0.1, 0.4]), np.array([[0.0, 0.5, -0.3], [0.3, -0.6, 0.1]])
    case = bandit(first, second)
    params = {"turn_returns": TurnReturnsParams(gamma=gamma, normalize=False)} if name == "turn_returns" else {}
    found = run(case, [name], params, Reduction.TOKEN_MEAN).gradient[:, :ARMS]
    p, q = np.exp(log_softmax(first)), np.exp(log_softmax(second))
    mean = np.zeros((1 + len(second), ARMS))
    for number in range(0, len(case.answers), 2):
        pair = case.answers[number : number + 2]
        arms = [(case.target[each.start], case.target[each.start + 2]) for each in pair]
        probability = np.prod([p[a] * q[SAYS[a], b] for a, b in arms])
        # Of the loss: a mean over the two tokens of the policy of every response.
        weight = -probability * len(case.answers) * 2 / 2
        for each, (a, _) in zip(pair, arms, strict=True):
            mean[0] += weight * found[each.start]
            mean[1 + SAYS[a]] += weight * found[each.start + 2]
            assert not found[each.start + 1].any()
    # d/dz of sum(p v) is p (v - sum(p v)).
    left = (q[SAYS] * SECOND).sum(1)
    value = FIRST + gamma * left
    expected = np.zeros_like(mean)
    expected[0] = p * (value - p @ value)
    for a in range(ARMS):
        expected[1 + SAYS[a]] += p[a] * q[SAYS[a]] * (SECOND[a] - left[a])
    assert np.abs(mean - share * expected).max() <= 1e-12
