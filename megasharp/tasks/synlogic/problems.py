"""SynLogic's problems (2505.19641), one JSON object a line: the task, the prompt as it stands, and the game's data.

The data are what SynLogic's generators write of a problem (MiniMax-AI/SynLogic, `base/data.py`): `question`, `answer`
and the `metadata` that the task's checker reads; its set on the hub keeps them as JSON text. A task that nothing here
judges is refused when data are loaded, and so is a problem that lacks what its checker needs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.tasks.extraction import Fields, check_names, name_of, read_objects, text_field
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.synlogic import CHECKERS, UNCHECKED, SynLogicAnswer, checker
from megasharp.tasks.synlogic.game import GameError


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
    records = [
        SynLogicRecord(
            name_of(fields, ("id",), path, where),
            text_field(fields, "prompt", where),
            answer_of(text_field(fields, "task", where), _game(fields, where), where),
        )
        for where, fields in read_objects(path, "write lines with 'task', 'prompt' and 'game'")
    ]
    check_names([record.id for record in records], path)
    return records


def answer_of(task: str, game: str, where: str) -> SynLogicAnswer:
    """What the verifier needs of a problem, its `game` a JSON text; it is checked here, once.

    Raises UserError, naming `where`, for a task that nothing judges and for a game that lacks a field.
    """
    if task not in CHECKERS:
        raise UserError(f"{where}: {_refusal(task)}")
    answer = SynLogicAnswer(task, game)
    try:
        checker(answer)
    except GameError as error:
        raise UserError(f"{where}: 'game' is no problem of {task}: {error}") from error
    return answer


def _refusal(task: str) -> str:
    for pattern, reason in UNCHECKED.items():
        if fnmatch(task, pattern):
            return f"SynLogic's task {task!r} has no checker here: {reason}"
    near = get_close_matches(task, CHECKERS, n=3, cutoff=0.5) or sorted(CHECKERS)
    return f"no SynLogic task {task!r}; is it {' or '.join(near)}?"


def _game(fields: Fields, where: str) -> str:
    game = fields.get("game")
    if isinstance(game, dict):
        return json.dumps(game, ensure_ascii=False)
    if not isinstance(game, str):
        raise UserError(f"{where}: 'game' must be an object with 'question', 'answer' and 'metadata', or its JSON text")
    return game


def load_items(path: Path) -> list[TaskItem]:
    """Problems of SynLogic from a JSONL file. Raises UserError as `synlogic.read_records` does."""
    return [TaskItem(record.id, "synlogic", record.prompt, record.answer, path.name) for record in read_records(path)]
