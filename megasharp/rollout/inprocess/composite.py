"""The policy, and beside it the memory network where there is one, as the one model the decode loop sees.

Both read the same tokens and keep caches of their own, row for row alike: a step costs the policy's step plus the
memory's, and nothing is added where there is no memory. Why two networks: `sampling.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from megasharp.convert.architecture import Architecture
from megasharp.protocols import MEMORY_PREFIX
from megasharp.rollout.inprocess.cache import KeyValueCache
from megasharp.rollout.inprocess.decoder import Decoder
from megasharp.rollout.inprocess.sampling import Logits
from megasharp.rollout.inprocess.weights import load_slots


@dataclass(frozen=True, slots=True, eq=False)
class Caches:
    """Each network's cache; row `s` of both belongs to the same sample."""

    policy: KeyValueCache
    memory: KeyValueCache | None

    def select(self, rows: Tensor) -> None:
        """Keep `rows` (int64 indices, repeats allowed) in that order."""
        self.policy.select(rows)
        if self.memory is not None:
            self.memory.select(rows)


class Composite:
    """Satisfies `generation.Model` with one network or with two."""

    def __init__(
        self, policy: Architecture, memory: Architecture | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.device = device
        self._policy = Decoder(policy, dtype, device)
        self._memory = Decoder(memory, dtype, device) if memory else None

    def policy_alone(self) -> Composite:
        """The same weights without the memory network."""
        alone = copy(self)
        alone._memory = None
        return alone

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy every weight of both networks into place; the memory's names begin with `MEMORY_PREFIX`.

        Raises UserError for an unknown, repeated, wrong-shaped or missing one; buffers then mix old and new.
        """
        slots = dict(self._policy.weights.slots)
        if self._memory is not None:
            slots.update((MEMORY_PREFIX + name, slot) for name, slot in self._memory.weights.slots.items())
        load_slots(slots, tensors)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Logits, Caches]:
        """Read each prompt once. Returns the logits after each of B prompts, and caches of B rows."""
        logits_BV, cache = self._policy.prefill(prompts)
        if self._memory is None:
            return Logits(logits_BV), Caches(cache, None)
        memory_BV, memory_cache = self._memory.prefill(prompts)
        return Logits(logits_BV, memory_BV), Caches(cache, memory_cache)

    def read(self, tokens: Sequence[int], first: int, rows: int) -> Iterator[Tensor]:
        """The policy's own logits that predict tokens `first` and later of one text, at most [`rows`, V] at a time."""
        return self._policy.read(tokens, first, rows)

    def step(self, tokens_S: Tensor, cache: Caches) -> Logits:
        """Append `tokens_S` (int64, one per row) to both caches; returns the logits that follow."""
        logits_SV = self._policy.step(tokens_S, cache.policy)
        if self._memory is None:
            return Logits(logits_SV)
        assert cache.memory is not None
        return Logits(logits_SV, self._memory.step(tokens_S, cache.memory))
