"""The kinds of difference that are known, each with its reason: the table of `docs/reference/synlogic.md`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from synlogic_peer.responses import RIGHT, WRONG, Response
from synlogic_peer.solutions import value_of

STRICTER, LAXER = "stricter", "laxer"

Holds = Callable[[Response], bool]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why our verdict differs. `holds` gets the response: no task as such is a reason.

    Example: `Reason("taken back", STRICTER, "...", lambda response: response.change == "taken back")`.
    """

    name: str
    side: str
    text: str
    holds: Holds


def _changed(*changes: str, tasks: tuple[str, ...] = ()) -> Holds:
    """Responses of these changes, to games of these tasks or of all."""
    return lambda each: each.change in changes and (not tasks or each.puzzle.task in tasks)


def _any(*some: Holds) -> Holds:
    return lambda each: any(holds(each) for holds in some)


def _leaves_a_region_empty(each: Response) -> bool:
    """A response to norinori whose dominoes leave a region without one."""
    if each.puzzle.task != "norinori":
        return False
    numbers = [int(float(number)) for number in re.findall(r"(?<!\d)\d{1,3}(?:\.0)?(?!\d)", each.text)]
    places = set(zip(numbers[::2], numbers[1::2], strict=False))
    regions = each.puzzle.data["metadata"]["region_grid"]
    touched = {regions[r - 1][c - 1] for r, c in places if 1 <= r <= len(regions) and 1 <= c <= len(regions[0])}
    return not touched.issuperset(cell for row in regions for cell in row)


def _has_another_value(each: Response) -> bool:
    """A response to mathador whose last expression is not worth the result, or has a sign twice."""
    if each.puzzle.task != "mathador":
        return False
    blocks = re.findall(r"```\w*\n(.*?)\n```", each.text, re.DOTALL)
    wanted = each.puzzle.data["metadata"]["result"]
    return any(value_of(block) != wanted or re.search(r"[-+*/]{2}", block) for block in blocks[-1:])


def _is_no_equation(each: Response) -> bool:
    """A response to math_path without an equals sign, or with a comment behind it."""
    return each.puzzle.task == "math_path" and each.kind != RIGHT and ("=" not in each.text or "#" in each.text)


def _is_near(each: Response) -> bool:
    """A wrong response to operation that differs behind the sixth digit, by a unit of the shorter one's last place."""
    given = re.search(r"-?[0-9]+(?:\.[0-9]*)?", each.text)
    if each.puzzle.task != "operation" or each.kind != WRONG or given is None:
        return False
    value, reference = Decimal(given[0]), Decimal(each.puzzle.solutions[0])
    unit = Decimal(10) ** -min(len(str(some).partition(".")[2]) for some in (value, reference))
    return unit <= abs(value - reference) <= Decimal("1e-6") * max(Decimal(1), abs(reference))


# Tasks in which their verifier takes the first of several answers, or all of them together.
FIRST_COUNTS = (
    *("calcudoko", "campsite", "dyck_language_reasoning_errors", "kukurasu"),
    *("minesweeper", "skyscraper_puzzle", "wordscapes"),
)
# What is written around digits that are right.
_AROUND_DIGITS = (
    *("words in the form", "words behind it in the form", "a comment in the form"),
    *("assigned", "printed", "an expression"),
)

# The first that holds is the reason.
REASONS = (
    Reason(
        "norinori, empty regions",
        STRICTER,
        "Theirs ignores regions that no domino touches, so that a board without dominoes is right, and so is any text.",
        _any(
            _leaves_a_region_empty,
            _changed(
                *("no form around it", "form not closed", "flattened", "a cell is None", "in thinking alone"),
                "full-width brackets",
                tasks=("norinori",),
            ),
        ),
    ),
    Reason(
        "mathador, any value",
        STRICTER,
        "Theirs compares the value with itself: every expression of the numbers is right, `**`, `//`, `++` included.",
        _has_another_value,
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
        _changed("right, then wrong", tasks=FIRST_COUNTS),
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
        _any(
            _changed(*_AROUND_DIGITS, "no form around it", "form not closed", "a part too many", tasks=("calcudoko",)),
            _changed("a bracket missing", tasks=("calcudoko",)),
            _changed(*_AROUND_DIGITS, tasks=("futoshiki",)),
            _changed(
                *("a comment in the form", "printed", "an expression"),
                *("prose behind", "much before it", "an order"),
                tasks=("dyck_language_reasoning_errors",),
            ),
            _changed("flattened", "transposed", "a comma missing", tasks=("minesweeper",)),
        ),
    ),
    Reason(
        "one value too many",
        STRICTER,
        "Theirs does not look at what follows the values that it compares, or lets a person occur twice.",
        lambda each: (
            each.change in ("a part too many", "part added") and each.puzzle.task in ("goods_exchange", "time_sequence")
        ),
    ),
    Reason(
        "a word within a text",
        STRICTER,
        'Theirs reads "valid" anywhere, even in "invalid", as -1, and the "no" of "None" as an answer.',
        _any(
            _changed("an order", tasks=("dyck_language_errors",)),
            lambda each: each.puzzle.task == "web_of_lies" and "None" in each.text,
        ),
    ),
    Reason(
        "math_path, no equation",
        STRICTER,
        "Theirs runs the text: comments are passed over, and a number without an equals sign is true.",
        _is_no_equation,
    ),
    Reason(
        "nested once more",
        STRICTER,
        "`[[[...]]]` is another shape, and so is a list with a comma less; theirs looks for the inner brackets by a "
        "pattern, or joins two texts that stand side by side.",
        _any(
            _changed(
                "nested once more",
                tasks=(
                    *("kukurasu", "minesweeper", "norinori", "number_wall"),
                    *("numbrix", "star_placement_puzzle", "wordscapes"),
                ),
            ),
            _changed("a comma missing", tasks=("norinori", "wordscapes")),
        ),
    ),
    Reason(
        "operation by math-verify",
        STRICTER,
        "Theirs lets math-verify find a number anywhere and compares six digits; here it must be in the box that the "
        'prompt asks for or after "the answer is", and of two decimals one must round the other.',
        _any(
            _is_near,
            _changed("a bare fence", "a fence on one line", "no form around it", "an order", tasks=("operation",)),
        ),
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
            "full stop behind",
        ),
    ),
    Reason(
        "spelling of a value",
        LAXER,
        "`'2'`, `2.0` and full-width digits are 2, as full-width commas and brackets are those of ASCII; spaces and "
        "typographic quotes do not count.",
        _changed(
            "every number in quotes",
            "numbers with decimals",
            "look-alike signs",
            "spread on lines",
            "typographic quotes",
            "full-width commas",
            "full-width brackets",
        ),
    ),
)


def reason(response: Response, side: str) -> Reason | None:
    """The reason of a difference; None for one of an unknown kind.

    No reason holds for a stricter verdict on a right response, nor for a laxer one on a wrong response.
    """
    if (response.kind, side) in ((RIGHT, STRICTER), (WRONG, LAXER)):
        return None
    return next((each for each in REASONS if each.side == side and each.holds(response)), None)
