"""Which response goes into which micro-batch of which rank, decided from lengths alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megasharp.batching.balance import even_shares, exchange, swap
from megasharp.batching.filling import Capacity, fill, spread
from megasharp.batching.sizes import Draft, Sizes

# How much more FLOPs than expected a micro-batch may have where all are filled alike, and where one is after the other.
_SPREAD, _FILLED = 1.02, 1.04
_MOST_LOST = 1.5
# Ranks whose largest is within this share of the mean are even; above the other, more micro-batches are worth a try.
_EVEN, _UNEVEN = 0.02, 0.05
_MORE = 2


def plan(sizes: Sizes, dp: int, budget: int, multiple: int) -> list[list[Draft]]:
    """Each rank's micro-batches: equally many, a multiple of `multiple`, from the most expensive one to the cheapest.

    1. As few micro-batches as the token budget allows, in whole rows of `dp * multiple`.
    2. So many micro-batches, filled again to equal FLOPs within the budget (Coffman, Garey and Johnson's MULTIFIT,
       1978: bin packing with a smaller capacity), unless they are too full for that.
    3. Neighbours by FLOPs go to different ranks, paired by differences; so ranks are even, and their k-th micro-batches
       cost alike.
    4. What is left of the largest rank's excess is exchanged, response by response.
    5. Where ranks are still uneven (a rank has a few responses only), 2 to 4 again within the token budget alone, with
       groups whole and taken apart; above 5 % also with few full micro-batches, whole ones of which change ranks (one
       has a response beyond the budget). What makes the largest rank smallest stays.
    6. Where they are more than 5 % uneven, and no single response is why, up to two more micro-batches a rank (times
       `multiple`) leave the room that full ones lack.

    Nothing is drawn: equal sizes give equal plans.
    """
    packed = fill(sizes, Capacity(budget))
    assert packed is not None
    row = dp * multiple
    least = math.ceil(len(packed) / row) * row
    ranks = _planned(sizes, packed, least, dp, budget)
    for count in range(least + row, least + (_MORE + 1) * row, row):
        if not _can_be_more_even(ranks, sizes):
            break
        ranks = min(ranks, _planned(sizes, packed, count, dp, budget), key=lambda plan: max(loads(plan)))
    return ranks


def _can_be_more_even(ranks: list[list[Draft]], sizes: Sizes) -> bool:
    values = loads(ranks)
    alone = max(own + sizes.prompt_flops[group] for own, group in zip(sizes.flops, sizes.group, strict=True))
    return max(values) > (1.0 + _UNEVEN) * max(sum(values) / len(values), alone)


def _planned(sizes: Sizes, packed: list[Draft], count: int, dp: int, budget: int) -> list[list[Draft]]:
    """Steps 2 to 5, for `count` micro-batches in all."""
    ranks = _shared_out(_even(sizes, packed, count, budget), count, dp, sizes, budget)
    if imbalance(loads(ranks)) <= _EVEN:
        return ranks
    # Where no prompt is shared both are the same.
    ways = (True, False) if len(set(sizes.group)) < len(sizes.group) else (True,)
    others = [spread(sizes, Capacity(budget), count, whole=whole) for whole in ways]
    plans = [ranks, *(_shared_out(drafts, count, dp, sizes, budget) for drafts in others if drafts is not None)]
    best = min(plans, key=lambda plan: max(loads(plan)))
    if imbalance(loads(best)) <= _UNEVEN or all(draft.tokens <= budget for draft in packed):
        return best
    # Few full micro-batches and some without anything, which can make up for a response beyond the budget.
    full = fill(sizes, Capacity(budget)) or []
    return min(best, _shared_out(full, count, dp, sizes, budget, emptied=True), key=lambda plan: max(loads(plan)))


def loads(ranks: list[list[Draft]]) -> list[float]:
    """Each rank's FLOPs."""
    return [sum(draft.flops for draft in rank) for rank in ranks]


def imbalance(values: Sequence[float]) -> float:
    """By how much the largest is above the mean, as a share of the mean; 0 where nothing is to do."""
    total = sum(values)
    return max(values) * len(values) / total - 1.0 if total else 0.0


def _shared_out(
    drafts: list[Draft], count: int, dp: int, sizes: Sizes, budget: int, emptied: bool = False
) -> list[list[Draft]]:
    drafts = drafts + [Draft() for _ in range(count - len(drafts))]
    ranks = [[drafts[number] for number in share] for share in even_shares([draft.flops for draft in drafts], dp)]
    if emptied:
        swap(ranks)
    exchange(ranks, sizes, budget)
    return ranks


def _even(sizes: Sizes, packed: list[Draft], count: int, budget: int) -> list[Draft]:
    """At most `count` micro-batches whose FLOPs are alike, as far as the budget lets them; else as many as `packed`."""
    mean = sum(draft.flops for draft in packed) / count
    # What is lost where the budget is filled is lost at smaller capacities, too.
    lost = min(_MOST_LOST, len(packed) * budget / max(1, sum(draft.tokens for draft in packed)))
    drafts = spread(sizes, Capacity(budget, mean * lost * _SPREAD), count)
    drafts = drafts or fill(sizes, Capacity(budget, mean * lost * _FILLED), count)
    # Not `packed` itself: plans change their drafts, and there may be another.
    return drafts or fill(sizes, Capacity(budget)) or []
