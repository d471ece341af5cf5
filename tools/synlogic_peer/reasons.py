"""The kinds of difference that are known, each with its reason: the table of `docs/reference/synlogic.md`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from synlogic_peer.responses import WRONG

STRICTER, LAXER = "stricter", "laxer"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why our verdict differs. `holds` gets the task, the response's kind and what was done to it.

    Example: `Reason("taken back", STRICTER, "...", lambda task, kind, change: change == "taken back")`.
    """

    name: str
    side: str
    text: str
    holds: Callable[[str, str, str], bool]


def _changed(*changes: str) -> Callable[[str, str, str], bool]:
    return lambda task, kind, change: change in changes


def _of(*tasks: str) -> Callable[[str, str, str], bool]:
    return lambda task, kind, change: task in tasks


# The first that holds is the reason.
REASONS = (
    Reason(
        "norinori, empty regions",
        STRICTER,
        "Theirs ignores regions that no domino touches, so that a board without dominoes is right, and so is any text.",
        _of("norinori"),
    ),
    Reason(
        "mathador, any value",
        STRICTER,
        "Theirs compares the value with itself: every expression of the numbers is right, `**` and `//` included.",
        lambda task, kind, change: task == "mathador" and (kind == WRONG or change == "right, then wrong"),
    ),
    Reason(
        "taken back",
        STRICTER,
        'An answer that the response takes back ("that is wrong, I give up") is none.',
        _changed("taken back"),
    ),
    Reason(
        "one or the other",
        STRICTER,
        'Two boxes or numbers with "or" between them are no answer; theirs takes the last one.',
        _changed("one or the other"),
    ),
    Reason(
        "first or last",
        STRICTER,
        "Of several answers the last one counts; theirs takes the first in these tasks, "
        "and all numbers together in `dyck_language_reasoning_errors`.",
        _changed("right, then wrong"),
    ),
    Reason(
        "first or last",
        LAXER,
        "The same: the last of several answers is right.",
        _changed("wrong, then right", "wrong tags, then right ones", "one or the other", "the same twice"),
    ),
    Reason(
        "anything but digits is dropped",
        STRICTER,
        "Theirs deletes all signs but digits, commas and spaces: words, LaTeX and comments in the answer, brackets "
        "that are missing; `calcudoko` fills rows up with ones, `minesweeper` takes any two numbers for a place.",
        _of("calcudoko", "dyck_language_reasoning_errors", "futoshiki", "minesweeper"),
    ),
    Reason(
        "one value too many",
        STRICTER,
        "Theirs does not look at what follows the values that it compares, or lets a person occur twice.",
        lambda task, kind, change: change in ("a part too many", "part added"),
    ),
    Reason(
        "math_path, no equation",
        STRICTER,
        "Theirs runs the text: comments are passed over, and a number without an equals sign is true.",
        _of("math_path"),
    ),
    Reason(
        "nested once more",
        STRICTER,
        "`[[[...]]]` is another shape; theirs looks for the inner brackets by a pattern.",
        _changed("nested once more", "a comma missing"),
    ),
    Reason(
        "operation by math-verify",
        STRICTER,
        "Theirs lets math-verify find a number anywhere and compares six digits; here it must be in the box that the "
        'prompt asks for or after "the answer is", and of two decimals one must round the other.',
        _of("operation"),
    ),
    Reason(
        "tags not closed",
        LAXER,
        "Theirs reads nothing of `<answer>` without `</answer>`; an answer that ended by itself stands complete.",
        _changed("opened tags"),
    ),
    Reason(
        "the wrong one denied",
        LAXER,
        '"not" before a value says that it is no answer; theirs takes it.',
        _changed("the wrong one denied"),
    ),
    Reason(
        "around the value",
        LAXER,
        "Words, a name, a call, quotes, a comment, a box or another fence around a value that can be read do not "
        "change it; theirs evaluates the whole block, or knows one kind of fence.",
        _changed(
            *("words in the form", "words behind it in the form", "assigned", "printed", "an expression", "in quotes"),
            *("LaTeX text", "a bare fence", "a fence on one line", "in a box", "no form around it", "form not closed"),
            *("a comment in the form", "bold", "nested once more", "last sign missing", "after brackets"),
        ),
    ),
    Reason(
        "spelling of a value",
        LAXER,
        "`'2'`, `2.0` and full-width digits are 2, spaces and typographic quotes do not count.",
        _changed(
            "every number in quotes",
            "numbers with decimals",
            "look-alike signs",
            "spread on lines",
            "typographic quotes",
        ),
    ),
)


def reason(task: str, kind: str, change: str, side: str) -> Reason | None:
    """The reason of a difference; None for one of an unknown kind."""
    return next((each for each in REASONS if each.side == side and each.holds(task, kind, change)), None)
