"""The tutorials' notebook, executed from an empty folder: its text is true of the runs that it makes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
from nbclient import NotebookClient

from megasharp.evals.compare import Difference, Side, compare
from megasharp.evals.result_files import load_result

REPOSITORY = Path(__file__).resolve().parents[2]
NOTEBOOK = REPOSITORY / "docs" / "tutorials" / "see-collapse-and-stop-it.ipynb"
# The executed copy, from which the committed notebook is renewed.
EXECUTED = REPOSITORY / ".reports" / NOTEBOOK.name
STEPS = 130

pytestmark = [pytest.mark.long("notebook"), pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs that the notebook has made; a cell that raises ends here."""
    folder = tmp_path_factory.mktemp("notebook")
    commands = Path(sys.executable).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        where = {"metadata": {"path": str(folder)}}
        NotebookClient(
            notebook, kernel_name="python3", resources=where, record_timing=False, coalesce_streams=True
        ).execute()
    EXECUTED.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, EXECUTED)
    return folder / "runs"


def differences(runs: Path, before: str, after: str) -> dict[str, Difference]:
    """Paired differences between two evaluations, by metric; `base` is the model that all runs begin with."""
    files = [_folder(runs, name, "evals") / "countdown_test.json" for name in (before, after)]
    one, other = (load_result(file) for file in files)
    return {
        found.name: found for found in compare(Side([one], files[:1]), Side([other], files[1:]), one.ks).differences
    }


def ranks(runs: Path, name: str) -> np.ndarray:
    """Mean probability of the first four candidates, over the positions that every evaluation reads."""
    table = pd.read_parquet(_folder(runs, name, "probe").with_suffix(".parquet"))
    return np.mean([np.exp(row[:4]) for row in table["candidate_logp"]], axis=0)


def _folder(runs: Path, name: str, kind: str) -> Path:
    run, step = ("grpo", 0) if name == "base" else (name, STEPS)
    return runs / run / kind / f"step_{step:06d}"


def rises(difference: Difference) -> bool:
    return difference.interval.low > 0.0


def falls(difference: Difference) -> bool:
    return difference.interval.high < 0.0


def test_grpo_gains_the_first_answer_and_loses_variety(runs: Path) -> None:
    found = differences(runs, "base", "grpo")
    assert rises(found["pass@1"]) and found["pass@1"].after > 2 * found["pass@1"].before
    assert falls(found["pass@64"]) and falls(found["token_entropy"]) and falls(found["distinct_correct"])


def test_candidates_after_the_first_lose_probability(runs: Path) -> None:
    first, *others = ranks(runs, "grpo") / ranks(runs, "base")
    assert first > 1.0 and max(others) < 0.75 and max(others[1:]) < 0.35, (first, others)


def test_the_remedy_keeps_variety_and_costs_first_answers(runs: Path) -> None:
    against_grpo, against_base = differences(runs, "grpo", "entropy"), differences(runs, "base", "entropy")
    assert rises(against_grpo["pass@64"]) and rises(against_grpo["token_entropy"]) and falls(against_grpo["pass@1"])
    assert rises(against_base["pass@1"]) and falls(against_base["pass@64"])


def test_half_the_learning_rate_does_as_well_at_64_and_better_at_1(runs: Path) -> None:
    found = differences(runs, "half", "entropy")
    assert not rises(found["pass@64"]) and not falls(found["pass@64"])
    assert falls(found["pass@1"]) and rises(found["token_entropy"])
    assert rises(differences(runs, "grpo", "half")["pass@64"])
