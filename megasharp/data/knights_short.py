"""The puzzles of `knights` as text of a few characters, for models that know no words.

A person is a digit, a statement is written before its parts: `+2` "2 is a knight", `-2` a knave, `=02` the same,
`#02` of different kinds, `!s` not s, `&st` and, `|st` or, `>st` if s then t, `~st` if and only if.
"""

from __future__ import annotations

from megasharp.data.knights import KnightsPuzzle

# Together with the digits: all characters of prompts and responses.
SIGNS = {
    "knight": "+",
    "knave": "-",
    "same": "=",
    "different": "#",
    "not": "!",
    "and": "&",
    "or": "|",
    "if": ">",
    "iff": "~",
}


def prompt_text(puzzle: KnightsPuzzle) -> str:
    """What everyone says, parted by commas, then a colon. Example: `-1,=01:` of two people."""
    return ",".join(map(_short, puzzle.statements)) + ":"


def _short(part: object) -> str:
    if isinstance(part, int):
        return str(part)
    assert isinstance(part, tuple)
    kind, *parts = part
    return SIGNS[str(kind)] + "".join(map(_short, parts))
