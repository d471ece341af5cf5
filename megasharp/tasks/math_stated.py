r"""The answer that a response commits to: the last of its boxes and of the statements that leave no doubt.

A statement is "The answer is ...", "Answer: ..." or "#### ...", in several languages, with a number that stands alone,
with mathematics in dollar signs, or with a sentence that states one ("Answer: Janet makes $18 a day",
`math_sentences.py`). One after the last box replaces it: "... \boxed{28}. So the correct answer is 56". Where there is
no box, the last answer tags count as a statement. Where there is none of these, a last line `\therefore 5` or
`\therefore b = 12`, or a last sentence "Thus, there are 5 such integers" states its number. Boxes with nothing but
commas, "and" or "or" between them are one answer. Boxes that one sentence joins, or a line or a case for each, may hold
the parts of a list.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from megasharp.tasks.extraction import (
    CUT,
    Box,
    boxes,
    displayed,
    ending,
    joined_boxes,
    last_line,
    last_tag,
    own_part,
    sentence_start,
    statements,
)
from megasharp.tasks.math_characters import as_latex
from megasharp.tasks.math_sentences import ANSWERS, ends_there, last_sentence, value_start
from megasharp.tasks.math_units import number_in_words
from megasharp.tasks.retraction import taken_back

# Words after a number that make another one of it.
_CHANGING = (
    r"(?:or|maybe|perhaps|possibly|alternatively|otherwise|and(?! not\b)|to|times|plus|minus|over|by|divided|multiplied"
    r"|squared|cubed|factorial|choose|mod|modulo|raised|half|halves|thirds|quarters|tenths|hundredths|dozen|hundred"
    r"|thousand|million|billion|trillion|pi|sqrt|sin|cos|tan|log|ln|exp)\b"
)
_REASON = r"\b(?:because|since|as|than|not|exclud\w*)\b"
# Text that leaves the number before it as it is: signs that close, then the end of line or sentence, words, a unit.
_UNCHANGED = (
    # Not "5 apples or 6", but "5, since 6 or 7 ..."
    rf"(?!(?:(?!{_REASON})[^.(])*\bor\s+[$\\(]*-?\d)"
    r"(?:[\s*$)\]}\"]|\\[)\],;: ]|\^\s*\{?\\circ\}?)*"
    rf"(?:$|[.?](?:[\s*$\\)\]\"']|$)|[,;:]\s+(?!{_CHANGING})[A-Za-z]{{2}}|[,;:]\s*$"
    rf"|(?<=[\s*$)])(?!{_CHANGING})(?:[A-Za-z][A-Za-z']+|[msgh])(?![A-Za-z0-9({{\\])"
    # A counted thing of a language without spaces, but no sign that multiplies.
    r"|(?![万亿兆百千分半余多或和])[\u3040-\u9fff]"
    r"|(?:[cmk]m|kg|ft|mph)(?![A-Za-z])|\\(?:text|textrm|mathrm|mbox)\s*\{\s*[A-Za-z]"
    # A remark, as in "5 (not 6)".
    rf"|\s?\((?!{_CHANGING})[A-Za-z]{{2}}"
    ")"
)
_NUMBER = re.compile(
    r"[\s$*(\"\\]*?(-?\s?\$?(?:\\[dt]?frac\{\d++\}\{\d++\}|\d++\s\d++/\d++"
    r"|\d++(?:,\d++)*(?:\.\d++)?(?:\s?/\s?\d++)?)"
    rf"(?:\s?(?:\\?%|percent\b))?){_UNCHANGED}"
)
_FORMULA = re.compile(
    r"[\s*]*(?:\$(?P<dollars>[^$\n]{1,400})\$|\\\((?P<brackets>[^\n]{1,400}?)\\\))[\s*]*(?:$|[.](?:\s|$))"
)
_THEREFORE = re.compile(
    r"^[\s$*]*(?:\\\(\s*)?\\therefore(?![A-Za-z])(?:\\[,;: ]|\s)*(?P<said>[^\n$]{1,400}?)(?:[\s$*.]|\\\))*$"
)
_SUPPOSED = re.compile(
    r"\b(?:suppose|assume|imagine|pretend|if (?:the|my|this)|claims?|(?<!I )thinks?|people (?:think|say|believe)"
    r"|(?:might|may|could|would) (?:think|say|believe|guess|expect))\b",
    re.IGNORECASE,
)
# Statements of no answer, but that one stands: "the answer is unchanged".
_KEEPS = re.compile(
    r"\s*(?:still |also )?(?:unchanged|unaffected|not (?:affected|changed)|the same|correct|right|confirmed|verified)\b"
    r"(?=[\s*]*(?:[.,;!]|$))",
    re.IGNORECASE,
)
_SPACES = re.compile(r"\s{2,}")
# So much of a statement and of the sentence before it is read: no known answer is longer.
_LONGEST = 2_000
_SAID = re.compile(r"\s*(?:\\[A-Za-z]+|[A-Za-z])(?:_\{?\w+\}?)?\s*=\s*\S.*|\s*-?[\d\\].*")
_LONGEST_BETWEEN = 1_000
# Between boxes with the parts of a pair: signs, "and", "or", an item's mark, a name and its equals sign.
_JOINT = re.compile(
    r"(?:[\s$*,;:&]|\\[()\[\],;: ]|\\\\|\\q?quad(?![A-Za-z])|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b"
    r"|\n[ \t]*(?:[-+•]|\d{1,2}[.)])(?=\s)|(?<![A-Za-z\\])(?:[A-Za-z]|\\[a-z]{2,8})(?:_\{?\w\}?)?\s*=)*",
    re.IGNORECASE,
)
# Between boxes with the parts of a list a sentence may go on, or the next case begin, but nothing be concluded.
_SENTENCE_ENDS = re.compile(r"[.!?](?=[\s$*\\)]|$)|\n")
_NEXT_CASE = re.compile(
    r"(?:[.!?;]\W|\n)\W*(?:case\s*\W?(?:\d|[IVX]+|[b-e])\b"
    r"|(?:in )?the (?:second|third|fourth|other|next) (?:root|solution|case)\b)",
    re.IGNORECASE,
)
_CONCLUDES = re.compile(
    r"\b(?:but|however|only|not|never|wrong|incorrect|mistake|fails?|failed|invalid|extraneous|reject\w*|discard\w*"
    r"|impossible|contradict\w*|actually|instead|wait|rather|step|final|answer|number|count|total|sum|product"
    r"|(?:so|hence|thus|therefore) the)\b|n't\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Commitment:
    """The answer that a response commits to: texts of it, more than one where several boxes are joined.

    `named` are the contents of the last boxes that only commas, "and", names and the like part, which may be a known
    pair; `listed` those of the last boxes that stand together, which may be a known list.
    """

    texts: tuple[str, ...]
    named: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    taken_back: bool = False


def commitment(text: str, line: bool = False) -> Commitment | None:
    """Return what a response commits to; None where it commits to nothing.

    `line`: the prompt asks for a line `Answer: ...`, which may state anything, where there is neither box nor number.
    """
    text = displayed(as_latex(own_part(text, ANSWERS)))
    found = boxes(text)
    end = found[-1].end if found else 0
    stated = _stated(text, end)
    closed = text.rfind("</answer>")
    tagged = None if found else last_tag(text)
    if tagged and text.rfind("<answer>", 0, closed) > (stated[1] if stated else -1):
        return Commitment((tagged,), taken_back=taken_back(text[closed + len("</answer>") :], tagged))
    if stated is not None:
        said, end = stated
        return Commitment((said,), taken_back=taken_back(text[end:], said))
    if found:
        last = tuple(dict.fromkeys(map(_clipped, joined_boxes(text)[0])))
        named, listed = _last_of(text, found, _JOINT.fullmatch), _last_of(text, found, _stand_together)
        return Commitment(last, named, listed, taken_back(text[end:], ", ".join(last)))
    stated_last = last_line(text) if line else None
    if not stated_last:
        # The end of the last line after a therefore sign: a number, or a name and its value.
        match = _THEREFORE.match(_clipped(ending(text).rstrip().rpartition("\n")[2]))
        stated_last = match["said"].strip() if match and _SAID.fullmatch(match["said"]) else None
    if not stated_last and not statements(text.rstrip().rpartition("\n")[2]):
        sentence = last_sentence(text)
        value = _in_sentence(sentence) if sentence else None
        stated_last = value[0] if value else None
    return Commitment((_clipped(stated_last),)) if stated_last else None


def _clipped(text: str) -> str:
    """Return a text with single spaces; of one longer than any known answer, enough to be none.

    Patterns would read what is longer for minutes.
    """
    text = _SPACES.sub(" ", text)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + CUT


def _is_supposed(text: str, start: int) -> bool:
    """Return whether the sentence before a statement only supposes it, or ascribes it to others."""
    least = max(0, start - _LONGEST)
    return bool(_SUPPOSED.search(text, sentence_start(text, start, least), start))


def _last_of(text: str, found: list[Box], joined: Callable[[str], object]) -> tuple[str, ...]:
    """The contents of the last boxes between all of which is a text that `joined` accepts."""
    first = len(found) - 1
    while first:
        between = text[found[first - 1].end : found[first].start]
        if len(between) > _LONGEST_BETWEEN or not joined(between):
            break
        first -= 1
    return tuple(_clipped(box.contents) for box in found[first:])


def _stand_together(between: str) -> bool:
    """Decide if the boxes before and behind a text may be parts of one list."""
    if _JOINT.fullmatch(between):
        return True
    if _CONCLUDES.search(between):
        return False
    return not _SENTENCE_ENDS.search(between) or _NEXT_CASE.search(between) is not None


def _stated(text: str, after: int) -> tuple[str, int] | None:
    """The number or formula of the last statement after a place, and where it ends; None where it has none."""
    stated = (each for each in reversed(statements(text[after:])) if not _KEEPS.match(each[0]))
    found = next((each for each in stated if not _is_supposed(text, after + each[1])), None)
    if found is None:
        return None
    said, start = found
    said, start = said.lstrip(" \t*"), start + len(said) - len(said.lstrip(" \t*"))
    said = _clipped(said)
    value = _value(said) or _in_sentence(said)
    if value is not None:
        return value[0], after + start + value[1]
    spelled = said.strip(" \t*.")
    return (spelled, after + start + len(said)) if number_in_words(spelled) is not None else None


def _value(said: str) -> tuple[str, int] | None:
    """The number or formula with which a text begins, and where it ends."""
    number = _NUMBER.match(said.rstrip(" \t*"))
    if number is not None:
        return number[1], number.end(1)
    formula = _FORMULA.match(said.rstrip(" \t*"))
    return (formula[formula.lastgroup or ""], formula.end(formula.lastgroup or "")) if formula else None


def _in_sentence(said: str) -> tuple[str, int] | None:
    """The number or formula that a sentence states in words of its own, and where it ends."""
    start = value_start(said)
    value = _value(said[start:]) if start is not None else None
    if start is None or value is None or not ends_there(said[start + value[1] :]):
        return None
    return value[0], start + value[1]
