"""Context parallel over four ranks: the figures and weights of one rank, with windows and shared prompts too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

DIST = Path(__file__).parents[1] / "multirank"
sys.path[:0] = [str(DIST), str(DIST / "learner")]

from launch import run_ranks  # noqa: E402
from policies import ragged_sequences, save_model  # noqa: E402
from test_invariance import CASES, CUTS, REFERENCE_CUT, assert_same, start_weights, train_all  # noqa: E402

pytestmark = pytest.mark.long("layouts")


@pytest.mark.parametrize("layout", ["cp4", "dp2cp2"])
def test_four_ranks_are_one(layout: str, tmp_path: Path) -> None:
    cases = [CASES[0], CASES[1], CASES[-1]]
    folders = {name: save_model(tmp_path, name) for name in sorted({case.model for case in cases})}
    alone = [(case, "tp1", REFERENCE_CUT) for case in cases]
    (references,) = run_ranks(1, train_all, folders, ragged_sequences(turns=True), alone)
    runs = [(case, layout, CUTS[number]) for number, case in enumerate(cases)]
    results = run_ranks(4, train_all, folders, ragged_sequences(turns=True), runs)[0]
    for run, result, reference in zip(runs, results, references, strict=True):
        assert_same(run, result, reference, start_weights(folders[run[0].model]))
