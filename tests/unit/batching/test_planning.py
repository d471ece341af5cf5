"""Planning against brute force on tiny steps, and its invariants on many random ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from cases import each_case

from megasharp.batching.planning import (
    Capacity,
    Draft,
    Flops,
    Sizes,
    even_shares,
    fill,
    imbalance,
    loads,
    measure,
    plan,
)

# Attention costs as much as the rest at 100 positions: short sequences then differ as long ones do in a real model.
FLOPS = Flops(100.0, ((None, 1.0),))


def random_sizes(rng: random.Random, groups: int, members: int, prompt: int, response: int) -> Sizes:
    """Groups of up to `members` responses of 0 to `response` tokens."""
    counts = [rng.randint(1, members) for _ in range(groups)]
    return measure(
        group=[g for g, count in enumerate(counts) for _ in range(count)],
        prompts=[rng.randint(1, prompt) for _ in counts],
        responses=[rng.randint(0, response) for count in counts for _ in range(count)],
        flops=FLOPS,
    )


def check(ranks: list[list[Draft]], sizes: Sizes, budget: int, multiple: int) -> None:
    """Every response once, the budget kept unless alone, equal counts, sums that are what the members say."""
    drafts = [draft for rank in ranks for draft in rank]
    assert sorted(i for draft in drafts for i in draft.responses()) == list(range(len(sizes.group)))
    assert len({len(rank) for rank in ranks}) == 1 and len(ranks[0]) % multiple == 0
    for draft in drafts:
        assert all(members and {sizes.group[i] for i in members} == {g} for g, members in draft.members.items())
        tokens = sum(sizes.prompt_tokens[g] for g in draft.members) + sum(sizes.tokens[i] for i in draft.responses())
        flops = sum(sizes.prompt_flops[g] for g in draft.members) + sum(sizes.flops[i] for i in draft.responses())
        assert draft.tokens == tokens and draft.flops == pytest.approx(flops, abs=1e-6)
        assert draft.tokens <= budget or len(draft.responses()) == 1


@each_case("seed", range(60))
def test_invariants(seed: int) -> None:
    rng = random.Random(seed)
    sizes = random_sizes(rng, rng.randint(1, 30), rng.randint(1, 12), rng.choice([1, 10, 60]), rng.choice([3, 40, 90]))
    dp, multiple, budget = rng.choice([1, 2, 3, 8]), rng.choice([1, 1, 4]), rng.choice([20, 60, 100, 400, 10_000])
    ranks = plan(sizes, dp, budget, multiple)
    check(ranks, sizes, budget, multiple)
    assert len(ranks) == dp
    assert plan(sizes, dp, budget, multiple) == ranks


def partitions(items: list[int], blocks: int) -> Iterator[list[list[int]]]:
    """All ways to cut `items` into at most `blocks` non-empty parts."""
    if not items:
        yield []
        return
    first, *rest = items
    for smaller in partitions(rest, blocks):
        for i in range(len(smaller)):
            yield [*smaller[:i], [first, *smaller[i]], *smaller[i + 1 :]]
        if len(smaller) < blocks:
            yield [[first], *smaller]


def draft_of(block: list[int], sizes: Sizes) -> Draft:
    draft = Draft()
    for i in block:
        draft.add([i], sizes)
    return draft


def optimum(sizes: Sizes, dp: int, budget: int) -> tuple[int, float]:
    """The fewest micro-batches of a rank, and with so many the smallest largest rank, of all plans there are."""
    responses = list(range(len(sizes.group)))
    kept = [
        drafts
        for drafts in ([draft_of(block, sizes) for block in blocks] for blocks in partitions(responses, len(responses)))
        if all(draft.tokens <= budget or len(draft.responses()) == 1 for draft in drafts)
    ]
    count = min(-(-len(drafts) // dp) for drafts in kept)
    flops = [[draft.flops for draft in drafts] for drafts in kept if len(drafts) <= count * dp]
    return count, min(smallest_largest_rank(costs + [0.0] * (count * dp - len(costs)), dp) for costs in flops)


def smallest_largest_rank(costs: list[float], dp: int) -> float:
    """Of every way to give each of `dp` (1 or 2) ranks as many."""
    halves = itertools.combinations(costs, len(costs) // dp)
    return min(max(sum(half), sum(costs) - sum(half)) for half in halves)


@each_case("dp", [1, 2])
@each_case("budget", [30, 70, 1000])
def test_against_brute_force(dp: int, budget: int) -> None:
    """On up to six responses: hardly ever a micro-batch more than needed, and ranks close to the best."""
    rng = random.Random(dp * budget)
    more = 0
    excess = []
    for _ in range(25):
        sizes = random_sizes(rng, 2, 3, 12, 30)
        ranks = plan(sizes, dp, budget, 1)
        count, best = optimum(sizes, dp, budget)
        assert count <= len(ranks[0]) <= count + 1
        more += len(ranks[0]) - count
        if len(ranks[0]) == count:
            excess.append(max(loads(ranks)) / best - 1)
    assert more <= 2
    assert min(excess) > -1e-9 and max(excess) < 0.2 and sum(excess) / len(excess) < 0.02


@each_case("dp", [16, 32])
@each_case("seed", range(4))
def test_full_micro_batches_get_room_where_ranks_would_be_uneven(seed: int, dp: int) -> None:
    """A long tail, a few responses a rank: with the fewest micro-batches ranks would be 6 to 30 % apart."""
    rng = random.Random(seed)
    responses = [min(24_576, int(rng.lognormvariate(7.6, 1.0)) + 1) for _ in range(384)]
    prompts = [rng.randint(50, 500) for _ in range(48)]
    sizes = measure([i // 8 for i in range(384)], prompts, responses, Flops(1.0, ((None, 1e-5),)))
    ranks = plan(sizes, dp, 8192, 1)
    check(ranks, sizes, 8192, 1)
    assert imbalance(loads(ranks)) <= 0.05


@each_case(("dp", "giant"), [(4, 32_768), (4, 65_536), (8, 32_768), (8, 65_536)])
def test_a_response_beyond_the_budget_leaves_its_rank_less_of_the_others(dp: int, giant: int) -> None:
    rng = random.Random(7)
    responses = [giant, *(rng.randint(1, 500) for _ in range(4095))]
    prompts = [rng.randint(50, 500) for _ in range(256)]
    sizes = measure([i // 16 for i in range(4096)], prompts, responses, Flops(1.0, ((None, 1e-5),)))
    ranks = plan(sizes, dp, 16_384, 1)
    check(ranks, sizes, 16_384, 1)
    alone = sizes.flops[0] + sizes.prompt_flops[0]
    values = loads(ranks)
    assert max(values) <= 1.05 * max(alone, sum(values) / dp)


@each_case("seed", range(10))
def test_even_shares_have_equal_counts_and_better_sums_than_dealing(seed: int) -> None:
    rng = random.Random(seed)
    parts, rows = rng.choice([2, 3, 8]), rng.choice([1, 2, 5, 20])
    costs = [rng.expovariate(1.0) for _ in range(parts * rows)]
    shares = even_shares(costs, parts)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    assert {len(share) for share in shares} == {rows}
    dealt = sorted(costs, reverse=True)
    sums = [sum(costs[i] for i in share) for share in shares]
    assert max(sums) <= max(sum(dealt[first::parts]) for first in range(parts)) + 1e-12
    for share, lower in itertools.product(shares, range(rows)):
        # The k-th of every list is one of the k-th row's neighbours by cost.
        assert dealt[lower * parts] >= costs[share[lower]] >= dealt[lower * parts + parts - 1]


def test_differencing_finds_what_longest_first_misses() -> None:
    """Dealt out, and longest first with equal counts: 8 + 5 + 4 and 7 + 6 + 1, or worse."""
    costs = [8, 7, 6, 5, 4, 1]
    shares = even_shares(costs, 2)
    assert sorted(sum(costs[i] for i in share) for share in shares) == [15, 16]


def test_a_group_is_cut_only_where_it_does_not_fit() -> None:
    sizes = measure([0] * 4 + [1] * 2, [10, 10], [20, 20, 20, 20, 30, 30], FLOPS)
    drafts = fill(sizes, Capacity(100))
    assert drafts is not None
    assert [draft.members for draft in drafts] == [{0: [0, 1, 2, 3]}, {1: [4, 5]}]
    # What is left of the first goes on in a new one, and the second joins it there.
    drafts = fill(sizes, Capacity(70))
    assert drafts is not None
    assert [draft.members for draft in drafts] == [{0: [0, 1, 2]}, {0: [3], 1: [4]}, {1: [5]}]


def test_a_long_prompt_is_not_copied_for_a_short_response() -> None:
    sizes = measure([0, 1, 1, 1], [50, 50], [40, 25, 25, 25], FLOPS)
    drafts = fill(sizes, Capacity(180))
    assert drafts is not None
    assert [draft.members for draft in drafts] == [{1: [1, 2, 3]}, {0: [0]}]


def test_ranks_are_even_where_groups_are_as_many_as_ranks() -> None:
    """One group of eight is much longer: groups are taken apart, so that no rank is left with most."""
    rng = random.Random(7)
    responses = [rng.randint(100, 200) * (1 + 7 * (group == 0)) for group in range(8) for _ in range(16)]
    sizes = measure([i // 16 for i in range(128)], [20] * 8, responses, FLOPS)
    ranks = plan(sizes, 8, 100_000, 1)
    check(ranks, sizes, 100_000, 1)
    assert imbalance(loads(ranks)) < 0.03


@each_case("dp", [2, 8, 64])
def test_micro_batches_of_one_number_cost_alike(dp: int) -> None:
    """Interleaved stages of all data-parallel ranks then reach the same places together."""
    rng = random.Random(dp)
    sizes = random_sizes(rng, 400, 16, 100, 1000)
    ranks = plan(sizes, dp, 8192, 1)
    assert len(ranks[0]) > 2
    for number in range(len(ranks[0]) - 1):
        assert imbalance([rank[number].flops for rank in ranks]) < 0.25


def test_no_rank_has_everything_where_prompts_are_nearly_all_there_is() -> None:
    """One-token answers to prompts of very different lengths: as even as whole prompts can be, a group to each rank."""
    rng = random.Random(5)
    prompts = [rng.randint(50, 500) for _ in range(16)]
    sizes = measure([i // 16 for i in range(256)], prompts, [1] * 256, FLOPS)
    ranks = plan(sizes, 16, 32_768, 1)
    assert imbalance(loads(ranks)) == pytest.approx(imbalance(sizes.prompt_flops))


def test_a_group_larger_than_many_micro_batches_is_planned_in_its_size_and_not_its_square() -> None:
    """Lengths read while one group is cut, counted: each a few times, however many micro-batches there are."""
    read = 0

    class Counted(list[int]):
        def __getitem__(self, at: int) -> int:  # type: ignore[override]
            nonlocal read
            read += 1
            return super().__getitem__(at)

    plain = measure([0] * 1024, [10], [600 + i % 7 for i in range(1024)], FLOPS)
    counted = Sizes(plain.group, plain.prompt_tokens, plain.prompt_flops, Counted(plain.tokens), plain.flops)
    drafts = fill(counted, Capacity(1000))
    assert drafts is not None and len(drafts) == 1024
    assert read < 40 * 1024
