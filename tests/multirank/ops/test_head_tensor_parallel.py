"""token_head with the vocabulary over 2, 4 and 8 ranks equals token_head on one: values and gradients.

By torch, and by the Triton kernels under their interpreter.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from dataclasses import dataclass, fields, replace

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from torch import Tensor

from megasharp.ops.head import HeadOutput, Kernels, VocabShard, token_head

# Ranks, and the sizes of groups that they form one after the other.
WORLDS: dict[Kernels, tuple[int, tuple[int, ...]]] = {"torch": (4, (2, 4)), "triton": (8, (2, 4, 8))}


@dataclass(frozen=True)
class Case:
    """Logits over the real vocabulary, and the padded size that is divided among the ranks."""

    logits_TV: Tensor
    target_T: Tensor
    padded: int
    topn: int = 3
    temperature: float = 1.0


@dataclass(frozen=True)
class Observed:
    """One rank's outputs by name, the gradient of its columns, and how often it called each collective."""

    outputs: dict[str, Tensor]
    gradient_TVp: Tensor
    collectives: dict[str, int]


def random_case(vocabulary: int, padded: int, tokens: int = 5, **options: float) -> Case:
    generator = torch.Generator().manual_seed(vocabulary)
    logits_TV = 3 * torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64)
    return Case(logits_TV, torch.randint(0, vocabulary, (tokens,), generator=generator), padded, **options)


def peaked_case() -> Case:
    case = random_case(13, 16)
    case.logits_TV[torch.arange(5), torch.tensor([0, 3, 8, 12, 4])] += 1e4
    return case


def tied_case() -> Case:
    """Equal logits on every shard, and one row where all candidates are impossible but one."""
    case = random_case(13, 16, topn=6)
    case.logits_TV[:3] = case.logits_TV[:3].round() / 4
    case.logits_TV[3] = 1.0
    case.logits_TV[4] = -math.inf
    case.logits_TV[4, 7] = 2.0
    case.target_T[3:] = torch.tensor([0, 7])
    return case


CASES = {
    "divisible": random_case(16, 16),
    "padded": random_case(13, 16, temperature=0.7),
    "a shard of padding only": random_case(9, 16, topn=8),
    "more candidates than a shard holds": random_case(13, 16, topn=13),
    "float32": Case(random_case(13, 16).logits_TV.float(), random_case(13, 16).target_T, 16),
    "peaked": peaked_case(),
    "ties": tied_case(),
    "no top-N": random_case(13, 16, topn=0),
    "zero tokens": random_case(13, 16, tokens=0),
}


def compute(case: Case, logits_TVp: Tensor, shard: VocabShard, kernels: Kernels = "torch") -> tuple[HeadOutput, Tensor]:
    leaf_TVp = logits_TVp.clone().requires_grad_()
    head = token_head(
        leaf_TVp,
        case.target_T,
        shard,
        temperature=case.temperature,
        entropy=True,
        entropy_gradient=True,
        topn=case.topn,
        kernels=kernels,
    )
    loss = torch.zeros(())
    for salt, value in enumerate((head.logp_T, head.entropy_T, head.topn_logp_TN)):
        if value is not None:
            weight = torch.cos(torch.arange(value.numel(), dtype=value.dtype) + salt).reshape(value.shape)
            loss = loss + (weight * value).nan_to_num(neginf=0.0).sum()
    loss.backward()
    assert leaf_TVp.grad is not None
    return head, leaf_TVp.grad


def named(head: HeadOutput) -> dict[str, Tensor]:
    values = {field.name: getattr(head, field.name) for field in fields(head)}
    return {name: value.detach() for name, value in values.items() if value is not None}


def count_collectives() -> Counter[str]:
    counter: Counter[str] = Counter()

    def counted(name: str) -> None:
        original = getattr(dist, name)

        def call(*args: object, **options: object) -> object:
            counter[name] += 1
            return original(*args, **options)

        setattr(dist, name, call)

    for name in ("all_reduce", "all_gather", "broadcast", "all_gather_into_tensor", "reduce_scatter"):
        counted(name)
    return counter


def shard_of(case: Case, group: dist.ProcessGroup) -> tuple[Tensor, VocabShard]:
    tp, rank = dist.get_world_size(group), dist.get_rank(group)
    tokens, vocabulary = case.logits_TV.shape
    columns = case.padded // tp
    padding = case.logits_TV.new_full((tokens, case.padded - vocabulary), 5e4)
    logits_TVp = torch.cat([case.logits_TV, padding], dim=1)[:, rank * columns : (rank + 1) * columns]
    valid = min(max(vocabulary - rank * columns, 0), columns)
    # Some callers know the vocabulary's size, others have the group find it.
    known = case.logits_TV.shape[1] if dist.get_world_size(group) > 2 else None
    return logits_TVp, VocabShard(rank * columns, valid, group, known)


def my_group(tp: int) -> dist.ProcessGroup:
    groups = [dist.new_group(list(range(start, start + tp))) for start in range(0, dist.get_world_size(), tp)]
    return groups[dist.get_rank() // tp]


# The interpreter is slow, and eight ranks share the cores.
INTERPRETED = ("padded", "a shard of padding only", "ties", "no top-N", "zero tokens")


def cases(kernels: Kernels) -> dict[str, Case]:
    if kernels == "torch":
        return CASES
    return {name: able_to_read(CASES[name], kernels) for name in INTERPRETED}


def able_to_read(case: Case, kernels: Kernels) -> Case:
    """The same numbers as the kernels have them: float32, and eight candidates."""
    return replace(case, logits_TV=case.logits_TV.float(), topn=min(case.topn, 8)) if kernels == "triton" else case


def interpret_kernels() -> None:
    """Have Triton imported anew: whether it interprets is settled at its import, which Megatron's brought about."""
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and not name.startswith("triton._C")]:
        del sys.modules[name]
    os.environ["TRITON_INTERPRET"] = "1"
    from megasharp.ops.head.kernel_launch import TUNING

    TUNING.forward_block = TUNING.backward_block = 4
    TUNING.programs = 9


def observe_cases(rank: int, world: int, kernels: Kernels) -> dict[tuple[int, str], Observed]:
    if kernels == "triton":
        interpret_kernels()
    counter = count_collectives()
    observed = {}
    for tp in WORLDS[kernels][1]:
        group = my_group(tp)
        for name, case in cases(kernels).items():
            counter.clear()
            head, gradient_TVp = compute(case, *shard_of(case, group), kernels)
            observed[tp, name] = Observed(named(head), gradient_TVp, dict(counter))
    return observed


def refusals(rank: int, world: int, vocabulary: int, padded: int) -> list[str]:
    """The error of each impossible request; a rank that did not raise would leave the others waiting."""
    case = random_case(vocabulary, padded)
    logits_TVp, shard = shard_of(case, dist.group.WORLD)
    messages = []
    for target, topn in ((vocabulary, 0), (-1, 0), (padded - 1, 0), (0, vocabulary + 1)):
        target_T = case.target_T.clone()
        target_T[2] = target
        try:
            token_head(logits_TVp, target_T, shard, topn=topn)
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.fixture(scope="module", params=["torch", pytest.param("triton", marks=pytest.mark.long("layouts"))])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    chosen: Kernels = request.param
    return chosen


@pytest.fixture(scope="module")
def observed(kernels: Kernels) -> list[dict[tuple[int, str], Observed]]:
    """By rank, every case at every size."""
    return run_ranks(WORLDS[kernels][0], observe_cases, kernels)


def expected_of(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    head, gradient_TV = compute(case, case.logits_TV, VocabShard(0, case.logits_TV.shape[1], None))
    return named(head), gradient_TV


def test_equal_to_one_rank(
    observed: list[dict[tuple[int, str], Observed]], kernels: Kernels, subtests: pytest.Subtests
) -> None:
    for tp in WORLDS[kernels][1]:
        for name, case in cases(kernels).items():
            with subtests.test(tp=tp, case=name):
                assert_equal_to_one_rank(case, [rank[tp, name] for rank in observed], tp)


def assert_equal_to_one_rank(case: Case, found: list[Observed], tp: int) -> None:
    """Every group of `tp` ranks has the outputs and the gradient of one rank with the whole vocabulary."""
    outputs, gradient_TV = expected_of(case)
    tolerance = 2e-6 if case.logits_TV.dtype == torch.float32 else 1e-12
    for first in range(0, len(found), tp):
        ranks = found[first : first + tp]
        for rank in ranks:
            assert rank.outputs.keys() == outputs.keys()
            for key, value in outputs.items():
                torch.testing.assert_close(rank.outputs[key], value, rtol=tolerance, atol=tolerance)
                assert torch.equal(rank.outputs[key], ranks[0].outputs[key])
        gradient_TVp = torch.cat([rank.gradient_TVp for rank in ranks], dim=1)
        vocabulary = case.logits_TV.shape[1]
        torch.testing.assert_close(gradient_TVp[:, :vocabulary], gradient_TV, rtol=tolerance, atol=tolerance)
        assert torch.equal(gradient_TVp[:, vocabulary:], torch.zeros_like(gradient_TVp[:, vocabulary:]))


def test_communication_is_two_reductions_and_one_gather(
    observed: list[dict[tuple[int, str], Observed]], kernels: Kernels
) -> None:
    for rank in observed:
        for tp in WORLDS[kernels][1]:
            assert rank[tp, "padded"].collectives == {"all_reduce": 2, "all_gather": 1}, tp
            assert rank[tp, "no top-N"].collectives == {"all_reduce": 2}, tp


@pytest.mark.parametrize(("vocabulary", "padded"), [(13, 16), (5, 12)], ids=["padded", "a shard of padding only"])
def test_every_rank_refuses_alike(vocabulary: int, padded: int) -> None:
    results = run_ranks(2, refusals, vocabulary, padded)
    assert results[0] == results[1]
    told = f"is outside the vocabulary of {vocabulary} tokens"
    assert results[0] == [
        *(f"target_T[2] = {bad} {told}" for bad in (vocabulary, -1, padded - 1)),
        f"topn = {vocabulary + 1} exceeds the vocabulary of {vocabulary}",
    ]
