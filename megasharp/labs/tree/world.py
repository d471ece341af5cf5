"""The tree of 2510.14807 figure 5: three actions in a row out of A, B, C, D; six of the 64 sequences are rewarded.

The policy is a table of logits, one row per decision state: the root, then the 4 states after one action, then the 16
after two. Suffixes beside those of `megasharp.labs.softmax`: `_D` decision states (21), `_L` the actions of a
sequence (3), `_64` all sequences in alphabetical order.
"""

from __future__ import annotations

import numpy as np

from megasharp.labs.softmax import Array, Integers

ACTIONS = "ABCD"
HORIZON = 3
MODES = ("ACD", "ACB", "BDC", "BDA", "CAB", "DBA")
# The first decision state of each level.
_FIRST_STATE = (0, 1, 5)
STATES = 21


def sequence_index(sequence: str) -> int:
    """A sequence's place among all 64 in alphabetical order: `sequence_index("BDC") == 30`."""
    return sum(ACTIONS.index(action) * 4 ** (HORIZON - 1 - level) for level, action in enumerate(sequence))


MODE_INDEX = np.array([sequence_index(mode) for mode in MODES])
REWARD_64 = np.isin(np.arange(64), MODE_INDEX).astype(np.float64)


def descend(policy_RDV: Array, uniform_RGL: Array) -> tuple[Integers, Integers, Integers]:
    """Sample sequences by inversion: the states met and the actions taken [R, G, L], and the sequences' indices [R, G].

    `policy_RDV` holds probabilities, `uniform_RGL` one number in [0, 1) per action.
    """
    # Without the last column, which rounding may leave just below 1.
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


def sequence_probability(policy_RDV: Array) -> Array:
    """The exact probability of every sequence, [R, 64]."""
    first_RA, second_RAB, third_RABC = policy_RDV[:, 0], policy_RDV[:, 1:5], policy_RDV[:, 5:].reshape(-1, 4, 4, 4)
    joint_RABC = first_RA[:, :, None, None] * second_RAB[..., None] * third_RABC
    return np.asarray(joint_RABC.reshape(-1, 64))
