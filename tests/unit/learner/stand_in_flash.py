"""A stand-in, for tests only, for the variable-length flash kernels, which exist on CUDA alone.

Same arguments and results as `flash_varlen.flash_forward` and `flash_backward`, in plain torch, stretch by stretch: a
query sees the keys up to its own position, counted from the END of its stretch's keys; all keys without `causal`.
Backward is the paper's, from
the kept log-sum-exp (arXiv 2307.08691, section 2.2), not autograd's. `test_flash_varlen.py` compares it with masked
attention in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megasharp.learner import flash_varlen
from megasharp.learner.flash_varlen import VarlenPlan


def use_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the kernels' path on the CPU and in any dtype, with the stand-in at its end."""
    monkeypatch.setattr(flash_varlen, "supports", lambda query: True)
    monkeypatch.setattr(flash_varlen, "flash_forward", forward)
    monkeypatch.setattr(flash_varlen, "flash_backward", backward)


def forward(query: Tensor, key: Tensor, value: Tensor, plan: VarlenPlan, scale: float | None) -> tuple[Tensor, ...]:
    exact = torch.promote_types(query.dtype, torch.float32)
    out, log_sum = torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0], dtype=exact)
    for queries, keys in _stretches(plan):
        scores = _scores(query[queries], key[keys], plan, scale)
        log_sum[:, queries] = scores.logsumexp(-1)
        weights = (scores - log_sum[:, queries, None]).exp().to(query.dtype)
        out[queries] = torch.einsum("hqk,khd->qhd", weights, _repeated(value[keys], query))
    return out, log_sum, torch.empty(2), torch.empty(0)


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    statistics: list[Tensor],
    plan: VarlenPlan,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    log_sum = statistics[0]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    gradients = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    mean = (gradient * out).sum(-1)
    for queries, keys in _stretches(plan):
        scores = _scores(query[queries], key[keys], plan, scale)
        weights = (scores - log_sum[:, queries, None]).exp().to(query.dtype)
        asked = torch.einsum("qhd,khd->hqk", gradient[queries], _repeated(value[keys], query))
        of_scores = weights * (asked - mean[queries].T[..., None]) * factor
        gradients[0][queries] = torch.einsum("hqk,khd->qhd", of_scores, _repeated(key[keys], query))
        gradients[1][keys] += _shared(torch.einsum("hqk,qhd->khd", of_scores, query[queries]), key)
        gradients[2][keys] += _shared(torch.einsum("hqk,qhd->khd", weights, gradient[queries]), value)
    return gradients


def _stretches(plan: VarlenPlan) -> Iterator[tuple[slice, slice]]:
    starts = zip(plan.query_starts.tolist(), plan.key_starts.tolist(), strict=True)
    for (query, key), (query_end, key_end) in pairwise(starts):
        assert query_end - query <= plan.most_queries and key_end - key <= plan.most_keys
        yield slice(query, query_end), slice(key, key_end)


def _scores(query: Tensor, key: Tensor, plan: VarlenPlan, scale: float | None) -> Tensor:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", query, _repeated(key, query)) * factor
    distance = torch.arange(len(query))[:, None] + len(key) - len(query) - torch.arange(len(key))
    if not plan.causal:
        return scores
    hidden = (distance < 0) | (distance >= (plan.window or len(key) + 1))
    return scores.masked_fill(hidden.to(query.device), float("-inf"))


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _shared(gradient: Tensor, x: Tensor) -> Tensor:
    """From query heads to the key heads that they share."""
    return gradient.view(len(gradient), x.shape[1], -1, gradient.shape[-1]).sum(2)
