"""A run's own evaluations: cut off and resumed in the folder of their step, and begun anew under other settings."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megasharp.common.signals import SaveAsked
from megasharp.config.run_config import EvalConfig
from megasharp.evals.result_files import load_result
from megasharp.evals.stored_samples import read_samples, samples_info
from megasharp.tasks.judge import DirectJudge
from megasharp.tasks.table import make_verifiers
from megasharp.trainer.evaluator import Evaluator
from tests.unit.evals.rule_engine import CharacterTokenizer, RuleEngine, run, suite_of
from tests.unit.evals.test_progress import CutEngine, sampled

STEP = 3


def evaluator(root: Path, engine: RuleEngine, said: list[str], **asked: Any) -> Evaluator:
    """Stand-ins for all of a run that an evaluation does not touch."""
    evaluation = EvalConfig(
        **{"suites": ["tiny"], "n": 10, "k": [1, 4, 10], "max_response_tokens": 8, "probe": 0} | asked
    )
    config = SimpleNamespace(
        eval=evaluation,
        seed=3,
        name="mine",
        model=SimpleNamespace(path="base", revision=None),
        rollout=SimpleNamespace(engine="inprocess"),
        reward=SimpleNamespace(function=None, functions=[]),
        checkpoint=SimpleNamespace(keep_best=None),
    )
    parts: dict[str, Any] = {
        "resolved": SimpleNamespace(config=config, suites=[suite_of(6)], tokenizer=CharacterTokenizer()),
        "folder": SimpleNamespace(
            root=root, evals=lambda step: root / "evals" / f"step_{step:06d}", superseded=root / "superseded"
        ),
        "engine": engine,
        "judge": DirectJudge(make_verifiers()),
        "phases": SimpleNamespace(sampling=lambda: None),
        "control": SimpleNamespace(evaluated=lambda *_, **__: None, state=SimpleNamespace(best={})),
        "checkpoints": SimpleNamespace(protect=lambda _: None),
        "log": SimpleNamespace(note=said.append, write=lambda *_: None, write_apart=lambda *_: None),
        "clock": SimpleNamespace(stage=lambda _: nullcontext()),
    }
    return Evaluator(**parts)


def test_a_run_s_evaluation_goes_on_where_it_was_asked_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps its samples beside the result; other settings set what is unfinished aside and begin anew."""
    monkeypatch.setattr("megasharp.trainer.evaluator.own_rewards", lambda _: {})
    said: list[str] = []
    first, second, third = CutEngine(5, SaveAsked()), RuleEngine(), RuleEngine()
    with pytest.raises(SaveAsked):
        evaluator(tmp_path, first, said).evaluate(STEP, only_missing=True)
    evaluator(tmp_path, second, said).evaluate(STEP, only_missing=True)
    folder = tmp_path / "evals" / "step_000003"
    assert sampled(first) > 0 and sampled(first, second) == 66
    assert load_result(folder / "tiny.json").rows == run().rows
    assert len(list(read_samples(folder, "tiny"))) == 66
    (folder / "tiny.json").unlink()
    evaluator(tmp_path, third, said, n=4, k=[1]).evaluate(STEP, only_missing=True)
    assert sampled(third) == 30 and load_result(folder / "tiny.json").n == 4
    aside = tmp_path / "superseded" / "evals" / "step_000003"
    assert len(list(read_samples(aside, "tiny"))) == 66
    info = samples_info(folder, "tiny")
    assert info is not None and info.identity["n"] == "4"
    assert any("begun with other settings, so it is sampled anew" in line for line in said)
