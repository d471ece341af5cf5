"""Filling a step with kept groups: where selection drops some, further rounds of prompts take their place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from megasharp.types import Group

SURPLUS = "surplus"

# Of how many prompts, numbering groups from where, to groups after selection.
Collect = Callable[[int, int], list[Group]]

# A round asks for no more than this many times what is missing, however few groups were kept so far.
_MOST_PER_MISSING = 4


def fill(collect: Collect, wanted: int, refill_rounds: int) -> list[Group]:
    """All groups sampled until `wanted` are kept, or after `refill_rounds` further rounds.

    A further round asks for as many prompts as the share kept so far makes necessary. Kept groups above `wanted` are
    marked as dropped with the reason `SURPLUS`, so that a step always trains on at most `wanted` groups.
    """
    groups = collect(wanted, 0)
    for _ in range(refill_rounds):
        missing = wanted - _kept(groups)
        if missing <= 0:
            break
        share = max(_kept(groups) / len(groups), 1.0 / _MOST_PER_MISSING)
        groups += collect(math.ceil(missing / share), len(groups))
    return _without_surplus(groups, wanted)


def most_refills(wanted: int, refill_rounds: int) -> int:
    """No more prompts than this are sampled beyond the first `wanted`."""
    return wanted * _MOST_PER_MISSING * refill_rounds


def _kept(groups: list[Group]) -> int:
    return sum(group.dropped_reason is None for group in groups)


def _without_surplus(groups: list[Group], wanted: int) -> list[Group]:
    kept = [number for number, group in enumerate(groups) if group.dropped_reason is None]
    surplus = set(kept[wanted:])
    return [
        dataclasses.replace(group, dropped_reason=SURPLUS) if number in surplus else group
        for number, group in enumerate(groups)
    ]
