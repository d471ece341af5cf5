"""SynLogic's tasks whose answer is a known text, number, list or table."""

from __future__ import annotations

import json
import re

from megasharp.tasks.extraction import CUT, boxes, joined_boxes, last_box
from megasharp.tasks.synlogic.boxed import box
from megasharp.tasks.synlogic.finding import (
    MAX_LENGTH,
    NO_MISTAKE,
    compared,
    last_block,
    last_value,
    refuse_choice,
)
from megasharp.tasks.synlogic.game import Check, Finding, Game, GameError, spelled
from megasharp.tasks.synlogic.literals import (
    MAX_CHARACTERS,
    Literal,
    UnreadableError,
    read_literal,
    whole_numbers,
    words,
)
from megasharp.tasks.synlogic.undressed import narrow, without_fonts

_NUMBER = re.compile(r"-?[0-9]{1,18}")
# A number with a point; where two decimals follow it and no more, they are a group of their own.
_DECIMAL = re.compile(rf"(?:(?<![0-9)])-)?[0-9][0-9,]{{0,30}}\.(?:(?P<decimals>[0-9]{{2}})(?![0-9{CUT}])|[0-9]*)")
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+\.[0-9]*")
_IN_A_ROW = re.compile(r"(?:[ \t,;/$*&]|\band\b|\u548c)*", re.IGNORECASE)
_NUMBERS = re.compile(r"[0-9]{1,9}(?:(?:\s*[,&\u3001]\s*|\s)(?:and\s|&\s)?[0-9]{1,9})*")
_EMPTY = frozenset(["", '""', "''", "[]", "\u201c\u201d"])
_ABOUT_THOUGHTS = re.compile(
    r"\b(?:the|my|answer|is|are|in|at|mistakes?|errors?|thoughts?|steps?|numbers?)\b|\u7b54\u6848|\u662f|\u9519\u8bef|\u601d\u7ef4|\u6b65\u9aa4"
)
_TRUTHS = re.compile(
    r"(?P<false>\b(?:no|false|lies?)\b|\u5426|\u4e0d\u662f|\u662f?(?:\u5047\u8bdd?|\u8c0e\u8bdd))"
    r"|(?P<true>\b(?:yes|true|truth)\b|\u662f?\u771f\u8bdd?|\u662f)"
)
_DENIED = re.compile(r"\bnot\b|n't\b", re.IGNORECASE)
_BOLD = re.compile(r"[\s,\u3001]*(?:and\s+)?\*\*([^*]+)\*\*")
_ANSWER_IS = re.compile(r"(?:the answer is|\u7b54\u6848\u662f)[ :=]*", re.IGNORECASE)
# What ends mathematics or bold type around a box, and what is no remark behind it.
_ENDED = re.compile(r"^(?:[\s.*$]|\\[\])])*")
_ANOTHER = re.compile(r"[0-9\[\]{}<>]|\((?![a-z])|\b(?:or|not)\b|\u6216", re.IGNORECASE)
_ONE_FENCE = re.compile(r"```[A-Za-z]*\s((?:(?!```).)*)```", re.DOTALL)
_STATED_LINE = re.compile(
    r"(?:(?:so|thus|hence|therefore),? )?(?:the (?:final )?answer is|\u7b54\u6848\u662f)[ :=]*(.*)", re.IGNORECASE
)
# Numbers of a list that goes on in the next line.
_GOES_ON = re.compile(r"(?<=[0-9])[ \t]*,[ \t]*\n\s*(?=[0-9])")
_FENCE = re.compile(r"\s*`{3,}\w*\s*")
_SENTENCE = re.compile(r"[^\n.!\u3002]*")


def _whole(text: str) -> str:
    """A whole number without leading zeros; an empty text where there is none."""
    return str(int(text)) if _NUMBER.fullmatch(text.strip()) else ""


def buggy_tables(game: Game) -> Check:
    """The last number with two decimals, with any text around it, or else the whole final part.

    Of several numbers in a row, as in `14.50, 5.25`, none is the answer.
    """
    return compared(game.answer, lambda text: text[-MAX_CHARACTERS:], _two_decimals)


def _two_decimals(text: str) -> str:
    found = [match for match in _DECIMAL.finditer(text) if match["decimals"]]
    if not found:
        return text.strip()
    # Without commas of thousands; of another list of digits, what follows its last comma.
    numbers = [match[0] for match in found]
    values = [each.replace(",", "") if _THOUSANDS.fullmatch(each) else each.rpartition(",")[2] for each in numbers]
    at = len(found) - 1
    while at and _IN_A_ROW.fullmatch(text, found[at - 1].end(), found[at].start()):
        at -= 1
    refuse_choice(text, *found[-1].span())
    return " or ".join(dict.fromkeys(values[at:]))


def cipher(game: Game) -> Check:
    """The deciphered text between `[[` and `]]`, as the reference has it; quotes around it do not count."""

    def spell(text: str) -> str:
        inner = re.fullmatch(r"\s*\[\[(.*)\]\]\s*", text, re.DOTALL)
        bare = (inner[1] if inner else text).strip()
        quoted = len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "'\""
        return bare[1:-1] if quoted else bare

    def read(text: str) -> str:
        text = without_fonts(text)
        block = last_block(text)
        written = text if block is None else block
        end = written.rfind("]]")
        start = written.rfind("[[", 0, max(end, 0))
        if start < 0:
            raise UnreadableError("nothing between [[ and ]]")
        refuse_choice(written, start)
        return written[start : end + 2]

    return compared(game.answer, read, spell)


def dyck_language(game: Game) -> Check:
    """The whole sequence of brackets, completed, and nothing else; spaces and quotes around it do not count."""
    return compared(game.text("full_sequence"), _alone, lambda text: re.sub(r"[\s\"'`]", "", text))


def dyck_language_errors(game: Game) -> Check:
    """The place of the first wrong bracket, or -1 where the sequence is right: that number and nothing else.

    SynLogic's checker reads the word "valid" in any answer as -1, "invalid" too; its prompt asks for the number.
    """
    valid = game.field("is_valid")
    if not isinstance(valid, bool):
        raise GameError("metadata's 'is_valid' must be true or false")
    reference = "-1" if valid else str(game.whole("first_error_pos"))
    return compared(reference, _alone, _whole)


def _alone(text: str) -> str:
    """The text itself, or all of it in one fence, or after "the answer is" on its last line, or its last box.

    Bold type, dollar signs and a full stop around it do not count. Raises UnreadableError where another value, "or" or
    "not" follows the box.
    """
    text = without_fonts(text).strip()
    found, lines = boxes(text), _lines(text)
    fence, stated = _ONE_FENCE.fullmatch(text), _STATED_LINE.fullmatch(lines[-1].strip()) if lines else None
    if found:
        refuse_choice(text, found[-1].start)
        if _ANOTHER.search(_ENDED.sub("", text[found[-1].end :])):
            raise UnreadableError("more than a remark follows the box")
        text = box(text)
    elif fence:
        text = fence[1]
    elif stated:
        refuse_choice(text, text.rindex(stated[0]) + stated.start(1))
        text = stated[1]
    return text.strip("*$ ").removesuffix(".").strip("*$ ")


def dyck_language_reasoning_errors(game: Game) -> Check:
    """The numbers of the wrong thoughts, in any order, commas between them; none, "no" or `""` where there is none.

    They are in the last box, or else on the last line; a few words such as "thoughts" may stand beside them.
    """
    wanted = sorted(set(game.wholes("error_indices"))) if game.field("error_indices") != [] else []

    def check(text: str) -> Finding:
        fence = _ONE_FENCE.fullmatch(text.strip())
        text = _GOES_ON.sub(", ", fence[1] if fence else text)
        lines = _lines(text)
        for start in [*(each.start for each in boxes(text)[-1:]), *(text.rindex(line) for line in lines[-1:])]:
            refuse_choice(text, start)
        if joined_boxes(text)[1]:
            raise UnreadableError("one box or another")
        for written in (last_box(text), lines[-1] if lines else text):
            given = None if written is None else _thoughts(written)
            if given is not None:
                return Finding(",".join(map(str, given)) or "none", given == wanted)
        raise UnreadableError("not numbers with commas between them")

    return check


def _thoughts(text: str) -> list[int] | None:
    """The numbers of a list of thoughts; None where there is more than that, or nothing."""
    if len(text) > MAX_LENGTH:
        return None
    if "".join(text.split()) in _EMPTY:
        return []
    plain = " ".join(re.sub("[\"'`]", "", without_fonts(text)).split()).strip("*$[](){}. ").lower()
    if NO_MISTAKE.fullmatch(plain):
        return []
    listed = _ABOUT_THOUGHTS.sub(" ", plain).strip(" :=")
    return sorted({int(each) for each in re.findall("[0-9]+", listed)}) if _NUMBERS.fullmatch(listed) else None


def _lines(text: str) -> list[str]:
    """Lines with anything on them, fences aside."""
    return [line for line in text.splitlines() if line.strip() and not _FENCE.fullmatch(line)]


def web_of_lies(game: Game) -> Check:
    """Yes or no for each person that is asked about, in order, after the last "the answer is", or else in the end.

    Bold words there are the answer, or else all words up to the sentence's end; "not" leaves none.
    """
    wanted = _truths(game.answer)
    if not wanted:
        raise GameError("'answer' must hold yes or no for each person")

    def check(text: str) -> Finding:
        given = _truths(_stated(text))
        if not given:
            raise UnreadableError("neither yes nor no in the answer")
        return Finding(",".join("yes" if true else "no" for true in given), given == wanted)

    return check


def _stated(text: str) -> str:
    """The bold words that follow the last "the answer is", or its sentence; without these words, of the last line."""
    lines = _lines(text)
    places = [match.end() for match in _ANSWER_IS.finditer(text)]
    start = places[-1] if places else text.rindex(lines[-1]) if lines else 0
    refuse_choice(text, start, start)
    said = text[places[-1] :] if places else lines[-1] if lines else ""
    bold: list[str] = []
    at = 0 if places else max(said.find("**"), 0)
    while match := _BOLD.match(said, at):
        bold.append(match[1])
        at = match.end()
    sentence = _SENTENCE.match(said)
    whole = said if not places or sentence is None else sentence[0]
    return "" if not bold and (_DENIED.search(whole) or whole.endswith(CUT)) else ",".join(bold) or whole


def _truths(text: str) -> list[bool]:
    return [match["true"] is not None for match in _TRUTHS.finditer(text[:MAX_LENGTH].lower())]


def time_sequence(game: Game) -> Check:
    """The longest meeting in minutes and how many of that length there can be, `[45, 3]`."""
    records = game.field("records")
    answers = records.get("answers") if isinstance(records, dict) else None
    match answers:
        case {"answer_maxLen": int(longest), "answer_nums": int(count)}:
            wanted = [longest, count]
        case _:
            raise GameError("metadata's 'records' must hold 'answers' with 'answer_maxLen' and 'answer_nums'")

    def check(text: str) -> Finding:
        given = last_value(text, lambda written: whole_numbers([read_literal(written)])[0])
        return Finding(" ".join(map(str, given)), given == wanted)

    return check


def goods_exchange(game: Game) -> Check:
    """The owners in the end, pairs of a person and a thing in any order; capital letters do not count."""
    wanted = _owners(_literal(game.text("owns_after"), "owns_after"))

    def check(text: str) -> Finding:
        given = last_value(text, lambda written: _owners(read_literal(written)))
        return Finding(spelled([list(pair) for pair in sorted(given.items())]), given == wanted)

    return check


def _owners(value: Literal) -> dict[str, str]:
    pairs = words(value)
    if any(len(pair) != 2 for pair in pairs) or len({pair[0] for pair in pairs}) < len(pairs):
        raise UnreadableError("not a pair for each person")
    return {person.strip().lower(): thing.strip().lower() for person, thing in pairs}


def _literal(text: str, name: str) -> Literal:
    try:
        return read_literal(narrow(text))
    except UnreadableError as error:
        raise GameError(f"{name!r} cannot be read ({error})") from error


def arc_agi(game: Game) -> Check:
    """The output grid, equal in every cell."""
    try:
        wanted = whole_numbers(_literal(game.answer, "answer"))
    except UnreadableError as error:
        raise GameError("'answer' must be rows of whole numbers") from error

    def check(text: str) -> Finding:
        given = last_value(text, lambda written: whole_numbers(read_literal(written)))
        return Finding(spelled(given), given == wanted)

    return check


def zebra_puzzle(game: Game) -> Check:
    """The table of houses, equal in every cell."""
    wanted = _literal(game.answer, "answer")
    if not isinstance(wanted, dict):
        raise GameError("'answer' must be a table")

    def check(text: str) -> Finding:
        given = last_value(text, _table)
        return Finding(json.dumps(given, ensure_ascii=False, sort_keys=True), given == wanted)

    return check


def _table(text: str) -> dict[str, Literal]:
    value = read_literal(text)
    if not isinstance(value, dict):
        raise UnreadableError("not a table")
    return value
