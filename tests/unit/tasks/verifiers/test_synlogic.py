"""SynLogic: games by hand with right, wrong and unreadable responses, and what no response may do to a checker."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import each_case
from waiting import SOON_S

from megasharp.common.records import Outcome
from megasharp.tasks.synlogic import CHECKERS, SynLogicAnswer, checker, verify
from megasharp.tasks.synlogic.game import GameError
from megasharp.tasks.synlogic.literals import UnreadableError, read_literal
from megasharp.tasks.table import make_verifiers

FILE = Path(__file__).parents[1] / "data" / "files" / "synlogic_games.yaml"
AGREED = FILE.with_name("synlogic_agreed.jsonl")
OUTCOMES = {"right": Outcome.CORRECT, "wrong": Outcome.WRONG, "unreadable": Outcome.FORMAT}


def games() -> list[tuple[SynLogicAnswer, dict[str, Any]]]:
    """Each game of the file as an answer record, and its responses."""
    written = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return [
        (SynLogicAnswer(task, json.dumps({key: each.get(key) for key in ("question", "answer", "metadata")})), each)
        for task, entry in written.items()
        for each in (entry, *entry.get("puzzles", []))
    ]


GAMES = games()


def test_every_task_has_a_game_with_right_and_wrong_responses() -> None:
    # ARC-AGI-2 has ARC-AGI's checker.
    for task in CHECKERS.keys() - {"arc_agi_2"}:
        of_task = [each for answer, each in GAMES if answer.task == task]
        assert all(any(each.get(kind) for each in of_task) for kind in ("right", "wrong")), task


@each_case(("answer", "responses"), GAMES, ids=[answer.task for answer, _ in GAMES])
def test_verdicts(answer: SynLogicAnswer, responses: dict[str, Any]) -> None:
    for kind, outcome in OUTCOMES.items():
        for text in responses.get(kind, []):
            verdict = make_verifiers()["synlogic"](text, answer)
            assert (verdict.outcome, verdict.reward) == (outcome, float(kind == "right")), (text, verdict)
            assert (verdict.canonical_answer is None) == (kind == "unreadable")


@each_case(("answer", "responses"), GAMES, ids=[answer.task for answer, _ in GAMES])
def test_an_answer_in_tags_after_thinking_is_judged_alike(answer: SynLogicAnswer, responses: dict[str, Any]) -> None:
    for text in responses.get("right", []):
        if "<answer>" not in text:
            assert verify(f"<think>{text}? [[9]] no</think>\n<answer>\n{text}\n</answer>", answer).reward == 1.0
            assert verify(f"<think>{text}</think>", answer).outcome is Outcome.FORMAT


@each_case(("answer", "responses"), GAMES, ids=[answer.task for answer, _ in GAMES])
def test_full_width_digits_and_signs_count_as_those_of_ascii(answer: SynLogicAnswer, responses: dict[str, Any]) -> None:
    wide = {ord(sign): ord(sign) + 0xFEE0 for sign in "0123456789,+-=()"}
    for kind in OUTCOMES:
        for text in responses.get(kind, []):
            assert verify(text.translate(wide), answer).reward == float(kind == "right"), text


def test_published_verifiers_give_the_same_verdicts() -> None:
    """On a sample that `tools/compare_with_synlogic.py` wrote, where both agreed: none of these games is by hand."""
    lines = AGREED.read_text(encoding="utf-8").splitlines()
    for line in lines:
        entry = json.loads(line)
        answer = SynLogicAnswer(entry["task"], json.dumps(entry["game"]))
        ours = {text: verify(text, answer).reward == 1.0 for text in entry["verdicts"]}
        assert ours == entry["verdicts"], entry["task"]
    assert [json.loads(line)["task"] for line in lines] == sorted(CHECKERS)


HOSTILE = (
    "[" * 200_000,
    "[[" * 50_000 + "]]" * 50_000,
    "(" * 5_000 + ")" * 5_000,
    "[[1," * 40_000,
    "9" * 1_000_000,
    "[[" + "9" * 100_000 + "]]",
    "```python\n" + "(" * 3_000 + "1" + ")" * 3_000 + "\n```",
    "```python\n__import__('os').system('touch /tmp/owned')\n```",
    "```" * 50_000,
    "\\boxed{" * 100_000,
    "]" * 100_000 + "[[1]]" + "]" * 100_000,
    "-" * 100_000 + "1",
    "#" * 100_000,
    "a=" * 50_000,
    "<answer>" * 50_000,
    "\x00\ud800[[1]]",
    "",
)


def test_no_response_stops_or_fools_a_checker() -> None:
    started = time.process_time()
    for answer, responses in GAMES:
        for text in HOSTILE:
            verdict = verify(text, answer)
            assert verdict.reward == 0.0 or text in responses["right"]
    assert time.process_time() - started < SOON_S
    assert not Path("/tmp/owned").exists()


@each_case(("answer", "responses"), GAMES, ids=[answer.task for answer, _ in GAMES])
def test_a_game_that_lacks_what_is_judged_by_is_refused(answer: SynLogicAnswer, responses: dict[str, Any]) -> None:
    game = json.loads(answer.game)
    for metadata in ({}, {name: {} for name in game["metadata"] or {}}):
        broken = SynLogicAnswer(answer.task, json.dumps({"question": "", "answer": "", "metadata": metadata}))
        if answer.task != "word_sorting_mistake":  # without an answer there is no mistake
            with pytest.raises(GameError):
                checker(broken)
    for text in ("[]", "{", '{"metadata": 1}'):
        with pytest.raises(GameError):
            checker(SynLogicAnswer(answer.task, text))


@each_case(
    ("text", "value"),
    [
        ("[[1, 'X'], (2, -3)]  # done", [[1, "X"], [2, -3]]),
        ("{1: [(1, 2)], 'b': {}}", {"1": [[1, 2]], "b": {}}),
        ("# first\n[true, 1.5, ↑,]", ["true", 1.5, "↑"]),
        ('["a\\"b", ""]', ['a"b', ""]),
        ("()", []),
    ],
)
def test_literals(text: str, value: object) -> None:
    assert read_literal(text) == value


@each_case(
    "text", ["", "[1 2]", "[1", "1]", "[1]]", "{1}", "{[1]: 2}", "[" * 9 + "]" * 9, "'a", "[" + "1," * 20_000 + "]"]
)
def test_what_is_no_literal(text: str) -> None:
    with pytest.raises(UnreadableError):
        read_literal(text)
