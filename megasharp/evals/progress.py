"""Lines that say how far an evaluation is, on a terminal and in a log alike."""

from __future__ import annotations

import time
from collections.abc import Callable

from megasharp.evals.samples import SuiteCounts
from megasharp.metrics.console import duration

# Shares of all samples, in percent, at which a line is due, and seconds after which one is due in any case.
_SHARES = (1, 2, 5, *range(10, 100, 10))
_EVERY_S = 60.0
# No line follows another sooner, and a short evaluation has none. The first one is due early.
_GAP_S = 5.0
_FIRST_S = 15.0


class ProgressLines:
    """Says problems, samples, tokens per second and the time left of the suite `name` as its `counts` grow."""

    def __init__(
        self, name: str, counts: SuiteCounts, say: Callable[[str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._counts, self._say, self._now = name, counts, say, now
        self._start = self._said = now()
        self._due_s = _FIRST_S
        self._tokens, self._share = counts.tokens, self._done()

    def update(self) -> None:
        """Say a line if one is due."""
        now, share = self._now(), self._done()
        if now - self._said < _GAP_S or share >= 100.0:
            return
        if now - self._said >= self._due_s or any(self._share < each <= share for each in _SHARES):
            self._said, self._share, self._due_s = now, share, _EVERY_S
            self._say(self.line(now))

    def line(self, now: float) -> str:
        """Return the line as of `now`.

        The time left rests on the mean length of samples of complete problems: of all samples that have ended the short
        ones are too many. Until a problem is complete those have to do, which the line says.
        """
        counts = self._counts
        rate = (counts.tokens - self._tokens) / max(now - self._start, 1e-9)
        done = (
            f"{self._name}: {counts.complete} of {counts.problems} problems, {counts.samples:,} of {counts.wanted:,} "
            f"samples ({self._done():.0f} %)"
        )
        if rate <= 0.0:
            return done
        mean, of = counts.tokens / counts.samples, "the samples so far, short ones first"
        if counts.complete:
            mean, of = counts.mean_of_complete, "complete problems"
        left = (counts.wanted - counts.samples) * mean / rate
        return f"{done}, {rate:,.0f} tokens/s, {duration(left)} left at the mean length of {of} ({mean:,.0f} tokens)"

    def _done(self) -> float:
        return 100.0 * self._counts.samples / max(1, self._counts.wanted)
