"""Single observations of `test_head_kernels`, made in the process that interprets kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from head_cases import Case, set_tiles
from torch import Tensor

from megasharp.ops.head import HeadOutput, Kernels, VocabShard, token_head


def call(case: Case, logits_TVp: Tensor, kernels: Kernels, **options: Any) -> HeadOutput:
    set_tiles(case)
    asked = {"topn": case.topn, "entropy": True, "entropy_gradient": True, "kernels": kernels, **options}
    return token_head(logits_TVp, case.target_T, VocabShard(0, case.valid, None), **asked)


def strided_gradients(case: Case, kernels: Kernels) -> list[tuple[Tensor, Tensor]]:
    """Gradients by incoming ones with gaps, transposed or expanded, each beside that by their plain copies."""
    leaf_TVp = case.logits_TVp.requires_grad_()
    tokens, topn = len(case.target_T), case.topn
    head = call(case, leaf_TVp, kernels)
    assert head.entropy_T is not None and head.topn_logp_TN is not None
    outputs = [head.logp_T, head.entropy_T, head.topn_logp_TN]
    numbers = torch.cos(torch.arange(3.0 * tokens * topn))
    ways = [
        [numbers[: 3 * tokens : 3], numbers[: 2 * tokens : 2], numbers[: tokens * topn].view(topn, tokens).t()],
        [numbers[:1].expand(tokens), numbers[1:2].expand(tokens), numbers[2:3, None].expand(tokens, topn)],
        [numbers[:tokens], numbers[:1].expand(tokens), numbers[: tokens * topn * 2].view(tokens, -1)[:, ::2]],
    ]
    found = []
    for incoming in ways:
        strided, plain = (
            torch.autograd.grad(outputs, leaf_TVp, gradients, retain_graph=True)[0]
            for gradients in (incoming, [x.contiguous().clone() for x in incoming])
        )
        found.append((strided, plain))
    return found


def through_one_output(case: Case, kernels: Kernels, used: str) -> Tensor:
    leaf_TVp = case.logits_TVp.requires_grad_()
    getattr(call(case, leaf_TVp, kernels), used).sum().backward()
    assert leaf_TVp.grad is not None
    return leaf_TVp.grad


def refusals(case: Case, kernels: Kernels) -> dict[str, str]:
    """The first line of each error, without where."""

    def target(value: int) -> None:
        target_T = case.target_T.clone()
        target_T[2] = value
        token_head(case.logits_TVp, target_T, VocabShard(0, case.valid, None), kernels=kernels)

    def leaf() -> None:
        call(case, case.logits_TVp.clone().requires_grad_(), kernels, overwrite_logits=True)

    def twice() -> None:
        total = call(case, _copy(case), kernels, overwrite_logits=True).logp_T.sum()
        total.backward(retain_graph=True)
        total.backward()

    def saved_elsewhere() -> None:
        logits_TVp = _copy(case)
        # It keeps its input, and runs backward after the head, which was called later.
        square = logits_TVp.square().sum()
        (square + call(case, logits_TVp, kernels, overwrite_logits=True).logp_T.sum()).backward()

    def second_derivative() -> None:
        leaf_TVp = case.logits_TVp.clone().requires_grad_()
        torch.autograd.grad(call(case, leaf_TVp, kernels).logp_T.sum(), leaf_TVp, create_graph=True)

    tried: dict[str, Callable[[], None]] = {
        "a target below": lambda: target(-1),
        "a target of padding": lambda: target(case.valid),
        "a target beyond int32": lambda: target(2**40),
        "a leaf overwritten": leaf,
        "a second backward": twice,
        "another op's saved logits": saved_elsewhere,
        "a second derivative": second_derivative,
    }
    return {name: _error(attempt) for name, attempt in tried.items()}


def _copy(case: Case) -> Tensor:
    """The logits as some operation's result."""
    return case.logits_TVp.clone().requires_grad_() * 1.0


def _error(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).partition(': [')[0]}"
    return "nothing was raised"


def overwritten(case: Case, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """What lies in the logits' memory after a backward that overwrites it, and the gradient by one that does not."""
    logits_TVp = _copy(case)
    call(case, logits_TVp, kernels, overwrite_logits=True).logp_T.sum().backward()
    leaf_TVp = case.logits_TVp.clone().requires_grad_()
    call(case, leaf_TVp, kernels).logp_T.sum().backward()
    assert leaf_TVp.grad is not None
    return logits_TVp.detach(), leaf_TVp.grad


def far_rows(case: Case) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The gradients of two rows 2^31 + 8 elements apart, and those of the same rows side by side."""
    apart = 2**31 + 8
    columns = case.logits_TVp.shape[1]
    storage = torch.empty(apart + columns, dtype=torch.bfloat16)
    far_TV = storage.as_strided((2, columns), (apart, 1))
    far_TV.copy_(case.logits_TVp)
    plain = case.logits_TVp.bfloat16().requires_grad_()
    call(case, plain, "triton").logp_T.sum().backward()
    far_TV.requires_grad_()
    logits_TV = far_TV.view_as(far_TV)
    call(case, logits_TV, "triton", overwrite_logits=True).logp_T.sum().backward()
    assert plain.grad is not None
    return (storage[:columns].clone(), storage[apart:].clone()), plain.grad


def unreadable(case: Case) -> list[str]:
    messages = []
    for logits_TVp, topn in (
        (case.logits_TVp.double(), 3),
        (case.logits_TVp, 9),
        (case.logits_TVp.t().contiguous().t(), 3),
    ):
        try:
            call(case, logits_TVp, "triton", topn=topn)
        except ValueError as error:
            messages.append(str(error))
    return messages


def split_of(tokens: int, columns: int) -> tuple[int, int]:
    from megasharp.ops.head.kernel_launch import TUNING, Tuning, _split

    TUNING.programs = Tuning().programs
    return _split(tokens, columns, Tuning().forward_block)
