"""The Countdown verifier and solver against an oracle of their own: Python's parser and Fractions."""

from __future__ import annotations

import ast
import operator
import re
import time
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import permutations
from random import Random

import pytest
from cases import each_case

from megasharp.common.records import Outcome
from megasharp.tasks.arithmetic import MAX_CHARACTERS, MAX_DEPTH
from megasharp.tasks.countdown import CountdownAnswer, count_solutions, solve, verify
from megasharp.tasks.table import make_verifiers

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def leaves_and_value(node: ast.expr, leaves: list[int]) -> Fraction:
    """Evaluate a Python syntax tree; SyntaxError for anything but the four operators on integers."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        sides = [leaves_and_value(side, leaves) for side in (node.left, node.right)]
        return OPERATORS[type(node.op)](*sides)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        leaves.append(node.value)
        return Fraction(node.value)
    raise SyntaxError("not in the grammar")


def check_grammar(node: ast.AST) -> None:
    """SyntaxError if any part is outside the grammar, whatever the values."""
    for child in ast.walk(node):
        known = isinstance(child, ast.BinOp | ast.operator | ast.Constant)
        if not known or isinstance(child, ast.FloorDiv | ast.Pow | ast.Mod):
            raise SyntaxError("not in the grammar")


def oracle(text: str, answer: CountdownAnswer) -> Outcome:
    if not re.fullmatch(r"[-+*/() 0-9]*", text) or re.search(r"(?<![0-9])0[0-9]", text):
        return Outcome.FORMAT
    try:
        tree = ast.parse(text.strip(" "), mode="eval").body
        check_grammar(tree)
        leaves: list[int] = []
        value = leaves_and_value(tree, leaves)
    except SyntaxError:
        return Outcome.FORMAT
    except ZeroDivisionError:
        return Outcome.WRONG
    right = sorted(leaves) == sorted(answer.numbers) and value == answer.target
    return Outcome.CORRECT if right else Outcome.WRONG


def perturbed(text: str, rng: Random) -> str:
    """One or two random edits: replace, insert, delete or swap characters, or wrap a part in parentheses."""
    characters = list(text)
    for _ in range(rng.randint(1, 2)):
        i, j = sorted(rng.choices(range(len(characters)), k=2))
        kind = rng.choice(["replace", "insert", "delete", "swap", "wrap", "operator"])
        if kind == "replace":
            characters[i] = rng.choice("123456789+-*/()")
        elif kind == "insert":
            characters.insert(i, rng.choice(" 0159+-*/()_.=e"))
        elif kind == "delete" and len(characters) > 1:
            del characters[i]
        elif kind == "swap":
            characters[i], characters[j] = characters[j], characters[i]
        elif kind == "wrap":
            characters = [*characters[:i], "(", *characters[i : j + 1], ")", *characters[j + 1 :]]
        else:
            characters = [rng.choice("+-*/") if c in "+-*/" and rng.random() < 0.3 else c for c in characters]
    return "".join(characters)


def problems(rng: Random) -> Iterator[CountdownAnswer]:
    while True:
        numbers = tuple(rng.randint(1, 9) for _ in range(rng.choice([3, 4, 4])))
        yield CountdownAnswer(numbers, rng.randint(1, 40))


def test_ten_thousand_cases_agree_with_the_oracle() -> None:
    rng = Random(20)
    seen: Counter[Outcome] = Counter()
    for answer in problems(rng):
        for solution in solve(answer.numbers, answer.target):
            verdict = verify(solution, answer)
            assert (verdict.outcome, verdict.canonical_answer) == (Outcome.CORRECT, solution)
            assert oracle(solution, answer) is Outcome.CORRECT
            seen[verdict.outcome] += 1
            for text in [perturbed(solution, rng) for _ in range(6)]:
                verdict = verify(text, answer)
                assert verdict.outcome is oracle(text, answer), text
                assert verdict.reward == float(verdict.outcome is Outcome.CORRECT)
                seen[verdict.outcome] += 1
        if seen.total() >= 10_000:
            break
    assert set(seen) == {Outcome.CORRECT, Outcome.WRONG, Outcome.FORMAT}
    assert min(seen.values()) > 500


def brute_force(numbers: tuple[int, ...], target: int) -> set[str]:
    """Canonical answers of every ordered, fully parenthesised expression that the verifier accepts."""

    def texts(part: tuple[int, ...]) -> list[str]:
        if len(part) == 1:
            return [str(part[0])]
        cuts = range(1, len(part))
        return [f"({a}{op}{b})" for c in cuts for a in texts(part[:c]) for b in texts(part[c:]) for op in "+-*/"]

    answer = CountdownAnswer(numbers, target)
    verdicts = [verify(text, answer) for order in set(permutations(numbers)) for text in texts(order)]
    return {str(verdict.canonical_answer) for verdict in verdicts if verdict.outcome is Outcome.CORRECT}


@each_case(
    ("numbers", "target"),
    [
        ((1, 2, 3), 6),
        ((2, 2, 8), 4),
        ((9, 9, 9), 10),
        ((5, 5, 5, 1), 24),
        ((3, 3, 8, 8), 24),
        ((6, 6, 2, 2), 3),
    ],
)
def test_the_solver_finds_all_and_only_the_solutions(numbers: tuple[int, ...], target: int) -> None:
    assert set(solve(numbers, target)) == brute_force(numbers, target)


def test_known_problems() -> None:
    assert solve((3, 3, 8, 8), 24) == ["8/(3-8/3)"]
    assert solve((5, 5, 5, 1), 24) == ["(5-1/5)*5"]
    assert count_solutions((1, 1, 1, 1), 24) == 0
    assert solve((7,), 7) == ["7"]
    assert solve((7,), 8) == []
    with pytest.raises(ValueError, match="1 to 5 numbers"):
        solve((1, 2, 3, 4, 5, 6), 7)


def test_four_numbers_are_solved_sooner_than_by_trying_all() -> None:
    rng = Random(3)
    drawn = [tuple(rng.randint(1, 9) for _ in range(4)) for _ in range(50)]
    started = time.process_time()
    for numbers in drawn:
        solve(numbers, 24)
    solved = time.process_time()
    brute_force((1, 2, 3, 4), 24)
    assert (solved - started) / len(drawn) < (time.process_time() - solved) / 4


ANSWER = CountdownAnswer((3, 5, 7, 8), 24)


@each_case("text", ["(8-5)*7+3", " ( 8 -5)* 7+3 ", "((((8-5))))*7+3", "3-7*(5-8)", "5*7-8-3"])
def test_correct(text: str) -> None:
    assert verify(text, ANSWER).outcome is Outcome.CORRECT
    assert verify(text, ANSWER).reward == 1.0


@each_case(
    ("text", "canonical"),
    [
        ("8-5*7+3", "3+8-5*7"),
        ("3*8", "3*8"),
        ("(8-5)*7+3+3-3", "(8-5)*7+3+3-3"),
        ("24", "24"),
        ("35-7-8+4", "35+4-7-8"),
        ("8/(7-7)", None),
        ("(3+5)/(8-8+0)", None),
        ("(8-5)*7+3+0", "(8-5)*7+0+3"),
    ],
)
def test_wrong(text: str, canonical: str | None) -> None:
    verdict = verify(text, ANSWER)
    assert (verdict.outcome, verdict.reward, verdict.canonical_answer) == (Outcome.WRONG, 0.0, canonical)


@each_case(
    "text",
    [
        "",
        " ",
        "-(5-8)*7+3",
        "+8",
        "(8-5)*7--3",
        "(8-5)*7+3=24",
        "(8-5)*7+3\n",
        "\t(8-5)*7+3",
        "(8-5)7+3",
        "(8-5)**7+3",
        "8//5+7*3",
        "1e3",
        "8.0-5+7*3",
        "08-5+7+3",
        "(8-5)*7+03",
        "8 5+7*3",
        "1_0",
        "0x8",
        "(8-5*7+3",
        "8-5)*7+3",
        "()",
        "(8-5)*7+",
        "\u0663+5",
        "\uff18-5",
        "\u00b2",
        "8\u22125",
        "8-5\u00a0+7",
        "8\u00d75",
        "None",
        "__import__('os')",
        "8,5",
        "8/(7-7)+",
    ],
)
def test_format(text: str) -> None:
    verdict = verify(text, ANSWER)
    assert (verdict.outcome, verdict.reward, verdict.canonical_answer) == (Outcome.FORMAT, 0.0, None)
    assert verdict.detail


@each_case(
    "text",
    [
        "(" * 100_000,
        "(" * 100_000 + "1" + ")" * 100_000,
        "1+" * 5_000_000 + "1",
        "9" * 10_000_000,
        " " * 10_000_000,
    ],
    ids=["open", "nested", "long sum", "long number", "spaces"],
)
def test_huge_texts_end_at_once_as_format(text: str) -> None:
    started = time.process_time()
    assert verify(text, ANSWER).outcome is Outcome.FORMAT
    assert time.process_time() - started < 0.5


def test_the_bounds_themselves() -> None:
    assert verify("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH, ANSWER).outcome is Outcome.WRONG
    assert verify("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1), ANSWER).outcome is Outcome.FORMAT
    assert verify("1+" * (MAX_CHARACTERS // 2 - 1) + "11", ANSWER).outcome is Outcome.WRONG
    assert verify("1+" * (MAX_CHARACTERS // 2) + "1", ANSWER).outcome is Outcome.FORMAT
    assert verify("9" * MAX_CHARACTERS, ANSWER).outcome is Outcome.WRONG
    assert verify("9*" * (MAX_CHARACTERS // 2 - 1) + "9", ANSWER).outcome is Outcome.WRONG


def test_the_table_names_the_task() -> None:
    assert make_verifiers()["countdown"]("(8-5)*7+3", ANSWER).outcome is Outcome.CORRECT


def test_a_sign_that_is_no_operator_is_named() -> None:
    assert verify("3 \N{MULTIPLICATION SIGN} 5", ANSWER).detail == "unexpected '\N{MULTIPLICATION SIGN}' at character 3"
