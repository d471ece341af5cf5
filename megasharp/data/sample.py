"""A seeded sample of problems, such as the 128 questions of ARC-c on which 2510.04028 evaluates (appendix C.2)."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from megasharp.data.tasks import TaskItem
from megasharp.errors import UserError


def sampled(items: Sequence[TaskItem], limit: int | None, seed: int) -> list[TaskItem]:
    """`limit` problems without repetition, in their own order; all of them where no limit is given.

    The choice depends on the number of problems, `limit` and `seed` alone, and a larger limit holds the smaller one's
    problems. Raises UserError where there are fewer problems than that.
    """
    if limit is None:
        return list(items)
    if not 1 <= limit <= len(items):
        raise UserError(f"limit: {limit} of {len(items)} problems of {items[0].source} cannot be drawn; lower it")
    order = list(range(len(items)))
    # Seeding with text is stable between processes and Python versions.
    Random(f"sample-{seed}").shuffle(order)
    return [items[index] for index in sorted(order[:limit])]
