"""What a request says about its sampling that SGLang does not know: mu, plausible, begun, and a seed that counts.

`check_request` judges it in the server, where a mistake is an answer with status 400; `Columns` holds it, one row per
request of a batch, where the sampler needs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MU = "mu"
PLAUSIBLE = "plausible"
BEGUN = "begun"
# Far above what a model has been trained with, and far below what float32 overflows at.
_MOST_MU = 1e6
_MOST_TOKENS = 2**31 - 1
# SGLang's own checks of a server's health carry no seed.
_DEFAULT_SEED = 0


def check_request(custom_params: object, has_memory: bool) -> None:
    """Raises ValueError for custom parameters that are not numbers in their range, or need a memory network."""
    if custom_params is None:
        return
    if not isinstance(custom_params, dict):
        raise ValueError("custom_params must be an object of numbers")
    for name, value in custom_params.items():
        if name not in (MU, PLAUSIBLE, BEGUN):
            raise ValueError(f"custom_params.{name} is not known; known are {MU}, {PLAUSIBLE} and {BEGUN}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"custom_params.{name} is {value!r}; it must be a finite number")
    if not 0 <= custom_params.get(MU, 0) <= _MOST_MU:
        raise ValueError(f"custom_params.{MU} is {custom_params[MU]}; it must be in [0, {_MOST_MU:g}]")
    if not 0 < custom_params.get(PLAUSIBLE, 1) <= 1:
        raise ValueError(f"custom_params.{PLAUSIBLE} is {custom_params[PLAUSIBLE]}; it must be in (0, 1]")
    begun = custom_params.get(BEGUN, 0)
    if not isinstance(begun, int) or not 0 <= begun <= _MOST_TOKENS:
        raise ValueError(f"custom_params.{BEGUN} is {begun!r}; it must be a number of tokens")
    of_memory = custom_params.keys() - {BEGUN}
    if of_memory and not has_memory:
        raise ValueError(f"custom_params.{min(of_memory)} needs a memory network; this engine holds none")


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """One row per request of a batch, on the batch's device.

    `mu_S` float32 [S], 0 where a request has none. `plausible_S` float32 [S], the logarithm of the share of the
    likeliest token's probability that a token needs, -inf where a request has no guard. `seed_S` int64 [S];
    `prompt_S` int64 [S] prompt lengths: without the `begun` last tokens of a request that goes on with a response,
    so that its next tokens are drawn with the same numbers as if it had never stopped. `guarded`: whether any row may
    have a guard.
    """

    mu_S: Tensor
    plausible_S: Tensor
    seed_S: Tensor
    prompt_S: Tensor
    guarded: bool

    def select(self, rows: Tensor) -> Columns:
        """These rows (int64 indices)."""
        return Columns(
            self.mu_S[rows], self.plausible_S[rows], self.seed_S[rows], self.prompt_S[rows], guarded=self.guarded
        )

    def followed_by(self, other: Columns) -> Columns:
        """Both batches' rows."""
        return Columns(
            torch.cat([self.mu_S, other.mu_S]),
            torch.cat([self.plausible_S, other.plausible_S]),
            torch.cat([self.seed_S, other.seed_S]),
            torch.cat([self.prompt_S, other.prompt_S]),
            guarded=self.guarded or other.guarded,
        )


def columns_of(requests: Sequence[Any], device: Any) -> Columns:
    """The columns of SGLang's requests."""
    params = [request.sampling_params for request in requests]
    custom = [each.custom_params or {} for each in params]
    # The guard belongs to the subtraction: a request without a mu has neither.
    plausible = [math.log(each[PLAUSIBLE]) if MU in each and PLAUSIBLE in each else -math.inf for each in custom]
    prompts = [len(r.origin_input_ids) - each.get(BEGUN, 0) for r, each in zip(requests, custom, strict=True)]
    seeds = [_DEFAULT_SEED if each.sampling_seed is None else each.sampling_seed for each in params]
    return Columns(
        _column([float(each.get(MU, 0.0)) for each in custom], torch.float32, device),
        _column(plausible, torch.float32, device),
        _column(seeds, torch.int64, device),
        _column(prompts, torch.int64, device),
        guarded=any(value > -math.inf for value in plausible),
    )


def _column(values: Sequence[float], dtype: torch.dtype, device: Any) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
