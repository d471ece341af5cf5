"""The theorems' functions against closed forms, autograd and hand calculations; a run of the study without a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megasharp.studies.bounds import coupling as c
from megasharp.studies.bounds import gradients, study
from megasharp.studies.bounds import sharpening as s
from megasharp.studies.bounds.coupling import grpo_ratio
from megasharp.studies.claims import at_most, never, pooled
from megasharp.studies.softmax import tilt
from megasharp.studies.study import Options, Outcome

REFERENCE = np.array([0.1, 0.2, 0.3, 0.4])
CORRECT = np.array([True, True, False, False])
COUNT = np.array([0, 3, 1, 0])
BETA = np.asarray(0.5)


def logit_gradient(policy: np.ndarray, gain: np.ndarray) -> torch.Tensor:
    """Gradient by autograd of sum policy * gain - beta KL over the logits of a softmax."""
    logits = torch.tensor(np.log(policy), requires_grad=True)
    reference = torch.tensor(REFERENCE)
    p = logits.softmax(-1)
    value = (p * torch.tensor(gain)).sum() - float(BETA) * (p * (p / reference).log()).sum()
    return torch.autograd.grad(value, logits)[0]


def test_classifier() -> None:
    assert s.classify(np.array([0.15, 0.2, 0.3, 0.35]), REFERENCE, CORRECT) is s.Sharpening.MODERATE
    assert s.classify(np.array([0.09, 0.8, 0.06, 0.05]), REFERENCE, CORRECT) is s.Sharpening.OVER


def test_optimum_is_stationary_and_the_ratio_policy_too() -> None:
    advantage = np.array([1.0, 0.3, -0.5, -2.0])
    share = COUNT * advantage / COUNT.sum()
    assert logit_gradient(s.optimal_policy(REFERENCE, advantage, BETA), advantage).abs().max() < 1e-15
    assert logit_gradient(s.batch_policy(REFERENCE, advantage, COUNT, BETA), share).abs().max() < 1e-15
    assert logit_gradient(s.ratio_policy(REFERENCE, advantage, COUNT, BETA), share / REFERENCE).abs().max() < 1e-15
    # Theorem 3.2 is not where GRPO's surrogate rests.
    assert logit_gradient(s.batch_policy(REFERENCE, advantage, COUNT, BETA), share / REFERENCE).abs().max() > 0.05


def test_batch_policy_by_hand() -> None:
    """p = 3/4, s = sqrt(3)/4: advantages 1/sqrt(3) and -sqrt(3); exponents n A / (G beta) = .866 and -.866."""
    advantage = s.normalised_advantages(CORRECT, COUNT)
    np.testing.assert_allclose(advantage, [3**-0.5, 3**-0.5, -(3**0.5), -(3**0.5)])
    partition = 0.5 + 0.2 * np.exp(0.75**0.5) + 0.3 * np.exp(-(0.75**0.5))
    assert s.batch_partition(REFERENCE, advantage, COUNT, BETA) == pytest.approx(partition)
    policy = s.batch_policy(REFERENCE, advantage, COUNT, BETA)
    np.testing.assert_allclose(policy[[0, 3]], REFERENCE[[0, 3]] / partition)
    # Mean reference probability of the correct samples is .2, of the incorrect one .3.
    assert s.probability_gap(REFERENCE, CORRECT, COUNT) == pytest.approx(-0.1)
    bound = s.normalised_partition_lower_bound(REFERENCE, CORRECT, COUNT, BETA)
    assert bound == pytest.approx(1 - 3**0.5 / 4 / 0.5 * 0.1)
    first = s.partition_lower_bound(REFERENCE, CORRECT, COUNT, np.asarray(3**-0.5), np.asarray(-(3**0.5)), BETA)
    assert first == pytest.approx(bound) and bound < partition


def test_interpolation_is_a_natural_gradient_step() -> None:
    """The natural gradient of softmax logits is F^+ times the plain one, F = diag(p) - p p^T (pseudo-inverse)."""
    current, rate = np.array([0.4, 0.3, 0.2, 0.1]), 0.1
    advantage = s.normalised_advantages(CORRECT, COUNT)
    plain = logit_gradient(current, COUNT * advantage / COUNT.sum()).numpy()
    natural = np.linalg.pinv(np.diag(current) - np.outer(current, current)) @ plain
    stepped = tilt(current, rate * natural)
    target = s.batch_policy(REFERENCE, advantage, COUNT, BETA)
    np.testing.assert_allclose(s.interpolate(current, target, rate * BETA), stepped, rtol=1e-12)
    np.testing.assert_allclose(s.interpolate(current, target, np.asarray(1.0)), target, rtol=1e-12)


def test_logit_shift_is_the_least_norm_update() -> None:
    rng = np.random.default_rng(0)
    jacobian, other, shift = rng.normal(size=(3, 9)), rng.normal(size=9), np.array([1.0, 0.5, 2.0])
    update = np.linalg.lstsq(jacobian, shift, rcond=None)[0]
    moved = c.logit_shift(jacobian @ jacobian.T, jacobian @ other, shift)
    assert moved == pytest.approx(other @ update)


def test_spectral_bounds_hold_as_matrices() -> None:
    rng = np.random.default_rng(1)
    jacobian = rng.normal(size=(5, 4, 40)) + 1.5
    kernel = jacobian @ jacobian.swapaxes(1, 2)
    bounds = c.spectral_bounds(kernel)
    low = np.linalg.eigvalsh(kernel - c.uniform_kernel(bounds.a_min, bounds.b_min, 4))
    high = np.linalg.eigvalsh(c.uniform_kernel(bounds.a_max, bounds.b_max, 4) - kernel)
    assert low.min() > -1e-9 and high.min() > -1e-9
    # They are tight in a: one eigenvalue of the difference is zero.
    np.testing.assert_allclose(low.min(-1), 0, atol=1e-9)
    np.testing.assert_allclose(np.linalg.eigvalsh(c.uniform_kernel(np.asarray(5.0), np.asarray(2.0), 4)), [3, 3, 3, 11])


def test_theorem_3_4_and_its_ratio_on_a_uniform_kernel() -> None:
    a, b, rho = np.asarray(4.0), np.asarray(1.0), np.asarray(0.5)
    bounds, shift, seen = c.KernelBounds(a, a, b, b), np.array([2.0, 1.0, 1.0]), np.array([True, False, False])
    kernel = c.uniform_kernel(a, b, 3)
    # S = 4, a + 2 b = 6: upper .5 * 4 / 6; lower .5 * (2 - 4 / 6); their ratio 2.
    upper, lower = c.unseen_upper_bound(bounds, shift, rho), c.seen_lower_bound(bounds, shift, seen, rho)
    assert upper == pytest.approx(1 / 3) and lower == pytest.approx(2 / 3)
    assert c.logit_shift(kernel, np.full(3, 0.5), shift) == pytest.approx(upper)
    assert c.logit_shift(kernel, rho * kernel[0], shift) == pytest.approx(0.5 * 2.0) and lower < 1.0
    assert c.suppression_ratio(bounds, shift, seen) == pytest.approx(2.0)
    assert c.uniform_suppression_ratio(*map(np.asarray, (0.5, 4.0, 3.0, 1.0))) == pytest.approx(2.0)


def test_the_ratio_grows_with_the_modes_share_and_with_self_alignment() -> None:
    """Corollary 3.2's first two bullets, at every group size and share; and footnote 3.

    With gradient correlations between two values of rho the seen bound takes the smaller and the unseen one the larger,
    so that the ratio is only scaled.
    """
    share, alignment = np.meshgrid(np.linspace(0.05, 1.0, 20), np.linspace(1.1, 50.0, 20), indexing="ij")
    for group in (2.0, 8.0, 64.0):
        ratio = c.uniform_suppression_ratio(share, alignment, np.asarray(group), np.asarray(1.0))
        assert (np.diff(ratio, axis=0) > 0.0).all() and (np.diff(ratio, axis=1) > 0.0).all()
    kernel = c.uniform_kernel(np.asarray(3.0), np.asarray(1.0), 4)
    bounds, shift, seen = c.entry_bounds(kernel), np.array([0.4, 0.3, 0.2, 0.1]), np.array([True, False, False, False])
    lower, upper = (c.seen_lower_bound(bounds, shift, seen, rho) for rho in np.array([0.2, 0.5]))
    assert lower / upper == pytest.approx(0.4)
    assert c.unseen_upper_bound(bounds, shift, np.asarray(0.5)) == pytest.approx(
        2.5 * c.unseen_upper_bound(bounds, shift, np.asarray(0.2))
    )


def test_case_1_counterexample() -> None:
    """a = 2, b = 1, G = 2, shifts (1, .1): duals (.633, -.267); cross-alignment (1, 0) <= b moves .633 > 1.1 / 3."""
    a, b, shift = np.asarray(2.0), np.asarray(1.0), np.array([1.0, 0.1])
    moved = c.logit_shift(c.uniform_kernel(a, b, 2), np.array([1.0, 0.0]), shift)
    assert moved == pytest.approx(1.9 / 3)
    assert c.unseen_upper_bound(c.KernelBounds(a, a, b, b), shift, np.asarray(1.0)) == pytest.approx(1.1 / 3)


def test_ratio_with_grpo_advantages() -> None:
    """A correct mode's share of all |A| at accuracy p is n / (2 p G), from the advantages themselves."""
    correct = np.arange(8) < 2
    advantage = s.normalised_advantages(correct, np.ones(8, dtype=np.int64))
    share = np.abs(advantage[0]) / np.abs(advantage).sum()
    assert share == pytest.approx(1 / (2 * 0.25 * 8))
    assert grpo_ratio(10.0, 8, 0.25, 1.0) == pytest.approx(share * 17 - 1)


def test_checks_count() -> None:
    check = at_most("x", "y", np.array([1.0, 2.0]), np.array([1.0, 1.0]))
    assert (check.trials, check.violations) == (2, 1) and check.worst == pytest.approx(1 / 3)
    both = pooled([check, at_most("x", "y", np.array([0.0]), np.array([1.0]))])
    assert (both.trials, both.violations, both.claim("", "").outcome) == (3, 1, Outcome.DIFFERS)
    assert never("x", "y", np.array([], dtype=bool)).claim("", "").outcome is Outcome.DIFFERS


def test_sketch_keeps_inner_products() -> None:
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(30_000, generator=generator)
    other = one + torch.randn(30_000, generator=generator)
    parts = [(vector[:10_000].view(100, 100), vector[10_000:]) for vector in (one, other)]
    exact = [gradients._flat(part, 30_000, 3) for part in parts]
    sketch = [gradients._flat(part, 4_096, 3) for part in parts]
    assert torch.equal(exact[0], one)
    error = float(one.norm() * other.norm()) / 4_096**0.5
    assert abs(float(sketch[0] @ sketch[1]) - float(one @ other)) < 4 * error


def test_alignment_of_known_gradients() -> None:
    """Two questions, two responses each; gradients (1, 0), (0, 1), (1, 1), (1, 1): one repeated response."""
    g = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    kernel = gradients.GradientKernel(
        2, np.array([0, 0, 1, 1]), ((1,), (2,), (3,), (3,)), np.array([True, False, True, True]), {"logit": g @ g.T}
    )
    found = gradients.summarise(kernel, "logit")
    assert (found.mean, found.deviation, found.positive) == (1.0, 0.0, 1.0)
    assert found.absorbed == pytest.approx(0.0) and found.cosine == pytest.approx(0.5**0.5)
    assert (found.self_alignment, found.cross_alignment, found.dominated) == (1.5, 0.0, 1.0)
    assert np.isnan(found.standard_error)
    assert gradients.repeated_share(kernel) == 0.5


def test_study_without_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(study, "DEFAULT_MODEL", tmp_path / "none")
    monkeypatch.setattr(study, "POLICY_TRIALS", 600)
    monkeypatch.setattr(study, "KERNEL_TRIALS", 200)
    monkeypatch.setattr(study, "SHARING_TRIALS", 300)
    findings = study.run(Options(seeds=1))
    assert "Appendix F is left out" in findings.settings
    outcomes = {(claim.where, claim.statement): claim.outcome for claim in findings.claims}
    assert outcomes["Thm 3.3", "first lower bound of Z"] is Outcome.REPRODUCED
    assert outcomes["Cor 3.1", "every correct mode gains in the infinite-sample optimum"] is Outcome.REPRODUCED
    assert outcomes["Thm 3.4 case 2", "seen mode (n = 1) bounded, general kernel"] is Outcome.REPRODUCED
    assert outcomes["Thm 3.4 case 1", "unseen mode bounded, alignments <= rho b"] is Outcome.DIFFERS


def test_log_prob_gradients_have_mean_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The score function: on the shipped model, expected log-prob gradients vanish, logits' do not."""
    folder = study.DEFAULT_MODEL
    if not folder.is_dir():
        pytest.skip("the quickstart's model is not here")
    monkeypatch.setattr(gradients, "QUESTIONS", 3)
    monkeypatch.setattr(gradients, "RESPONSES", 6)
    kernel = gradients.measure(gradients.sample_responses(folder, 0), 0)
    logit, score = (gradients.summarise(kernel, reading) for reading in gradients.READINGS)
    assert logit.cosine > 0.05 and abs(score.cosine) < 0.05
