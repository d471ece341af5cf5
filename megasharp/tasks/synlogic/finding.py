"""Finding a response's answer in the form that SynLogic's prompts ask for: a block of code, a bracketed value, a box.

SynLogic's training prompt asks for `<think>` and `<answer>` tags (base/verifier.py of its repository): the last closed
answer tags count, or else all that follows the thinking. Within that, the task's own form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

from megasharp.tasks.extraction import ending, last_box, last_tag
from megasharp.tasks.synlogic.literals import MAX_CHARACTERS, UnreadableError, read_literal, whole_numbers

T = TypeVar("T")

# Number of bracketed values that are tried, from the last one on: a remark in parentheses may follow the answer.
MAX_TRIES = 16

_FENCE = re.compile(r"```[A-Za-z]*[ \t]*\n?(.*?)```", re.DOTALL)
_ASSIGNED = re.compile(r"\s*[A-Za-z_]\w*\s*=\s*")
_CLOSING = {"]": "[", ")": "(", "}": "{"}


def final_part(text: str) -> str:
    """Return the part of a response that a checker reads. Raises UnreadableError where nothing follows the thinking.

    Empty tags are an answer: that there is no mistake, say.
    """
    after = ending(text).rpartition("</think>")[2]
    tagged = last_tag(after)
    if tagged is None and not after.strip():
        raise UnreadableError("no answer")
    return after if tagged is None else tagged


def last_block(text: str) -> str | None:
    """The last fenced block's contents, stripped, without a leading `name =`; None where there is none."""
    blocks = _FENCE.findall(text)
    return _ASSIGNED.sub("", str(blocks[-1]), count=1).strip() if blocks else None


def box(text: str) -> str:
    """The last box's contents. Raises UnreadableError where there is none, or an empty one."""
    found = last_box(text)
    if not found:
        raise UnreadableError("no box")
    return found


def last_value(text: str, read: Callable[[str], T]) -> T:
    """Read, by `read`, the last fenced block, or else the last bracketed text that it can read.

    Raises UnreadableError where it can read neither.
    """
    block = last_block(text)
    if block is not None:
        with suppress(UnreadableError):
            return read(block)
    for written in _bracketed(text):
        try:
            return read(written)
        except UnreadableError:
            continue
    raise UnreadableError("no value of the form that is asked for")


def last_whole_numbers(text: str) -> list[list[int]]:
    """The last grid of whole numbers: rows in brackets, or parted by commas, and numbers by spaces: `[[1 2,2 1]]`."""
    return last_value(text, _rows)


def _rows(text: str) -> list[list[int]]:
    try:
        return whole_numbers(read_literal(text))
    except UnreadableError:
        bare = text.strip().strip("[]() \n\t")
        rows = [row.split() for row in re.split(r"[,;\n]", bare) if row.strip()]
        # One number a row is a list, and the same numbers with commas between them are one too.
        if len(rows) < 2 or any(len(row) < 2 for row in rows):
            raise
        return whole_numbers(rows)


def _bracketed(text: str) -> Iterator[str]:
    """Texts in brackets, outermost ones, the last one first."""
    end = len(text)
    for _ in range(MAX_TRIES):
        end = max(text.rfind(sign, 0, end) for sign in _CLOSING)
        if end < 0:
            return
        start = _opened(text, end)
        if start is not None:
            yield text[start : end + 1]
            end = start


def _opened(text: str, end: int) -> int | None:
    """Find the place where the bracket that closes at `end` opens; None where none opens within the limit of length."""
    open_brackets: list[str] = []
    for at in range(end, max(end - MAX_CHARACTERS, -1), -1):
        sign = text[at]
        if sign in _CLOSING:
            open_brackets.append(_CLOSING[sign])
        elif sign in "[({":
            if open_brackets.pop() != sign:
                return None
            if not open_brackets:
                return at
    return None
