r"""Where the answer stands in a response: the last box, the last pair of tags, or what follows "the answer is".

Every search reads the last `MAX_CHARACTERS` of a response only, in time that grows with them and no faster: a response
may be of any length, and made of nothing but opening braces.
"""

from __future__ import annotations

import re

MAX_CHARACTERS = 100_000

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MARKER = r"(?:\banswer is|\banswer:|####)"
# The words must be on one line; what follows them may be bold or quoted, and ends where they are said again. Where a
# colon, a star or `####` ends their line, it is the next line with anything on it.
_STATED = re.compile(rf"{_MARKER}(?:[ \t*:]*(?<=[:*#])[ \t]*\n\s*)?[ \t*:]*((?:(?!{_MARKER})[^\n])*)", re.IGNORECASE)


def ending(text: str) -> str:
    """The part of a response that is searched for its answer."""
    return text[-MAX_CHARACTERS:]


def last_box(text: str) -> str | None:
    r"""What stands in the last complete `\boxed{...}`, stripped; None where there is none.

    A box in a box is part of the outer one, and what is returned holds no box. A box that is never closed is none.

    Example: `last_box(r"\boxed{1}, no: \boxed{\frac{1}{2}}")` is `\frac{1}{2}`.
    """
    text = ending(text)
    boxes = _closed_boxes(text)
    if not boxes:
        return None
    _, begin, end = boxes[-1]
    inside = [box for box in boxes if begin <= box[0]]
    marks = sorted([(start, inner) for start, inner, _ in inside] + [(close, close + 1) for _, _, close in inside])
    kept: list[str] = []
    for start, after in marks:
        kept.append(text[begin:start])
        begin = after
    return "".join([*kept, text[begin:end]]).strip()


def last_tag(text: str, name: str = "answer") -> str | None:
    """What stands between the last `<name>` that is closed and its `</name>`, stripped; None where there is none.

    Example: `last_tag("<answer>1</answer> <answer> 2 </answer>")` is `2`.
    """
    text = ending(text)
    end = text.rfind(f"</{name}>")
    start = text.rfind(f"<{name}>", 0, max(end, 0))
    return text[start + len(name) + 2 : end].strip() if start >= 0 else None


def last_stated(text: str) -> str | None:
    """What follows the last "answer is", "answer:" or "####" on its line, stripped; None where nothing does.

    Where a colon ends their line, it is the next line with anything on it. What was stated before is none of it.

    Example: `last_stated("So the answer is (B).")` is `(B).`
    """
    found = [match[1].strip(" \t*") for match in _STATED.finditer(ending(text))]
    return next((each for each in reversed(found) if each), None)


def _closed_boxes(text: str) -> list[tuple[int, int, int]]:
    """Where each closed box starts, where its contents do, and where it is closed; in the order of the last."""
    starts = {match.end(): match.start() for match in _BOX.finditer(text)}
    boxes: list[tuple[int, int, int]] = []
    open_at: list[int] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            open_at.append(match.end())
        elif match[0] == "}" and open_at:
            inner = open_at.pop()
            if inner in starts:
                boxes.append((starts[inner], inner, match.start()))
    return boxes
