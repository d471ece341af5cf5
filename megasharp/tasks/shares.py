"""Whose turn it is among the sources of a mixture: shares of prompts that every step keeps, not only the run's mean.

Prompts come in blocks, a step's number of them. In a block a source has its share, rounded down or up; those furthest
behind are rounded up. Within a block too the source that is furthest behind comes next, so the sources alternate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# A share of a block is a whole number where it is so close to one: weights are binary fractions.
_WHOLE = 1e-9


@dataclass(frozen=True, slots=True)
class Account:
    """A source's account: its share of all prompts, the prompts that it is behind, and those left in the block.

    Example: `Account(share=0.25, owed=-0.5, left=63)`.
    """

    share: float
    owed: float = 0.0
    left: int = 0


class Shares:
    """Deals the turns of sources; `accounts` is all that a later process needs to go on, besides the block's size."""

    def __init__(self, names: Sequence[str], block: int, accounts: Sequence[Account] | None = None) -> None:
        self._names = names
        self._block = block
        found = accounts or [Account(0.0)] * len(names)
        self._share = [account.share for account in found]
        self._owed = [account.owed for account in found]
        self._left = [account.left for account in found]

    @property
    def accounts(self) -> list[Account]:
        """The sources' accounts, in their order."""
        return [Account(*each) for each in zip(self._share, self._owed, self._left, strict=True)]

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Deal by these weights from now on; where they are others than before, nobody is owed anything."""
        total = sum(weights.get(name, 0.0) for name in self._names)
        assert total > 0.0, weights
        share = [weights.get(name, 0.0) / total for name in self._names]
        if share != self._share:
            self._share, self._owed, self._left = share, [0.0] * len(share), [0] * len(share)

    def next(self) -> int:
        """The number of the source whose turn it is."""
        if not any(self._left):
            self._left = self._deal()
        self._owed = [owed + share for owed, share in zip(self._owed, self._share, strict=True)]
        chosen = max((number for number, left in enumerate(self._left) if left), key=lambda number: self._owed[number])
        self._owed[chosen] -= 1.0
        self._left[chosen] -= 1
        return chosen

    def _deal(self) -> list[int]:
        """A block's prompts of each source: the whole part of its share, and one more for those furthest behind."""
        whole = [int(share * self._block + _WHOLE) for share in self._share]
        rest = [max(share * self._block - number, 0.0) for share, number in zip(self._share, whole, strict=True)]
        # After the block without one more. Of equals the first comes first.
        behind = sorted(range(len(whole)), key=lambda n: (rest[n] <= _WHOLE, -(self._owed[n] + rest[n])))
        for number in behind[: self._block - sum(whole)]:
            whole[number] += 1
        return whole
