"""A small sample of games and responses on which both sides agree, which the unit tests hold without the repository."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from megasharp.tasks.synlogic import SynLogicAnswer, checker
from megasharp.tasks.synlogic.game import GameError
from synlogic_peer.responses import KINDS, OFF_FORM, Response

Enough = Callable[[dict[str, Any]], bool]

# Characters of the longest response that is kept.
LONGEST = 360


def sample(agreed: Sequence[tuple[Response, bool]]) -> Iterator[str]:
    """For each task a line: its smallest game, and the shortest responses to it of each kind with their verdicts."""
    for task in sorted({response.puzzle.task for response, _ in agreed}):
        games = {id(response.puzzle): response.puzzle for response, _ in agreed if response.puzzle.task == task}
        puzzle = min(games.values(), key=lambda each: len(json.dumps(_needed(task, each.data))))
        kept: dict[str, bool] = {}
        for kind in KINDS:
            for verdict in (True, False) if kind != OFF_FORM else (True,):
                some = [
                    each.text
                    for each, right in agreed
                    if each.puzzle is puzzle and each.kind == kind and right == verdict and each.text not in kept
                ]
                if some and len(min(some, key=len)) <= LONGEST:
                    kept[min(some, key=len)] = verdict
        yield (
            json.dumps({"task": task, "game": _needed(task, puzzle.data), "verdicts": kept}, ensure_ascii=False) + "\n"
        )


def _needed(task: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a game that its checker needs."""
    game: dict[str, Any] = {"question": data["question"], "answer": data["answer"], "metadata": data["metadata"] or {}}
    game["metadata"] = _fewer(game["metadata"], lambda some: _is_game(task, game | {"metadata": some}))
    # Without metadata it is the answer that is compared, also where none would be one.
    for name in ("question", "answer") if game["metadata"] else ("question",):
        game[name] = "" if _is_game(task, game | {name: ""}) else game[name]
    return game


def _fewer(fields: dict[str, Any], enough: Enough) -> dict[str, Any]:
    """The fields without those that may be missing, and so the fields of objects in them."""
    for name in list(fields):
        without = {key: value for key, value in fields.items() if key != name}
        if enough(without):
            fields = without
        elif isinstance(fields[name], dict):
            fields = {**fields, name: _fewer(fields[name], partial(_enough_with, enough, fields, name))}
    return fields


def _enough_with(enough: Enough, fields: dict[str, Any], name: str, value: dict[str, Any]) -> bool:
    return enough({**fields, name: value})


def _is_game(task: str, game: Mapping[str, Any]) -> bool:
    try:
        checker(SynLogicAnswer(task, json.dumps(game)))
    except GameError:
        return False
    return True
