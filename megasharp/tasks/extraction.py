"""Reading the answer in a response: in the last box, in the last pair of tags, or after the last "the answer is".

Every search reads the last `MAX_CHARACTERS` of a response only, in time that grows linearly with them: a response may
be of any length, and made of nothing but opening braces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_CHARACTERS = 100_000
# The end of a text that was cut off, in the place of its last word, which may be half of one (`final_answer.py`).
CUT = "\u2026"

_BOX = re.compile(
    r"\\(?:boxed|fbox|framebox)(?:\s*(?P<open>\{)|\s*(?P<bare>-?\d[\d,]*(?:\.\d+)?|\\[A-Za-z]+(?:\s*\{[^{}]*\}|\d)+"
    r"|\([^()\n]*\)|[A-Z](?![A-Za-z])(?!\s+[a-z])))"
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# Signs and words between boxes that are one answer, or a choice.
_BETWEEN = re.compile(
    r"(?:[\s,;:$*&\uff0c\u3001]|\\[()\[\],;: ]|\\q?quad\b|\band\b|\\text\{\s*and\s*\}|\u548c"
    r"|(?P<or>\bor\b|\\text\{\s*or\s*\}|\u6216))*",
    re.IGNORECASE,
)
# Boxes with nothing in them: they fill no place of an answer.
_EMPTY = re.compile(r"(?:\s|\\(?:ldots|dots|cdots|quad|text\{\s*\}|[,;! ])|\.\.\.|\?|_|[$~])*")
# "The answer should be 8" states an answer, "should be a positive integer" tells of it: only a number, a formula, a
# letter or "yes" and its kind may follow, and end the sentence or be given a reason.
_BE = (
    r"(?:(?:should|would|must|has to|appears to|seems to) (?:therefore |thus |then )?be)(?=[ \t*:]*"
    r"(?:\$[^$\n]{1,200}\$|\\\([^\n]{1,200}?\\\)"
    r"|[(\[]?(?:[A-Z]|-?\\?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?|yes|no|true|false)[)\]]?)"
    r"[*\"]*(?:[ \t]*$|[.!](?:\s|$|[*\"])|,?\s(?:because|since|as)\b|,\s(?:not|the)\b|(?<=[)\]])\s))"
)
# "The answer is" in the languages in which models answer; and a heading of that one word.
_WORDS = (
    rf"\banswer (?:is|equals|{_BE})|\banswer:|####|"
    r"^[#*\s]{1,8}(?:final )?answer[*:]*(?=[ \t]*(?:\n|\$))",
    "答案(?:是|为|\uff1a|:)|答え(?:は|\uff1a|:)",
    r"\bla respuesta (?:final |correcta )?es|\brespuesta:|\ba resposta (?:final |correta )?é|\bresposta:",
    r"\bla (?:bonne )?réponse (?:finale |correcte )?est|\bréponse\s?:",
    r"\bdie (?:richtige |korrekte )?Antwort (?:ist|lautet)|\bAntwort:",
    "\\b\u041e\u0442\u0432\u0435\u0442:",
)
_MARKER = rf"(?:{'|'.join(_WORDS)})"
# The words must be on one line; what follows them may be bold or quoted, and ends where they are said again. Where a
# colon, a star or `####` ends their line, it is the next line with anything on it.
_STATED = re.compile(
    rf"{_MARKER}(?:[ \t*:]*(?<=[:\uff1a*#r])[ \t]*\n\s*)?[ \t*:]*((?:(?!{_MARKER})[^\n])*)",
    re.IGNORECASE | re.MULTILINE,
)
# A part of each of these words, in the spellings of a sentence or heading: found 30 times as fast as the words, which
# begin at most so many characters before it.
_HINT = re.compile(
    "|".join(
        each
        for word in ("answer", "respuesta", "resposta", "réponse", "antwort", "\u043e\u0442\u0432\u0435\u0442")
        for each in (word, word.title(), word.upper())
    )
    + "|####|答案|答え"
)
_BEFORE_HINT = 16
# "If x were even, the answer would be 8" states nothing.
_BE_SAID = re.compile(r"answer (?!is|equals)(?:\w+ ){1,2}be\b", re.IGNORECASE)
_CONDITION = re.compile(
    r"\b(?:if|unless|otherwise|without|whether|suppose|assum\w+|think|thinks|thought|says?|expected|guessed)\b",
    re.IGNORECASE,
)
# Right before a statement: "It is not true that", "I do not think that".
_DENIAL = re.compile(
    r"(?:\b(?:not true|false|not the case)\s+that|\b(?:not|cannot)\s+(?:think|believe|say|conclude|agree)(?:\s+that)?"
    r"|n't\s+(?:think|believe|say|conclude|agree)(?:\s+that)?)(?:\s+the)?(?:\s+(?:correct|right|final|best))?\s+$",
    re.IGNORECASE,
)
# A statement may stand between quotes of which one is before it.
_CLOSED_QUOTE = re.compile(r"[\"\u201d](?=[.!]?[\s*]*$)")
# Displayed mathematics goes on with its line: "The answer is: \[5\]".
_DISPLAYED = re.compile(r"(?<!\s)\s*(?:\\\[\s*([^\n]{1,400}?)\s*\\\]|\$\$\s*([^\n$]{1,400}?)\s*\$\$)")

# DAPO's `(?i)Answer\s*:\s*([^\n]+)`, not within longer words, and with bold type around it.
_LINE = re.compile(r"\banswer\s*:[\s*]*([^\n]+)", re.IGNORECASE)
# Where a base model goes on with another turn, or with a problem that it makes up.
_NEXT = re.compile(
    r"<\|(?:im_end|im_start|endoftext|eot_id|end_of_text)\|>"
    r"|^[#* \t]{0,8}(?:(?:human|user|question|problem|exercise|instruction|q)\s?\d{0,3}[*\s]*[:\uff1a]"
    r"|(?:problem|exercise|question)\s+\d{1,3}\b)",
    re.IGNORECASE | re.MULTILINE,
)


def ending(text: str) -> str:
    """Return the part of a response that is searched for its answer."""
    return text[-MAX_CHARACTERS:]


def own_part(text: str, answers: re.Pattern[str] | None = None) -> str:
    """Return a response up to where, after an answer, it goes on with another turn or another problem.

    Base models do so: "The answer is 15.\\n\\nQuestion: ...". Only the end of a response is searched and returned. What
    matches `answers` is an answer beside boxes and statements.
    """
    text = ending(text)
    marks = list(_NEXT.finditer(text))
    if not marks:
        return text
    said = [_STATED.search(text), answers.search(text) if answers else None]
    ends = [box.end for box in boxes(text)[:1]] + [each.end() for each in said if each]
    first = min(ends, default=len(text))
    return next((text[: mark.start()] for mark in marks if mark.start() >= first), text)


@dataclass(frozen=True, slots=True)
class Box:
    """A closed box of a response: where its command starts, where it has ended, and its contents, stripped."""

    start: int
    end: int
    contents: str


def boxes(text: str) -> list[Box]:
    r"""Return the closed boxes of a text that are in no other box and hold anything, in their order.

    A box in a box is part of the outer one, and loses its braces and command. A box that is never closed is none. A
    number, a command or a capital may stand for braces (`\boxed 5`). Places left empty, as `\boxed{\ldots}`, hold
    nothing.
    """
    nested: list[list[_Span]] = []
    for span in sorted(_closed_boxes(text)):
        if nested and span[0] < nested[-1][0][3]:
            nested[-1].append(span)
        else:
            nested.append([span])
    found = [Box(outer[0], outer[3], _contents(text, outer, inner)) for outer, *inner in nested]
    return [box for box in found if not _EMPTY.fullmatch(box.contents)]


def last_box(text: str) -> str | None:
    r"""Return the contents of the last box that holds anything; `""` where all are empty, None where there is none.

    Example: `last_box(r"\boxed{1}, no: \boxed{\frac{1}{2}}")` is `\frac{1}{2}`.
    """
    text = ending(text)
    found = boxes(text)
    if found:
        return found[-1].contents
    return "" if _closed_boxes(text) else None


def _contents(text: str, box: _Span, inside: list[_Span]) -> str:
    """The text in a box without what opens and what closes the boxes inside of it."""
    _, begin, end, _ = box
    marks = sorted(mark for start, inner, close, after in inside for mark in ((start, inner), (close, after)))
    kept: list[str] = []
    for start, after in marks:
        kept.append(text[begin:start])
        begin = after
    return "".join([*kept, text[begin:end]]).strip()


def joined_boxes(text: str) -> tuple[list[str], bool]:
    r"""Return the contents of the last boxes that only commas, "and" or "or" part, and if an "or" is among these.

    Example: `joined_boxes(r"\boxed{1}; thus \boxed{2}, \boxed{3} and $\boxed{4}$")` is `(["2", "3", "4"], False)`.
    """
    text = ending(text)
    run: list[Box] = []
    hedged = False
    for box in reversed(boxes(text)):
        between = _BETWEEN.fullmatch(text, box.end, run[-1].start) if run else None
        if run and between is None:
            break
        hedged = hedged or bool(between and between["or"])
        run.append(box)
    return [box.contents for box in reversed(run)], hedged


def last_tag(text: str, name: str = "answer") -> str | None:
    """Return the text between the last closed `<name>` and its `</name>`, stripped; None where there is none.

    Example: `last_tag("<answer>1</answer> <answer> 2 </answer>")` is `2`.
    """
    text = ending(text)
    end = text.rfind(f"</{name}>")
    start = text.rfind(f"<{name}>", 0, max(end, 0))
    return text[start + len(name) + 2 : end].strip() if start >= 0 else None


def open_box(text: str) -> str | None:
    """Return the contents so far of a box that is never closed, and begins after the last closed one; else None.

    Example: `open_box(r"\boxed{12}, so \boxed{1")` is `1`.
    """
    text = ending(text)
    last = max((box.start for box in boxes(text)), default=-1)
    return next((text[box.end() :].strip() for box in _BOX.finditer(text) if box.start() > last), None)


def open_tag(text: str, name: str = "answer") -> str | None:
    """Return the text after the last `<name>` where no `</name>` follows, stripped; else None."""
    _, opened, inside = ending(text).rpartition(f"<{name}>")
    return inside.strip() if opened and f"</{name}>" not in inside else None


def displayed(text: str) -> str:
    r"""Return the text with displayed mathematics, `\[5\]` or `$$5$$`, within the line before it, as `$5$`."""
    if r"\[" not in text and "$$" not in text:
        return text
    return _DISPLAYED.sub(lambda match: f" ${match[1] or match[2]}$", text)


def statements(text: str) -> list[tuple[str, int]]:
    """Return what follows each "answer is", "answer:", "####" or the like on its line, with where that begins.

    The words may be Chinese, Japanese, Spanish, French, German, Russian or Portuguese. Where a colon, a star or `####`
    ends their line, it is the next line with anything on it.
    """
    found: list[tuple[str, int]] = []
    end = 0
    for hint in _HINT.finditer(text):
        starts = range(max(end, hint.start() - _BEFORE_HINT), hint.start() + 1)
        match = next(filter(None, (_STATED.match(text, start) for start in starts)), None)
        if match is not None:
            end = match.end()
            if match[1].strip(" \t*") and not _unmeant(text, match):
                found.append((_unquoted(match[1]), match.start(1)))
    return [(each, start) for each, start in found if each.strip(" \t*")]


def _unmeant(text: str, match: re.Match[str]) -> bool:
    """Return whether a statement is denied by the words before it, or only supposed."""
    before = _sentence_before(text, match.start())
    return bool(_DENIAL.search(before[-60:]) or (_BE_SAID.match(match[0]) and _CONDITION.search(before)))


def _sentence_before(text: str, end: int) -> str:
    """The part of a sentence before a place, of a bounded length."""
    return text[sentence_start(text, end, max(end - 300, 0)) : end]


def _unquoted(said: str) -> str:
    """A statement without a quote at its end that was opened before it."""
    marks = said.count('"') % 2 or said.count("\u201d") > said.count("\u201c")
    return _CLOSED_QUOTE.sub("", said) if marks else said


def last_stated(text: str) -> str | None:
    """Return the last of `statements`, stripped; None where there is none.

    Example: `last_stated("So the answer is (B).")` is `(B).`
    """
    found = statements(displayed(ending(text)))
    return found[-1][0].strip(" \t*") if found else None


def last_line(text: str) -> str | None:
    """Return what follows the last "Answer:" on its line, stripped; None where nothing does. So DAPO's verifier reads.

    Where that line ends with the colon, it is the next line with anything on it. A line that was cut off is none.

    Example: `last_line("Answer: $x + 1$")` is `$x + 1$`.
    """
    found = [match[1].strip(" \t*") for match in _LINE.finditer(ending(text))]
    return next((each for each in reversed(found) if each and not each.endswith(CUT)), None)


# Of a box: where its command starts, where its contents start and end, and where it has ended.
_Span = tuple[int, int, int, int]


def _closed_boxes(text: str) -> list[_Span]:
    """Find closed boxes, those inside of others too, in no order."""
    starts: dict[int, int] = {}
    found: list[_Span] = []
    for match in _BOX.finditer(text):
        if match["open"]:
            starts[match.end()] = match.start()
        else:
            found.append((match.start(), match.start("bare"), match.end(), match.end()))
    open_at: list[int] = []
    for match in _BRACE.finditer(text) if starts else ():
        if match[0] == "{":
            open_at.append(match.end())
        elif match[0] == "}" and open_at:
            inner = open_at.pop()
            if inner in starts:
                found.append((starts[inner], inner, match.start(), match.end()))
    return found


def sentence_start(text: str, place: int, least: int = 0) -> int:
    """Return where the sentence before or around a place begins, `least` at the least."""
    return max(least, max(text.rfind(mark, least, place) for mark in ".!?\n") + 1)
