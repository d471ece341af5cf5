"""Values of k as people write them: `1,4,16` or `1,2,4,...,1024`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megasharp.errors import UserError

_ELLIPSES = ("...", "…")


def parse_ks(text: str) -> tuple[int, ...]:
    """The values of k that `text` names, sorted, each once.

    `...` stands between at least two values and a last one, and goes on from those before it by a constant factor or a
    constant difference, whichever fits; where both do, a third value before it decides.

    Raises:
        UserError: no numbers, a value below 1, or dots that lead nowhere or to two places.

    Example: `parse_ks("1,2,4,...,32,100")` is `(1, 2, 4, 8, 16, 32, 100)`.
    """
    parts = [part.strip() for part in text.split(",")]
    values: list[int] = []
    for number, part in enumerate(parts):
        if part in _ELLIPSES:
            end = parts[number + 1] if number + 1 < len(parts) else ""
            values += _continued(values, _number(end, text), text)
        else:
            values.append(_number(part, text))
    return tuple(sorted(set(values)))


def default_ks(n: int) -> tuple[int, ...]:
    """Powers of 4 below `n`, and `n`."""
    return (*(4**power for power in range(16) if 4**power < n), n)


def _number(part: str, text: str) -> int:
    if not part.isascii() or not part.isdigit() or int(part) < 1:
        raise UserError(f"--k {text}: expected whole numbers from 1 on, such as 1,4,16 or 1,2,4,...,1024")
    return int(part)


def _continued(before: Sequence[int], end: int, text: str) -> list[int]:
    """What the dots after `before` stand for, without `end`."""
    if len(before) < 2 or not before[-2] < before[-1] < end:
        raise UserError(f"--k {text}: the dots need two growing values before them and a larger one after")
    a, b = before[-2:]
    factor, difference = b // a, b - a
    steps: list[tuple[Callable[[int], int], bool]] = [
        (lambda k: k * factor, b % a == 0 and _is_kept(before, lambda k: k * factor)),
        (lambda k: k + difference, _is_kept(before, lambda k: k + difference)),
    ]
    found = [run for step, fits in steps if fits and (run := _run(b, end, step)) is not None]
    if not found:
        raise UserError(f"--k {text}: neither a constant factor nor a constant difference leads from {a},{b} to {end}")
    if len(found) > 1 and found[0] != found[1]:
        raise UserError(f"--k {text}: the dots may double or count; give a third value before them, as in 1,2,4,...,16")
    return found[0]


def _is_kept(before: Sequence[int], step: Callable[[int], int]) -> bool:
    """Whether the last three values, where there are three, keep to the step."""
    return len(before) < 3 or before[-2] == step(before[-3])


def _run(start: int, end: int, step: Callable[[int], int]) -> list[int] | None:
    """The values strictly between both; None where the step passes over `end`."""
    found: list[int] = []
    value = step(start)
    while value < end:
        found.append(value)
        value = step(value)
    return found if value == end else None
