"""Above which gradient norm a step is left out: far from what the run's last steps had.

As OLMo-core's optimizer does it: mean + 6 standard deviations over the last 128 steps. A norm that was too large is
counted among them, but as twice the limit at most: so norms that have grown somewhat for good pass after a few steps,
and one huge norm does not let the next one through.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_LIMITS = 2.0
# With fewer the deviation says little, and a run's first steps are its most different ones.
_FEWEST = 20


@dataclass(frozen=True, slots=True)
class SpikeRule:
    """`sigma` standard deviations above the mean of the last `window` optimizer steps."""

    sigma: float
    window: int = 128


@dataclass(frozen=True, slots=True)
class SpikeState:
    """The gradient norms of the last optimizer steps, oldest first."""

    norms: tuple[float, ...] = ()

    def limit(self, rule: SpikeRule) -> float | None:
        """The largest norm that is applied; None while there are too few to tell."""
        if len(self.norms) < _FEWEST:
            return None
        mean = statistics.fmean(self.norms)
        return mean + rule.sigma * statistics.pstdev(self.norms, mean)

    def seen(self, rule: SpikeRule, norms: Sequence[float]) -> SpikeState:
        """With the norms of a training step's optimizer steps; what is not finite, or zero, tells nothing.

        Zero is a step whose groups are all right or all wrong. Where rewards are rare these are most steps, and were
        they counted, those that learn something would be spikes.
        """
        state = self
        for norm in norms:
            if math.isfinite(norm) and norm > 0.0:
                limit = state.limit(rule)
                counted = norm if limit is None else min(norm, _MOST_LIMITS * limit)
                state = SpikeState((*state.norms, counted)[-rule.window :])
        return state
