"""token_head without a group, against log_softmax in float64 and autograd through it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from cases import each_case
from head_cases import loss, oracle
from torch import Tensor

from megasharp.ops.head import VocabShard, token_head

VOCABULARY = 13
TOKENS = 6


def whole(valid: int) -> VocabShard:
    return VocabShard(start=0, valid=valid, group=None)


def random_case(columns: int = VOCABULARY, scale: float = 3.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits_TVp = scale * torch.randn(TOKENS, columns, generator=generator, dtype=torch.float64)
    return logits_TVp, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


def check(
    logits_TVp: Tensor,
    target_T: Tensor,
    *,
    valid: int = VOCABULARY,
    temperature: float = 1.0,
    topn: int = 3,
    tolerance: float = 1e-11,
    gradient_tolerance: float | None = None,
) -> None:
    expected = oracle(logits_TVp, target_T, valid, temperature, topn)
    leaf_TVp = logits_TVp.detach().requires_grad_()
    actual = token_head(
        leaf_TVp,
        target_T,
        whole(valid),
        temperature=temperature,
        entropy=True,
        entropy_gradient=True,
        topn=topn,
    )
    loss(actual).backward()
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    torch.testing.assert_close(actual.logp_T, expected.output.logp_T, **close)
    torch.testing.assert_close(actual.entropy_T, expected.output.entropy_T, **close)
    torch.testing.assert_close(actual.topn_logp_TN, expected.output.topn_logp_TN, **close)
    torch.testing.assert_close(actual.normaliser_T, expected.output.normaliser_T, **close)
    torch.testing.assert_close(actual.topn_id_TN, expected.output.topn_id_TN)
    torch.testing.assert_close(actual.is_top1_T, expected.output.is_top1_T, **close)
    assert leaf_TVp.grad is not None
    close |= {"rtol": gradient_tolerance or tolerance, "atol": gradient_tolerance or tolerance}
    torch.testing.assert_close(leaf_TVp.grad, expected.gradient, **close)
    assert torch.equal(leaf_TVp.grad[:, valid:], torch.zeros_like(leaf_TVp.grad[:, valid:]))


@each_case("topn", range(1, 9))
def test_random_logits(topn: int) -> None:
    check(*random_case(seed=topn), topn=topn)


@each_case("temperature", [0.1, 0.7, 1.0, 2.5])
def test_temperature(temperature: float) -> None:
    check(*random_case(), temperature=temperature)


def test_whole_vocabulary_as_candidates() -> None:
    check(*random_case(), topn=VOCABULARY)


def test_float32_logits() -> None:
    logits_TVp, target_T = random_case()
    check(logits_TVp.float(), target_T, tolerance=2e-6)


def test_bfloat16_logits_keep_float32_statistics() -> None:
    logits_TVp, target_T = random_case()
    logits_TVp = logits_TVp.bfloat16()
    check(logits_TVp, target_T, tolerance=2e-6, gradient_tolerance=8e-3)
    assert token_head(logits_TVp, target_T, whole(VOCABULARY)).logp_T.dtype == torch.float32


@each_case("dtype", [torch.float32, torch.float64])
@each_case("winner_is_target", [True, False])
def test_one_logit_ten_thousand_larger(dtype: torch.dtype, winner_is_target: bool) -> None:
    logits_TVp, target_T = random_case()
    winner_T = target_T if winner_is_target else (target_T + 1) % VOCABULARY
    logits_TVp[torch.arange(TOKENS), winner_T] += 1e4
    check(logits_TVp.to(dtype), target_T, tolerance=1e-11 if dtype == torch.float64 else 1e-6)


@each_case("shift", [-1e6, 1e6, -1e30])
def test_large_magnitude(shift: float) -> None:
    logits_TVp, target_T = random_case()
    check((logits_TVp + shift).float(), target_T, tolerance=2e-6)


def test_all_negative_logits() -> None:
    logits_TVp, target_T = random_case()
    check(-logits_TVp.abs() - 50.0, target_T)


def test_float32_range_from_end_to_end() -> None:
    logits_TVp = torch.full((1, VOCABULARY), -1.5e38)
    logits_TVp[0, 4] = 1.5e38
    check(logits_TVp, torch.tensor([4]), tolerance=1e-6)


def test_impossible_columns() -> None:
    logits_TVp, target_T = random_case()
    masked_TV = (torch.arange(TOKENS * VOCABULARY).reshape(TOKENS, VOCABULARY) % 3) == 0
    masked_TV[torch.arange(TOKENS), target_T] = False
    check(logits_TVp.masked_fill(masked_TV, -math.inf), target_T, topn=8)


def test_impossible_columns_among_the_candidates() -> None:
    logits_TVp = torch.full((1, VOCABULARY), -math.inf)
    logits_TVp[0, 5] = 2.0
    head = token_head(logits_TVp, torch.tensor([7]), whole(VOCABULARY), entropy=True, topn=3)
    assert head.logp_T.tolist() == [-math.inf]
    assert head.entropy_T is not None and head.entropy_T.tolist() == [0.0]
    assert head.topn_id_TN is not None and head.topn_id_TN.tolist() == [[5, 0, 1]]
    assert head.topn_logp_TN is not None and head.topn_logp_TN.tolist() == [[0.0, -math.inf, -math.inf]]


def test_not_a_number_is_not_hidden() -> None:
    logits_TVp, target_T = random_case()
    logits_TVp[2, 3] = math.nan
    head = token_head(logits_TVp, target_T, whole(VOCABULARY), entropy=True)
    assert head.logp_T.isnan().tolist() == [False, False, True, False, False, False]
    assert head.entropy_T is not None and head.entropy_T.isnan()[2]


@each_case("padding", [1e4, math.nan, math.inf])
def test_padded_vocabulary_has_no_effect(padding: float) -> None:
    logits_TVp, target_T = random_case(columns=VOCABULARY + 3)
    logits_TVp[:, VOCABULARY:] = padding
    check(logits_TVp, target_T)


def test_ties_go_to_the_lowest_id() -> None:
    logits_TVp, target_T = random_case()
    logits_TVp = logits_TVp.round() / 2
    logits_TVp[0] = 1.0
    logits_TVp[1, [2, 9, 11]] = 20.0
    target_T[:2] = torch.tensor([0, 9])
    for topn in (1, 2, 5, VOCABULARY):
        check(logits_TVp, target_T, topn=topn)


def test_strided_logits_and_gradients() -> None:
    logits_TVp, target_T = random_case()
    storage = torch.zeros(VOCABULARY, 2 * TOKENS, dtype=torch.float64)
    storage[:, ::2] = logits_TVp.T
    strided_TVp = storage[:, ::2].T.detach().requires_grad_()
    assert not strided_TVp.is_contiguous()
    expected = oracle(logits_TVp, target_T, VOCABULARY, 0.8, 2)
    head = token_head(
        strided_TVp, target_T, whole(VOCABULARY), temperature=0.8, entropy=True, entropy_gradient=True, topn=2
    )
    assert head.topn_logp_TN is not None and head.entropy_T is not None
    weights = [torch.cos(torch.arange(n, dtype=torch.float64) + salt) for salt, n in enumerate((6, 6, 12))]
    incoming = [
        torch.stack([weights[0], weights[0]], dim=1)[:, 0],
        torch.stack([weights[1], weights[1]], dim=1)[:, 0],
        weights[2].reshape(6, 2).T.contiguous().T,
    ]
    assert not any(x.is_contiguous() for x in incoming)
    (gradient,) = torch.autograd.grad([head.logp_T, head.entropy_T, head.topn_logp_TN], strided_TVp, incoming)
    torch.testing.assert_close(gradient, expected.gradient)


def test_gradient_of_an_expanded_scalar() -> None:
    logits_TVp, target_T = random_case()
    logits_TVp.requires_grad_()
    token_head(logits_TVp, target_T, whole(VOCABULARY)).logp_T.sum().backward()
    expected = torch.eye(VOCABULARY).double()[target_T] - torch.softmax(logits_TVp.detach(), 1)
    torch.testing.assert_close(logits_TVp.grad, expected)


@each_case("temperature", [1.0, 0.6])
def test_gradcheck(temperature: float) -> None:
    logits_TVp, target_T = random_case(columns=VOCABULARY + 2, scale=1.0)

    def outputs(x: Tensor) -> tuple[Tensor, ...]:
        head = token_head(
            x,
            target_T,
            whole(VOCABULARY),
            temperature=temperature,
            entropy=True,
            entropy_gradient=True,
            topn=4,
        )
        assert head.entropy_T is not None and head.topn_logp_TN is not None
        return head.logp_T, head.entropy_T, head.topn_logp_TN

    assert torch.autograd.gradcheck(outputs, (logits_TVp.requires_grad_(),))


@each_case("used", ["logp_T", "entropy_T", "topn_logp_TN"])
def test_gradient_through_one_output_alone(used: str) -> None:
    logits_TVp, target_T = random_case()
    logits_TVp.requires_grad_()
    head = token_head(logits_TVp, target_T, whole(VOCABULARY), entropy=True, entropy_gradient=True, topn=2)
    getattr(head, used).sum().backward()
    plain_TV = logits_TVp.detach().clone().requires_grad_()
    logp_TV = torch.log_softmax(plain_TV, 1)
    reference = {
        "logp_T": logp_TV.gather(1, target_T[:, None]),
        "entropy_T": -(logp_TV.exp() * logp_TV),
        "topn_logp_TN": logp_TV.topk(2, dim=1).values,
    }
    reference[used].sum().backward()
    torch.testing.assert_close(logits_TVp.grad, plain_TV.grad)


def test_what_was_not_asked_for_is_absent_or_constant() -> None:
    logits_TVp, target_T = random_case()
    logits_TVp.requires_grad_()
    bare = token_head(logits_TVp, target_T, whole(VOCABULARY))
    assert (bare.entropy_T, bare.topn_logp_TN, bare.topn_id_TN, bare.is_top1_T) == (None, None, None, None)
    head = token_head(logits_TVp, target_T, whole(VOCABULARY), entropy=True, topn=1)
    assert head.logp_T.requires_grad and head.topn_logp_TN is not None and head.topn_logp_TN.requires_grad
    for constant in (head.entropy_T, head.topn_id_TN, head.is_top1_T):
        assert constant is not None and not constant.requires_grad


def test_zero_tokens() -> None:
    logits_TVp = torch.zeros(0, VOCABULARY + 2, requires_grad=True)
    head = token_head(
        logits_TVp,
        torch.zeros(0, dtype=torch.int64),
        whole(VOCABULARY),
        entropy=True,
        entropy_gradient=True,
        topn=3,
    )
    assert head.logp_T.shape == (0,) and head.topn_id_TN is not None and head.topn_id_TN.shape == (0, 3)
    loss(head).backward()
    assert logits_TVp.grad is not None and logits_TVp.grad.shape == (0, VOCABULARY + 2)


@each_case("bad", [-1, VOCABULARY, VOCABULARY + 1, -100])
def test_target_outside_the_vocabulary(bad: int) -> None:
    logits_TVp, target_T = random_case(columns=VOCABULARY + 3)
    target_T[4] = bad
    with pytest.raises(ValueError, match=rf"target_T\[4\] = {bad} .* vocabulary of {VOCABULARY}"):
        token_head(logits_TVp, target_T, whole(VOCABULARY))


def test_impossible_requests() -> None:
    logits_TVp, target_T = random_case(columns=VOCABULARY + 3)
    with pytest.raises(ValueError, match=r"topn = 14 exceeds the vocabulary of 13"):
        token_head(logits_TVp, target_T, whole(VOCABULARY), topn=14)
    with pytest.raises(ValueError, match="topn must not be negative"):
        token_head(logits_TVp, target_T, whole(VOCABULARY), topn=-1)
    with pytest.raises(ValueError, match="entropy_gradient"):
        token_head(logits_TVp, target_T, whole(VOCABULARY), entropy_gradient=True)
    for temperature in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="temperature"):
            token_head(logits_TVp, target_T, whole(VOCABULARY), temperature=temperature)


def test_only_the_logits_are_kept_at_vocabulary_size() -> None:
    logits_TVp, target_T = random_case()
    logits_TVp.requires_grad_()
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        token_head(logits_TVp, target_T, whole(VOCABULARY), entropy=True, entropy_gradient=True, topn=2)
    large = [x for x in saved if x.numel() >= TOKENS * VOCABULARY]
    assert [x.data_ptr() for x in large] == [logits_TVp.data_ptr()]
    assert all(x.numel() <= 2 * TOKENS for x in saved if x.data_ptr() != logits_TVp.data_ptr())


def test_input_is_left_alone() -> None:
    logits_TVp, target_T = random_case()
    before = logits_TVp.clone()
    logits_TVp.requires_grad_()
    head = token_head(
        logits_TVp, target_T, whole(VOCABULARY), temperature=0.5, entropy=True, entropy_gradient=True, topn=2
    )
    loss(head).backward()
    assert torch.equal(logits_TVp.detach(), before)


def test_no_communication_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a collective without a group")

    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(dist, name, refuse)
    logits_TVp, target_T = random_case()
    token_head(logits_TVp, target_T, whole(VOCABULARY), entropy=True, topn=2)
