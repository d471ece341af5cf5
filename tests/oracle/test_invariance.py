"""Every method, and the papers' combinations: loss and gradient do not depend on packing, order, or ranks' shares."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import each_case
from harness import CUTS, Case, random_case, run, with_estimator

from megasharp.algos import METHODS


@pytest.fixture(scope="module")
def fixed() -> Case:
    return random_case(4)


@each_case("name", METHODS)
def test_float64(fixed: Case, name: str) -> None:
    whole = run(fixed, with_estimator(name))
    scale = np.abs(whole.gradient).max()
    assert scale > 0
    for title, cut in CUTS.items():
        result = run(fixed, with_estimator(name), cut=cut)
        assert result.loss == pytest.approx(whole.loss, rel=1e-10, abs=1e-12), title
        assert np.abs(result.gradient - whole.gradient).max() <= 1e-10 * scale, title
        assert result.metrics == pytest.approx(whole.metrics, rel=1e-9, abs=1e-12), title


@each_case("name", METHODS)
def test_float32(fixed: Case, name: str) -> None:
    """In one cut, of several micro-batches, in another order and on two ranks; float64 has all of them."""
    exact = run(fixed, with_estimator(name))
    scale = np.abs(exact.gradient).max()
    result = run(fixed, with_estimator(name), cut=CUTS["two data-parallel ranks"], dtype=torch.float32)
    assert result.loss == pytest.approx(exact.loss, rel=1e-5, abs=2e-6)
    assert np.abs(result.gradient - exact.gradient).max() <= 1e-5 * scale
