"""Everything the squeeze study measures, in one record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megasharp.labs.softmax import Array
from megasharp.labs.squeeze.dynamics import LemmaTrials, lemma_trials, on_policy, repeated_penalty
from megasharp.labs.squeeze.shapes import distinct, drawn_distinct, peak, plateau, with_top

PENALISED_RANKS = (1, 2, 5, 20)
TOPS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999, 0.999999)
BUDGETS = (8, 64, 1024)
SHAPE_BUDGETS = (2, 4, 8, 16, 64, 1024)
DRAWS = 2000


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What `measure` found, distributions by name, and Proposition 3 by formula and by simulation.

    `penalised`: [T, V] by rank. `sampled`: [T, R, V] by advantage. `distinct`: both figures by top probability and K.
    """

    lemma: LemmaTrials
    penalised: Mapping[int, Array]
    sampled: Mapping[float, Array]
    distinct: Mapping[tuple[float, int], tuple[float, float]]
    shapes: Mapping[str, Array]


def measure(seeds: Sequence[int]) -> Measured:
    """Run it all; `seeds` are those of the on-policy simulations, the first also that of the random trials."""
    counted = {}
    for top in TOPS:
        for samples in BUDGETS:
            p_V = with_top(top)
            counted[top, samples] = (distinct(p_V, samples), drawn_distinct(p_V, samples, DRAWS, seeds[0]))
    return Measured(
        lemma=lemma_trials(seeds[0]),
        penalised={rank: repeated_penalty(rank) for rank in PENALISED_RANKS},
        sampled={advantage: on_policy(advantage, seeds) for advantage in (1.0, -1.0)},
        distinct=counted,
        shapes={"plateau": plateau(), "peak": peak()},
    )
