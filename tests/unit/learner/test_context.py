"""A micro-batch cut over context-parallel ranks: each rank's part of attention, and which tokens are whose.

What ranks send each other is `tests/multirank/learner/test_context.py`'s; here every rank is given what it would get.
"""

from __future__ import annotations

import pytest
import stand_in_flash
import torch
from cases import each_case
from plain_attention import inputs, segments_of, visible, written_out
from train_sequences import ROUTING, with_experts

from megasharp.batching.packing import PackLayout, pack
from megasharp.common.records import MicroBatch, Sequence
from megasharp.learner.attention import attend
from megasharp.learner.context_parallel import ContextCut
from megasharp.learner.output_head import rank_share
from megasharp.learner.packed import packed_rows

# Prompts of 5 and 1 rows with two and one responses, runs that share nothing, and padding: 48 rows.
RUNS = [(5, -1), (7, 0), (1, 0), (1, -1), (12, 3), (9, -1), (1, -1), (3, -1), (9, -1)]
ROWS = 48


@each_case("size", [1, 2, 3, 4])
def test_every_row_is_somebodys_and_work_is_even(size: int) -> None:
    cuts = [ContextCut(rank, size, ROWS) for rank in range(size)]
    joined = torch.cat([cut.held() for cut in cuts])
    assert joined[cuts[0].places()].tolist() == list(range(ROWS))
    # One causal run: what a row costs is how many rows it sees.
    assert len({int((cut.held() + 1).sum()) for cut in cuts}) == 1


@each_case("way", ["blocks", "kernels"])
@each_case(
    ("window", "response_window"),
    [(None, None), (1, None), (3, None), (8, None), (17, None), (None, 1), (None, 4), (None, 9)],
)
@each_case("size", [2, 3, 4])
def test_the_ranks_parts_are_the_whole(
    way: str, window: int | None, response_window: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs row by row; gradients as the sum of what each rank has for them."""
    query, key, value, cotangent = inputs(ROWS)
    expected = written_out(query, key, value, visible(segments_of(RUNS), window, response_window))
    if way == "kernels":
        stand_in_flash.use_stand_in(monkeypatch)
    cuts = [ContextCut(rank, size, ROWS) for rank in range(size)]
    joined = torch.cat([cut.held() for cut in cuts])
    tables = torch.empty(ROWS // size, 1)
    parts = [
        attend(
            query[cut.held()],
            key[joined],
            value[joined],
            packed_rows(segments_of(RUNS), tables, tables, cut, response_window=response_window),
            window,
            None,
        )
        for cut in cuts
    ]
    out = torch.cat(parts)[cuts[0].places()]
    gradients = (torch.autograd.grad(x, (query, key, value), cotangent.detach()) for x in (out, expected))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    for got, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(got, plain, rtol=1e-12, atol=1e-12)


def a_micro_batch() -> MicroBatch:
    def sequence(number: int, length: int) -> Sequence:
        return Sequence(
            group_id=str(number // 2), index=number % 2, group_size=2, group_correct=1, seed=number,
            tokens=torch.arange(100 * number, 100 * number + 3 + length), prompt_length=3, reward=1.0, correct=True,
            advantage_T=torch.ones(length, dtype=torch.float64), mask_T=torch.ones(length),
            sampler_logp_T=torch.zeros(length), policy_logp_T=torch.zeros(length),
        )  # fmt: skip

    sequences = [sequence(number, length) for number, length in enumerate((4, 1, 9, 6))]
    cut = PackLayout(1, 1000, 1, row_multiple=8, constant=1.0, routing=ROUTING)
    batch = pack(with_experts(sequences), cut, seed=0)
    return batch.mini_batches[0].per_rank[0][0]


@each_case("size", [1, 2, 4])
def test_every_token_is_predicted_by_the_rank_that_holds_its_row(size: int) -> None:
    micro = a_micro_batch()
    shares = [rank_share(micro, rank, size) for rank in range(size)]
    if size == 1:
        assert shares[0].rows_T is micro.rows_T and shares[0].tokens is None
        assert micro.experts_PLK is not None and torch.equal(shares[0].experts, micro.experts_PLK)
        return
    assert torch.cat([share.tokens.own for share in shares if share.tokens]).sort().values.tolist() == [*range(20)]
    sent = torch.zeros(size * shares[0].tokens.most, dtype=torch.int64)
    for rank, share in enumerate(shares):
        assert share.cut is not None and share.tokens is not None
        # The row of this rank is the packed row that the micro-batch names.
        assert share.cut.held()[share.rows_T].tolist() == micro.rows_T[share.tokens.own].tolist()
        assert share.tokens_L.tolist() == micro.tokens_P[share.cut.held()].tolist()
        assert share.experts is not None and micro.experts_PLK is not None
        assert torch.equal(share.experts, micro.experts_PLK[share.cut.held()])
        assert share.own(micro.targets_T).tolist() == share.targets_T.tolist()
        sent[rank * share.tokens.most :][: len(share.targets_T)] = share.targets_T
        assert sent.dtype == torch.int64 and share.tokens.most >= len(share.targets_T)
    assert sent[shares[0].tokens.places_T].tolist() == micro.targets_T.tolist()
