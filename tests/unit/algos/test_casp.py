"""CaSP: the gate, the gradient on logits, the two places of the penalty, and what is never allocated."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cases import each_case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megasharp.algos.base import MethodParams, Needs
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.casp import CaSP, CaSPParams
from megasharp.algos.clip import ClipParams
from megasharp.common.records import Denominators, Metrics, MicroBatch, TokenInputs
from megasharp.ops.head import VocabShard, token_head

VOCABULARY = 11
TOKENS = 14
PAPERS_CLIP = ClipParams(low=0.2, high=0.2)


def gate(entropy: list[list[float]], quantile: float, mask: list[list[int]] | None = None) -> list[list[int]]:
    """Return the tokens of these responses that the method gates."""
    lengths = torch.tensor([len(row) for row in entropy])
    entropy_T = torch.tensor([value for row in entropy for value in row], dtype=torch.float64)
    mask_T = torch.tensor([value for row in mask for value in row]) if mask else torch.ones_like(entropy_T)
    seq_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    zeros_T = torch.zeros_like(entropy_T)
    x = TokenInputs(
        mask_T=mask_T.double(),
        seq_T=seq_T,
        group_T=seq_T,
        reward_T=zeros_T,
        correct_T=zeros_T,
        group_size_T=zeros_T,
        group_correct_T=zeros_T,
        num_sequences=len(lengths),
        entropy_T=entropy_T,
        topn_logp_TN=zeros_T[:, None].expand(-1, 3),
        is_top1_T=zeros_T,
    )
    _, metrics = CaSP(CaSPParams(quantile=quantile)).direction(zeros_T, x, zeros_T)
    gate_T = metrics["method/casp/gate_rate"].value_T.int()
    return [part.tolist() for part in gate_T.split(lengths.tolist())]


def test_gate_is_per_response_and_strictly_above_the_quantile() -> None:
    """Of six tokens the 0.8-quantile is the second largest itself; of five it lies between the two largest."""
    assert gate([[5.0, 1.0, 2.0, 6.0, 3.0, 4.0], [0.1, 0.5, 0.3, 0.2, 0.4]], 0.8) == [
        [0, 0, 0, 1, 0, 0],
        [0, 1, 0, 0, 0],
    ]


@each_case("entropy", [[[2.0, 1.0, 3.0]], [[1.0, 1.0]], [[0.7]], [[]]])
def test_ends_of_the_gate(entropy: list[list[float]]) -> None:
    assert gate(entropy, 0.0) == [[1] * len(entropy[0])]
    assert gate(entropy, 1.0) == [[0] * len(entropy[0])]


def test_ties_and_single_tokens_are_not_gated() -> None:
    assert gate([[1.0, 1.0, 1.0], [2.0], [], [3.0, 3.0, 1.0, 1.0, 1.0, 1.0]], 0.5) == [
        [0] * 3,
        [0],
        [],
        [1, 1, 0, 0, 0, 0],
    ]
    # Two equal ones at the top set the threshold themselves.
    assert gate([[3.0, 3.0, 1.0]], 0.8) == [[0, 0, 0]]


def test_masked_tokens_are_neither_gated_nor_counted() -> None:
    assert gate([[9.0, 1.0, 2.0, 8.0]], 0.5, mask=[[0, 1, 1, 0]]) == [[0, 0, 1, 0]]
    assert gate([[9.0, 1.0]], 0.0, mask=[[0, 1]]) == [[0, 1]]


@dataclasses.dataclass
class Step:
    """One micro-batch through the head and a recipe: the loss, the gradient on logits, and what they were made of."""

    logits_TV: Tensor
    micro: MicroBatch
    x: TokenInputs
    loss: Tensor
    gradient_TV: Tensor
    metrics: Metrics


def step(make_micro, params: MethodParams | None, topn: int = 4, clip: ClipParams = PAPERS_CLIP) -> Step:
    """GRPO's surrogate with CaSP, or without it when `params` is None; advantages are random, loss is their sum."""
    generator = torch.Generator().manual_seed(3)
    logits_TV = 2.0 * torch.randn(TOKENS, VOCABULARY, dtype=torch.float64, generator=generator)
    target_T = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    # Half of the targets are favourites, for the penalty.
    target_T = torch.where(torch.arange(TOKENS) % 2 == 0, logits_TV.argmax(1), target_T)
    leaf_TV = logits_TV.clone().requires_grad_()
    shard = VocabShard(0, VOCABULARY, None)
    head = token_head(leaf_TV, target_T, shard, temperature=0.9, entropy=True, topn=topn)
    micro = make_micro(Needs(), seed=5)
    noise_T = 0.1 * torch.randn(TOKENS, dtype=torch.float64, generator=generator)
    x = dataclasses.replace(
        micro.inputs,
        logp_T=head.logp_T,
        old_logp_T=head.logp_T.detach() + noise_T,
        entropy_T=head.entropy_T,
        topn_logp_TN=head.topn_logp_TN,
        is_top1_T=head.is_top1_T,
    )
    micro = dataclasses.replace(micro, targets_T=target_T)
    names, tables = ["grpo"], {"clip": clip}
    if params is not None:
        names, tables = ["grpo", "casp"], {"clip": clip, "casp": params}
    recipe = build_recipe(names, tables, reduction=None, constant=1.0, mini_batches=2)
    loss, metrics = recipe.loss(micro, x, Denominators(1.0, 1.0, 1.0), ())
    loss.backward()
    assert leaf_TV.grad is not None
    return Step(logits_TV, micro, x, loss.detach(), leaf_TV.grad, metrics)


@each_case("omega", ["uniform", "softmax"])
@each_case("penalty_on", ["ratio", "advantage"])
@each_case("quantile", [0.0, 0.3, 0.8])
def test_gradient_on_logits_is_the_papers(make_micro, omega: str, penalty_on: str, quantile: float) -> None:
    """-A gamma ((1 - alpha w) e_y + alpha w sum omega_n e_v(n) - pi) / temperature, nothing clipped."""
    params = CaSPParams(alpha=0.4, topn=3, quantile=quantile, lambda_top1=1.3, omega=omega, penalty_on=penalty_on)
    got = step(make_micro, params, clip=ClipParams(low=1.0, high=100.0))
    pi_TV = (got.logits_TV / 0.9).softmax(1)
    expected_TV = torch.zeros_like(pi_TV)
    gated = {i: float(torch.quantile(entropies(got, i), quantile)) for i in range(4) if len(entropies(got, i))}
    for t in range(TOKENS):
        if not got.x.mask_T[t]:
            continue
        entropy = float(-(pi_TV[t] * pi_TV[t].log()).sum())
        w = float(quantile == 0.0 or entropy > gated[int(got.x.seq_T[t])] + 1e-12)
        y, advantage = int(got.micro.targets_T[t]), float(got.micro.advantage_T[t])
        assert got.x.old_logp_T is not None
        gamma = math.exp(float(pi_TV[t, y].log() - got.x.old_logp_T[t]))
        top = pi_TV[t].argsort(descending=True)[:3]
        weights = pi_TV[t, top] / pi_TV[t, top].sum() if omega == "softmax" else torch.ones_like(pi_TV[t, top]) / 3
        direction_V = torch.zeros(VOCABULARY, dtype=torch.float64)
        direction_V[y] = 1.0
        if advantage > 0:
            direction_V = (1 - 0.4 * w) * direction_V
            direction_V[top] += 0.4 * w * weights
        elif w and y == int(pi_TV[t].argmax()):
            gamma *= 1.3
        expected_TV[t] = -advantage * gamma * (direction_V - pi_TV[t]) / 0.9
    torch.testing.assert_close(got.gradient_TV, expected_TV, rtol=1e-12, atol=1e-13)
    assert got.metrics["method/casp/penalised"].value > 0


def entropies(got: Step, sequence: int) -> Tensor:
    assert got.x.entropy_T is not None
    return got.x.entropy_T[(got.x.seq_T == sequence) & (got.x.mask_T > 0)]


def test_value_of_the_ratio_is_gamma(make_micro) -> None:
    """To the bit, though the gradient is another one: loss, ratio and clip are GRPO's."""
    plain = step(make_micro, None)
    smooth = step(make_micro, CaSPParams(alpha=0.7, quantile=0.0, lambda_top1=1.0))
    assert torch.equal(smooth.loss, plain.loss)
    assert {name: smooth.metrics[name] for name in plain.metrics} == dict(plain.metrics)
    assert (smooth.gradient_TV - plain.gradient_TV).abs().max() > 0.01
    logp_T = plain.x.logp_T
    assert logp_T is not None
    method = CaSP(CaSPParams(alpha=0.7, quantile=0.0))
    directed_T, _ = method.direction(logp_T, smooth.x, torch.ones_like(logp_T))
    assert torch.equal(directed_T, logp_T)


@each_case("penalty_on", ["ratio", "advantage"])
@each_case(
    "values",
    [
        {"alpha": 0.0, "lambda_top1": 1.0, "quantile": 0.0},
        {"alpha": 0.0, "lambda_top1": 1.0, "quantile": 0.8, "omega": "softmax"},
        {"alpha": 0.9, "lambda_top1": 1.5, "quantile": 1.0},
    ],
)
def test_identities_with_grpo(make_micro, penalty_on: str, values: dict[str, object]) -> None:
    plain, other = step(make_micro, None), step(make_micro, CaSPParams(penalty_on=penalty_on, **values))
    torch.testing.assert_close(other.loss, plain.loss, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(other.gradient_TV, plain.gradient_TV, rtol=1e-12, atol=1e-15)


def test_more_candidates_than_asked_for(make_micro) -> None:
    params = CaSPParams(alpha=0.5, topn=2, quantile=0.0)
    exact, wide = step(make_micro, params, topn=2), step(make_micro, params, topn=7)
    torch.testing.assert_close(wide.gradient_TV, exact.gradient_TV, rtol=1e-13, atol=1e-15)


@each_case(
    ("gamma", "on_ratio", "on_advantage"),
    [
        (0.70, (0.8, 0.0), (0.88, 0.0)),
        (0.74, (0.814, 0.814), (0.88, 0.0)),
        (0.79, (0.869, 0.869), (0.88, 0.0)),
        (0.85, (0.935, 0.935), (0.935, 0.935)),
        (1.30, (1.43, 1.43), (1.43, 1.43)),
    ],
)
def test_where_the_two_penalties_differ(
    make_micro, gamma: float, on_ratio: tuple[float, float], on_advantage: tuple[float, float]
) -> None:
    """Loss and gradient at A = -1, low 0.2, lambda 1.1: one stops below 0.8 / 1.1 = 0.727, the other below 0.8."""
    assert one_token(make_micro, gamma, "ratio") == pytest.approx(on_ratio, rel=1e-12)
    assert one_token(make_micro, gamma, "advantage") == pytest.approx(on_advantage, rel=1e-12)


def one_token(make_micro, gamma: float, penalty_on: str) -> tuple[float, float]:
    """Loss and its gradient on the log-prob of a token of advantage -1, gated and the policy's favourite."""
    micro = make_micro(Needs(entropy=True, topn=3))
    mask_T = (torch.arange(TOKENS) == 0).double()
    logp_T = torch.full((TOKENS,), -0.5, dtype=torch.float64, requires_grad=True)
    x = dataclasses.replace(
        micro.inputs,
        mask_T=mask_T,
        logp_T=logp_T,
        old_logp_T=logp_T.detach() - math.log(gamma),
        is_top1_T=torch.ones_like(mask_T),
    )
    tables = {"casp": CaSPParams(quantile=0.0, penalty_on=penalty_on)}
    recipe = build_recipe(["grpo", "casp"], tables, reduction=None, constant=1.0, mini_batches=2)
    micro = dataclasses.replace(micro, advantage_T=-torch.ones_like(mask_T), inputs=x)
    loss, _ = recipe.loss(micro, x, Denominators(1.0, 1.0, 1.0), ())
    loss.backward()
    assert logp_T.grad is not None
    return float(loss.detach()), float(logp_T.grad[0])


@each_case("changed", ["advantage", "no advantage", "rank", "gate", "none"])
def test_only_gated_favourites_of_negative_advantage_are_penalised(make_micro, changed: str) -> None:
    x = make_micro(Needs(entropy=True, topn=3)).inputs
    ones_T = torch.ones_like(x.mask_T)
    x = dataclasses.replace(x, mask_T=ones_T, is_top1_T=ones_T * (changed != "rank"))
    adv_T = {"advantage": 1.0, "no advantage": 0.0}.get(changed, -1.0) * ones_T
    quantile = 1.0 if changed == "gate" else 0.0
    on_ratio = CaSP(CaSPParams(quantile=quantile, penalty_on="ratio"))
    on_advantage = CaSP(CaSPParams(quantile=quantile, penalty_on="advantage"))
    strength = 1.1 if changed == "none" else 1.0
    torch.testing.assert_close(on_ratio.log_ratio(0.0 * ones_T, x, adv_T), math.log(strength) * ones_T)
    torch.testing.assert_close(on_advantage.weight(x, adv_T, {})[0], strength * ones_T)
    assert torch.equal(on_ratio.weight(x, adv_T, {})[0], ones_T)
    assert torch.equal(on_advantage.log_ratio(0.3 * ones_T, x, adv_T), 0.3 * ones_T)


def test_entropy_carries_no_gradient(make_micro) -> None:
    micro = make_micro(Needs(entropy=True, topn=3))
    assert micro.inputs.entropy_T is not None and micro.inputs.logp_T is not None
    entropy_T, logp_T = micro.inputs.entropy_T.clone().requires_grad_(), micro.inputs.logp_T.clone().requires_grad_()
    x = dataclasses.replace(micro.inputs, entropy_T=entropy_T, logp_T=logp_T)
    recipe = build_recipe(["grpo", "casp"], {}, reduction=None, constant=1.0, mini_batches=1)
    recipe.loss(micro, x, Denominators(1.0, 1.0, 1.0), ())[0].backward()
    assert logp_T.grad is not None and logp_T.grad.any() and entropy_T.grad is None


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes, backward included."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for value in made if isinstance(made, tuple | list) else [made]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return made


def test_no_tensor_of_candidates_times_vocabulary(make_micro) -> None:
    """More candidates than tokens, so that [N, V] would be larger than the logits, and [T, N, V] more so."""
    candidates, vocabulary = 2 * TOKENS, 3000
    logits_TV = torch.randn(TOKENS, vocabulary, generator=torch.Generator().manual_seed(0), requires_grad=True)
    micro = make_micro(Needs(), dtype=torch.float32)
    params = {"casp": CaSPParams(alpha=0.5, topn=candidates, quantile=0.0)}
    recipe = build_recipe(["grpo", "casp"], params, reduction=None, constant=1.0, mini_batches=1)
    with Largest() as largest:
        shard = VocabShard(0, vocabulary, None)
        head = token_head(logits_TV, micro.targets_T, shard, entropy=True, topn=recipe.needs.topn)
        x = dataclasses.replace(
            micro.inputs,
            logp_T=head.logp_T,
            entropy_T=head.entropy_T,
            topn_logp_TN=head.topn_logp_TN,
            is_top1_T=head.is_top1_T,
        )
        recipe.loss(micro, x, Denominators(1.0, 1.0, 1.0), ())[0].backward()
    assert logits_TV.grad is not None and torch.count_nonzero(logits_TV.grad) > vocabulary
    assert TOKENS * vocabulary <= largest.elements < candidates * vocabulary


def test_the_tracker_sees_what_backward_makes() -> None:
    """The control of the test above: autograd through log_softmax and a gather of copies is caught."""
    logits_TV = torch.randn(3, 50, requires_grad=True)
    with Largest() as largest:
        copies_TNV = logits_TV.log_softmax(1)[:, None].expand(-1, 8, -1)
        copies_TNV.gather(2, torch.zeros(3, 8, 1).long()).sum().backward()
    assert largest.elements == 3 * 8 * 50
