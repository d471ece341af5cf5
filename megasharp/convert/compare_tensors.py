"""Two models' tensors side by side: which are equal, which only after rounding, and where the others differ first."""

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
    """What is compared of one tensor; `dtype` is a torch name, `sha256` of its bytes.

    `is_finite`: it holds no NaN and no infinity, which its bytes tell too.
    """

    shape: tuple[int, ...]
    dtype: str
    sha256: str
    is_finite: bool = field(default=True, compare=False)


Tensors = Mapping[str, Described]


def to_round(mine: Tensors, theirs: Tensors) -> dict[str, str]:
    """Which of `mine` to round, and to which dtype: to the other side's, where that is another and no wider.

    Tensors of other shapes are left out.
    """
    return {
        name: theirs[name].dtype
        for name, tensor in mine.items()
        if name in theirs and tensor.shape == theirs[name].shape and _narrows(tensor.dtype, theirs[name].dtype)
    }


def _narrows(dtype: str, other: str) -> bool:
    return dtype != other and as_dtype(dtype).itemsize >= as_dtype(other).itemsize


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tensors A and B by name; `rounded` has those that are equal once rounded, with the dtype that they then have."""

    a: Tensors
    b: Tensors
    rounded: Mapping[str, str]

    def same_shapes(self) -> bool:
        """Whether both have the same names with the same shapes."""
        return {n: t.shape for n, t in self.a.items()} == {n: t.shape for n, t in self.b.items()}

    def share_values_that_are_no_numbers(self) -> bool:
        """Whether both hold the same weights, some of them NaN or infinite."""
        tensors = (*self.a.values(), *self.b.values())
        return not self.different() and not all(tensor.is_finite for tensor in tensors)

    def different(self) -> list[str]:
        """Names of the tensors that differ by more than a rounding, layer by layer."""
        names = sorted(self.a.keys() | self.b.keys(), key=_place)
        return [name for name in names if self.a.get(name) != self.b.get(name) and name not in self.rounded]

    def lines(self) -> list[str]:
        """The first difference of each of the first layers that have one, and how many tensors are what."""
        different = self.different()
        groups = [(layer, list(names)) for layer, names in groupby(different, key=_layer)]
        lines = [self._line(layer, names) for layer, names in groups[:_SHOWN_LAYERS]]
        if len(groups) > _SHOWN_LAYERS:
            lines.append(f"more places with differences: {len(groups) - _SHOWN_LAYERS}")
        return [*lines, self._summary(len(different))]

    def _line(self, layer: str, names: list[str]) -> str:
        more = f", and {len(names) - 1} more of its tensors" if len(names) > 1 else ""
        return f"{layer}: {names[0]}: {self._what(names[0])}{more}"

    def _what(self, name: str) -> str:
        a, b = self.a.get(name), self.b.get(name)
        if a is None or b is None:
            return f"missing from {'A' if a is None else 'B'}"
        if a.shape != b.shape:
            return f"shape {a.shape} in A, {b.shape} in B"
        if a.dtype != b.dtype:
            return f"{a.dtype} in A, {b.dtype} in B, and other values, however it is rounded"
        return f"SHA-256 {a.sha256[:_SHOWN_DIGITS]} in A, {b.sha256[:_SHOWN_DIGITS]} in B"

    def _summary(self, different: int) -> str:
        count = len(self.a.keys() | self.b.keys())
        equal = count - different - len(self.rounded)
        rounded = f"{len(self.rounded)} with the same values after rounding to {self.rounded_to()}"
        parts = [f"{equal} equal in name, shape, dtype and SHA-256"] if equal else []
        parts += [rounded] if self.rounded else []
        parts += [f"{different} different"] if different else []
        return f"{count} tensors: {', '.join(parts)}"

    def rounded_to(self) -> str:
        """The dtypes of `rounded`, as text."""
        return " or ".join(sorted(set(self.rounded.values())))


def _place(name: str) -> tuple[int, int, str]:
    """The embedding, the layers by their numbers, and what follows them."""
    layer = _LAYER.search(name)
    return (1, int(layer[1]), name) if layer else (0 if "embed" in name else 2, 0, name)


def _layer(name: str) -> str:
    kind, number, _ = _place(name)
    return ("embedding", f"layer {number}", "behind the layers")[kind]
