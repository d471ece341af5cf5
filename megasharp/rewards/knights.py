r"""Knights and Knaves: who tells the truth and who lies, from what they say of each other.

A puzzle has one solution (`data/knights.py` makes them so), and a response gives it in the last answer tags, or else in
the last box: one statement a person, in any order, parted by commas, semicolons, lines or "and".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megasharp.rewards.extraction import last_box, last_tag
from megasharp.types import Outcome, TaskAnswer, Verdict

MAX_LENGTH = 2000

_PARTS = re.compile(r"[,;\n]|\band\b", re.IGNORECASE)
_STATEMENT = re.compile(r"(?:[-*]\s+|\(?\d+[.)]\s*)?(\w+)\s*(?:\bis\b|[:=])\s*(not\s+)?(?:an?\s+)?(\w+)", re.IGNORECASE)
_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")


class _UnreadableError(ValueError):
    """The response gives no assignment; the text says why."""


@dataclass(frozen=True, slots=True)
class KnightsAnswer(TaskAnswer):
    """Who is a knight, by name, and what knights and knaves are called in the puzzle.

    Example: `KnightsAnswer((("Zoey", True), ("Oliver", False)))`.
    """

    knights: tuple[tuple[str, bool], ...]
    truthful: str = "knight"
    lying: str = "knave"


def verify(text: str, answer: TaskAnswer) -> Verdict:
    """Judge who is said to be what. The canonical answer is sorted by name. Rewards are 1.0 or 0.0.

    FORMAT: no tags and no box; a part that is no statement; a name that the puzzle does not have, or one that is left
    out; two statements of one name that conflict.

    Example: `verify("<answer>Oliver is a knave, and Zoey is a knight.</answer>", KnightsAnswer((("Zoey", True),
    ("Oliver", False))))` is `Verdict(Outcome.CORRECT, 1.0, "oliver=knave zoey=knight", "")`.
    """
    assert isinstance(answer, KnightsAnswer)
    given = last_tag(text)
    given = last_box(text) if given is None else given
    if given is None or len(given) > MAX_LENGTH:
        return Verdict(Outcome.FORMAT, 0.0, None, "no answer tags and no box, or too long a text in them")
    try:
        said = _assignment(given, answer)
    except _UnreadableError as error:
        return Verdict(Outcome.FORMAT, 0.0, None, str(error))
    right = said == {name.casefold(): knight for name, knight in answer.knights}
    named = (f"{name}={answer.truthful if knight else answer.lying}" for name, knight in sorted(said.items()))
    return Verdict(Outcome.CORRECT if right else Outcome.WRONG, float(right), " ".join(named))


def _assignment(text: str, answer: KnightsAnswer) -> dict[str, bool]:
    """Who is said to be a knight, by name in small letters."""
    names = {name.casefold() for name, _ in answer.knights}
    roles = {answer.truthful.casefold(): True, answer.lying.casefold(): False}
    said: dict[str, bool] = {}
    for part in _PARTS.split(_COMMAND.sub(r"\1", text)):
        statement = part.strip().rstrip(".").replace("**", "").replace("\\", "").strip()
        if not statement:
            continue
        match = _STATEMENT.fullmatch(statement)
        if match is None or match[3].casefold() not in roles:
            raise _UnreadableError(f"{statement[:80]!r} does not say who is what")
        name, knight = match[1].casefold(), roles[match[3].casefold()] != bool(match[2])
        if name not in names:
            raise _UnreadableError(f"{match[1]} is not in the puzzle")
        if said.setdefault(name, knight) != knight:
            raise _UnreadableError(f"{match[1]} is said to be both")
    if missing := names - said.keys():
        raise _UnreadableError(f"nothing is said of {', '.join(sorted(missing))}")
    return said
