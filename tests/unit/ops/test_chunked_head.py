"""chunked_token_head against the float64 oracle of its logits, whose gradient is multiplied out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import each_case
from head_cases import loss, oracle
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megasharp.ops import chunked_head
from megasharp.ops.chunked_head import chunked_token_head
from megasharp.ops.head import HeadOutput, VocabShard, token_head

TOKENS, HIDDEN, VOCABULARY, PADDED = 7, 5, 13, 16
SHARD = VocabShard(0, VOCABULARY, None)


@dataclass(frozen=True)
class Inputs:
    hidden_TH: Tensor
    weight_VpH: Tensor
    target_T: Tensor

    def leaves(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        return self.hidden_TH.to(dtype, copy=True).requires_grad_(), self.weight_VpH.to(
            dtype, copy=True
        ).requires_grad_()


def random_inputs(tokens: int = TOKENS, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    hidden_TH = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    weight_VpH = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64)
    return Inputs(hidden_TH, weight_VpH, torch.randint(0, VOCABULARY, (tokens,), generator=generator))


def head_of(inputs: Inputs, leaves: tuple[Tensor, Tensor], **options: Any) -> HeadOutput:
    asked = {"entropy": True, "entropy_gradient": True, "topn": 3, "temperature": 0.8, **options}
    return chunked_token_head(*leaves, inputs.target_T, SHARD, **asked)


@each_case("chunk_tokens", [1, 3, 7, 8])
def test_equal_to_the_oracle(chunk_tokens: int) -> None:
    inputs = random_inputs()
    leaves = inputs.leaves()
    expected = oracle(inputs.hidden_TH @ inputs.weight_VpH.t(), inputs.target_T, VOCABULARY, 0.8, 3)
    head = head_of(inputs, leaves, chunk_tokens=chunk_tokens)
    loss(head).backward()
    for name in ("logp_T", "entropy_T", "topn_logp_TN", "topn_id_TN", "is_top1_T", "normaliser_T"):
        torch.testing.assert_close(getattr(head, name), getattr(expected.output, name))
    torch.testing.assert_close(leaves[0].grad, expected.gradient @ inputs.weight_VpH)
    torch.testing.assert_close(leaves[1].grad, expected.gradient.t() @ inputs.hidden_TH)


@each_case("options", [{"topn": 0}, {"entropy": False, "entropy_gradient": False}, {"topn": 13}])
def test_what_was_not_asked_for(options: dict[str, Any]) -> None:
    inputs = random_inputs()
    leaves, plain = inputs.leaves(), inputs.leaves()
    asked = {"entropy": True, "entropy_gradient": True, "topn": 3, "temperature": 0.8, **options}
    expected = token_head(plain[0] @ plain[1].t(), inputs.target_T, SHARD, **asked)
    head = head_of(inputs, leaves, chunk_tokens=3, **options)
    for name in ("entropy_T", "topn_id_TN", "is_top1_T"):
        assert (getattr(head, name) is None) == (getattr(expected, name) is None)
    for output in (head, expected):
        loss(output).backward()
    for leaf, reference in zip(leaves, plain, strict=True):
        torch.testing.assert_close(leaf.grad, reference.grad)


def test_zero_tokens() -> None:
    inputs = random_inputs(tokens=0)
    leaves = inputs.leaves(torch.float32)
    head = head_of(inputs, leaves)
    assert head.logp_T.shape == (0,) and head.topn_id_TN is not None and head.topn_id_TN.shape == (0, 3)
    loss(head).backward()
    assert leaves[0].grad is not None and leaves[0].grad.shape == (0, HIDDEN)
    assert torch.equal(leaves[1].grad, torch.zeros(PADDED, HIDDEN))


def test_a_tied_weight_gets_both_gradients() -> None:
    inputs = random_inputs()
    _, tied_VpH = inputs.leaves()
    expected = oracle(tied_VpH.detach()[inputs.target_T] @ tied_VpH.detach().t(), inputs.target_T, VOCABULARY, 0.8, 3)
    loss(head_of(inputs, (tied_VpH[inputs.target_T], tied_VpH), chunk_tokens=2)).backward()
    hidden_TH = tied_VpH.detach()[inputs.target_T]
    by_output = expected.gradient.t() @ hidden_TH
    by_embedding = torch.zeros_like(by_output).index_add(0, inputs.target_T, expected.gradient @ tied_VpH.detach())
    torch.testing.assert_close(tied_VpH.grad, by_output + by_embedding)


def test_frozen_inputs_get_no_gradient() -> None:
    inputs = random_inputs()
    for frozen in (0, 1):
        leaves = inputs.leaves()
        leaves[frozen].requires_grad_(False)
        loss(head_of(inputs, leaves, chunk_tokens=3)).backward()
        assert leaves[frozen].grad is None and leaves[1 - frozen].grad is not None


def test_chunks_of_bfloat16_are_added_in_float32() -> None:
    """512 chunks whose products with one another are alike: a bfloat16 sum stops growing at 256 times its addend."""
    inputs = random_inputs(tokens=1)
    many = Inputs(inputs.hidden_TH.repeat(512, 1), inputs.weight_VpH, inputs.target_T.repeat(512))
    one, all_of_them = inputs.leaves(torch.bfloat16), many.leaves(torch.bfloat16)
    head_of(inputs, one).logp_T.sum().backward()
    head_of(many, all_of_them, chunk_tokens=1).logp_T.sum().backward()
    assert one[1].grad is not None
    torch.testing.assert_close(all_of_them[1].grad, 512 * one[1].grad)


@each_case(("dtype", "block_rows"), [(torch.float32, 16_384), (torch.bfloat16, 16_384), (torch.bfloat16, 5)])
@each_case("chunk_tokens", [2, 7])
def test_the_callers_buffer_gets_the_weights_gradient(
    dtype: torch.dtype, block_rows: int, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On top of what is in it, and autograd is left with nothing to add."""
    monkeypatch.setattr(chunked_head, "_BLOCK_ROWS", block_rows)
    inputs = random_inputs()
    buffer_VpH = torch.full((PADDED, HIDDEN), 2.0)
    leaves, plain = inputs.leaves(dtype), inputs.leaves(dtype)
    loss(head_of(inputs, leaves, chunk_tokens=chunk_tokens, weight_grad_VpH=buffer_VpH)).backward()
    loss(head_of(inputs, plain, chunk_tokens=chunk_tokens)).backward()
    assert plain[1].grad is not None and leaves[1].grad is not None and not leaves[1].grad.any()
    assert torch.equal(leaves[0].grad, plain[0].grad)
    difference = (buffer_VpH - 2.0 - plain[1].grad).abs()
    assert (difference <= 8 * torch.finfo(dtype).eps * (plain[1].grad.abs() + 1)).all()


def test_a_buffer_that_cannot_hold_the_sum_is_refused() -> None:
    inputs = random_inputs()
    for buffer_VpH in (torch.zeros(PADDED, HIDDEN, dtype=torch.bfloat16), torch.zeros(VOCABULARY, HIDDEN)):
        with pytest.raises(ValueError, match="weight_grad_VpH must be float32 of shape"):
            head_of(inputs, inputs.leaves(torch.float32), weight_grad_VpH=buffer_VpH)


class _Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            self.elements = max(self.elements, x.numel() if isinstance(x, Tensor) else 0)
        return result


def test_never_a_whole_sequence_of_logits() -> None:
    inputs = random_inputs(tokens=100)
    with _Largest() as chunked:
        loss(head_of(inputs, inputs.leaves(), chunk_tokens=10)).backward()
    assert chunked.elements <= max(10 * PADDED, 100 * HIDDEN)
    with _Largest() as whole:
        loss(head_of(inputs, inputs.leaves(), chunk_tokens=100)).backward()
    assert whole.elements == 100 * PADDED


def test_what_is_refused() -> None:
    inputs = random_inputs()
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1, got 0"):
        head_of(inputs, inputs.leaves(), chunk_tokens=0)
    with pytest.raises(ValueError, match="topn = 14 exceeds the vocabulary of 13"):
        head_of(inputs, inputs.leaves(), topn=14)
    with pytest.raises(ValueError, match="temperature"):
        head_of(inputs, inputs.leaves(), temperature=0.0)
    inputs.target_T[5] = VOCABULARY
    with pytest.raises(ValueError, match=r"target_T\[5\] = 13 is outside the vocabulary of 13"):
        head_of(inputs, inputs.leaves(), chunk_tokens=3)
    inputs = random_inputs()
    leaves = inputs.leaves()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(head_of(inputs, leaves).logp_T.sum(), leaves[0], create_graph=True)
