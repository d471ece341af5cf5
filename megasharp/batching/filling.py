"""Filling micro-batches to a capacity: best fit decreasing, with groups cut where they do not fit whole."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from megasharp.batching.sizes import Draft, Sizes

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
