"""Stored samples on which two judges differ become items that wait for a label."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import mine_disagreements
import pytest
import verifier_corpus as corpus

from megasharp.common.errors import UserError
from megasharp.common.records import FinishReason, Outcome
from megasharp.evals.sample_store import SampleStore
from megasharp.evals.stored_samples import SamplesInfo
from tests.unit.evals.stored import sample

# The verdicts that are stored are of a verifier that read the first box, and text without one.
STORED = {
    r"\boxed{5}, no, \boxed{7}": Outcome.CORRECT,
    r"\boxed{7} or so, no: \boxed{5}": Outcome.WRONG,
    r"\boxed{5}": Outcome.CORRECT,
    r"\boxed{ 5 }, no, \boxed{8}": Outcome.CORRECT,
    "5 it is": Outcome.CORRECT,
    r"\boxed{6}": Outcome.WRONG,
}


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
    (tmp_path / "fives.yaml").write_text("{task: short_answer, path: fives.jsonl}")
    rows = [{"id": f"p{number}", "input": "What is 2 + 3?", "target": "5"} for number in range(2)]
    (tmp_path / "fives.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = SampleStore(tmp_path, SamplesInfo("fives"))
    for place, (text, outcome) in enumerate(STORED.items()):
        one = sample(place // 5, place % 5)
        finish = FinishReason.LENGTH if place == 1 else FinishReason.STOP
        store.add([replace(one, text=text, outcome=outcome, finish=finish)])
    store.finish()
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, evaluated: Path, *options: str) -> list[dict[str, object]]:
    out = evaluated / "mined.jsonl"
    command = ["", str(evaluated), "--suite", str(evaluated / "fives.yaml"), "--out", str(out), *options]
    monkeypatch.setattr(sys, "argv", command)
    mine_disagreements.main()
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_what_a_mended_verifier_sees_otherwise_waits_for_a_label(
    evaluated: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of a problem at the most, none that differs in digits alone; the corpus' reader refuses them."""
    first, second = run(monkeypatch, evaluated)
    assert (first["response"], first["finish"]) == (r"\boxed{5}, no, \boxed{7}", "stop")
    assert (second["response"], second["finish"]) == (r"\boxed{7} or so, no: \boxed{5}", "length")
    assert first["row"] == {"id": "p0", "input": "What is 2 + 3?", "target": "5"} and first["wanted"] is None
    taken = {item.id for item in corpus.read_corpus() if item.task == "short_answer"}
    assert first["id"] != second["id"] and not {first["id"], second["id"]} & taken
    assert "6 samples: both correct 1, only stored 3, only now 1, neither 1; 2 items" in capsys.readouterr().out
    (evaluated / "mined.jsonl").rename(evaluated / "short_answer.jsonl")
    with pytest.raises(UserError, match="wanted is null"):
        corpus.read_file(evaluated / "short_answer.jsonl")


def test_a_function_of_ones_own_is_a_judge(
    evaluated: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (evaluated / "judge_fives.py").write_text("def last(text, answer):\n    return float(text[-2:] in ('5}', '7}'))\n")
    monkeypatch.chdir(evaluated)
    [found] = run(monkeypatch, evaluated, "--first", "now", "--second", "judge_fives:last")
    assert found["response"] == r"\boxed{5}, no, \boxed{7}"
    assert "6 samples: both correct 2, only now 0, only judge_fives:last 1, neither 3" in capsys.readouterr().out


def test_a_judge_that_is_not_there_is_refused(evaluated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, words in (
        (["--second", "then"], "no judge 'then'; known: stored, now, math-verify"),
        (["--second", "math-verify"], "math-verify judges math, in the Python that --graders names"),
    ):
        with pytest.raises(SystemExit, match=words):
            run(monkeypatch, evaluated, *options)
