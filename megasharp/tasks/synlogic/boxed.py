"""SynLogic's tasks whose prompts ask for a box: letters, names, words in order, numbers.

SynLogic's checkers compare the box's text, or read whole numbers by `int`. Here LaTeX's commands of fonts, dollar
signs and quotes around the text do not count, nor an article or label before it, nor a noun behind a number.
"""

from __future__ import annotations

import re

from megasharp.tasks.extraction import boxes as all_boxes
from megasharp.tasks.extraction import joined_boxes
from megasharp.tasks.synlogic.finding import NO_MISTAKE, compared, refuse_choice
from megasharp.tasks.synlogic.game import Check, Game
from megasharp.tasks.synlogic.literals import UnreadableError
from megasharp.tasks.synlogic.undressed import without_fonts

_SIGNS_OF_LATEX = re.compile(r"[{}$]")
# What leaves a space where it stood.
_SPACE = re.compile(r"\\[,;:! ]|[\\~]")
_COMMA = re.compile(r"\s*(?:[,\u3001;]\s*(?:(?:and|&)\s)?|\s(?:and|&)\s)\s*", re.IGNORECASE)
_SIGNS = "'\"`*()[]\u201c\u201d\u2018\u2019 \t."
_ARTICLE = re.compile(r"(?:the|an?)\s+(?=\S)", re.IGNORECASE)
# Words that may stand beside the letters; "or", "not" and all others leave no list of letters.
_ABOUT_LETTERS = re.compile(
    "and|only|both|the|all|options?|expressions?|statements?|letters|is|are|true", re.IGNORECASE
)
_COUNTED = re.compile(
    r"(?P<number>-?[0-9]{1,3}(?:,[0-9]{3})+|-?[0-9]{1,18})(?:\.0{1,9})?"
    r"(?:(?P<noun>(?:\s+[a-z][a-z'-]*){1,3})|\s*(?P<measure>[\u4e00-\u9fff]{1,6}))?"
)
_WORD = re.compile(r"(?P<word>[a-z]+(?:-[a-z]+)?)(?P<noun>(?:\s+[a-z][a-z'-]*){0,3})")
_CHANGING_SIGNS = re.compile("[\u5341\u767e\u5343\u4e07\u4ebf\u534a\u6216\u548c]")
_ONES, _TENS = (
    re.findall("[a-z]+", words)
    for words in (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen",
        "twenty thirty forty fifty sixty seventy eighty ninety",
    )
)
_NUMBERS = {word: number for number, word in enumerate(_ONES)} | {
    f"{ten}{one}": 10 * tens + ones
    for tens, ten in enumerate(_TENS, start=2)
    for ones, one in enumerate(["", *(f"-{word}" for word in _ONES[1:10])])
}
# Words behind a number that make another one of it, as the signs above do.
_CHANGING = re.compile(
    r"\b(?:or|and|to|times|plus|minus|half|halves|thirds|dozen|hundred|thousand|million|billion|percent|not"
    rf"|{'|'.join(_NUMBERS)})\b"
)
_LABEL = re.compile(
    r"(?:(?:thought|step|number|no\.?|n|\u601d\u7ef4|\u601d\u8003|\u6b65\u9aa4|\u7b2c)\s*(?:=|#|:)?\s*|#)(?=[0-9])",
    re.IGNORECASE,
)


def box(text: str) -> str:
    """The last box's contents. Raises UnreadableError where there is none, an empty one, or a choice of two."""
    found, hedged = joined_boxes(text)
    if not found or not found[-1]:
        raise UnreadableError("no box")
    if hedged:
        raise UnreadableError("one box or another")
    refuse_choice(text, all_boxes(text)[-1].start)
    return found[-1]


def boxes(text: str) -> str:
    """The last box's contents, or those of single things in boxes that commas or "and" part. Raises as `box`."""
    last = box(text)
    parts = joined_boxes(text)[0]
    return last if any(_COMMA.search(part) for part in parts) else ",".join(dict.fromkeys(parts))


def _undressed(text: str) -> str:
    """A box's text without LaTeX's commands of fonts, braces, quotes, bold type and the last full stop."""
    plain = _SPACE.sub(" ", _SIGNS_OF_LATEX.sub("", without_fonts(text)))
    return " ".join(plain.split()).strip(_SIGNS)


def boolean_expressions(game: Game) -> Check:
    """The letters of the true expressions, in any order; words that are none of a few leave no answer."""
    return compared(game.answer, boxes, _letters)


def _letters(text: str) -> str:
    found: set[str] = set()
    for word in re.split(r"[\s,.;:&'\"*()\[\]\u3001\u548c]+", _undressed(text)):
        if len(word) == 1 or (word.isupper() and word == "".join(sorted(set(word)))):
            found.update(word.lower())
        elif word and not _ABOUT_LETTERS.fullmatch(word):
            return ""
    return "".join(sorted(found)) if "".join(found).isascii() and "".join(found).isalpha() else ""


def space_reasoning(game: Game) -> Check:
    """The name of a place; capital letters and an article do not count."""
    return compared(game.answer, box, lambda text: " ".join(_ARTICLE.sub("", _undressed(text).lower()).split()))


def space_reasoning_tree(game: Game) -> Check:
    """Names of places in any order, commas between them, in a box or one box each."""
    return compared(game.answer, boxes, lambda text: ",".join(sorted(set(_list(text)))))


def word_sorting(game: Game) -> Check:
    """Words in order, commas between them, in a box or one box each."""
    return compared(game.answer, boxes, lambda text: ",".join(_list(text)))


def _list(text: str) -> list[str]:
    parts = (re.sub(r"\s", "", each.strip(_SIGNS)) for each in _COMMA.split(_undressed(text)))
    return [each for each in parts if each]


def object_number(game: Game) -> Check:
    """A whole number, in digits or a word, with a noun behind it or none: `object_counting` and `object_properties`."""
    return compared(game.answer, box, _counted)


def _counted(text: str) -> str:
    """A whole number without leading zeros; an empty text where there is none."""
    plain = _undressed(text).lower()
    match = _COUNTED.fullmatch(plain) or _WORD.fullmatch(plain)
    if match is None:
        return ""
    parts = match.groupdict()
    number = _NUMBERS.get(parts["word"]) if "word" in parts else int(parts["number"].replace(",", ""))
    changed = _CHANGING.search(parts["noun"] or "") or _CHANGING_SIGNS.search(parts.get("measure") or "")
    return "" if number is None or changed else str(number)


def word_sorting_mistake(game: Game) -> Check:
    """The number of the thought with the first mistake, or `No`, which a missing answer stands for too."""
    reference = "no" if game.answer in ("null", "") else game.answer

    def spell(text: str) -> str:
        plain = _undressed(text).lower()
        return "no" if NO_MISTAKE.fullmatch(plain) else _counted(_LABEL.sub("", plain, count=1)) or plain

    return compared(reference, box, spell)
