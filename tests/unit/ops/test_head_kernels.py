"""token_head by torch and by the Triton kernels, under Triton's interpreter, against the float64 oracle.

Every test calls a process of its own for that: a process interprets kernels or it does not, from its first import of
Triton on. Tiles are small, so that rows have many, and the sizes of real models are in `tools/bench_head.py`.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import head_kernel_faults as faults
import pytest
import torch
from cases import each_case
from head_cases import Case, observe, oracle
from torch import Tensor

from megasharp.ops.head import Kernels

VOCABULARY = 187
KERNELS: tuple[Kernels, ...] = ("torch", "triton")


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Callable[..., Any]]:
    """Calls a function, at the top level of a file of this folder, where kernels are interpreted."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
            executor.submit(torch.tensor, 0).result()
            yield lambda function, *arguments: executor.submit(function, *arguments).result()


def random_case(tokens: int = 4, padding: int = 5, seed: int = 0, **options: Any) -> Case:
    generator = torch.Generator().manual_seed(seed)
    logits_TVp = 3 * torch.randn(tokens, VOCABULARY + padding, generator=generator)
    logits_TVp[:, VOCABULARY:] = math.nan
    target_T = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    return Case(logits_TVp, target_T, VOCABULARY, **options)


def changed(change: Callable[[Tensor, Tensor], Tensor | None], **options: Any) -> Case:
    """A random case with its logits changed, in place or to what is returned."""
    case = random_case(**options)
    logits_TVp = change(case.logits_TVp, case.target_T)
    return case if logits_TVp is None else replace(case, logits_TVp=logits_TVp)


def peak(logits_TVp: Tensor, target_T: Tensor) -> None:
    logits_TVp[0, target_T[0]] += 1e4
    logits_TVp[1, (target_T[1] + 40) % VOCABULARY] += 1e4


def one_possible(logits_TVp: Tensor, target_T: Tensor) -> None:
    logits_TVp[:, :VOCABULARY] = -math.inf
    logits_TVp[torch.arange(len(target_T)), target_T] = torch.tensor([-3.0, 0.0, 5.0, 1e30])


def many_impossible(logits_TVp: Tensor, target_T: Tensor) -> None:
    kept = logits_TVp[torch.arange(len(target_T)), target_T]
    logits_TVp[:, :150] = -math.inf
    logits_TVp[torch.arange(len(target_T)), target_T] = kept


def tie(logits_TVp: Tensor, target_T: Tensor) -> None:
    logits_TVp[:, :VOCABULARY] = logits_TVp[:, :VOCABULARY].round() / 2
    logits_TVp[0, :VOCABULARY] = 1.0
    logits_TVp[1, [2, 3, 60, 100, 186]] = 20.0
    logits_TVp[2, :VOCABULARY] = 0.0
    logits_TVp[2, ::2] = -0.0


def rising(logits_TVp: Tensor, target_T: Tensor) -> None:
    """Every column is a new maximum: the most work for sums and candidates."""
    logits_TVp[:, :VOCABULARY] = torch.linspace(-40.0, 30.0, VOCABULARY)


def with_gaps(logits_TVp: Tensor, target_T: Tensor) -> Tensor:
    wide = torch.full((len(logits_TVp), 2 * logits_TVp.shape[1]), 7.0)
    wide[:, : logits_TVp.shape[1]] = logits_TVp
    return wide[:, : logits_TVp.shape[1]]


CASES = {
    "random": random_case(),
    **{f"top {n}": random_case(seed=n, topn=n, programs=9) for n in (1, 2, 8)},
    "no candidates, no entropy": random_case(topn=0, entropy=False),
    "no candidates": random_case(topn=0, temperature=2.5),
    "no entropy": random_case(entropy=False, programs=9),
    "every tile its own program": random_case(programs=1000, topn=8),
    "one tile a row": random_case(block=256),
    "no padding": random_case(padding=0, temperature=0.3),
    "whole tiles": replace(random_case(padding=5), valid=160, target_T=torch.tensor([0, 31, 32, 159])),
    "vocabulary below a tile": replace(random_case(), valid=8, topn=8, target_T=torch.tensor([0, 7, 3, 1])),
    "peaked": changed(peak, programs=9),
    "all negative": changed(lambda x, _: -x.abs() - 50.0),
    "large and negative": changed(lambda x, _: x - 1e6),
    "beyond the temperature's range": changed(lambda x, _: x - 1e30, temperature=0.5),
    "one possible token": changed(one_possible, topn=5),
    "one possible token, split": changed(one_possible, topn=5, programs=20),
    "impossible tokens": changed(many_impossible, topn=8, temperature=0.7),
    "ties": changed(tie, topn=6),
    "ties, split": changed(tie, topn=6, programs=20),
    "rising": changed(rising, topn=4),
    "rows with gaps": changed(with_gaps, programs=9),
    "zero tokens": random_case(tokens=0),
    "zero tokens, split": random_case(tokens=0, programs=9),
    "bfloat16": changed(lambda x, _: x.bfloat16(), programs=9),
    "float16": changed(lambda x, _: x.half()),
}


# Cases of what the values are, not of how they lie in memory. For the kernels, whose interpreter is slow, the gradient
# of each other one of them is in place, for the rest it is elsewhere; all other cases are tried both ways.
OF_VALUES = [
    *("top 1", "top 2", "top 8", "peaked", "all negative", "large and negative", "beyond the temperature's range"),
    *("one possible token", "one possible token, split", "impossible tokens", "ties", "ties, split", "rising"),
]
assert CASES.keys() >= set(OF_VALUES)


def ways(name: str, kernels: Kernels) -> tuple[bool, ...]:
    """Whether the gradient overwrites the logits."""
    return (OF_VALUES.index(name) % 2 == 1,) if kernels == "triton" and name in OF_VALUES else (False, True)


# The cases that `make test` tries the kernels on; their interpreter is slow, so the others are in a slice.
INTERPRETED = [
    *("random", "no candidates, no entropy", "vocabulary below a tile", "ties, split", "bfloat16"),
]
OTHERS = [name for name in CASES if name not in INTERPRETED]


@each_case(("kernels", "name"), [*product(["torch"], CASES), *product(["triton"], INTERPRETED)])
def test_equal_to_the_oracle(interpreter: Callable[..., Any], name: str, kernels: Kernels) -> None:
    compare_with_the_oracle(interpreter, name, kernels)


@pytest.mark.long("layouts")
@each_case("name", OTHERS)
def test_kernels_are_equal_to_the_oracle_in_all_other_cases(interpreter: Callable[..., Any], name: str) -> None:
    compare_with_the_oracle(interpreter, name, "triton")


def compare_with_the_oracle(interpreter: Callable[..., Any], name: str, kernels: Kernels) -> None:
    case = CASES[name]
    expected = oracle(case.logits_TVp, case.target_T, case.valid, case.temperature, case.topn)
    wanted = {"logp_T", "normaliser_T"}
    wanted |= {"entropy_T"} if case.entropy else set()
    wanted |= {"topn_logp_TN", "topn_id_TN", "is_top1_T"} if case.topn else set()
    gradient = expected.gradient if case.entropy else without_entropy(case)
    for overwrite in ways(name, kernels):
        observed = interpreter(observe, case, kernels, overwrite)
        assert observed.outputs.keys() == wanted
        for field in wanted:
            torch.testing.assert_close(
                observed.outputs[field], getattr(expected.output, field), rtol=3e-6, atol=3e-6, check_dtype=False
            )
            assert observed.outputs[field].dtype == (torch.int64 if field == "topn_id_TN" else torch.float32)
        assert observed.gradient.dtype == case.logits_TVp.dtype
        tolerance = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[case.logits_TVp.dtype]
        torch.testing.assert_close(observed.gradient, gradient, rtol=tolerance, atol=tolerance, check_dtype=False)
        padding = observed.gradient[:, case.valid :]
        assert torch.equal(padding, torch.zeros_like(padding))


def without_entropy(case: Case) -> Tensor:
    """The oracle's gradient of `loss` when entropy is no part of it."""
    leaf_TV = case.logits_TVp.double().requires_grad_()
    logp_TV = torch.log_softmax(leaf_TV[:, : case.valid] / case.temperature, 1)
    total = torch.cos(torch.arange(len(leaf_TV)).double()) @ logp_TV.gather(1, case.target_T[:, None])[:, 0]
    if case.topn:
        best_TN = logp_TV.topk(case.topn, dim=1).values
        total = total + (torch.cos(torch.arange(best_TN.numel()).double() + 2) * best_TN.flatten()).sum()
    total.backward()
    assert leaf_TV.grad is not None
    return leaf_TV.grad


@each_case("kernels", KERNELS)
def test_incoming_gradients_of_any_strides(interpreter: Callable[..., Any], kernels: Kernels) -> None:
    for strided, plain in interpreter(faults.strided_gradients, random_case(programs=9), kernels):
        assert torch.equal(strided, plain)


@each_case("kernels", KERNELS)
@each_case("used", ["logp_T", "entropy_T", "topn_logp_TN"])
def test_gradient_through_one_output_alone(interpreter: Callable[..., Any], used: str, kernels: Kernels) -> None:
    case = random_case(padding=0)
    gradient = interpreter(faults.through_one_output, case, kernels, used)
    leaf_TV = case.logits_TVp.double().requires_grad_()
    logp_TV = torch.log_softmax(leaf_TV, 1)
    reference = {
        "logp_T": logp_TV.gather(1, case.target_T[:, None]),
        "entropy_T": -(logp_TV.exp() * logp_TV),
        "topn_logp_TN": logp_TV.topk(3, dim=1).values,
    }
    reference[used].sum().backward()
    torch.testing.assert_close(gradient, leaf_TV.grad, rtol=5e-6, atol=5e-6, check_dtype=False)


@each_case("kernels", KERNELS)
def test_what_is_refused(interpreter: Callable[..., Any], kernels: Kernels) -> None:
    found = interpreter(faults.refusals, random_case(), kernels)
    beyond = f"is outside the vocabulary of {VOCABULARY} tokens"
    assert found == {
        "a target below": f"ValueError: target_T[2] = -1 {beyond}",
        "a target of padding": f"ValueError: target_T[2] = {VOCABULARY} {beyond}",
        "a target beyond int32": f"ValueError: target_T[2] = {2**40} {beyond}",
        "a leaf overwritten": "ValueError: overwrite_logits: these logits are a leaf, whose values the caller keeps",
        "a second backward": "RuntimeError: token_head(overwrite_logits=True) has no second backward: "
        "the logits are overwritten",
        "another op's saved logits": "RuntimeError: one of the variables needed for gradient computation has been "
        "modified by an inplace operation",
        "a second derivative": "RuntimeError: token_head has no second derivative: leave create_graph=True out",
    }


@each_case("kernels", KERNELS)
def test_the_gradient_lies_where_the_logits_were(interpreter: Callable[..., Any], kernels: Kernels) -> None:
    in_place, gradient = interpreter(faults.overwritten, random_case(programs=9), kernels)
    assert torch.equal(in_place, gradient)


@each_case("kernels", KERNELS)
def test_not_a_number_is_not_hidden(interpreter: Callable[..., Any], kernels: Kernels) -> None:
    case = random_case(padding=0, programs=9)
    case.logits_TVp[2, 100] = math.nan
    case.logits_TVp[3, :] = math.nan
    observed = interpreter(observe, case, kernels, False)
    for field in ("logp_T", "entropy_T", "normaliser_T"):
        assert observed.outputs[field].isnan().tolist() == [False, False, True, True]
    ids_TN = observed.outputs["topn_id_TN"]
    assert ((ids_TN >= 0) & (ids_TN < VOCABULARY)).all()


def test_offsets_beyond_int32(interpreter: Callable[..., Any]) -> None:
    """Two rows that lie 2^31 elements apart; what lies between them is never touched, and so takes no memory."""
    (first, second), plain = interpreter(faults.far_rows, random_case(tokens=2, padding=0))
    assert torch.equal(first, plain[0]) and torch.equal(second, plain[1])


def test_what_the_kernels_cannot_read(interpreter: Callable[..., Any]) -> None:
    found = interpreter(faults.unreadable, random_case())
    assert found == [
        'kernels="triton": the kernels read float32, bfloat16 and float16, not torch.float64',
        'kernels="triton": topn = 9: the kernels keep at most 8 candidates',
        'kernels="triton": each token\'s logits must be contiguous',
    ]


def test_splits_cover_every_row_within_the_grid(interpreter: Callable[..., Any]) -> None:
    for tokens in (1, 7, 2111, 2112, 8192, 70_000, 3_000_000):
        for columns in (0, 1, 1023, 1024, 18_992, 151_936, 2**30):
            splits, span = interpreter(faults.split_of, tokens, columns)
            assert span % 1024 == 0 and splits * span >= columns and (splits - 1) * span < max(columns, 1)
            assert splits <= 65_535 and max(tokens, splits * span) <= 2**31 - 1
            assert splits == 1 or tokens * (splits - 1) < 2112
