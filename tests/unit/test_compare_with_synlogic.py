"""The comparison with SynLogic's verifiers: no known kind of difference hides a checker that refuses right answers."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from megasharp.tasks.synlogic import CHECKERS

REPOSITORY = Path(__file__).parents[2]
AGREED = REPOSITORY / "tests" / "unit" / "tasks" / "data" / "files" / "synlogic_agreed.jsonl"
# Forms of a right answer that are read in every task.
FORMS = ("alone", "in a box", "LaTeX text", "bold", "full-width commas", "the same twice", "no spaces")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`tools/compare_with_synlogic.py`, with its folder on the import path."""
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    return importlib.import_module("compare_with_synlogic")


def test_a_checker_that_refuses_right_answers_differs_without_a_known_reason(tool: ModuleType) -> None:
    games = importlib.import_module("synlogic_peer.games")
    of_responses = importlib.import_module("synlogic_peer.responses")
    tasks = set()
    for line in AGREED.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        puzzle = games.Puzzle(entry["task"], entry["game"], ())
        text = next(each for each, right in entry["verdicts"].items() if right)
        tasks.add(puzzle.task)
        for form in FORMS:
            kind = of_responses.RIGHT if form == "alone" else of_responses.OFF_FORM
            refused = tool.Judged(of_responses.Response(puzzle, kind, form, text), ours=False, theirs=True)
            known, unknown = tool.differences([refused])
            assert (known, unknown) == ([], [refused]), (puzzle.task, form)
            accepted = tool.Judged(refused.response, ours=True, theirs=True)
            assert tool.hidden([accepted]) == []
    assert tasks == set(CHECKERS)
