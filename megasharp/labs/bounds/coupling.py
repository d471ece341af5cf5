"""How an update on one query moves another: section 3.3 and appendices E, G and H of arXiv 2601.15609, as functions.

A batch has G responses to query q; `kernel_GG` holds the inner products of the gradients of their logits, `cross_G`
those of a response to another query q' with each of them, `shift_G` >= 0 the wanted shifts |A| / beta (the sign is
absorbed in the gradient). Leading axes are independent cases; float64. `rho` in (0, 1] is Assumption 3.2's decay.

All formulas are [DERIVED]: the symbols are lost in the text we have, the proofs' words are not. Which of them hold, and
for which kernels, is what `megasharp toy bounds` measures; these functions only say what the paper says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megasharp.labs.tilting import Bools, Floats


@dataclass(frozen=True, slots=True, eq=False)
class KernelBounds:
    """a bounds the diagonal (self-alignment), b the other entries (cross-alignment); arrays over the cases."""

    a_min: Floats
    a_max: Floats
    b_min: Floats
    b_max: Floats


def dual_coefficients(kernel_GG: Floats, shift_G: Floats) -> Floats:
    """K^-1 shift. Raises numpy.linalg.LinAlgError for a singular kernel (a response sampled twice makes one)."""
    solved: Floats = np.linalg.solve(kernel_GG, shift_G[..., None]).astype(np.float64)[..., 0]
    return solved


def logit_shift(kernel_GG: Floats, cross_G: Floats, shift_G: Floats) -> Floats:
    """What the least-norm update that fits `shift_G` does to another logit: cross^T K^-1 shift (appendix E)."""
    moved: Floats = (cross_G * dual_coefficients(kernel_GG, shift_G)).sum(-1)
    return moved


def uniform_kernel(a: Floats, b: Floats, group: int) -> Floats:
    """M(a, b) = (a - b) I + b 1 1^T: eigenvalues a + (G - 1) b once and a - b, G - 1 times."""
    ones = np.ones((group, group))
    kernel: Floats = (a - b)[..., None, None] * np.eye(group) + b[..., None, None] * ones
    return kernel


def entry_bounds(kernel_GG: Floats) -> KernelBounds:
    """Smallest and largest diagonal and other entry. These need not bound the kernel's spectrum."""
    group = kernel_GG.shape[-1]
    diagonal_G = np.diagonal(kernel_GG, axis1=-2, axis2=-1)
    others = kernel_GG[..., ~np.eye(group, dtype=bool)]
    return KernelBounds(diagonal_G.min(-1), diagonal_G.max(-1), others.min(-1), others.max(-1))


def spectral_bounds(kernel_GG: Floats) -> KernelBounds:
    """Bounds of the entries that also hold as matrices: M(a_min, b_min) <= K <= M(a_max, b_max) (Loewner order).

    b is taken from the entries, a is then as tight as the order allows.
    """
    entries = entry_bounds(kernel_GG)
    low = np.linalg.eigvalsh(kernel_GG - entries.b_min[..., None, None])[..., 0]
    high = np.linalg.eigvalsh(kernel_GG - entries.b_max[..., None, None])[..., -1]
    a_max = np.maximum(entries.a_max, entries.b_max + high)
    return KernelBounds(entries.b_min + low, a_max, entries.b_min, entries.b_max)


def self_alignment_exceeds(bounds: KernelBounds) -> Bools:
    """Assumption 3.3: a_min > b_max (and the kernel's lower bound is positive definite)."""
    return np.asarray((bounds.a_min > bounds.b_max) & (bounds.b_min >= 0))


def unseen_upper_bound(bounds: KernelBounds, shift_G: Floats, rho: Floats) -> Floats:
    """Theorem 3.4, case 1: a mode outside the batch moves at most rho b_max S / (a_min + (G - 1) b_min).

    S is the sum of the shifts.
    """
    group = shift_G.shape[-1]
    bound: Floats = rho * bounds.b_max * shift_G.sum(-1) / (bounds.a_min + (group - 1) * bounds.b_min)
    return bound


def seen_lower_bound(bounds: KernelBounds, shift_G: Floats, seen_G: Bools, rho: Floats) -> Floats:
    """Theorem 3.4, case 2: a mode sampled at `seen_G` moves at least

    rho (a_min - b_min) / (a_max - b_max) [shift_I - n b_max S / (a_max + (G - 1) b_max)],
    n = number of such samples, shift_I = the sum of their shifts, S = the sum of all.
    """
    group = shift_G.shape[-1]
    damping = (bounds.a_min - bounds.b_min) / (bounds.a_max - bounds.b_max)
    spill = seen_G.sum(-1) * bounds.b_max * shift_G.sum(-1) / (bounds.a_max + (group - 1) * bounds.b_max)
    bound: Floats = rho * damping * ((shift_G * seen_G).sum(-1) - spill)
    return bound


def suppression_ratio(bounds: KernelBounds, shift_G: Floats, seen_G: Bools) -> Floats:
    """Corollary 3.2: case 2's lower bound over case 1's upper bound; rho cancels."""
    one = np.ones_like(bounds.a_min)
    ratio: Floats = seen_lower_bound(bounds, shift_G, seen_G, one) / unseen_upper_bound(bounds, shift_G, one)
    return ratio


def uniform_suppression_ratio(share: Floats, alignment: Floats, group: Floats, seen: Floats) -> Floats:
    """Corollary 3.2 for a uniform kernel: (shift_I / S) (a / b + G - 1) - n.

    `share` = shift_I / S, `alignment` = a / b, `seen` = n. S and shift_I depend on G too: with GRPO's advantages at
    batch accuracy p, a correct mode's share is n / (2 p G).
    """
    ratio: Floats = share * (alignment + group - 1) - seen
    return ratio
