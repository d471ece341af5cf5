"""What the tests of the head share: its outputs and gradient by straight-line float64 code, and one observed call.

`observe` may run in another process, whose Triton interprets kernels; it says how large their tiles are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megasharp.ops.head import HeadOutput, Kernels, VocabShard, token_head


@dataclass(frozen=True)
class Oracle:
    """The same outputs by straight-line float64 code, and the gradient of `loss` by autograd."""

    output: HeadOutput
    gradient: Tensor


def oracle(logits_TVp: Tensor, target_T: Tensor, valid: int, temperature: float, topn: int) -> Oracle:
    leaf_TVp = logits_TVp.detach().double().clone().requires_grad_()
    logp_TV = torch.log_softmax(leaf_TVp[:, :valid] / temperature, dim=1)
    possible_TV = torch.isfinite(logp_TV)
    safe_logp_TV = torch.where(possible_TV, logp_TV, torch.zeros_like(logp_TV))
    entropy_T = -(safe_logp_TV.exp() * safe_logp_TV * possible_TV).sum(1)
    ranked = [sorted(range(valid), key=lambda v: (-row[v], v)) for row in leaf_TVp.tolist()]
    topn_id_TN = torch.tensor([row[:topn] for row in ranked], dtype=torch.int64).reshape(len(ranked), topn)
    is_top1_T = torch.tensor([float(row[0] == t) for row, t in zip(ranked, target_T.tolist(), strict=True)])
    output = HeadOutput(
        logp_TV.gather(1, target_T[:, None])[:, 0],
        entropy_T,
        logp_TV.gather(1, topn_id_TN),
        topn_id_TN,
        is_top1_T.double(),
        torch.logsumexp(leaf_TVp.detach()[:, :valid] / temperature, dim=1),
    )
    loss(output).backward()
    assert leaf_TVp.grad is not None
    return Oracle(output, leaf_TVp.grad)


def loss(output: HeadOutput) -> Tensor:
    """A weighted sum with another weight, sign included, for every element that carries a gradient."""
    total = torch.zeros((), dtype=torch.float64, device=output.logp_T.device)
    for salt, value in enumerate((output.logp_T, output.entropy_T, output.topn_logp_TN)):
        if value is not None and value.requires_grad:
            places = torch.arange(value.numel(), dtype=torch.float64, device=value.device)
            weight = torch.cos(places + salt).reshape(value.shape)
            total = total + (weight * value.double()).nan_to_num(neginf=0.0).sum()
    return total


@dataclass(frozen=True)
class Case:
    """Logits of `valid` columns and padding; tiles of `block` columns, and `programs` to cut rows into splits for."""

    logits_TVp: Tensor
    target_T: Tensor
    valid: int
    topn: int = 3
    temperature: float = 1.0
    entropy: bool = True
    block: int = 32
    programs: int = 1


@dataclass(frozen=True)
class Observed:
    """The outputs by name, without what was not asked for, and the gradient of `loss`."""

    outputs: dict[str, Tensor]
    gradient: Tensor


def set_tiles(case: Case) -> None:
    from megasharp.ops.head.kernel_launch import TUNING

    TUNING.forward_block = TUNING.backward_block = case.block
    TUNING.programs = case.programs


def observe(case: Case, kernels: Kernels, overwrite: bool) -> Observed:
    """One call and its backward, in place on the logits where `overwrite`."""
    set_tiles(case)
    leaf_TVp = case.logits_TVp.detach().requires_grad_()
    # A view, and so no leaf, of the same strides.
    logits_TVp = leaf_TVp.clone() if overwrite else leaf_TVp.view_as(leaf_TVp)
    head = token_head(
        logits_TVp,
        case.target_T,
        VocabShard(0, case.valid, None),
        temperature=case.temperature,
        entropy=case.entropy,
        entropy_gradient=case.entropy,
        topn=case.topn,
        overwrite_logits=overwrite,
        kernels=kernels,
    )
    loss(head).backward()
    assert leaf_TVp.grad is not None
    values = {field.name: getattr(head, field.name) for field in fields(head)}
    return Observed({name: x.detach() for name, x in values.items() if x is not None}, leaf_TVp.grad)
