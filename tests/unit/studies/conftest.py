"""One small run of every study, shared by the tests that look at what a study reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from megasharp.studies import STUDIES
from megasharp.studies.actions import experiments as actions_training
from megasharp.studies.actions import tangent
from megasharp.studies.bounds import gradients, transfer
from megasharp.studies.bounds import study as bounds_study
from megasharp.studies.cats import experiments as cats_experiments
from megasharp.studies.smoothing import multiplicity
from megasharp.studies.smoothing import study as smoothing_study
from megasharp.studies.smoothing import variance as smoothing_variance
from megasharp.studies.squeeze import candidates
from megasharp.studies.study import Findings, Options
from megasharp.studies.tree import experiments as tree_experiments

train_cats = cats_experiments.train


def briefly(setting: cats_experiments.Setting, seeds: Sequence[int]) -> cats_experiments.Trajectory:
    return train_cats(replace(setting, steps=8), seeds)


def no_samples(folder: Path, seed: int) -> None:
    """Sample nothing."""


def no_model(samples: None, seed: int) -> gradients.GradientKernel:
    """Random gradients as long as those of the quickstart's model, two responses for each of four questions."""
    gradient_RD = 30.0 * np.random.default_rng(seed).normal(size=(8, 50)) + 15.0
    gram_RR = gradient_RD @ gradient_RD.T
    responses = tuple((row,) for row in range(8))
    grams = dict.fromkeys(gradients.READINGS, gram_RR)
    return gradients.GradientKernel(50, np.arange(8) // 2, responses, np.arange(8) % 3 == 0, grams)


def no_transfer(samples: None, kernel: gradients.GradientKernel, seed: int) -> transfer.Transfer:
    share_Q = np.linspace(0.1, 0.9, 4)
    followed = {(r, u, s): share_Q for r in gradients.READINGS for u in transfer.UPDATES for s in transfer.SIZES}
    by_reading = dict.fromkeys(gradients.READINGS, share_Q)
    return transfer.Transfer(by_reading, by_reading, followed, 2.0 + share_Q)


def no_candidates(folder: Path, seed: int) -> candidates.Candidates:
    top_TN = np.array([[0.9, 0.06, 0.02], [0.5, 0.3, 0.1], [0.99, 0.01, 0.0], [0.6, 0.2, 0.1]])
    return candidates.Candidates(np.array([0, 0, 1, 1]), top_TN, np.array([2, 4, 1, 4]), top_TN[:, 0] > 0.55)


def made_up() -> tangent.Measured:
    """Made-up measurements of a model of which no gradient is taken."""
    places = tuple(tangent.FirstOrder((0.01, 0.03, 0.1, 0.3, 1.0), 0.5 + 0.2 * n, 1000.0 * n) for n in (1, 2))
    return tangent.Measured(places, tuple(tangent.Drift(steps, 0.02 * steps, (0.05, 0.4)) for steps in tangent.STEPS))


def shrink(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cats_experiments, "train", briefly)
    for optimizer in actions_training.STEPS:
        patch.setitem(actions_training.STEPS, optimizer, 30)
    patch.setattr(tangent, "measure", lambda seed: made_up())
    patch.setattr(tree_experiments, "STEPS", 60)
    patch.setattr(bounds_study, "DEFAULT_MODEL", Path(__file__).parent)
    patch.setattr(gradients, "sample_responses", no_samples)
    patch.setattr(gradients, "measure", no_model)
    patch.setattr(transfer, "measure_transfer", no_transfer)
    patch.setattr(candidates, "DEFAULT_MODEL", Path(__file__).parent)
    patch.setattr(candidates, "measure_candidates", no_candidates)
    patch.setattr(bounds_study, "POLICY_TRIALS", 600)
    patch.setattr(bounds_study, "KERNEL_TRIALS", 200)
    patch.setattr(bounds_study, "SHARING_TRIALS", 300)
    patch.setattr(smoothing_study, "TRIALS", 300)
    patch.setattr(smoothing_study, "THEOREM_TRIALS", 100)
    patch.setattr(smoothing_variance, "POLICIES", 1)
    patch.setattr(multiplicity, "PROBLEMS", 4)


@pytest.fixture(scope="session")
def small_run() -> Callable[[str], Findings]:
    """The findings of a study's small run, by the study's name; run once."""

    @cache
    def run(name: str) -> Findings:
        with pytest.MonkeyPatch.context() as patch:
            shrink(patch)
            return STUDIES[name].run(Options(seeds=2))

    return run
