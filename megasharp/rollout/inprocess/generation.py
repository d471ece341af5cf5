"""The decode loop for one batch of samples: draw, record, drop finished rows now and then, step.

It knows a model only as `prefill` and `step`, a cache only as `select`, and hands logits on without looking inside; so
whether there is a memory network beside the policy is the model's matter and `draw`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from megasharp.ops.uniform import seeds_to_int64
from megasharp.rollout.inprocess.sampling import Draw, Logits, draw, join
from megasharp.types import SamplingParams

# Finished rows are dropped once live ones are at most this share: a drop copies the cache.
COMPACT_BELOW = 0.75


class Selectable(Protocol):
    """A cache whose rows can be chosen."""

    def select(self, rows: Tensor) -> None:
        """Keep `rows` (int64 indices, repeats allowed) in that order."""
        ...


Cache = TypeVar("Cache", bound=Selectable)


class Model(Protocol[Cache]):
    """Anything that turns tokens into next-token logits against a cache."""

    @property
    def device(self) -> torch.device:
        """Where logits and caches live."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Logits, Cache]:
        """Logits after each of B prompts, and a cache of B rows."""
        ...

    def step(self, tokens_S: Tensor, cache: Cache) -> Logits:
        """Logits after one more token per row."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Drawn tokens of S rows over U steps; row `s` counts up to `lengths_S[s]`.

    `drawn` holds [S, U] wherever a `Draw` of one step holds [S]; `lengths_S` int64, `stopped_S` bool.
    """

    drawn: Draw
    lengths_S: Tensor
    stopped_S: Tensor


def generate_batch(
    model: Model[Cache],
    prompts: Sequence[Sequence[int]],
    prompt_of_row: Sequence[int],
    seeds: Sequence[int],
    sampling: SamplingParams,
) -> Samples:
    """Sample row `s` from `prompts[prompt_of_row[s]]` with `seeds[s]`; each prompt is read only once."""
    device = model.device
    prompt_S = torch.tensor(prompt_of_row, dtype=torch.int64, device=device)
    seeds_S = seeds_to_int64(seeds, device)
    log = _Log(len(seeds), sampling, device)
    logits, cache = model.prefill(prompts)
    logits = logits.select(prompt_S)
    cache.select(prompt_S)
    for position in range(sampling.max_tokens):
        drawn = draw(logits, seeds_S[log.rows], position, sampling)
        live = log.record(drawn)
        count = int(live.sum())
        if count == 0 or position + 1 == sampling.max_tokens:
            break
        tokens = drawn.tokens_S
        if count <= COMPACT_BELOW * live.numel():
            kept = live.nonzero().squeeze(1)
            log.keep(kept)
            cache.select(kept)
            tokens = tokens.index_select(0, kept)
        logits = model.step(tokens, cache)
    return log.samples()


class _Log:
    """What was drawn, in the order of the whole batch; `rows` maps the rows still computed to it."""

    def __init__(self, count: int, sampling: SamplingParams, device: torch.device) -> None:
        self.rows = torch.arange(count, device=device)
        self._stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        self._draws: list[Draw] = []
        self._lengths_S = torch.zeros(count, dtype=torch.int64, device=device)
        self._stopped_S = torch.zeros(count, dtype=torch.bool, device=device)

    def record(self, drawn: Draw) -> Tensor:
        """Note one step; returns which of the computed rows go on (bool)."""
        self._draws.append(drawn.apply(self._spread))
        stopped = self._stopped_S[self.rows]
        self._lengths_S[self.rows] += ~stopped
        stopped |= torch.isin(drawn.tokens_S, self._stops)
        self._stopped_S[self.rows] = stopped
        return ~stopped

    def keep(self, kept: Tensor) -> None:
        """Go on with these of the computed rows."""
        self.rows = self.rows.index_select(0, kept)

    def samples(self) -> Samples:
        """Everything, as [S, U]."""
        drawn = join(self._draws, partial(torch.stack, dim=1))
        return Samples(drawn, self._lengths_S, self._stopped_S)

    def _spread(self, values: Tensor) -> Tensor:
        spread = values.new_zeros((len(self._lengths_S), *values.shape[1:]))
        spread[self.rows] = values
        return spread
