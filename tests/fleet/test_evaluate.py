"""`megasharp eval --engines`: a suite on real engines, beside the engine of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megasharp.common.errors import UserError
from megasharp.evals.groups import Settings
from megasharp.trainer.evaluation import Asked, evaluate_source

pytestmark = pytest.mark.long("fleet-runs")

REPOSITORY = Path(__file__).parents[2]
BASE = REPOSITORY / "examples" / "quickstart" / "base"
EXAMPLE = REPOSITORY / "examples" / "fleet_on_cpu" / "run.yaml"


def evaluated(out: Path, engines: Path | None, *overrides: str) -> dict[str, float]:
    asked = Asked(
        BASE,
        ["countdown_test"],
        Settings(n=2, k="1,2", max_tokens=20),
        out=out,
        engines=engines,
        overrides=overrides,
    )
    evaluate_source(asked, lambda _: None, lambda _: None)
    found: dict[str, float] = json.loads((out / "countdown_test.json").read_text())
    return found


def test_engines_answer_greedily_as_the_engine_of_one_process_does(tmp_path: Path) -> None:
    ours = evaluated(tmp_path / "ours", None)
    theirs = evaluated(tmp_path / "theirs", EXAMPLE, "rollout.engines=1")
    assert (tmp_path / "theirs" / "logs" / "engine_0.log").stat().st_size > 0, "no engine was started"
    assert theirs["greedy_accuracy"] == pytest.approx(ours["greedy_accuracy"], abs=2 / 256)
    assert 0.0 < ours["greedy_accuracy"] < 1.0
    # Of different samples of the same distribution.
    assert theirs["token_entropy"] == pytest.approx(ours["token_entropy"], abs=0.05)
    assert theirs["token_entropy_sampled"] == pytest.approx(theirs["token_entropy"], abs=0.08)
    assert theirs["lambdas"] == pytest.approx(ours["lambdas"], abs=0.3) and len(theirs["lambdas"]) == 3


def test_a_run_file_without_engines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout.engine=inprocess starts no engines; leave out --engines"):
        evaluated(tmp_path, EXAMPLE.parents[1] / "quickstart" / "run.yaml")
