"""Finding a response's answer in the form that SynLogic's prompts ask for: a block of code, a bracketed value, a box.

SynLogic's training prompt asks for `<think>` and `<answer>` tags (base/verifier.py of its repository): the last closed
answer tags count, or else all that follows the thinking. Within that, the task's own form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

from megasharp.tasks.extraction import ending, last_tag
from megasharp.tasks.synlogic.game import Check, Finding, GameError
from megasharp.tasks.synlogic.literals import MAX_CHARACTERS, MAX_DEPTH, UnreadableError, read_literal, whole_numbers
from megasharp.tasks.synlogic.undressed import narrow, without_fonts

T = TypeVar("T")

# Answers that say that there is no mistake.
NO_MISTAKE = re.compile("no|none|no (?:mistakes?|errors?)|all correct|\u65e0\u95ee\u9898|\u65e0\u9519\u8bef")

# Number of bracketed values that are tried, from the last one on: a remark in parentheses may follow the answer.
MAX_TRIES = 16
# Signs before such a value that are read for what it is said to be.
NEAR = 60
MAX_LENGTH = 2_000

_FENCE = re.compile(r"```[A-Za-z]*[ \t]*\n?(.*?)```", re.DOTALL)
_ASSIGNED = re.compile(r"\s*[A-Za-z_]\w*\s*=\s*")
# A bracket that is no part of a value: of a LaTeX command, of displayed mathematics, or of a call.
_AROUND = re.compile(r"\{\s*[\[({]|\(\s*[\[{]|(?<=\\)[\[(]")
_COMMAS = re.compile(r"\s*(?:[,;\u3001]\s*(?:and\s)?|\band\b)?\s*")
_CLOSING = {"]": "[", ")": "(", "}": "{"}
# Words right before a bracketed value that say what else it is.
_SOMETHING_ELSE = re.compile(
    r"(?:\bnot|\b(?:input|given|original|initial|starting|puzzle|question)(?:'s)?"
    r"(?:\s+(?:grid|board|matrix|puzzle|list|one|values?))?(?:\s+(?:is|was|being))?\s*[:=]?)[\s*`$]*$",
    re.IGNORECASE,
)
# An answer that ends, in a bracket, fence, bold sign, number or tag, and "or" right before another one.
_OR_WORD = r"(?:\bor\b|\\text\{\s*or\s*\}|\u6216)"
_OR = re.compile(
    rf"(?:[\])}}>0-9\"']|```|\*\*)[\s,;.*$`]*{_OR_WORD}"
    r"(?:[\s,:*$({\[`]|\\[\[({]|\b(?:maybe|perhaps|possibly|else|even|python|json)\b|\b(?:the answer|it) is\b"
    r"|\\(?:boxed|fbox|text|mathrm|mathbf)\s*\{?)*$",
    re.IGNORECASE,
)
_OR_BEHIND = re.compile(rf"(?:[\s,;.*$`\])}}\"']|\\[\])}}])*{_OR_WORD}", re.IGNORECASE)
# Signs that end an answer: what follows the last of them is words about it.
_ENDS = ("]", "}", ")", "```", "**")


def final_part(text: str) -> str:
    """Return the part of a response that a checker reads, in ASCII's signs and without fonts around numbers.

    Empty tags are an answer: that there is no mistake, say. Raises UnreadableError where nothing follows the thinking.
    """
    after = ending(text).rpartition("</think>")[2]
    tagged = last_tag(after)
    if tagged is None and not after.strip():
        raise UnreadableError("no answer")
    return without_fonts(narrow(after if tagged is None else tagged), words=False)


def refuse_choice(text: str, start: int, end: int | None = None) -> None:
    """Raise UnreadableError where another answer and "or" stand right before the one that begins at `start`.

    With `end`, its end, also where "or" stands right behind it.
    """
    if _OR.search(text, max(start - NEAR, 0), start) or (end is not None and _OR_BEHIND.match(text, end)):
        raise UnreadableError("one answer or another")


def words_after(text: str) -> str:
    """Return the text behind the last bracket, brace, fence or bold sign, or else the last digit; empty without any."""
    ends = [text.rfind(sign) + len(sign) for sign in _ENDS if sign in text]
    ends = ends or [text.rfind(digit) + 1 for digit in "0123456789" if digit in text]
    return text[max(ends) :] if ends else ""


def compared(reference: str, read: Callable[[str], str], spell: Callable[[str], str]) -> Check:
    """Make a checker that compares the answer that is read with the reference, both spelled alike."""
    wanted = spell(narrow(reference))
    if not wanted:
        raise GameError("'answer' must hold the reference answer")

    def check(text: str) -> Finding:
        written = read(text)
        given = spell(written) if len(written) <= MAX_CHARACTERS else ""
        if not given or len(given) > MAX_LENGTH:
            raise UnreadableError("no answer, or too long a one")
        return Finding(given, given == wanted)

    return check


def last_block(text: str) -> str | None:
    """The last fenced block's contents, stripped, without a leading `name =`; None where there is none."""
    return _block(text)[0]


def _block(text: str) -> tuple[str | None, int]:
    """The last fenced block, as `last_block` has it, and where it begins; the text's beginning where there is none."""
    blocks = list(_FENCE.finditer(text))
    if blocks:
        refuse_choice(text, blocks[-1].start(1))
    return (_ASSIGNED.sub("", blocks[-1][1], count=1).strip(), blocks[-1].start(1)) if blocks else (None, 0)


def last_value(text: str, read: Callable[[str], T], *, listed: bool = False) -> T:
    """Read, by `read`, the last fenced block, or else the last bracketed text that it can read.

    Behind a block that it cannot read, or in it, there must be such a text, if it has brackets at all: an answer before
    it was another one. A bracketed text that is called the input or the given grid, or follows "not", is none.
    `listed`: several of them with commas between them may be a list. Raises UnreadableError where it can read none.
    """
    text = without_fonts(text)
    block, begin = _block(text)
    if block is not None:
        with suppress(UnreadableError):
            return read(block)
        text = text[begin:] if any(sign in block for sign in _CLOSING) else text
    for start, end in _bracketed(text):
        if not _SOMETHING_ELSE.search(text, max(start - NEAR, 0), start):
            refuse_choice(text, start)
            for written in (_with_those_before(text, start, end) if listed else "", text[start:end]):
                with suppress(UnreadableError):
                    return read(written)
            listed = False
    raise UnreadableError("no value of the form that is asked for")


def _with_those_before(text: str, start: int, end: int) -> str:
    """The bracketed text and those before it that only commas or "and" part, as one list."""
    head = text[max(start - MAX_CHARACTERS, 0) : start]
    parts = [text[start:end]]
    reached = len(head)
    for begin, after in _bracketed(head):
        if not _COMMAS.fullmatch(head, after, reached):
            break
        parts.append(head[begin:after])
        reached = begin
    return f"[{','.join(reversed(parts))}]"


def last_whole_numbers(text: str) -> list[list[int]]:
    """The last grid of whole numbers: rows in brackets, or parted by commas, and numbers by spaces: `[[1 2,2 1]]`."""
    return last_value(text, _rows)


def _rows(text: str) -> list[list[int]]:
    try:
        return whole_numbers(read_literal(text))
    except UnreadableError:
        bare = re.sub("[\"']", "", text).strip("[](){} \n\t")
        rows = [row.split() for row in re.split(r"[,;\n]", bare) if row.strip()]
        # One number a row is a list, and the same numbers with commas between them are one too.
        if len(rows) < 2 or any(len(row) < 2 for row in rows):
            raise
        return whole_numbers(rows)


def _bracketed(text: str) -> Iterator[tuple[int, int]]:
    """Where texts in brackets begin and end, outermost ones, the last one first; after a box or call what is in it."""
    end = len(text)
    for _ in range(MAX_TRIES):
        end = max(text.rfind(sign, 0, end) for sign in _CLOSING)
        if end < 0:
            return
        start = _opened(text, end)
        if start is not None:
            yield start, end + 1
            end = end if _AROUND.match(text, start) else start


def _opened(text: str, end: int) -> int | None:
    """Find the place where the bracket that closes at `end` opens; None where none opens within the limits."""
    open_brackets: list[str] = []
    for at in range(end, max(end - MAX_CHARACTERS, -1), -1):
        sign = text[at]
        if sign in _CLOSING:
            open_brackets.append(_CLOSING[sign])
            if len(open_brackets) > 2 * MAX_DEPTH:
                return None
        elif sign in "[({":
            if open_brackets.pop() != sign:
                return None
            if not open_brackets:
                return at
    return None
