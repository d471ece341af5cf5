"""What a value of a config.json must be: the checks of its text are tables of these."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

SIZE = "a whole number of at least 1"


@dataclass(frozen=True, slots=True)
class Expected:
    """What the values of some keys must be; `what` says it in a message."""

    keys: tuple[str, ...]
    fits: Callable[[object], bool]
    what: str
    required: bool = False

    def faults(self, values: Mapping[str, object], table: str = "") -> Iterator[str]:
        """What is wrong with those keys, a message each; `table` is the one that `values` stand in, with its dot."""
        for key in self.keys:
            if key not in values and self.required:
                yield f"{table}{key} is missing: it must be {self.what}"
            elif key in values and not self.fits(values[key]):
                yield f"{table}{key}={values[key]!r} must be {self.what}"


def is_whole(value: object) -> bool:
    """A whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_size(value: object) -> bool:
    """`SIZE`."""
    return isinstance(value, int) and is_whole(value) and value > 0


def is_above(value: object, bound: float) -> bool:
    """A finite number greater than `bound`; JSON as Python reads it has NaN and Infinity too."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return bound < value <= sys.float_info.max


def is_at_least(value: object, bound: float) -> bool:
    """A finite number of `bound` or more."""
    return (value == bound and not isinstance(value, bool)) or is_above(value, bound)


def or_null(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    """The same, or null."""
    return lambda value: value is None or fits(value)
