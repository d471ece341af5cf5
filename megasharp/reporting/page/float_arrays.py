"""Numbers of curves in few characters: equal distances as three numbers, all others as base64 of float32.

Steps are mostly equally distant, and many metrics are constant. float32 holds seven significant digits; the scripts
decode a curve when its chart is drawn.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Packed = str | list[float]


def packed(values: Sequence[float] | NDArray[np.float64]) -> Packed:
    """Return [first, difference, count] for equally distant numbers, else base64 of little-endian float32."""
    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) == 0:
        return [0.0, 0.0, 0]
    first, difference = float(numbers[0]), float(numbers[1] - numbers[0]) if len(numbers) > 1 else 0.0
    if np.array_equal(numbers, first + difference * np.arange(len(numbers))):
        return [first, difference, len(numbers)]
    return base64.b64encode(numbers.astype("<f4").tobytes()).decode()


def thinned(points: Sequence[tuple[float, float]], most: int) -> NDArray[np.float64]:
    """Reduce points to at most `most` means of x and y over equally many neighbours, at the end maybe fewer; [2, N]."""
    points_2N = np.array(points, dtype=np.float64).reshape(-1, 2).T
    width = max(1, -(-points_2N.shape[1] // most))
    if width == 1:
        return points_2N
    starts = np.arange(0, points_2N.shape[1], width)
    counts = np.diff(np.append(starts, points_2N.shape[1]))
    return np.add.reduceat(points_2N, starts, axis=1) / counts
