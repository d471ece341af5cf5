"""`megasharp eval --engines`: a suite on real engines, beside the engine of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megasharp.build.evaluate import evaluate_source
from megasharp.errors import UserError

pytestmark = pytest.mark.long

REPOSITORY = Path(__file__).parents[2]
BASE = REPOSITORY / "examples" / "quickstart" / "base"
EXAMPLE = REPOSITORY / "examples" / "fleet_on_cpu" / "run.yaml"


def evaluated(out: Path, engines: Path | None, *overrides: str) -> dict[str, float]:
    evaluate_source(
        BASE,
        "countdown_test",
        n=2,
        k="1,2",
        temperature=1.0,
        max_tokens=20,
        seed=1,
        out=out,
        engines=engines,
        overrides=overrides,
    )
    found: dict[str, float] = json.loads((out / "countdown_test.json").read_text())
    return found


def test_engines_answer_greedily_as_the_engine_of_one_process_does(tmp_path: Path) -> None:
    ours = evaluated(tmp_path / "ours", None)
    theirs = evaluated(tmp_path / "theirs", EXAMPLE, "rollout.engines=1")
    assert (tmp_path / "theirs" / "logs" / "engine_0.log").stat().st_size > 0, "no engine was started"
    assert theirs["greedy_accuracy"] == pytest.approx(ours["greedy_accuracy"], abs=2 / 256)
    assert 0.0 < ours["greedy_accuracy"] < 1.0


def test_a_run_file_without_engines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout.engine=inprocess starts no engines; leave out --engines"):
        evaluated(tmp_path, EXAMPLE.parents[1] / "quickstart" / "run.yaml")
