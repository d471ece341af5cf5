"""Estimators that read which responses are correct, and no reward."""

from __future__ import annotations

from typing import Any

from megasharp.algos.base import Method, ParamsT


class OutcomeEstimator(Method[ParamsT]):
    """Base of such estimators: a reward that another method reshapes would never reach them, so it is refused."""

    def refuses(self, name: str, other: Method[Any]) -> str | None:
        if not other.reshapes_rewards():
            return None
        return "the first reads only which responses are correct, so the second's rewards would have no effect"
