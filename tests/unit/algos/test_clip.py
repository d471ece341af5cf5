"""The clipped surrogate: values and gradients at chosen ratios, against the formula written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megasharp.algos.base import Needs
from megasharp.algos.clip import Clip, ClipParams
from megasharp.algos.group_statistics import LOG_RATIO_BOUND

# ratio, advantage, loss, d loss / d log ratio, with low = 0.2, high = 0.3.
CASES = [
    (1.0, 2.0, -2.0, -2.0),
    (1.2, 1.0, -1.2, -1.2),
    (1.5, 1.0, -1.3, 0.0),
    (0.5, 1.0, -0.5, -0.5),
    (0.9, -1.0, 0.9, 0.9),
    (0.5, -1.0, 0.8, 0.0),
    (1.5, -1.0, 1.5, 1.5),
    (9.0, -2.0, 18.0, 18.0),
    (4.0, 0.0, 0.0, 0.0),
]
# The same with dual = 3: only negative advantages at ratios above 3 differ.
DUAL = [case if case[:2] != (9.0, -2.0) else (9.0, -2.0, 6.0, 0.0) for case in CASES]


def surrogate(make_micro, params: ClipParams, logr_T: Tensor, adv_T: Tensor):
    x = make_micro(Needs()).inputs
    x = type(x)(torch.ones_like(adv_T), *[torch.zeros_like(adv_T)] * 6, num_sequences=1)
    return Clip(params).surrogate(x, logr_T, adv_T, {})


@pytest.mark.parametrize(("dual", "cases"), [(None, CASES), (3.0, DUAL)])
def test_values_and_gradients(make_micro, dual: float | None, cases: list[tuple[float, ...]]) -> None:
    ratio_T, adv_T, loss_T, gradient_T = torch.tensor(cases, dtype=torch.float64).T
    logr_T = ratio_T.log().requires_grad_()
    got_T, _ = surrogate(make_micro, ClipParams(low=0.2, high=0.3, dual=dual), logr_T, adv_T)
    got_T.sum().backward()
    torch.testing.assert_close(got_T, loss_T)
    torch.testing.assert_close(logr_T.grad, gradient_T)


def test_metrics_count_what_was_clipped(make_micro) -> None:
    ratio_T, adv_T, _, _ = torch.tensor(CASES, dtype=torch.float64).T
    _, metrics = surrogate(make_micro, ClipParams(low=0.2, high=0.3), ratio_T.log(), adv_T)
    assert metrics["policy/clip_high"].value_T.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert metrics["policy/clip_low"].value_T.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0]
    torch.testing.assert_close(metrics["policy/ratio"].value_T, ratio_T)
    torch.testing.assert_close(metrics["policy/kl_old"].value_T, ratio_T - 1 - ratio_T.log())


@pytest.mark.parametrize("logr", [1e4, -1e4, math.inf, -math.inf])
def test_stray_log_ratio_is_bounded(make_micro, logr: float) -> None:
    logr_T = torch.tensor([logr], dtype=torch.float32, requires_grad=True)
    loss_T, metrics = surrogate(make_micro, ClipParams(), logr_T, torch.tensor([-1.0]))
    loss_T.sum().backward()
    expected = math.exp(LOG_RATIO_BOUND) if logr > 0 else 0.8
    assert loss_T.item() == pytest.approx(expected, rel=1e-5) and logr_T.grad.item() == 0.0
    assert all(metric.value_T.isfinite().all() for metric in metrics.values())
