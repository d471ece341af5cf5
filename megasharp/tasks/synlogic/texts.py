"""SynLogic's tasks whose answer is a known text, number, list or table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from megasharp.tasks.synlogic.finding import box, last_block, last_value
from megasharp.tasks.synlogic.game import Check, Finding, Game, GameError, spelled
from megasharp.tasks.synlogic.literals import Literal, UnreadableError, read_literal, whole_numbers, words

MAX_LENGTH = 2_000

_NUMBER = re.compile(r"-?[0-9]{1,18}")
_TWO_DECIMALS = re.compile(r"-?[0-9]{1,18}\.[0-9]{2}(?![0-9])")
_IN_BRACKETS = re.compile(r"\[([^\[\]]*)\]\.?")
_NO_MISTAKE = frozenset({"", "no", "none", "no error", "no errors", "no mistakes", "all correct", "无问题", "无错误"})
_TRUTHS = re.compile(r"(?P<true>\b(?:yes|true|truth)\b|是)|(?P<false>\b(?:no|false|lie)\b|否)")
_ANSWER_IS = re.compile(r"(?:the answer is|\u7b54\u6848\u662f)[ :\uff1a=]*([^\n]*)", re.IGNORECASE)


def _same(reference: str, read: Callable[[str], str], spell: Callable[[str], str]) -> Check:
    """Make a checker that compares the answer that is read with the reference, both spelled alike."""
    wanted = spell(reference)
    if not wanted:
        raise GameError("'answer' must hold the reference answer")

    def check(text: str) -> Finding:
        given = spell(read(text))
        if not given or len(given) > MAX_LENGTH:
            raise UnreadableError("no answer, or too long a one")
        return Finding(given, given == wanted)

    return check


def boolean_expressions(game: Game) -> Check:
    """In a box, the letters of the true expressions, in any order."""
    return _same(game.answer, box, lambda text: "".join(sorted(set(re.findall("[a-z]", text.lower())))))


def space_reasoning(game: Game) -> Check:
    """In a box, the name of a place; capital letters do not count."""
    return _same(game.answer, box, lambda text: text.strip().lower())


def space_reasoning_tree(game: Game) -> Check:
    """In a box, names of places in any order, commas between them."""
    return _same(game.answer, box, lambda text: ",".join(sorted(set(_list(text)))))


def word_sorting(game: Game) -> Check:
    """In a box, words in order, commas between them."""
    return _same(game.answer, box, lambda text: ",".join(_list(text)))


def _list(text: str) -> list[str]:
    return [each for each in re.sub(r"\s", "", text.replace("\uff0c", ",")).split(",") if each]


def object_number(game: Game) -> Check:
    """In a box, a whole number: `object_counting` and `object_properties`."""
    return _same(game.answer, lambda text: _whole(box(text)), _whole)


def _whole(text: str) -> str:
    """A whole number without leading zeros; an empty text where there is none."""
    return str(int(text)) if _NUMBER.fullmatch(text.strip()) else ""


def word_sorting_mistake(game: Game) -> Check:
    """In a box, the number of the thought with the first mistake, or `No`, which a missing answer stands for too."""
    reference = "no" if game.answer in ("null", "") else game.answer
    return _same(reference, box, lambda text: _whole(text) or text.strip().lower())


def buggy_tables(game: Game) -> Check:
    """The last number with two decimals, with any text around it, or else the whole final part."""

    def spell(text: str) -> str:
        found = _TWO_DECIMALS.findall(text)
        return str(found[-1]) if found else text.strip()

    return _same(game.answer, lambda text: text, spell)


def cipher(game: Game) -> Check:
    """The deciphered text between `[[` and `]]`, as the reference has it; quotes around it do not count."""

    def spell(text: str) -> str:
        inner = re.fullmatch(r"\s*\[\[(.*)\]\]\s*", text, re.DOTALL)
        bare = (inner[1] if inner else text).strip()
        quoted = len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "'\""
        return bare[1:-1] if quoted else bare

    def read(text: str) -> str:
        block = last_block(text)
        written = text if block is None else block
        end = written.rfind("]]")
        start = written.rfind("[[", 0, max(end, 0))
        if start < 0:
            raise UnreadableError("nothing between [[ and ]]")
        return written[start : end + 2]

    return _same(game.answer, read, spell)


def dyck_language(game: Game) -> Check:
    """The whole sequence of brackets, completed; spaces and quotes around it do not count."""
    return _same(game.text("full_sequence"), lambda text: text, lambda text: re.sub(r"[\s\"'`]", "", text))


def dyck_language_errors(game: Game) -> Check:
    """The place of the first wrong bracket, or -1 where the sequence is right: that number and nothing else.

    SynLogic's checker reads the word "valid" in any answer as -1, "invalid" too; its prompt asks for the number.
    """
    valid = game.field("is_valid")
    if not isinstance(valid, bool):
        raise GameError("metadata's 'is_valid' must be true or false")
    reference = "-1" if valid else str(game.whole("first_error_pos"))
    return _same(reference, lambda text: text, _whole)


def dyck_language_reasoning_errors(game: Game) -> Check:
    """The numbers of the wrong thoughts, in any order, commas between them; none, or "no", where there is none."""
    wanted = sorted(set(game.wholes("error_indices"))) if game.field("error_indices") != [] else []

    def check(text: str) -> Finding:
        bare = text.strip().lower().replace("\uff0c", ",")
        listed = (_IN_BRACKETS.fullmatch(bare) or [bare, bare])[1].strip()
        numbers = [] if listed in _NO_MISTAKE else [_whole(each) for each in listed.split(",")]
        if "" in numbers or len(listed) > MAX_LENGTH:
            raise UnreadableError("not numbers with commas between them")
        given = sorted({int(each) for each in numbers})
        return Finding(",".join(map(str, given)) or "none", given == wanted)

    return check


def web_of_lies(game: Game) -> Check:
    """Yes or no for each person that is asked about, in order, after the last "the answer is", or else in the end."""
    wanted = _truths(game.answer)
    if not wanted:
        raise GameError("'answer' must hold yes or no for each person")

    def check(text: str) -> Finding:
        stated = _ANSWER_IS.findall(text)
        lines = [line for line in text.splitlines() if line.strip()]
        given = _truths(stated[-1] if stated else lines[-1] if lines else "")
        if not given:
            raise UnreadableError("neither yes nor no in the answer")
        return Finding(",".join("yes" if true else "no" for true in given), given == wanted)

    return check


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
        given = last_value(text.replace("\uff0c", ","), lambda written: whole_numbers([read_literal(written)])[0])
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
        return read_literal(text)
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
