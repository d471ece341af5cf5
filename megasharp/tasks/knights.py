"""Knights and Knaves: a seeded generator of puzzles with one solution, their text, and their data files.

Everyone says one thing, knights the truth and knaves a lie. A statement is a nested list, so that a data file holds it:

    ["knight", i]  ["knave", i]  ["not", s]  ["and", s, t]  ["or", s, t]  ["if", s, t]  ["iff", s, t]
    ["same", i, j]  ["different", i, j]

with i and j the places of people, s and t statements. After the puzzles of Xie et al. (2410.23123), which reasoning-gym
makes too and 2511.19942 trains on; the text of a puzzle is our own.

A puzzle has one solution: the generator makes none other, and the reader refuses it. A response gives the solution in
the last answer tags, or else in the last box or in several: statements of all people, in any order, as
`knights_reading.py` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks.data_fields import Fields, check_names, name_of, read_objects, texts_field
from megasharp.tasks.extraction import boxes, last_tag, own_part
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.knights_reading import UnreadableError, assignment, key
from megasharp.tasks.prompts import TEMPLATES
from megasharp.tasks.retraction import TAKEN_BACK, withdrawn

NAMES = (
    "Alice", "Boris", "Clara", "David", "Elena", "Felix", "Grace", "Henry", "Irene", "Jacob", "Karen", "Louis",
    "Maria", "Nadia", "Oscar", "Paula", "Quinn", "Robin", "Sarah", "Tomas",
)  # fmt: skip
LEAST_PEOPLE = 2
MOST_PEOPLE = 8
MAX_DEPTH = 8
_LEAST_DEPTH = 2

Statement = tuple[str | int | tuple[object, ...], ...]

_OF_PERSON = ("knight", "knave")
_OF_PAIR = ("same", "different")
_OF_TWO = ("and", "or", "if", "iff")


@dataclass(frozen=True, slots=True)
class KnightsPuzzle:
    """People, what each says, and who is a knight.

    Example: `KnightsPuzzle(("Alice", "Boris"), (("knave", 1), ("same", 0, 1)), (True, False))`.
    """

    names: tuple[str, ...]
    statements: tuple[Statement, ...]
    solution: tuple[bool, ...]

    @property
    def answer(self) -> KnightsAnswer:
        """The solution as the verifier needs it."""
        return KnightsAnswer(tuple(zip(self.names, self.solution, strict=True)))


@dataclass(frozen=True, slots=True)
class KnightsRecord:
    """One line of a data file.

    Example: `{"id": "k1", "names": ["Alice", "Boris"], "statements": [["knave", 1], ["same", 0, 1]],
    "solution": [true, false]}`.
    """

    id: str
    puzzle: KnightsPuzzle


def is_true(statement: Statement, knights: Sequence[bool]) -> bool:
    """Evaluate a statement, with `knights` saying who is one. Example: `is_true(("same", 0, 1), (True, True))`."""
    kind, *parts = statement
    if kind in _OF_PERSON:
        return knights[_person(parts[0])] == (kind == "knight")
    if kind in _OF_PAIR:
        return (knights[_person(parts[0])] == knights[_person(parts[1])]) == (kind == "same")
    values = [is_true(_statement(part), knights) for part in parts]
    match kind:
        case "not":
            return not values[0]
        case "and":
            return all(values)
        case "or":
            return any(values)
        case "if":
            return not values[0] or values[1]
        case _:
            assert kind == "iff"
            return values[0] == values[1]


def solutions(statements: Sequence[Statement]) -> list[tuple[bool, ...]]:
    """Every way to say who is a knight that fits: a statement is true exactly where its speaker is one."""
    return [
        knights
        for knights in product((True, False), repeat=len(statements))
        if all(is_true(said, knights) == knight for said, knight in zip(statements, knights, strict=True))
    ]


def make_puzzle(rng: Random, people: int, depth: int = 2) -> KnightsPuzzle:
    """A random puzzle with one solution; statements nest up to `depth` deep, and nobody says "I am a knave".

    Raises ValueError for a number of people outside of 2 to 8, and for a depth below 2.
    """
    if not LEAST_PEOPLE <= people <= MOST_PEOPLE:
        raise ValueError(f"a puzzle has {LEAST_PEOPLE} to {MOST_PEOPLE} people, got {people}")
    if depth < _LEAST_DEPTH:
        raise ValueError(
            f"statements of depth {depth} only say what somebody else is: with each solution goes the one with "
            f"everybody turned round, so no puzzle has exactly one; give {_LEAST_DEPTH} or more"
        )
    while True:
        statements = tuple(_random_statement(rng, people, speaker, depth) for speaker in range(people))
        found = solutions(statements)
        if len(found) == 1:
            return KnightsPuzzle(tuple(rng.sample(NAMES, people)), statements, found[0])


def _random_statement(rng: Random, people: int, speaker: int, depth: int) -> Statement:
    others = [person for person in range(people) if person != speaker]
    kind = rng.choice((*_OF_PERSON, *_OF_PAIR, "not", *_OF_TWO)) if depth > 1 else rng.choice(_OF_PERSON)
    if kind in _OF_PERSON:
        return kind, rng.choice(others)
    if kind in _OF_PAIR:
        return kind, *rng.sample(range(people), 2)
    first = _random_statement(rng, people, speaker, depth - 1)
    if kind == "not":
        return kind, first
    second = _random_statement(rng, people, speaker, depth - 1)
    # "s and s" would say no more than "s".
    while second == first:
        second = _random_statement(rng, people, speaker, depth - 1)
    return kind, first, second


def puzzle_text(puzzle: KnightsPuzzle) -> str:
    """The puzzle in words, with the form of the answer that the verifier reads."""
    said = [
        f'{name} says: "{_sentence(statement, puzzle.names)}."'
        for name, statement in zip(puzzle.names, puzzle.statements, strict=True)
    ]
    form = ", ".join(f"{name} is a knight/knave" for name in puzzle.names)
    return (
        "On an island everyone is a knight or a knave. Knights always tell the truth, knaves always lie. "
        f"You meet {', '.join(puzzle.names[:-1])} and {puzzle.names[-1]}. {' '.join(said)} "
        f"Who is a knight, and who is a knave? Think step by step, then answer in this form: <answer>{form}</answer>"
    )


def _sentence(statement: Statement, names: Sequence[str]) -> str:
    kind, *parts = statement
    if kind in _OF_PERSON:
        return f"{names[_person(parts[0])]} is a {kind}"
    if kind in _OF_PAIR:
        of = "the same" if kind == "same" else "of different kinds"
        return f"{names[_person(parts[0])]} and {names[_person(parts[1])]} are {of}"
    inner: list[str] = []
    for part in map(_statement, parts):
        text = _sentence(part, names)
        # A statement with parts of its own stands in parentheses.
        inner.append(text if part[0] in (*_OF_PERSON, *_OF_PAIR) else f"({text})")
    match kind:
        case "not":
            return f"it is not true that {inner[0]}"
        case "if":
            return f"if {inner[0]}, then {inner[1]}"
        case "iff":
            return f"{inner[0]} if and only if {inner[1]}"
        case _:
            return f" {kind} ".join(inner)


def read_records(path: Path) -> list[KnightsRecord]:
    """Read a JSONL file of puzzles. Raises UserError, naming the file and the line, for a bad or an ambiguous one."""
    records = [
        KnightsRecord(name_of(fields, ("id",), path, where), _puzzle(fields, where))
        for where, fields in read_objects(path, "make one with tools/make_knights_data.py")
    ]
    check_names([record.id for record in records], path)
    return records


def _puzzle(fields: Fields, where: str) -> KnightsPuzzle:
    names = texts_field(fields, "names", where)
    if not LEAST_PEOPLE <= len(names) <= MOST_PEOPLE or len({name.casefold() for name in names}) < len(names):
        raise UserError(f"{where}: 'names' must be {LEAST_PEOPLE} to {MOST_PEOPLE} different names")
    if not all(name.isidentifier() for name in names):
        raise UserError(f"{where}: 'names' must be single words of letters, or no answer could be read")
    written = fields.get("statements")
    if not isinstance(written, list) or len(written) != len(names):
        raise UserError(f"{where}: 'statements' must hold one statement for each of 'names'")
    statements = tuple(_read_statement(each, len(names), where) for each in written)
    solution, found = fields.get("solution"), solutions(statements)
    if not isinstance(solution, list) or found != [tuple(solution)]:
        raise UserError(f"{where}: 'solution' must be the only one; the statements allow {found}")
    return KnightsPuzzle(names, statements, found[0])


def _read_statement(value: object, people: int, where: str, depth: int = 1) -> Statement:
    """A statement of a data file, checked."""
    kind, *parts = value if isinstance(value, list) and value else [None]
    persons = {"knight": 1, "knave": 1, "same": 2, "different": 2}
    inner = {"not": 1, "and": 2, "or": 2, "if": 2, "iff": 2}
    places = [part for part in parts if isinstance(part, int) and not isinstance(part, bool) and 0 <= part < people]
    if isinstance(kind, str) and len(parts) == persons.get(kind) == len(places):
        return kind, *places
    if isinstance(kind, str) and len(parts) == inner.get(kind) and depth < MAX_DEPTH:
        return kind, *(_read_statement(part, people, where, depth + 1) for part in parts)
    raise UserError(f"{where}: {str(value)[:80]} is no statement about people 0 to {people - 1}; see tasks/knights.py")


def _person(part: object) -> int:
    assert isinstance(part, int)
    return part


def _statement(part: object) -> Statement:
    assert isinstance(part, tuple)
    return part


MAX_LENGTH = 2000


@dataclass(frozen=True, slots=True)
class KnightsAnswer(TaskAnswer):
    """The solution: for each name, if it is a knight's; and the puzzle's words for knights and knaves.

    Example: `KnightsAnswer((("Zoey", True), ("Oliver", False)))`.
    """

    knights: tuple[tuple[str, bool], ...]
    truthful: str = "knight"
    lying: str = "knave"


def verify(text: str, answer: TaskAnswer) -> Verdict:
    """Judge who is said to be what. The canonical answer is sorted by name. Rewards are 1.0 or 0.0.

    FORMAT: no tags and no box; a part that is no statement (`knights_reading.py`); a name that the puzzle does not
    have, or one that is left out; two statements of one name that conflict. Wrong without a canonical answer: one
    that is taken back.

    Example: `verify("<answer>Oliver is a knave, and Zoey is a knight.</answer>", KnightsAnswer((("Zoey", True),
    ("Oliver", False))))` is `Verdict(Outcome.CORRECT, 1.0, "oliver=knave zoey=knight", "")`.
    """
    assert isinstance(answer, KnightsAnswer)
    text = own_part(text)
    tag, found = last_tag(text), boxes(text)
    given = [tag] if tag is not None else [box.contents for box in found[-MOST_PEOPLE:]]
    if not given or sum(map(len, given)) > MAX_LENGTH:
        return Verdict(Outcome.FORMAT, 0.0, None, "no answer tags and no box, or too long a text in them")
    if withdrawn(text):
        return Verdict(Outcome.WRONG, 0.0, None, TAKEN_BACK)
    names = [name for name, _ in answer.knights]
    try:
        said = _said(given, names, answer)
    except UnreadableError as error:
        return Verdict(Outcome.FORMAT, 0.0, None, str(error))
    right = said == {key(name): knight for name, knight in answer.knights}
    named = (f"{name}={answer.truthful if knight else answer.lying}" for name, knight in sorted(said.items()))
    return Verdict(Outcome.CORRECT if right else Outcome.WRONG, float(right), " ".join(named))


def _said(given: Sequence[str], names: Sequence[str], answer: KnightsAnswer) -> dict[str, bool]:
    """Read the last text, or else all of them, of which each says a part. Raises UnreadableError as `assignment`."""
    try:
        return assignment(given[-1], names, answer.truthful, answer.lying)
    except UnreadableError:
        if len(given) == 1:
            raise
        return assignment("\n".join(given), names, answer.truthful, answer.lying)


def load_items(path: Path) -> list[TaskItem]:
    """Knights and Knaves from a JSONL file. Raises UserError as `read_records` does."""
    template, found = TEMPLATES["chatml"], ((record, puzzle_text(record.puzzle)) for record in read_records(path))
    return [
        TaskItem(record.id, "knights", template.text_of(text), record.puzzle.answer, path.name, question=text)
        for record, text in found
    ]
