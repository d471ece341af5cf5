"""Sampling parameters of a request that SGLang does not know: mu and its guard, a seed that counts, and more.

`check_request` judges it in the server, where a mistake is an answer with status 400; `Columns` holds it, one row per
request of a batch, where the sampler needs it; `overdue` names the requests whose time limits have passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

MU = "mu"
MIN_P = "plausible_min_p"
TOP_K = "plausible_top_k"
BEGUN = "begun"
CANDIDATES = "candidates"
FIRST_TOKEN_S = "first_token_s"
RESPONSE_S = "response_s"
# Far above what a model has been trained with, and far below what float32 overflows at.
_MOST_MU = 1e6
_MOST_TOKENS = 2**31 - 1
_MOST_CANDIDATES = 8
# Our mark on a request: the seconds that it had waited when its first token was there.
_WAITED = "megasharp_waited"
# SGLang's own checks of a server's health carry no seed.
_DEFAULT_SEED = 0


def _tokens(least: int) -> Callable[[float], bool]:
    return lambda value: isinstance(value, int) and least <= value <= _MOST_TOKENS


def _seconds(value: float) -> bool:
    return value > 0


# Every number that a request may carry: a test of its range, and the range in words.
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    MU: (lambda value: 0 <= value <= _MOST_MU, f"in [0, {_MOST_MU:g}]"),
    MIN_P: (lambda value: 0 < value <= 1, "in (0, 1]"),
    TOP_K: (_tokens(1), "a number of tokens, at least 1"),
    BEGUN: (_tokens(0), "a number of tokens, at least 0"),
    CANDIDATES: (lambda value: value in range(1, _MOST_CANDIDATES + 1), f"from 1 to {_MOST_CANDIDATES}"),
    FIRST_TOKEN_S: (_seconds, "a number of seconds, above 0"),
    RESPONSE_S: (_seconds, "a number of seconds, above 0"),
}


def check_request(custom_params: object, has_memory: bool) -> None:
    """Raises ValueError for custom parameters that are not numbers in their range, or need a memory network."""
    if custom_params is None:
        return
    if not isinstance(custom_params, dict):
        raise ValueError("custom_params must be an object of numbers")
    for name, value in custom_params.items():
        if name not in _RANGES:
            raise ValueError(f"custom_params.{name} is not known; known are {', '.join(_RANGES)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"custom_params.{name} is {value!r}; it must be a finite number")
    for name, (fits, wanted) in _RANGES.items():
        if name in custom_params and not fits(custom_params[name]):
            raise ValueError(f"custom_params.{name} is {custom_params[name]!r}; it must be {wanted}")
    of_memory = custom_params.keys() & {MU, MIN_P, TOP_K}
    if of_memory and not has_memory:
        raise ValueError(f"custom_params.{min(of_memory)} needs a memory network; this engine holds none")


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Our sampling parameters of a batch, one row per request, on the batch's device.

    `mu_S` float32 [S], 0 where a request has none. The guard's two forms: `min_p_S` float32 [S], the logarithm of the
    share of the likeliest token's probability that a token needs, -inf where a request has no such guard; `top_k_S`
    int64 [S], of how many likeliest tokens it must be, 0 where a request has no such guard. `seed_S` int64 [S];
    `prompt_S` int64 [S] prompt lengths: without the `begun` last tokens of a request that goes on with a response,
    so that its next tokens are drawn with the same numbers as if it had never stopped.

    Known without asking the device: `any_min_p`, whether a row may have that guard, `most_top_k`, the largest
    `top_k_S` that a row may have, and `most_candidates`, the largest number of likeliest tokens that a row may ask for.
    """

    mu_S: Tensor
    min_p_S: Tensor
    top_k_S: Tensor
    seed_S: Tensor
    prompt_S: Tensor
    any_min_p: bool
    most_top_k: int
    most_candidates: int

    @property
    def untouched_S(self) -> Tensor:
        """bool [S]: rows that draw from the policy itself."""
        return (self.mu_S == 0) & (self.min_p_S == -math.inf) & (self.top_k_S == 0)

    def select(self, rows: Tensor) -> Columns:
        """Select rows (int64 indices)."""
        return self._changed(lambda name: getattr(self, name)[rows])

    def followed_by(self, other: Columns) -> Columns:
        """Append the rows of another batch."""
        both = self._changed(lambda name: torch.cat([getattr(self, name), getattr(other, name)]))
        return replace(
            both,
            any_min_p=self.any_min_p or other.any_min_p,
            most_top_k=max(self.most_top_k, other.most_top_k),
            most_candidates=max(self.most_candidates, other.most_candidates),
        )

    def _changed(self, change: Callable[[str], Tensor]) -> Columns:
        changed: dict[str, Any] = {each.name: change(each.name) for each in fields(self) if each.name.endswith("_S")}
        return replace(self, **changed)


def begun(request: Any) -> int:
    """Tokens at the end of one of SGLang's requests that are a response's, with which it goes on."""
    return int((request.sampling_params.custom_params or {}).get(BEGUN, 0))


def prompt_length(request: Any) -> int:
    """Tokens of the prompt of one of SGLang's requests."""
    return len(request.origin_input_ids) - begun(request)


def columns_of(requests: Sequence[Any], device: Any) -> Columns:
    """Build the columns of SGLang's requests."""
    params = [request.sampling_params for request in requests]
    custom = [each.custom_params or {} for each in params]
    # The guard belongs to the subtraction: a request without a mu has neither.
    guards = [each if MU in each else {} for each in custom]
    min_p = [math.log(each[MIN_P]) if MIN_P in each else -math.inf for each in guards]
    top_k = [each.get(TOP_K, 0) for each in guards]
    seeds = [_DEFAULT_SEED if each.sampling_seed is None else each.sampling_seed for each in params]
    return Columns(
        _column([float(each.get(MU, 0.0)) for each in custom], torch.float32, device),
        _column(min_p, torch.float32, device),
        _column(top_k, torch.int64, device),
        _column(seeds, torch.int64, device),
        _column([prompt_length(request) for request in requests], torch.int64, device),
        any_min_p=any(value > -math.inf for value in min_p),
        most_top_k=max(top_k, default=0),
        most_candidates=max((int(each.get(CANDIDATES, 0)) for each in custom), default=0),
    )


def _column(values: Sequence[float], dtype: torch.dtype, device: Any) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def overdue(waiting: Iterable[Any], running: Iterable[Any], now: float) -> list[str]:
    """Name SGLang's requests that have had their time: to the first token, or from there on.

    A request that was retracted, and waits to be computed again, is not ended, as its numbers would be lost; nor does
    that time count.
    """
    late = [request for request in waiting if _begins_late(request, now)]
    late += [request for request in running if _begins_late(request, now) or _ends_late(request, now)]
    return [request.rid for request in late]


def _begins_late(request: Any, now: float) -> bool:
    times = request.time_stats
    if times.prefill_finished_time or not times.wait_queue_entry_time:
        return False
    return bool(now - times.wait_queue_entry_time > _limit(request, FIRST_TOKEN_S))


def _ends_late(request: Any, now: float) -> bool:
    times = request.time_stats
    if not times.prefill_finished_time:
        return False
    # SGLang adds up all waiting; what came before the first token is not ours to subtract.
    if not hasattr(request, _WAITED):
        setattr(request, _WAITED, times.queue_duration_s)
    waited = times.queue_duration_s - getattr(request, _WAITED)
    return bool(now - times.prefill_finished_time - waited > _limit(request, RESPONSE_S))


def _limit(request: Any, name: str) -> float:
    return float((request.sampling_params.custom_params or {}).get(name, math.inf))
