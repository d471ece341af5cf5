"""Decide from lengths alone: each response into a micro-batch, each micro-batch to a data-parallel rank.

`Flops` says what packed rows cost, `measure` turns lengths into `Sizes`, and a `Draft` is a micro-batch under planning.
`plan` is the entry and names the steps; below it come its parts in the order of use. `fill` and `spread` pack responses
into micro-batches (bin packing, with groups cut where they do not fit whole). `even_shares` deals these out to ranks,
equally many to each. Then whole micro-batches or single responses change ranks until the largest rank is near the mean.

`packing` builds the tensors of what is decided here. Nothing is drawn: equal sizes give equal plans.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of a forward pass; a backward pass costs twice as much in every part, so shares are the same.

    Linear in rows, and in each layer linear in the positions that a row attends to. `per_row`: each packed row,
    whatever it sees. `attention`: pairs (window, FLOPs) of groups of layers, the FLOPs for each row and each position
    that it attends to; a row sees `window` positions at most, its own included (None: all before it). That selective
    recomputation does attention's part once more is not counted. `per_token`: each response token, where the output
    layer computes logits of those alone. `response_window`: a row behind others sees those and so many of its own run.

    Example: `Flops(2 * 0.5e9, ((None, 4 * 24 * 896),))`, a model of 24 layers with 0.5e9 weights.
    """

    per_row: float
    attention: tuple[tuple[int | None, float], ...] = ()
    per_token: float = 0.0
    response_window: int | None = None

    def of_runs(self, before: Tensor, rows: Tensor) -> Tensor:
        """Return the FLOPs of runs of `rows` rows that stand behind `before` others each, without their tokens' logits.

        Both int64 of one shape, float64 out.
        """
        total = self.per_row * rows.to(torch.float64)
        for window, per_position in self.attention:
            # The sum over a run's rows j = 1 .. rows of min(before + j, window): first it grows by one a row, then
            # every row sees a full window.
            growing = rows if window is None else (window - before).clamp(min=0).minimum(rows)
            seen = growing * before + growing * (growing + 1) // 2
            if window is not None:
                seen = seen + (rows - growing) * window
            if self.response_window is not None:
                hidden = (rows - self.response_window).clamp(min=0)
                seen = seen - torch.where(before > 0, hidden * (hidden + 1) // 2, 0)
            total += per_position * seen.to(torch.float64)
        return total


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
    """Return the sizes of responses from lengths in tokens: `prompts` by group, `group` and `responses` by response."""
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
        """Put responses of one group in, and its prompt with the first of them."""
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
        """Return tokens and FLOPs as they would be without `out`, a response of this draft, and with `into`."""
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
        """List the responses, group by group."""
        return [i for members in self.members.values() for i in members]


# The capacity in FLOPs over the expected FLOPs of a micro-batch: where all are filled alike, and one after the other.
_SPREAD, _FILLED = 1.02, 1.04
_MOST_LOST = 1.5
# Up to the first excess over the mean ranks are even; above the second, more micro-batches are worth a try, so many.
_EVEN, _UNEVEN = 0.02, 0.05
_MORE = 2


def plan(sizes: Sizes, dp: int, budget: int, multiple: int) -> list[list[Draft]]:
    """Plan each rank's micro-batches: equally many, a multiple of `multiple`, from the most expensive to the cheapest.

    1. Fill as few micro-batches as the token budget allows; round their number up to a multiple of `dp * multiple`.
    2. Fill that number again to equal FLOPs within the budget (Coffman, Garey and Johnson's MULTIFIT, 1978: bin packing
       with a smaller capacity), unless they are too full for that.
    3. Deal neighbours by FLOPs to different ranks, paired by differences: ranks come out even, and their k-th
       micro-batches cost alike.
    4. Exchange what is left of the largest rank's excess, response by response.
    5. Where ranks are still uneven (a rank has a few responses only), repeat 2 to 4 within the token budget alone, with
       groups whole and taken apart. Above 5 %, if a response is beyond the budget, try few full micro-batches too,
       whole ones of which change ranks. Keep the plan whose largest rank is smallest.
    6. Where ranks are more than 5 % uneven, and no single response is why, try up to two more micro-batches a rank
       (times `multiple`): they leave the room that full ones lack.

    `budget` counts tokens, prompts included; a response that is larger is alone in its micro-batch. Ranks that have
    less to do get empty micro-batches.
    """
    packed = fill(sizes, Capacity(budget))
    assert packed is not None
    row = dp * multiple
    least = math.ceil(len(packed) / row) * row
    ranks = _plan_count(sizes, packed, least, dp, budget)
    # No rank can be smaller than the largest response with its prompt.
    alone = max(own + sizes.prompt_flops[group] for own, group in zip(sizes.flops, sizes.group, strict=True))
    for count in range(least + row, least + (_MORE + 1) * row, row):
        values = loads(ranks)
        if max(values) <= (1.0 + _UNEVEN) * max(sum(values) / len(values), alone):
            break
        ranks = min(ranks, _plan_count(sizes, packed, count, dp, budget), key=lambda plan: max(loads(plan)))
    return ranks


def _plan_count(sizes: Sizes, packed: list[Draft], count: int, dp: int, budget: int) -> list[list[Draft]]:
    """Carry out steps 2 to 5 of `plan` for `count` micro-batches in all."""
    # The share of a full budget that packing leaves unused is lost at smaller capacities too.
    lost = min(_MOST_LOST, len(packed) * budget / max(1, sum(draft.tokens for draft in packed)))
    mean = sum(draft.flops for draft in packed) / count
    drafts = spread(sizes, Capacity(budget, mean * lost * _SPREAD), count)
    drafts = drafts or fill(sizes, Capacity(budget, mean * lost * _FILLED), count)
    # Not `packed` itself: plans change their drafts, and there may be another.
    drafts = drafts or fill(sizes, Capacity(budget)) or []
    ranks = _deal(drafts, count, dp, sizes, budget)
    if imbalance(loads(ranks)) <= _EVEN:
        return ranks
    # Where no prompt is shared, whole groups and responses one by one are the same.
    ways = (True, False) if len(set(sizes.group)) < len(sizes.group) else (True,)
    others = [spread(sizes, Capacity(budget), count, whole=whole) for whole in ways]
    plans = [ranks, *(_deal(drafts, count, dp, sizes, budget) for drafts in others if drafts is not None)]
    best = min(plans, key=lambda plan: max(loads(plan)))
    if imbalance(loads(best)) <= _UNEVEN or all(draft.tokens <= budget for draft in packed):
        return best
    # Few full micro-batches and some without anything, which can make up for a response beyond the budget.
    full = fill(sizes, Capacity(budget)) or []
    return min(best, _deal(full, count, dp, sizes, budget, emptied=True), key=lambda plan: max(loads(plan)))


def loads(ranks: list[list[Draft]]) -> list[float]:
    """Sum each rank's FLOPs."""
    return [sum(draft.flops for draft in rank) for rank in ranks]


def imbalance(values: Sequence[float]) -> float:
    """Return the largest's excess over the mean, as a share of the mean; 0 where all are 0."""
    total = sum(values)
    return max(values) * len(values) / total - 1.0 if total else 0.0


# Rooms are shares of the capacity; what fits exactly must not be missed by rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most that a micro-batch holds. A single response that is larger is alone in its micro-batch."""

    tokens: int
    flops: float = math.inf

    def share(self, tokens: float, flops: float) -> float:
        """Return the part of the capacity that this takes: of tokens or of FLOPs, whichever is more."""
        return max(tokens / self.tokens, flops / self.flops)

    def holds(self, tokens: float, flops: float) -> bool:
        """Return whether this much may be together."""
        return tokens <= self.tokens and flops <= self.flops


def fill(sizes: Sizes, capacity: Capacity, most: float = math.inf) -> list[Draft] | None:
    """Pack every response into few micro-batches within the capacity; None where `most` of them are not enough.

    Groups come longest first, whole into the fullest micro-batch that has room (best fit decreasing: D. S. Johnson et
    al., SIAM J. Computing 3(4), 1974). A group that fits nowhere is cut: as much of it as fits goes into the emptiest,
    unless the copy of the prompt would be larger than what it is for, then into new ones. So where groups are about as
    large as micro-batches, one goes on where the other ended.
    """
    filling = _Filling(sizes, capacity, most)
    return filling.drafts if filling.take_groups() else None


def spread(sizes: Sizes, capacity: Capacity, count: int, *, whole: bool = True) -> list[Draft] | None:
    """Pack every response into `count` micro-batches within the capacity; None where they are not enough.

    As `fill`, but groups go into the emptiest (longest first: R. L. Graham, SIAM J. Applied Mathematics 17(2), 1969),
    so that every micro-batch has long and short ones. Without `whole` every response goes its own way, which makes more
    copies of prompts.
    """
    filling = _Spreading(sizes, capacity, count)
    if whole:
        return filling.drafts if filling.take_groups() else None
    order = sorted(range(len(sizes.group)), key=lambda i: (-sizes.tokens[i] - sizes.prompt_tokens[sizes.group[i]], i))
    return filling.drafts if all(filling.take(sizes.group[i], [i]) for i in order) else None


class _Filling:
    """Micro-batches so far, and their rooms (shares of the capacity) in ascending order."""

    def __init__(self, sizes: Sizes, capacity: Capacity, most: float) -> None:
        self.sizes = sizes
        self.drafts: list[Draft] = []
        self._capacity = capacity
        self._most = most
        self._rooms: list[tuple[float, int]] = []

    def take_groups(self) -> bool:
        """Place all groups, the longest first; False where micro-batches ran out."""
        sizes = self.sizes
        groups: list[list[int]] = [[] for _ in sizes.prompt_tokens]
        for i in sorted(range(len(sizes.group)), key=lambda i: (-sizes.tokens[i], i)):
            groups[sizes.group[i]].append(i)
        lengths = [
            tokens + sum([sizes.tokens[i] for i in group])
            for tokens, group in zip(sizes.prompt_tokens, groups, strict=True)
        ]
        return all(self.take(g, groups[g]) for g in sorted(range(len(groups)), key=lambda g: (-lengths[g], g)))

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
        """Find the fullest micro-batch that this fits into whole, as a place in the rooms."""
        first = bisect_left(self._rooms, (self._capacity.share(tokens, flops) - _ROUNDING, 0))
        for at in range(first, len(self._rooms)):
            if self._fits(at, tokens, flops):
                return at
        return None

    def _fits(self, at: int, tokens: int, flops: float) -> bool:
        draft = self.drafts[self._rooms[at][1]]
        return self._capacity.holds(draft.tokens + tokens, draft.flops + flops)

    def _part(self, group: int, rest: list[int]) -> list[int]:
        """Choose responses for the emptiest micro-batch, as places in `rest`: the longest first that fit.

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
                # Not even the shortest fits.
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
        # An empty micro-batch takes one response at least, however large. Elsewhere the copy of the prompt must not be
        # larger than what it is for.
        if not draft.members:
            return chosen or [0]
        return chosen if whole_room - room_tokens >= prompt else []

    def _put(self, at: int, responses: Sequence[int]) -> None:
        number = self._rooms.pop(at)[1]
        draft = self.drafts[number]
        draft.add(responses, self.sizes)
        insort(self._rooms, (1.0 - self._capacity.share(draft.tokens, draft.flops), number))


class _Spreading(_Filling):
    """Open all micro-batches at the start; a group goes into the emptiest."""

    def __init__(self, sizes: Sizes, capacity: Capacity, count: int) -> None:
        super().__init__(sizes, capacity, count)
        for _ in range(count):
            self._open()

    def _room_for(self, tokens: int, flops: float) -> int | None:
        last = len(self._rooms) - 1
        return last if self._fits(last, tokens, flops) else None


# Ranks whose FLOPs are within this share of the mean are even enough.
TOLERANCE = 0.005
# The number of most promising exchanges that are worked out, and of small ranks that the largest one tries.
_CANDIDATES = 8
_PARTNERS = 3


def _deal(
    drafts: list[Draft], count: int, dp: int, sizes: Sizes, budget: int, emptied: bool = False
) -> list[list[Draft]]:
    """Carry out steps 3 and 4 of `plan`; with `emptied`, whole micro-batches change ranks in between."""
    drafts = drafts + [Draft() for _ in range(count - len(drafts))]
    ranks = [[drafts[number] for number in share] for share in even_shares([draft.flops for draft in drafts], dp)]
    if emptied:
        _relieve_largest(ranks, len(ranks[0]) + 2 * len(ranks), _swap_micro_batches)
    _relieve_largest(ranks, 2 * len(ranks), partial(_exchange_responses, sizes=sizes, budget=budget))
    return ranks


def even_shares(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Part the numbers of `costs` into `parts` lists, equally long, of close sums; the k-th ones of all cost alike.

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


# Changes a large rank and a small one, whose FLOPs it takes, and returns their FLOPs after it; None where it finds
# nothing that makes the larger of them smaller.
_Change = Callable[[list[Draft], list[Draft], float, float], tuple[float, float] | None]


def _relieve_largest(ranks: list[list[Draft]], most: int, change: _Change) -> None:
    """Change the largest rank and a small one, up to `most` times, while that makes the largest smaller. In place."""
    flops = loads(ranks)
    mean = sum(flops) / len(flops)
    for _ in range(most):
        order = sorted(range(len(ranks)), key=lambda rank: (flops[rank], rank))
        heavy = order[-1]
        if flops[heavy] <= mean * (1.0 + TOLERANCE):
            return
        for light in order[: min(_PARTNERS, len(ranks) - 1)]:
            after = change(ranks[heavy], ranks[light], flops[heavy], flops[light])
            if after is not None:
                flops[heavy], flops[light] = after
                break
        else:
            return


def _swap_micro_batches(
    heavy: list[Draft], light: list[Draft], large: float, small: float
) -> tuple[float, float] | None:
    """Swap two micro-batches whose FLOPs differ by about half of the ranks' difference.

    What one response beyond the budget weighs is made up for by emptier micro-batches of its rank.
    """
    wanted = (large - small) / 2
    order = sorted(range(len(light)), key=lambda j: light[j].flops)
    flops = [light[j].flops for j in order]
    found = []
    for i, draft in enumerate(heavy):
        at = bisect_left(flops, draft.flops - wanted)
        found += [(abs(draft.flops - flops[k] - wanted), i, order[k]) for k in (at - 1, at) if 0 <= k < len(flops)]
    _, out, back = min(found)
    moved = heavy[out].flops - light[back].flops
    if moved <= 0 or small + moved >= large:
        return None
    heavy[out], light[back] = light[back], heavy[out]
    return large - moved, small + moved


# A response with its own FLOPs, and the micro-batch where it is; -1 stands for none.
_Place = tuple[float, int, Draft]


def _exchange_responses(
    heavy: list[Draft], light: list[Draft], large: float, small: float, sizes: Sizes, budget: int
) -> tuple[float, float] | None:
    """Move a response to the light rank, or swap two, so that the larger of the ranks becomes as small as it can.

    Prompts count as they are copied. No micro-batch grows beyond `budget` tokens by it.
    """
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
    """Yield pairs whose FLOPs differ by about `wanted`: a response of the heavy rank, and one of the light or none."""
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
