"""Two models' tensors side by side: those that are equal, equal after rounding, or different, and where first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

from megasharp.common.records import as_dtype

_SHOWN_LAYERS = 5
# Of a digest's 64 digits: enough to tell two apart by eye.
_SHOWN_DIGITS = 12
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Described:
    """The compared properties of one tensor; `dtype` is a torch name, `sha256` that of its bytes.

    `is_finite`: it holds no NaN and no infinity. Equal bytes say the same, so it takes no part in comparisons.
    """

    shape: tuple[int, ...]
    dtype: str
    sha256: str
    is_finite: bool = field(default=True, compare=False)


Tensors = Mapping[str, Described]


def to_round(mine: Tensors, theirs: Tensors) -> dict[str, str]:
    """Return the dtypes, by name, that some of `mine` are to be rounded to: the other side's, where it is no wider.

    Tensors of the same dtype, or of other shapes, are left out.
    """
    found = {}
    for name, tensor in mine.items():
        other = theirs.get(name)
        if other is None or tensor.shape != other.shape or tensor.dtype == other.dtype:
            continue
        if as_dtype(tensor.dtype).itemsize >= as_dtype(other.dtype).itemsize:
            found[name] = other.dtype
    return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tensors A and B by name; `rounded` has those that are equal once rounded, with the dtype that they then have."""

    a: Tensors
    b: Tensors
    rounded: Mapping[str, str]

    def same_shapes(self) -> bool:
        """Return True where both have the same names with the same shapes."""
        return {n: t.shape for n, t in self.a.items()} == {n: t.shape for n, t in self.b.items()}

    def share_values_that_are_no_numbers(self) -> bool:
        """Return True where both hold the same weights, some of them NaN or infinite."""
        tensors = (*self.a.values(), *self.b.values())
        return not self.different() and not all(tensor.is_finite for tensor in tensors)

    def different(self) -> list[str]:
        """Names of the tensors that differ by more than a rounding, layer by layer."""
        names = sorted(self.a.keys() | self.b.keys(), key=_place)
        return [name for name in names if self.a.get(name) != self.b.get(name) and name not in self.rounded]

    def lines(self) -> list[str]:
        """List the first difference of each of the first layers that have one, then a count of each kind of tensor."""
        different = self.different()
        groups = [(layer, list(names)) for layer, names in groupby(different, key=_layer)]
        lines = []
        for layer, (first, *others) in groups[:_SHOWN_LAYERS]:
            more = f", and {len(others)} more of its tensors" if others else ""
            lines.append(f"{layer}: {first}: {self._difference(first)}{more}")
        if len(groups) > _SHOWN_LAYERS:
            lines.append(f"more places with differences: {len(groups) - _SHOWN_LAYERS}")
        count = len(self.a.keys() | self.b.keys())
        counts = {
            "equal in name, shape, dtype and SHA-256": count - len(different) - len(self.rounded),
            f"with the same values after rounding to {self.rounded_to()}": len(self.rounded),
            "different": len(different),
        }
        parts = ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)
        return [*lines, f"{count} tensors: {parts}"]

    def _difference(self, name: str) -> str:
        a, b = self.a.get(name), self.b.get(name)
        if a is None or b is None:
            return f"missing from {'A' if a is None else 'B'}"
        if a.shape != b.shape:
            return f"shape {a.shape} in A, {b.shape} in B"
        if a.dtype != b.dtype:
            return f"{a.dtype} in A, {b.dtype} in B, and other values, however it is rounded"
        return f"SHA-256 {a.sha256[:_SHOWN_DIGITS]} in A, {b.sha256[:_SHOWN_DIGITS]} in B"

    def rounded_to(self) -> str:
        """The dtypes of `rounded`, as text."""
        return " or ".join(sorted(set(self.rounded.values())))


def _place(name: str) -> tuple[int, int, str]:
    """Sort key of a tensor: the embedding first, then the layers by their numbers, then the rest."""
    layer = _LAYER.search(name)
    return (1, int(layer[1]), name) if layer else (0 if "embed" in name else 2, 0, name)


def _layer(name: str) -> str:
    kind, number, _ = _place(name)
    return ("embedding", f"layer {number}", "behind the layers")[kind]
