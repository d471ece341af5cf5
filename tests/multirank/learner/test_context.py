"""What context-parallel ranks send each other: keys and values inside attention, and the head's results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from policies import CPU, GatheredRanks, packed, ragged_sequences, recipe, save_model, settings
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "learner"))

import stand_in_flash
from plain_attention import inputs, segments_of, visible, written_out

from megasharp.common.layout import ParallelLayout
from megasharp.convert.hf_folder import read_config
from megasharp.learner.attention import attend
from megasharp.learner.context_parallel import ContextCut, GroupExchange
from megasharp.learner.learner import POLICY, Rank
from megasharp.learner.output_head import TokenCut, whole_head
from megasharp.learner.packed import packed_rows
from megasharp.learner.ranks.all_ranks import RanksLearner
from megasharp.ops.head import HeadOutput
from megasharp.planner.formulas import context_bytes_per_row

RUNS = [(5, -1), (7, 0), (1, 0), (1, -1), (12, 3), (6, -1)]
ROWS = 32


def parts(rank: int, world: int) -> list[list[Tensor]]:
    """Of this rank's rows: outputs and gradients of queries, keys and values; by blocks, then by the kernels' path."""
    cut, exchange = ContextCut(rank, world, ROWS), GroupExchange(dist.group.WORLD)
    found = []
    for kernels in (False, True):
        query, key, value, cotangent = (x.detach()[cut.held()].requires_grad_() for x in inputs(ROWS))
        tables = torch.empty(len(query), 1)
        with pytest.MonkeyPatch.context() as patch:
            if kernels:
                stand_in_flash.use_stand_in(patch)
            rows = packed_rows(segments_of(RUNS), tables, tables, cut, exchange)
            out = attend(query, key, value, rows, None, None)
            found.append([out.detach(), *torch.autograd.grad(out, (query, key, value), cotangent.detach())])
    return found


def test_attention_is_the_whole_rows() -> None:
    query, key, value, cotangent = inputs(ROWS)
    out = written_out(query, key, value, visible(segments_of(RUNS), None))
    expected = [out.detach(), *torch.autograd.grad(out, (query, key, value), cotangent.detach())]
    for rank, ways in enumerate(run_ranks(2, parts)):
        held = ContextCut(rank, 2, ROWS).held()
        for got in ways:
            for mine, whole in zip(got, expected, strict=True):
                torch.testing.assert_close(mine, whole[held], rtol=1e-12, atol=1e-12)


def received(rank: int, world: int, folder: str, recompute: str, modules: tuple[str, ...]) -> tuple[int, int]:
    """Bytes of keys and values (and of their gradients) from the other rank in one step, and the step's packed rows."""
    layout, chosen = ParallelLayout(cp=world), recipe(("grpo",))
    own = settings(folder, layout, chosen.needs, recompute=recompute, recompute_modules=modules)
    learner, counted = RanksLearner(GatheredRanks(Rank({POLICY: own}, CPU))), [0]
    gather, scatter_sum = GroupExchange.gather, GroupExchange.scatter_sum

    def count(exchange: GroupExchange, method: Callable[[GroupExchange, Tensor], Tensor], rows: Tensor) -> Tensor:
        result = method(exchange, rows)
        # The head's results have no heads.
        if rows.dim() == 3:
            counted[0] += max(rows.nbytes, result.nbytes) * (world - 1) // world
        return result

    batch = packed(ragged_sequences(), layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupExchange, "gather", partialmethod(count, gather))
        patch.setattr(GroupExchange, "scatter_sum", partialmethod(count, scatter_sum))
        learner.step(batch, chosen)
    learner.close()
    micros = (micro for mini in batch.mini_batches for share in mini.per_rank for micro in share)
    return counted[0], sum(micro.tokens_P.numel() for micro in micros)


@pytest.mark.parametrize(
    ("recompute", "modules", "times"),
    [
        ("none", ("core_attn",), 2),
        ("full", ("core_attn",), 3),
        ("selective", ("core_attn",), 3),
        ("selective", ("mlp",), 2),
    ],
)
def test_bytes_between_ranks_are_the_plans(
    tmp_path: Path, recompute: str, modules: tuple[str, ...], times: int
) -> None:
    folder = save_model(tmp_path, "qwen3-tied")
    each = context_bytes_per_row(read_config(Path(folder))[2], 1, 2, 4)
    for count, rows in run_ranks(2, received, folder, recompute, modules):
        assert count == times * rows * each


# Of five tokens the first rank predicts two, the second three.
OWN = ([0, 3], [1, 2, 4])
VALUES = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
IDS = torch.tensor([[7, 1], [2, 151_935], [3, 4], [0, 5], [6, 8]])


def joined_head(rank: int, world: int) -> tuple[HeadOutput, Tensor, Tensor]:
    """The whole head; the gradients of this rank's log-probs and entropies for a loss of all tokens."""
    own = torch.tensor(OWN[rank])
    logp, entropy = (x[own].requires_grad_() for x in (-VALUES, 2 * VALUES))
    candidates = torch.stack([-VALUES, -2 * VALUES], dim=1)[own]
    head = HeadOutput(logp, entropy, candidates, IDS[own], (VALUES[own] > 0.25).float(), 3 * VALUES[own])
    places = torch.tensor([0, 3, 4, 1, 5])
    whole = whole_head(head, TokenCut(own, places, 3), GroupExchange(dist.group.WORLD))
    assert whole.topn_logp_TN is not None and not whole.topn_logp_TN.requires_grad and whole.entropy_T is not None
    loss = (whole.logp_T * torch.arange(1.0, 6.0)).sum() + whole.entropy_T.square().sum()
    gradients = torch.autograd.grad(loss, (logp, entropy))
    detached = HeadOutput(*(None if x is None else x.detach() for x in vars_of(whole)))
    return detached, *gradients


def vars_of(head: HeadOutput) -> tuple[Tensor | None, ...]:
    return head.logp_T, head.entropy_T, head.topn_logp_TN, head.topn_id_TN, head.is_top1_T, head.normaliser_T


def test_every_rank_has_the_heads_results_and_the_gradients_of_its_own() -> None:
    for rank, (whole, of_logp, of_entropy) in enumerate(run_ranks(2, joined_head)):
        expected = (
            -VALUES,
            2 * VALUES,
            torch.stack([-VALUES, -2 * VALUES], 1),
            IDS,
            (VALUES > 0.25).float(),
            3 * VALUES,
        )
        for got, values in zip(vars_of(whole), expected, strict=True):
            assert got is not None and torch.equal(got, values) and got.dtype == values.dtype
        own = torch.tensor(OWN[rank])
        assert torch.equal(of_logp, torch.arange(1.0, 6.0)[own])
        assert torch.equal(of_entropy, 4 * VALUES[own])
