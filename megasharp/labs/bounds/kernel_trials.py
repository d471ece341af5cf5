"""Random trials of Theorem 3.4 and Corollary 3.2, under the assumptions as stated and as the proof uses them."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from megasharp.labs.bounds import coupling as c
from megasharp.labs.bounds.coupling import KernelBounds
from megasharp.labs.check import Check, at_most
from megasharp.labs.tilting import Bools, Floats

# The paper runs no such trials; all sizes and ranges are ours.
GROUP = 8
DIMENSIONS = (128, 512)
SHARED = (0.05, 0.6)
SCALE_SPREAD = 0.1
REPEATS = 3


def kernel_checks(trials: int, rng: Generator) -> list[Check]:
    """Every check of this module. Kernels without Assumption 3.3 are drawn and left out, so trials can be fewer."""
    checks = _uniform(trials, rng)
    kernel_GG = random_kernels(trials, rng)
    for name, bounds in (("entry", c.entry_bounds(kernel_GG)), ("spectral", c.spectral_bounds(kernel_GG))):
        valid = c.self_alignment_exceeds(bounds)
        kept = KernelBounds(bounds.a_min[valid], bounds.a_max[valid], bounds.b_min[valid], bounds.b_max[valid])
        checks += _general(name, kernel_GG[valid], kept, rng)
    return checks


def random_kernels(trials: int, rng: Generator) -> Floats:
    """K = J J^T of gradients with a shared direction, scales that differ a little, in 128 or 512 dimensions."""
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
    """|A| of GRPO at 1 to G - 1 correct samples (the size of beta cancels), and which samples are correct."""
    correct = rng.integers(1, GROUP, (trials, 1))
    correct_G = np.arange(GROUP) < correct
    odds = np.sqrt((GROUP - correct) / correct)
    return np.where(correct_G, odds, 1 / odds), correct_G


def _uniform(trials: int, rng: Generator) -> list[Check]:
    """Kernels M(a, b), for which the proof's Step 1 is exact."""
    a = rng.uniform(1, 10, trials)
    b = a * rng.uniform(0, 1, trials)
    rho = rng.uniform(0.1, 1, trials)
    bounds, kernel_GG = KernelBounds(a, a, b, b), c.uniform_kernel(a, b, GROUP)
    shift_G, _ = random_shifts(trials, rng)
    same_G = np.broadcast_to((rho * b)[:, None], shift_G.shape)
    free_G = same_G * rng.random(shift_G.shape)
    upper = c.unseen_upper_bound(bounds, shift_G, rho)
    return [
        at_most("Thm 3.4 case 1", "uniform kernel, all rho b", _moved(kernel_GG, same_G, shift_G), upper),
        at_most("Thm 3.4 case 1", "uniform kernel, any in [0, rho b]", _moved(kernel_GG, free_G, shift_G), upper),
        _seen_realisations(kernel_GG, bounds, shift_G, rho),
        _seen_repeats(a, b, rho, rng),
    ]


def _moved(kernel_GG: Floats, cross_G: Floats, shift_G: Floats) -> Floats:
    return c.logit_shift(kernel_GG, cross_G, shift_G)


def _seen_realisations(kernel_GG: Floats, bounds: KernelBounds, shift_G: Floats, rho: Floats) -> Check:
    """Case 2 as the proof has it: n samples of the mode, each with a gradient of its own, all aligned by rho a."""
    seen_G = np.arange(GROUP) < REPEATS
    cross_G = rho[:, None] * np.where(seen_G, bounds.a_min[:, None], bounds.b_min[:, None])
    lower = c.seen_lower_bound(bounds, shift_G, np.broadcast_to(seen_G, shift_G.shape), rho)
    statement = f"uniform kernel, {REPEATS} distinct samples"
    return at_most("Thm 3.4 case 2", statement, lower, _moved(kernel_GG, cross_G, shift_G))


def _seen_repeats(a: Floats, b: Floats, rho: Floats, rng: Generator) -> Check:
    """Case 2 where one response is sampled n times: K is singular, and its pseudo-inverse gives the least-norm update.

    a and b bound the distinct responses (literally, b_max >= a, which Assumption 3.3 forbids).
    """
    distinct = GROUP - REPEATS + 1
    of_G = np.maximum(np.arange(GROUP) - REPEATS + 1, 0)
    kernel_GG = c.uniform_kernel(a, b, distinct)[:, of_G][:, :, of_G]
    correct = rng.integers(1, distinct, (len(a), 1))
    share = (REPEATS - 1 + correct) / GROUP
    shift_G = np.where(of_G < correct, np.sqrt((1 - share) / share), np.sqrt(share / (1 - share)))
    inverse_GG = np.linalg.pinv(kernel_GG, hermitian=True)
    cross_G = rho[:, None] * kernel_GG[:, 0]
    moved = np.einsum("tg,tgh,th->t", cross_G, inverse_GG, shift_G)
    seen_G = np.broadcast_to(of_G == 0, shift_G.shape)
    lower = c.seen_lower_bound(KernelBounds(a, a, b, b), shift_G, seen_G, rho)
    return at_most("Thm 3.4 case 2", f"uniform kernel, one sample {REPEATS} times", lower, moved)


def _general(name: str, kernel_GG: Floats, bounds: KernelBounds, rng: Generator) -> list[Check]:
    """Kernels with unequal entries, bounded by `bounds`, which satisfy Assumptions 3.1 and 3.3."""
    trials = len(kernel_GG)
    rho = rng.uniform(0.1, 1, trials)
    shift_G, _ = random_shifts(trials, rng)
    dual_G = c.dual_coefficients(kernel_GG, shift_G)
    upper = c.unseen_upper_bound(bounds, shift_G, rho)
    free_G = (rho * bounds.b_max)[:, None] * rng.random(shift_G.shape)
    # Assumption 3.2 to the letter: the mode at q' aligns with the batch as its own sample does, times rho.
    seen_G = np.broadcast_to(np.arange(GROUP) == 0, shift_G.shape)
    lower = c.seen_lower_bound(bounds, shift_G, seen_G, rho)
    at_most_sum = upper / (rho * bounds.b_max)
    own = rho * c.logit_shift(kernel_GG, kernel_GG[:, 0], shift_G)
    return [
        at_most("Thm 3.4 step 1", f"{name} bounds, sum of dual coefficients", dual_G.sum(-1), at_most_sum),
        at_most("Thm 3.4 case 1", f"{name} bounds, any in [0, rho b_max]", _moved(kernel_GG, free_G, shift_G), upper),
        at_most("Thm 3.4 case 2", f"{name} bounds, one sample", lower, own),
        _several_seen(name, kernel_GG, bounds, shift_G, rho, rng),
    ]


def _several_seen(
    name: str, kernel_GG: Floats, bounds: KernelBounds, shift_G: Floats, rho: Floats, rng: Generator
) -> Check:
    """n samples of the mode, with alignments anywhere between the bounds that the proof substitutes."""
    seen_G = np.broadcast_to(np.arange(GROUP) < REPEATS, shift_G.shape)
    draw_G = rng.random(shift_G.shape)
    self_G = bounds.a_min[:, None] + draw_G * (bounds.a_max - bounds.a_min)[:, None]
    other_G = bounds.b_min[:, None] + draw_G * (bounds.b_max - bounds.b_min)[:, None]
    cross_G = rho[:, None] * np.where(seen_G, self_G, other_G)
    lower = c.seen_lower_bound(bounds, shift_G, seen_G, rho)
    statement = f"{name} bounds, {REPEATS} distinct samples"
    return at_most("Thm 3.4 case 2", statement, lower, _moved(kernel_GG, cross_G, shift_G))


def ratio_check(trials: int, rng: Generator) -> Check:
    """Corollary 3.2: the ratio of the two bounds is its uniform formula, where the kernel is uniform."""
    a = rng.uniform(1, 10, trials)
    b = a * rng.uniform(0.01, 1, trials)
    shift_G, _ = random_shifts(trials, rng)
    seen_G = rng.random(shift_G.shape) < rng.random((trials, 1))
    ratio = c.suppression_ratio(KernelBounds(a, a, b, b), shift_G, seen_G)
    share = (shift_G * seen_G).sum(-1) / shift_G.sum(-1)
    formula = c.uniform_suppression_ratio(share, a / b, np.full(trials, float(GROUP)), seen_G.sum(-1).astype(float))
    off = np.abs(ratio - formula)
    return at_most("Cor 3.2", "ratio of the bounds = its uniform formula", off, 1e-8 * (1 + a / b))


def grpo_ratio(alignment: float, group: int, accuracy: float, seen: float) -> float:
    """Corollary 3.2's R for a correct mode seen `seen` times, with GRPO's advantages: its share is n / (2 p G)."""
    share = np.asarray(seen / (2 * accuracy * group))
    return float(
        c.uniform_suppression_ratio(share, np.asarray(alignment), np.asarray(float(group)), np.asarray(float(seen)))
    )
