"""Above which gradient norm a step is left out: far from what the run's last steps had.

As OLMo-core's optimizer does it: mean + 6 standard deviations over the last 128 steps. A norm that was too large is
counted among them, so that a run whose norms have changed for good goes on after a few steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

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
        telling = tuple(norm for norm in norms if math.isfinite(norm) and norm > 0.0)
        return SpikeState((*self.norms, *telling)[-rule.window :])
