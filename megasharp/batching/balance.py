"""Micro-batches to data-parallel ranks, equally many to each, so that the ranks' sums come out alike."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from megasharp.batching.sizes import Draft, Sizes

# Ranks whose FLOPs are within this share of the mean are even enough.
TOLERANCE = 0.005
# How many of the most promising exchanges are worked out, and between the largest rank and how many small ones.
_CANDIDATES = 8
_PARTNERS = 3


def even_shares(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Numbers of `costs` in `parts` lists of equal length whose sums are close; the k-th ones of all lists cost alike.

    The largest differencing method (Karmarkar and Karp, 1982) with equal counts (balanced LDM; Michiels, Korst, Aarts
    and van Leeuwen, STACS 2003): by cost, each `parts` neighbours are a row, one for each list; then the two rows with
    the largest spread are added, largest to smallest, until one row of sums is left. `parts` divides the number of
    costs. A list is in the rows' order: from the largest cost to the smallest.
    """
    assert costs and len(costs) % parts == 0
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    rows = [[(costs[i], [i]) for i in order[first : first + parts]] for first in range(0, len(order), parts)]
    # The number tells rows of equal spread apart, so that lists are never compared by chance.
    heap = [(row[-1][0] - row[0][0], number, row) for number, row in enumerate(rows)]
    heapq.heapify(heap)
    for number in range(len(heap), 2 * len(heap) - 1):
        (_, _, wide), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        row = [(a + b, left + right) for (a, left), (b, right) in zip(wide, reversed(other), strict=True)]
        row.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (row[-1][0] - row[0][0], number, row))
    place = {i: position for position, i in enumerate(order)}
    return [sorted(chosen, key=place.__getitem__) for _, chosen in heap[0][2]]


def exchange(ranks: Sequence[list[Draft]], sizes: Sizes, budget: int) -> None:
    """Move or swap single responses between the largest rank and small ones while that makes the largest smaller.

    Prompts count as they are copied. No micro-batch grows beyond `budget` tokens by it. In place.
    """
    loads = [sum(draft.flops for draft in rank) for rank in ranks]
    mean = sum(loads) / len(loads)
    for _ in range(2 * len(ranks)):
        order = sorted(range(len(ranks)), key=lambda rank: (loads[rank], rank))
        heavy = order[-1]
        if loads[heavy] <= mean * (1.0 + TOLERANCE):
            return
        for light in order[: min(_PARTNERS, len(ranks) - 1)]:
            loads_after = _best_exchange(ranks[heavy], ranks[light], loads[heavy], loads[light], sizes, budget)
            if loads_after is not None:
                loads[heavy], loads[light] = loads_after
                break
        else:
            return


def swap(ranks: Sequence[list[Draft]]) -> None:
    """Swap whole micro-batches between the largest rank and small ones while that makes the largest smaller.

    What one response beyond the budget weighs is made up for by emptier micro-batches of its rank. In place.
    """
    loads = [sum(draft.flops for draft in rank) for rank in ranks]
    mean = sum(loads) / len(loads)
    for _ in range(len(ranks[0]) + 2 * len(ranks)):
        order = sorted(range(len(ranks)), key=lambda rank: (loads[rank], rank))
        heavy = order[-1]
        if loads[heavy] <= mean * (1.0 + TOLERANCE):
            return
        for light in order[: min(_PARTNERS, len(ranks) - 1)]:
            mine, theirs = _pair(ranks[heavy], ranks[light], (loads[heavy] - loads[light]) / 2)
            moved = ranks[heavy][mine].flops - ranks[light][theirs].flops
            if moved > 0 and loads[light] + moved < loads[heavy]:
                ranks[heavy][mine], ranks[light][theirs] = ranks[light][theirs], ranks[heavy][mine]
                loads[heavy], loads[light] = loads[heavy] - moved, loads[light] + moved
                break
        else:
            return


def _pair(heavy: list[Draft], light: list[Draft], wanted: float) -> tuple[int, int]:
    """The places of a micro-batch of each whose FLOPs differ by about `wanted`."""
    order = sorted(range(len(light)), key=lambda j: light[j].flops)
    flops = [light[j].flops for j in order]
    found = []
    for i, draft in enumerate(heavy):
        at = bisect_left(flops, draft.flops - wanted)
        found += [(abs(draft.flops - flops[k] - wanted), i, order[k]) for k in (at - 1, at) if 0 <= k < len(flops)]
    return min(found)[1:]


# A response with its own FLOPs, and the micro-batch where it is; -1 stands for none.
_Place = tuple[float, int, Draft]


def _best_exchange(
    heavy: list[Draft], light: list[Draft], large: float, small: float, sizes: Sizes, budget: int
) -> tuple[float, float] | None:
    """Carry out the exchange that leaves the smaller maximum; returns both ranks' FLOPs after it, None without one."""
    best: tuple[float, float, float, _Place, _Place] | None = None
    for out, back in _candidates(heavy, light, (large - small) / 2, sizes):
        leaving, coming = out[1], back[1] if back[1] >= 0 else None
        tokens_heavy, flops_heavy = out[2].exchanged(leaving, coming, sizes)
        tokens_light, flops_light = back[2].exchanged(coming, leaving, sizes)
        if max(tokens_light, tokens_heavy if coming is not None else 0) > budget:
            continue
        after = large + flops_heavy - out[2].flops, small + flops_light - back[2].flops
        if max(after) < (large if best is None else best[0]):
            best = max(after), *after, out, back
    if best is None:
        return None
    _, large, small, (_, leaving, source), (_, response, target) = best
    source.remove(leaving, sizes)
    if response >= 0:
        target.remove(response, sizes)
        source.add([response], sizes)
    target.add([leaving], sizes)
    return large, small


def _candidates(heavy: list[Draft], light: list[Draft], wanted: float, sizes: Sizes) -> Iterator[tuple[_Place, _Place]]:
    """Pairs whose FLOPs differ by about `wanted`: a response of the heavy rank, and one of the light rank or none."""
    theirs = sorted(((sizes.flops[i], i, draft) for draft in light for i in draft.responses()), key=lambda p: p[:2])
    emptiest = min(light, key=lambda draft: draft.tokens)
    theirs.insert(0, (0.0, -1, emptiest))
    flops = [place[0] for place in theirs]
    found: list[tuple[float, int, int, _Place, _Place]] = []
    for draft in heavy:
        for i in draft.responses():
            at = bisect_left(flops, sizes.flops[i] - wanted)
            for place in theirs[max(0, at - 1) : at + 1]:
                miss = abs(sizes.flops[i] - place[0] - wanted)
                found.append((miss, i, place[1], (sizes.flops[i], i, draft), place))
    for _, _, _, out, back in heapq.nsmallest(_CANDIDATES, found, key=lambda pair: pair[:3]):
        yield out, back
