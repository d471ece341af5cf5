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
from megasharp.studies.bounds import gradients
from megasharp.studies.bounds import study as bounds_study
from megasharp.studies.cats import experiments as cats_experiments
from megasharp.studies.smoothing import study as smoothing_study
from megasharp.studies.study import Findings, Options
from megasharp.studies.tree import experiments as tree_experiments

train_cats = cats_experiments.train


def briefly(setting: cats_experiments.Setting, seeds: Sequence[int]) -> cats_experiments.Trajectory:
    return train_cats(replace(setting, steps=20), seeds)


def no_model(folder: Path, seed: int) -> gradients.GradientKernel:
    """Random gradients as long as those of the quickstart's model, two responses for each of four questions."""
    gradient_RD = 30.0 * np.random.default_rng(seed).normal(size=(8, 50)) + 15.0
    gram_RR = gradient_RD @ gradient_RD.T
    responses = tuple((row,) for row in range(8))
    grams = dict.fromkeys(gradients.READINGS, gram_RR)
    return gradients.GradientKernel(50, np.arange(8) // 2, responses, np.arange(8) % 3 == 0, grams)


def shrink(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cats_experiments, "train", briefly)
    for optimizer in actions_training.STEPS:
        patch.setitem(actions_training.STEPS, optimizer, 30)
    patch.setattr(tree_experiments, "STEPS", 60)
    patch.setattr(bounds_study, "DEFAULT_MODEL", Path(__file__).parent)
    patch.setattr(gradients, "measure", no_model)
    patch.setattr(bounds_study, "POLICY_TRIALS", 600)
    patch.setattr(bounds_study, "KERNEL_TRIALS", 200)
    patch.setattr(bounds_study, "SHARING_TRIALS", 300)
    patch.setattr(smoothing_study, "TRIALS", 300)
    patch.setattr(smoothing_study, "THEOREM_TRIALS", 100)


@pytest.fixture(scope="session")
def small_run() -> Callable[[str], Findings]:
    """The findings of a study's small run, by the study's name; run once."""

    @cache
    def run(name: str) -> Findings:
        with pytest.MonkeyPatch.context() as patch:
            shrink(patch)
            return STUDIES[name].run(Options(seeds=2))

    return run
