"""Which response goes into which micro-batch of which rank, decided from lengths alone.

Estimated work of packed rows: linear in rows, and in each layer linear in the positions that a row attends to.

How a step is cut: ranks, token budget, and what the packed length must divide by.

What responses and prompts add to a micro-batch: tokens, which the budget counts, and FLOPs, which ranks share.

Filling micro-batches to a capacity: best fit decreasing, with groups cut where they do not fit whole.

Micro-batches to data-parallel ranks, equally many to each, so that the ranks' sums come out alike.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megasharp.common.records import ParallelLayout


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of a forward pass; a backward pass costs twice as much in every part, so shares are the same.

    `per_row`: each packed row, whatever it sees. `attention`: pairs (window, FLOPs) of groups of layers, the FLOPs for
    each row and each position that it attends to; a row sees `window` positions at most, its own included (None: all
    before it). That selective recomputation does attention's part once more is not counted. `per_token`: each response
    token, where the output layer computes logits of those alone.

    Example: `Flops(2 * 0.5e9, ((None, 4 * 24 * 896),))`, a model of 24 layers with 0.5e9 weights.
    """

    per_row: float
    attention: tuple[tuple[int | None, float], ...] = ()
    per_token: float = 0.0

    def of_runs(self, before: Tensor, rows: Tensor) -> Tensor:
        """FLOPs of runs of `rows` rows that stand behind `before` others each, without their tokens' logits.

        Both int64 of one shape, float64 out.
        """
        total = self.per_row * rows.to(torch.float64)
        for window, per_position in self.attention:
            total += per_position * _positions(before, rows, window).to(torch.float64)
        return total


# Without a model: every row costs the same.
ROWS_ALONE = Flops(1.0)


def _positions(before: Tensor, rows: Tensor, window: int | None) -> Tensor:
    """The sum over a run's rows j = 1 .. rows of min(before + j, window)."""
    growing = rows if window is None else (window - before).clamp(min=0).minimum(rows)
    seen = growing * before + growing * (growing + 1) // 2
    return seen if window is None else seen + (rows - growing) * window


# On a CPU packed rows come in steps of this many for each tensor-parallel rank: oneDNN keeps code and scratch memory
# for every matrix shape, and so there are few. Measured: with free lengths resident memory grew by 20 MB a step, with
# this by none after the first steps.
CPU_ROWS = 128
# On a GPU nothing is kept per shape. Tensor cores want multiples of 8 rows in bfloat16, and Transformer Engine refuses
# others than multiples of 16 in FP8 (of 8 in one of the two products), on each rank.
GPU_ROWS = 16


@dataclass(frozen=True, slots=True)
class PackLayout:
    """How a step is cut. Token counts include prompts; `row_multiple` is what the packed length must divide by.

    A rank's number of micro-batches is a multiple of `micro_batch_multiple`, which interleaved pipelines ask for.
    `constant` is the horizon of `token_sum_over_constant`; `share_prompts` keeps one copy of a group's prompt. `flops`
    says what rows cost, by which ranks are balanced.
    """

    dp: int
    micro_batch_tokens: int
    mini_batches: int
    row_multiple: int
    constant: float
    share_prompts: bool = True
    micro_batch_multiple: int = 1
    flops: Flops = ROWS_ALONE


def row_multiple(layout: ParallelLayout, device: str) -> int:
    """What the packed length must divide by on a device of this type ("cpu", "cuda").

    Sequence parallelism cuts the rows over `tp` ranks, context parallelism into 2 * cp pieces before that (zigzag), and
    what a rank multiplies must itself be a multiple of `CPU_ROWS` or `GPU_ROWS`, both even.
    """
    return (CPU_ROWS if device == "cpu" else GPU_ROWS) * layout.tp * layout.cp


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one optimizer step's responses, numbered from 0, and of the prompts that they share.

    `group[i]` is the prompt of response i. A micro-batch with responses of a group has one copy of its prompt:
    `prompt_tokens`, `prompt_flops` by group; `tokens`, `flops` by response, its prompt left out.
    """

    group: list[int]
    prompt_tokens: list[int]
    prompt_flops: list[float]
    tokens: list[int]
    flops: list[float]


def measure(group: Sequence[int], prompts: Sequence[int], responses: Sequence[int], flops: Flops) -> Sizes:
    """Sizes from lengths in tokens: `prompts` by group, `responses` by response."""
    prompt = torch.tensor(prompts, dtype=torch.int64)
    before = prompt[torch.tensor(group, dtype=torch.int64)]
    tokens = torch.tensor(responses, dtype=torch.int64)
    # The last token of a response predicts nothing, so it has no row.
    rows = (tokens - 1).clamp(min=0)
    return Sizes(
        list(group),
        list(prompts),
        flops.of_runs(torch.zeros_like(prompt), prompt).tolist(),
        list(responses),
        (flops.of_runs(before, rows) + flops.per_token * tokens).tolist(),
    )


@dataclass(slots=True)
class Draft:
    """A micro-batch under planning: responses by group, with their tokens and FLOPs, copies of prompts included."""

    members: dict[int, list[int]] = field(default_factory=dict)
    tokens: int = 0
    flops: float = 0.0

    def add(self, responses: Sequence[int], sizes: Sizes) -> None:
        """Put responses of one group in."""
        group = sizes.group[responses[0]]
        if group not in self.members:
            self.members[group] = []
            self.tokens += sizes.prompt_tokens[group]
            self.flops += sizes.prompt_flops[group]
        self.members[group].extend(responses)
        for i in responses:
            self.tokens += sizes.tokens[i]
            self.flops += sizes.flops[i]

    def remove(self, response: int, sizes: Sizes) -> None:
        """Take a response out, and its prompt with the last of its group."""
        group = sizes.group[response]
        self.tokens, self.flops = self.exchanged(response, None, sizes)
        self.members[group].remove(response)
        if not self.members[group]:
            del self.members[group]

    def exchanged(self, out: int | None, into: int | None, sizes: Sizes) -> tuple[int, float]:
        """Tokens and FLOPs if `out`, which is here, went and `into` came."""
        tokens, flops = self.tokens, self.flops
        if out is not None:
            group = sizes.group[out]
            tokens, flops = tokens - sizes.tokens[out], flops - sizes.flops[out]
            if len(self.members[group]) == 1 and (into is None or sizes.group[into] != group):
                tokens, flops = tokens - sizes.prompt_tokens[group], flops - sizes.prompt_flops[group]
        if into is not None:
            group = sizes.group[into]
            tokens, flops = tokens + sizes.tokens[into], flops + sizes.flops[into]
            if group not in self.members:
                tokens, flops = tokens + sizes.prompt_tokens[group], flops + sizes.prompt_flops[group]
        return tokens, flops

    def responses(self) -> list[int]:
        """All of them."""
        return [i for members in self.members.values() for i in members]


# Rooms are shares of the capacity; what fits exactly must not be missed by rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a micro-batch may hold. A single response that is larger is alone in its micro-batch."""

    tokens: int
    flops: float = math.inf

    def share(self, tokens: float, flops: float) -> float:
        """The part of the capacity that this takes: of tokens or of FLOPs, whichever is more."""
        return max(tokens / self.tokens, flops / self.flops)

    def holds(self, tokens: float, flops: float) -> bool:
        """Whether this much may be together."""
        return tokens <= self.tokens and flops <= self.flops


def fill(sizes: Sizes, capacity: Capacity, most: float = math.inf) -> list[Draft] | None:
    """Few micro-batches within the capacity that hold every response once; None where `most` of them do not do.

    Groups come longest first, whole into the fullest micro-batch that has room (best fit decreasing: D. S. Johnson et
    al., SIAM J. Computing 3(4), 1974). A group that fits nowhere is cut: as much of it as fits goes into the emptiest,
    unless the copy of the prompt would be larger than what it is for, then into new ones. So where groups are about as
    large as micro-batches, one goes on where the other ended.
    """
    return _filled(_Filling(sizes, capacity, most))


def spread(sizes: Sizes, capacity: Capacity, count: int, *, whole: bool = True) -> list[Draft] | None:
    """`count` micro-batches within the capacity that hold every response once; None where they do not do.

    As `fill`, but groups go into the emptiest (longest first: R. L. Graham, SIAM J. Applied Mathematics 17(2), 1969),
    so that every micro-batch has long and short ones. Without `whole` every response goes its own way, which makes more
    copies of prompts.
    """
    filling = _Spreading(sizes, capacity, count)
    if whole:
        return _filled(filling)
    order = sorted(range(len(sizes.group)), key=lambda i: (-sizes.tokens[i] - sizes.prompt_tokens[sizes.group[i]], i))
    return filling.drafts if all(filling.take(sizes.group[i], [i]) for i in order) else None


def _filled(filling: _Filling) -> list[Draft] | None:
    sizes = filling.sizes
    groups: list[list[int]] = [[] for _ in sizes.prompt_tokens]
    for i in sorted(range(len(sizes.group)), key=lambda i: (-sizes.tokens[i], i)):
        groups[sizes.group[i]].append(i)
    lengths = [p + sum([sizes.tokens[i] for i in group]) for p, group in zip(sizes.prompt_tokens, groups, strict=True)]
    done = all(filling.take(g, groups[g]) for g in sorted(range(len(groups)), key=lambda g: (-lengths[g], g)))
    return filling.drafts if done else None


class _Filling:
    """Micro-batches so far, and their rooms (shares of the capacity) in ascending order."""

    def __init__(self, sizes: Sizes, capacity: Capacity, most: float) -> None:
        self.sizes = sizes
        self.drafts: list[Draft] = []
        self._capacity = capacity
        self._most = most
        self._rooms: list[tuple[float, int]] = []

    def take(self, group: int, rest: list[int]) -> bool:
        """Place a group's responses, which come longest first; False where micro-batches ran out."""
        sizes, rest = self.sizes, list(rest)
        tokens = sizes.prompt_tokens[group] + sum([sizes.tokens[i] for i in rest])
        flops = sizes.prompt_flops[group] + sum([sizes.flops[i] for i in rest])
        while rest:
            at = self._room_for(tokens, flops)
            if at is not None:
                self._put(at, rest)
                return True
            chosen = self._part(group, rest) if self._rooms else []
            if not chosen:
                if len(self.drafts) >= self._most:
                    return False
                self._open()
                chosen = self._part(group, rest)
            responses = [rest[place] for place in chosen]
            self._put(-1, responses)
            if len(responses) == len(rest):
                return True
            tokens -= sum([sizes.tokens[i] for i in responses])
            flops -= sum([sizes.flops[i] for i in responses])
            for place in reversed(chosen):
                del rest[place]
        return True

    def _open(self) -> None:
        self._rooms.append((1.0, len(self.drafts)))
        self.drafts.append(Draft())

    def _room_for(self, tokens: int, flops: float) -> int | None:
        """Where in the rooms the fullest micro-batch stands that this fits into whole."""
        first = bisect_left(self._rooms, (self._capacity.share(tokens, flops) - _ROUNDING, 0))
        for at in range(first, len(self._rooms)):
            if self._fits(at, tokens, flops):
                return at
        return None

    def _fits(self, at: int, tokens: int, flops: float) -> bool:
        draft = self.drafts[self._rooms[at][1]]
        return self._capacity.holds(draft.tokens + tokens, draft.flops + flops)

    def _part(self, group: int, rest: list[int]) -> list[int]:
        """What should go into the emptiest micro-batch, as places in `rest`: the longest responses first that fit.

        Of one group the longer response has the more FLOPs too, so what is too large for the room comes first.
        """
        sizes, capacity, draft = self.sizes, self._capacity, self.drafts[self._rooms[-1][1]]
        if draft.members and len(rest) == 1:
            return []
        tokens, flops, prompt = sizes.tokens, sizes.flops, sizes.prompt_tokens[group]
        room_tokens = whole_room = capacity.tokens - draft.tokens - prompt
        room_flops = capacity.flops - draft.flops - sizes.prompt_flops[group]
        chosen: list[int] = []
        at = 0
        while at < len(rest):
            i = rest[at]
            if tokens[i] > room_tokens or flops[i] > room_flops:
                if tokens[rest[-1]] > room_tokens or flops[rest[-1]] > room_flops:
                    break
                # A large group must not be gone through for each of its micro-batches.
                at = bisect_left(rest, -room_tokens, at, key=lambda i: -tokens[i])
                at = bisect_left(rest, -room_flops, at, key=lambda i: -flops[i])
                i = rest[at]
            chosen.append(at)
            room_tokens -= tokens[i]
            room_flops -= flops[i]
            at += 1
        if not draft.members:
            return chosen or [0]
        return chosen if whole_room - room_tokens >= prompt else []

    def _put(self, at: int, responses: Sequence[int]) -> None:
        number = self._rooms.pop(at)[1]
        draft = self.drafts[number]
        draft.add(responses, self.sizes)
        insort(self._rooms, (1.0 - self._capacity.share(draft.tokens, draft.flops), number))


class _Spreading(_Filling):
    """All micro-batches from the start, the emptiest one next."""

    def __init__(self, sizes: Sizes, capacity: Capacity, count: int) -> None:
        super().__init__(sizes, capacity, count)
        for _ in range(count):
            self._open()

    def _room_for(self, tokens: int, flops: float) -> int | None:
        last = len(self._rooms) - 1
        return last if self._fits(last, tokens, flops) else None


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
