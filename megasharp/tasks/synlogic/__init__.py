"""SynLogic (2505.19641; MiniMax-AI/SynLogic, MIT): its problems, one JSON object a line, its checkers, the verifier.

A problem is the task, the prompt as it stands, and the game's data as SynLogic's generators write them (`base/data.py`
of the repository): `question`, `answer` and the `metadata` that the task's checker reads. The set on the hub keeps them
as JSON text (`game_data_str`). A task without a checker here is refused when data are loaded, and so is a problem that
lacks what its checker needs.

The rules are those of the repository's own checkers at commit 6794f97 (`task2verifier.py`), the code is ours: answers
are parsed, never run. Where a checker there lets pass what its prompt forbids, its function here says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks.data_fields import check_names, name_of, read_objects, text_field
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.retraction import taken_back
from megasharp.tasks.synlogic import boxed, equations, filling, latin, placing, texts
from megasharp.tasks.synlogic.finding import final_part, words_after
from megasharp.tasks.synlogic.game import Check, Game, GameError, read_game
from megasharp.tasks.synlogic.literals import UnreadableError

MAX_CANONICAL = 1_000

CHECKERS: dict[str, Callable[[Game], Check]] = {
    "arc_agi": texts.arc_agi,
    "arc_agi_2": texts.arc_agi,
    "arrow_maze": filling.arrow_maze,
    "boolean_expressions": boxed.boolean_expressions,
    "buggy_tables": texts.buggy_tables,
    "calcudoko": latin.calcudoko,
    "campsite": placing.campsite,
    "cipher": texts.cipher,
    "cryptarithm": equations.cryptarithm,
    "dyck_language": texts.dyck_language,
    "dyck_language_errors": texts.dyck_language_errors,
    "dyck_language_reasoning_errors": texts.dyck_language_reasoning_errors,
    "futoshiki": latin.futoshiki,
    "goods_exchange": texts.goods_exchange,
    "kukurasu": filling.kukurasu,
    "math_path": equations.math_path,
    "mathador": equations.mathador,
    "minesweeper": placing.minesweeper,
    "norinori": placing.norinori,
    "number_wall": filling.number_wall,
    "numbrix": filling.numbrix,
    "object_counting": boxed.object_number,
    "object_properties": boxed.object_number,
    "operation": equations.operation,
    "skyscraper_puzzle": latin.skyscraper_puzzle,
    "space_reasoning": boxed.space_reasoning,
    "space_reasoning_tree": boxed.space_reasoning_tree,
    "star_placement_puzzle": placing.star_placement_puzzle,
    "sudoku": latin.sudoku,
    "survo": filling.survo,
    "time_sequence": texts.time_sequence,
    "web_of_lies": texts.web_of_lies,
    "word_sorting": boxed.word_sorting,
    "word_sorting_mistake": boxed.word_sorting_mistake,
    "wordscapes": filling.wordscapes,
    "zebra_puzzle": texts.zebra_puzzle,
}
# Evaluation sets in the repository's table, which are none of SynLogic's own tasks.
UNCHECKED = {
    "gpqa_diamond": "an evaluation set: use task=choice",
    "bbh_*": "an evaluation set: use task=short_answer",
    "bbeh_*": "an evaluation set that no task here judges",
}


@dataclass(frozen=True, slots=True)
class SynLogicAnswer(TaskAnswer):
    """One of SynLogic's tasks, and the JSON text of the problem's data: `question`, `answer`, `metadata`.

    Example: `SynLogicAnswer("object_counting", '{"question": "...", "answer": "7", "metadata": {}}')`.
    """

    task: str
    game: str


@dataclass(frozen=True, slots=True)
class SynLogicRecord:
    """One line of a data file.

    Example: `{"task": "object_counting", "prompt": "... in a box.", "game": {"answer": "7", "metadata": {}}}`.
    """

    id: str
    prompt: str
    answer: SynLogicAnswer


def read_records(path: Path) -> list[SynLogicRecord]:
    """Read a JSONL file of problems. Raises UserError, naming the file and the line, for what it must not hold."""
    records: list[SynLogicRecord] = []
    for where, fields in read_objects(path, "write lines with 'task', 'prompt' and 'game'"):
        name, prompt = name_of(fields, ("id",), path, where), text_field(fields, "prompt", where)
        task, game = text_field(fields, "task", where), fields.get("game")
        if isinstance(game, dict):
            game = json.dumps(game, ensure_ascii=False)
        if not isinstance(game, str):
            raise UserError(
                f"{where}: 'game' must be an object with 'question', 'answer' and 'metadata', or its JSON text"
            )
        records.append(SynLogicRecord(name, prompt, answer_of(task, game, where)))
    check_names([record.id for record in records], path)
    return records


def answer_of(task: str, game: str, where: str) -> SynLogicAnswer:
    """A problem's answer record of its `game`, a JSON text, which is checked here, once.

    Raises UserError, naming `where`, for a task without a checker and for a game that lacks a field.
    """
    if task not in CHECKERS:
        refusal = next((reason for pattern, reason in UNCHECKED.items() if fnmatch(task, pattern)), None)
        if refusal is not None:
            raise UserError(f"{where}: SynLogic's task {task!r} has no checker here: {refusal}")
        near = get_close_matches(task, CHECKERS, n=3, cutoff=0.5) or sorted(CHECKERS)
        raise UserError(f"{where}: no SynLogic task {task!r}; is it {' or '.join(near)}?")
    answer = SynLogicAnswer(task, game)
    try:
        checker(answer)
    except GameError as error:
        raise UserError(f"{where}: 'game' is no problem of {task}: {error}") from error
    return answer


def verify(text: str, answer: TaskAnswer) -> Verdict:
    r"""Judge the response's answer tags, or else what follows its thinking, by the task's rule. Rewards 1.0 or 0.0.

    FORMAT: no answer in the form that the task asks for. The canonical answer is one line, cut at 1,000 characters.

    Example: `verify(r"<answer>\boxed{7}</answer>", SynLogicAnswer("object_counting", '{"answer": "7"}'))` is
    `Verdict(Outcome.CORRECT, 1.0, "7", "")`.
    """
    assert isinstance(answer, SynLogicAnswer)
    check = checker(answer)
    try:
        part = final_part(text)
        if taken_back(words_after(part)):
            raise UnreadableError("the answer is taken back")
        finding = check(part)
    except UnreadableError as error:
        return Verdict(Outcome.FORMAT, 0.0, None, str(error))
    outcome = Outcome.CORRECT if finding.right else Outcome.WRONG
    return Verdict(outcome, float(finding.right), finding.given[:MAX_CANONICAL])


@lru_cache(maxsize=1024)
def checker(answer: SynLogicAnswer) -> Check:
    """The problem's checker. Raises GameError, naming the field, where the problem's data lack what it needs."""
    if answer.task not in CHECKERS:
        raise GameError(f"no checker for SynLogic's task {answer.task!r}")
    return CHECKERS[answer.task](read_game(answer.game))


def load_items(path: Path) -> list[TaskItem]:
    """Problems of SynLogic from a JSONL file. Raises UserError as `read_records` does."""
    return [
        TaskItem(record.id, "synlogic", record.prompt, record.answer, path.name, question=record.prompt)
        for record in read_records(path)
    ]
