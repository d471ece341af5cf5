"""Routing replay's part of a packed step: every row has its token's experts, and what cannot be replayed is refused."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from cases import each_case
from torch import Tensor
from train_sequences import ROUTING, layout, micros, random_sequences, routed, sequence, with_experts

from megasharp.batching.delivery import opened, shares_of
from megasharp.batching.packing import pack
from megasharp.batching.share import Share
from megasharp.common.errors import UserError
from megasharp.common.records import MicroBatch, Routing
from megasharp.learner.without_advantage import split

ANYWHERE = ROUTING.anywhere(1)


def check_rows(micro: MicroBatch, *, without: Tensor | None = None) -> None:
    """Rows have their tokens' experts; padding, and rows of the tokens `without` any, the first ones."""
    found = micro.experts_PLK
    assert found is not None and found.dtype is torch.int16
    expected = routed(micro.tokens_P)
    if without is not None:
        expected[torch.isin(micro.tokens_P, without)] = ANYWHERE
    expected[micro.rows - micro.padding :] = ANYWHERE
    assert torch.equal(found, expected)


@each_case("share_prompts", [True, False])
@each_case(("dp", "mini_batches", "row_multiple", "groups"), [(1, 1, 1, 7), (2, 1, 4, 7), (3, 2, 2, 7), (4, 1, 16, 1)])
def test_every_row_has_its_tokens_experts(
    dp: int, mini_batches: int, row_multiple: int, groups: int, share_prompts: bool
) -> None:
    """As a rank sees it after pickling: of empty responses and micro-batches too."""
    sequences = with_experts(random_sequences(dp, groups))
    cut = layout(
        dp=dp, mini_batches=mini_batches, row_multiple=row_multiple, share_prompts=share_prompts, routing=ROUTING
    )
    batch = pack(sequences, cut, seed=0)
    for share in shares_of(batch):
        assert isinstance(share, Share)
        for micro in (micro for mini in opened(pickle.loads(pickle.dumps(share, 5)), draws=True) for micro in mini):
            check_rows(micro)
            check_rows(replace(micro))
    silent = [replace(one, advantage_T=one.advantage_T * (place % 2)) for place, one in enumerate(sequences)]
    for micro in micros(pack(silent, cut, seed=0)):
        for part in split(micro, 8):
            if part is not None:
                check_rows(part)


def test_a_shared_prompt_has_the_first_responses_experts() -> None:
    first, second = with_experts([sequence(0, index, [1, 2, 3], [10 + index, 20 + index]) for index in (0, 1)])
    second = replace(second, experts=second.experts + 5)
    (micro,) = micros(pack([first, second], layout(routing=ROUTING), seed=0))
    assert first.experts is not None and second.experts is not None and micro.experts_PLK is not None
    assert micro.tokens_P.tolist() == [1, 2, 3, 10, 11]
    assert torch.equal(micro.experts_PLK, torch.cat([first.experts[:4], second.experts[3:4]]))


def test_tokens_that_were_not_read_go_where_the_one_before_them_went() -> None:
    """The last one of every response, and the answer that an environment gave at the end."""
    (whole,) = with_experts([sequence(0, 0, [1, 2, 3], [10, 20, 30, 40])])
    assert whole.experts is not None
    for read in (6, 5, 4, 3):
        short = replace(whole, experts=whole.experts[:read])
        (micro,) = micros(pack([short], layout(routing=ROUTING), seed=0))
        assert micro.experts_PLK is not None
        assert torch.equal(micro.experts_PLK, whole.experts[torch.arange(micro.rows).clamp(max=read - 1)])


def test_without_replay_experts_are_left_out() -> None:
    batch = pack(with_experts(random_sequences(0)), layout(), seed=0)
    plain = pack(random_sequences(0), layout(), seed=0)
    replayed = pack(with_experts(random_sequences(0)), layout(routing=ROUTING), seed=0)
    assert all(micro.experts_PLK is None for micro in micros(batch))
    (one,), (other,), (larger,) = (
        [share.bytes for share in shares_of(each) if isinstance(share, Share)] for each in (batch, plain, replayed)
    )
    ids = sum(share.packed.ids.numel() for share in shares_of(plain) if isinstance(share, Share))
    assert one == other == larger - ids * ROUTING.bytes_per_token


def test_a_response_of_which_nothing_trains_needs_no_experts() -> None:
    """An aborted one, first of its prompt: the prompt's rows are those of the next response that has some."""
    lost, whole = sequence(0, 0, [1, 2, 3], [10, 11, 12], masked=3), sequence(0, 1, [1, 2, 3], [13, 14])
    nothing = sequence(1, 0, [4, 5], [])
    (micro,) = micros(pack([lost, *with_experts([whole]), nothing], layout(routing=ROUTING), seed=0))
    assert micro.tokens_P.tolist() == [1, 2, 3, 10, 11, 13, 4, 5]
    check_rows(micro, without=torch.tensor([10, 11, 4, 5]))


def test_what_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(UserError, match=r"no experts were recorded of response 1 of group g0; sample with engines"):
        pack([*with_experts([sequence(0, 0, [1], [2])]), sequence(0, 1, [1], [2])], layout(routing=ROUTING), seed=0)
    with pytest.raises(UserError, match=r"are \[2, 3\] int16 a token, where this model's are \[2, 3\] uint8"):
        pack(with_experts([sequence(0, 0, [1], [2])]), layout(routing=Routing(2, 3, 256)), seed=0)
