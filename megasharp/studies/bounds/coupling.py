"""Coupling of queries, where an update on one moves another: section 3.3 and appendices E, G, H of arXiv 2601.15609.

A batch has G responses to query q; `kernel_GG` holds the inner products of the gradients of their logits, `cross_G`
those of a response to another query q' with each of them, `shift_G` >= 0 the wanted shifts |A| / beta (the sign is
absorbed in the gradient). Leading axes are independent cases; float64. `rho` in (0, 1] is Assumption 3.2's decay.

All formulas are [DERIVED]: the symbols are lost in the text we have, the proofs' words are not. The first half of the
file says what the paper says. The second half tries Theorem 3.4 and Corollary 3.2 on random kernels, under the
assumptions as stated and as the proof uses them: `megasharp toy bounds` reports which of them hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from megasharp.studies.claims import Check, at_most
from megasharp.studies.softmax import Bools, Floats


@dataclass(frozen=True, slots=True, eq=False)
class KernelBounds:
    """a bounds the diagonal (self-alignment), b the other entries (cross-alignment); arrays over the cases."""

    a_min: Floats
    a_max: Floats
    b_min: Floats
    b_max: Floats


def dual_coefficients(kernel_GG: Floats, shift_G: Floats) -> Floats:
    """Return K^-1 shift. Raises numpy.linalg.LinAlgError for a singular kernel (a response sampled twice makes one)."""
    solved: Floats = np.linalg.solve(kernel_GG, shift_G[..., None]).astype(np.float64)[..., 0]
    return solved


def logit_shift(kernel_GG: Floats, cross_G: Floats, shift_G: Floats) -> Floats:
    """Return the change of another logit by the least-norm update that fits `shift_G`: cross^T K^-1 shift (app. E)."""
    moved: Floats = (cross_G * dual_coefficients(kernel_GG, shift_G)).sum(-1)
    return moved


def uniform_kernel(a: Floats, b: Floats, group: int) -> Floats:
    """Return M(a, b) = (a - b) I + b 1 1^T: eigenvalues a + (G - 1) b once and a - b, G - 1 times."""
    ones = np.ones((group, group))
    kernel: Floats = (a - b)[..., None, None] * np.eye(group) + b[..., None, None] * ones
    return kernel


def entry_bounds(kernel_GG: Floats) -> KernelBounds:
    """Return the extreme diagonal and other entries. They need not bound the kernel's spectrum."""
    group = kernel_GG.shape[-1]
    diagonal_G = np.diagonal(kernel_GG, axis1=-2, axis2=-1)
    others = kernel_GG[..., ~np.eye(group, dtype=bool)]
    return KernelBounds(diagonal_G.min(-1), diagonal_G.max(-1), others.min(-1), others.max(-1))


def spectral_bounds(kernel_GG: Floats) -> KernelBounds:
    """Return bounds of the entries that also hold as matrices: M(a_min, b_min) <= K <= M(a_max, b_max) (Loewner order).

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


# The paper runs no such trials; all sizes and ranges are ours.
GROUP = 8
DIMENSIONS = (128, 512)
SHARED = (0.05, 0.6)
SCALE_SPREAD = 0.1
REPEATS = 3


def kernel_checks(trials: int, rng: Generator) -> list[Check]:
    """Run every check of this module. Kernels without Assumption 3.3 are drawn and left out, so trials can be fewer."""
    checks = _uniform(trials, rng)
    kernel_GG = random_kernels(trials, rng)
    for name, bounds in (("entry", entry_bounds(kernel_GG)), ("spectral", spectral_bounds(kernel_GG))):
        valid = self_alignment_exceeds(bounds)
        kept = KernelBounds(bounds.a_min[valid], bounds.a_max[valid], bounds.b_min[valid], bounds.b_max[valid])
        checks += _general(name, kernel_GG[valid], kept, rng)
    return checks


def random_kernels(trials: int, rng: Generator) -> Floats:
    """Draw K = J J^T of gradients with a shared direction and slightly different scales, in 128 or 512 dimensions."""
    kernels = []
    for dimension in DIMENSIONS:
        count = trials // len(DIMENSIONS)
        shared = rng.uniform(*SHARED, (count, 1, 1))
        common = rng.normal(size=(count, 1, dimension))
        own = rng.normal(size=(count, GROUP, dimension))
        scale = np.exp(SCALE_SPREAD * rng.normal(size=(count, GROUP, 1)))
        jacobian = scale * (np.sqrt(shared) * common + np.sqrt(1 - shared) * own) / np.sqrt(dimension)
        kernels.append(jacobian @ jacobian.swapaxes(-1, -2))
    return np.concatenate(kernels)


def random_shifts(trials: int, rng: Generator) -> tuple[Floats, Bools]:
    """Draw |A| of GRPO at 1 to G - 1 correct samples (the size of beta cancels), and mark the correct samples."""
    correct = rng.integers(1, GROUP, (trials, 1))
    correct_G = np.arange(GROUP) < correct
    odds = np.sqrt((GROUP - correct) / correct)
    return np.where(correct_G, odds, 1 / odds), correct_G


def _uniform(trials: int, rng: Generator) -> list[Check]:
    """Check kernels M(a, b), for which the proof's step 1 is exact."""
    a = rng.uniform(1, 10, trials)
    b = a * rng.uniform(0, 1, trials)
    rho = rng.uniform(0.1, 1, trials)
    bounds, kernel_GG = KernelBounds(a, a, b, b), uniform_kernel(a, b, GROUP)
    shift_G, _ = random_shifts(trials, rng)
    same_G = np.broadcast_to((rho * b)[:, None], shift_G.shape)
    free_G = same_G * rng.random(shift_G.shape)
    upper = unseen_upper_bound(bounds, shift_G, rho)
    # Case 2 as the proof has it: n samples of the mode, each with a gradient of its own, all aligned by rho a.
    seen_G = np.arange(GROUP) < REPEATS
    cross_G = rho[:, None] * np.where(seen_G, bounds.a_min[:, None], bounds.b_min[:, None])
    lower = seen_lower_bound(bounds, shift_G, np.broadcast_to(seen_G, shift_G.shape), rho)
    same, free, cross = (logit_shift(kernel_GG, moved_G, shift_G) for moved_G in (same_G, free_G, cross_G))
    return [
        at_most("Thm 3.4 case 1", "uniform kernel, all rho b", same, upper),
        at_most("Thm 3.4 case 1", "uniform kernel, any in [0, rho b]", free, upper),
        at_most("Thm 3.4 case 2", f"uniform kernel, {REPEATS} distinct samples", lower, cross),
        _seen_repeats(a, b, rho, rng),
    ]


def _seen_repeats(a: Floats, b: Floats, rho: Floats, rng: Generator) -> Check:
    """Check case 2 where one response is sampled n times: K is singular, its pseudo-inverse gives the least norm.

    a and b bound the distinct responses (literally, b_max >= a, which Assumption 3.3 forbids).
    """
    distinct = GROUP - REPEATS + 1
    of_G = np.maximum(np.arange(GROUP) - REPEATS + 1, 0)
    kernel_GG = uniform_kernel(a, b, distinct)[:, of_G][:, :, of_G]
    correct = rng.integers(1, distinct, (len(a), 1))
    share = (REPEATS - 1 + correct) / GROUP
    shift_G = np.where(of_G < correct, np.sqrt((1 - share) / share), np.sqrt(share / (1 - share)))
    inverse_GG = np.linalg.pinv(kernel_GG, hermitian=True)
    cross_G = rho[:, None] * kernel_GG[:, 0]
    moved = np.einsum("tg,tgh,th->t", cross_G, inverse_GG, shift_G)
    seen_G = np.broadcast_to(of_G == 0, shift_G.shape)
    lower = seen_lower_bound(KernelBounds(a, a, b, b), shift_G, seen_G, rho)
    return at_most("Thm 3.4 case 2", f"uniform kernel, one sample {REPEATS} times", lower, moved)


def _general(name: str, kernel_GG: Floats, bounds: KernelBounds, rng: Generator) -> list[Check]:
    """Check kernels with unequal entries, bounded by `bounds`, which satisfy Assumptions 3.1 and 3.3."""
    trials = len(kernel_GG)
    rho = rng.uniform(0.1, 1, trials)
    shift_G, _ = random_shifts(trials, rng)
    dual_G = dual_coefficients(kernel_GG, shift_G)
    upper = unseen_upper_bound(bounds, shift_G, rho)
    free_G = (rho * bounds.b_max)[:, None] * rng.random(shift_G.shape)
    # Assumption 3.2 to the letter: the mode at q' aligns with the batch as its own sample does, times rho.
    seen_G = np.broadcast_to(np.arange(GROUP) == 0, shift_G.shape)
    lower = seen_lower_bound(bounds, shift_G, seen_G, rho)
    at_most_sum = upper / (rho * bounds.b_max)
    free = logit_shift(kernel_GG, free_G, shift_G)
    own = rho * logit_shift(kernel_GG, kernel_GG[:, 0], shift_G)
    # n samples of the mode, with alignments anywhere between the bounds that the proof substitutes.
    several_G = np.broadcast_to(np.arange(GROUP) < REPEATS, shift_G.shape)
    draw_G = rng.random(shift_G.shape)
    self_G = bounds.a_min[:, None] + draw_G * (bounds.a_max - bounds.a_min)[:, None]
    other_G = bounds.b_min[:, None] + draw_G * (bounds.b_max - bounds.b_min)[:, None]
    several = logit_shift(kernel_GG, rho[:, None] * np.where(several_G, self_G, other_G), shift_G)
    several_lower = seen_lower_bound(bounds, shift_G, several_G, rho)
    return [
        at_most("Thm 3.4 step 1", f"{name} bounds, sum of dual coefficients", dual_G.sum(-1), at_most_sum),
        at_most("Thm 3.4 case 1", f"{name} bounds, any in [0, rho b_max]", free, upper),
        at_most("Thm 3.4 case 2", f"{name} bounds, one sample", lower, own),
        at_most("Thm 3.4 case 2", f"{name} bounds, {REPEATS} distinct samples", several_lower, several),
    ]


def ratio_check(trials: int, rng: Generator) -> Check:
    """Check Corollary 3.2: the ratio of the two bounds is its uniform formula, where the kernel is uniform."""
    a = rng.uniform(1, 10, trials)
    b = a * rng.uniform(0.01, 1, trials)
    shift_G, _ = random_shifts(trials, rng)
    seen_G = rng.random(shift_G.shape) < rng.random((trials, 1))
    ratio = suppression_ratio(KernelBounds(a, a, b, b), shift_G, seen_G)
    share = (shift_G * seen_G).sum(-1) / shift_G.sum(-1)
    formula = uniform_suppression_ratio(share, a / b, np.full(trials, float(GROUP)), seen_G.sum(-1).astype(float))
    off = np.abs(ratio - formula)
    return at_most("Cor 3.2", "ratio of the bounds = its uniform formula", off, 1e-8 * (1 + a / b))


def grpo_ratio(alignment: float, group: int, accuracy: float, seen: float) -> float:
    """Corollary 3.2's R for a correct mode seen `seen` times, with GRPO's advantages: its share is n / (2 p G)."""
    share = np.asarray(seen / (2 * accuracy * group))
    return float(
        uniform_suppression_ratio(share, np.asarray(alignment), np.asarray(float(group)), np.asarray(float(seen)))
    )
