"""SynLogic's arithmetic: the game of 24 (`mathador`), math path, cryptarithm, defined operations."""

from __future__ import annotations

import re
from fractions import Fraction

from megasharp.common.records import Outcome
from megasharp.tasks import math
from megasharp.tasks.arithmetic import NotArithmeticError, parse
from megasharp.tasks.extraction import CUT, boxes, joined_boxes, last_box
from megasharp.tasks.synlogic.boxed import box
from megasharp.tasks.synlogic.finding import last_block, refuse_choice
from megasharp.tasks.synlogic.game import Check, Finding, Game, GameError
from megasharp.tasks.synlogic.literals import UnreadableError

MAX_CHARACTERS = 200

_SIGNS = frozenset("+-*/%")
_ARITHMETIC = re.compile(r"(?:0|[1-9][0-9]{0,8})(?![0-9])|[-+*/%()]")
_IN_BRACKETS = re.compile(r"\[\[([^\[\]]*)\]\]")
_EQUATION = re.compile(rf"[0-9]{{1,20}}(?: *[-+*] *[0-9]{{1,20}})+ *= *-?[0-9]{{1,40}}(?![0-9{CUT}])")
# Signs of defined operations: of no script of letters or usual mathematics, or LaTeX's names of shapes.
_DEFINED = re.compile(
    "[\u2190-\u21ff\u2295-\u22a1\u22c4-\u22c6\u2300-\u23ff\u25a0-\u27bf\u2a00-\u2aff\u2b00-\u2bff\u2206\u2207\u00a7\u00a4@#\u203b]"
    r"|\\(?:big)?(?:triangle|circ|star|ast|oplus|ominus|otimes|oslash|odot|diamond|square|Box|nabla|bullet)(?![a-z])"
)


def mathador(game: Game) -> Check:
    """An expression of exactly the given numbers, by the given operators, that is worth the result: a block or box.

    SynLogic's checker compares the expression's value with itself, so that any value passes; its prompt asks for the
    result, and so do we.
    """
    numbers, operators, result = sorted(game.wholes("numbers")), set(game.texts("operators")), game.whole("result")

    def check(text: str) -> Finding:
        expression = _block_or_box(text)
        try:
            form, used = parse(expression)
        except NotArithmeticError as error:
            raise UnreadableError(str(error)) from error
        except ZeroDivisionError:
            return Finding(expression.replace(" ", ""), False)
        allowed = operators.issuperset(_SIGNS.intersection(expression))
        return Finding(form.text, allowed and sorted(used) == numbers and form.value == result)

    return check


def _block_or_box(text: str) -> str:
    """The last fenced block, without a box in it, or else the last box. Raises UnreadableError."""
    block = last_block(text)
    if block is None:
        return box(text)
    for each in boxes(text):
        refuse_choice(text, each.start)
    return last_box(block) or block


def math_path(game: Game) -> Check:
    """The equation with a digit for each `?`, in `[[` and `]]` or a box, that holds; all other signs as they were."""
    asked = game.text("query_expr").replace(" ", "")
    pattern = re.compile("".join("[0-9]" if sign == "?" else re.escape(sign) for sign in asked))
    if "=" not in asked:
        raise GameError("metadata's 'query_expr' must be an equation")

    def check(text: str) -> Finding:
        written = [(match.start(), match.end(), match[1]) for match in _IN_BRACKETS.finditer(text)]
        boxed = [each for each in boxes(text) if "=" in each.contents and "[[" not in each.contents]
        written += [(each.start, each.end, each.contents) for each in boxed]
        if not written:
            raise UnreadableError("no equation between [[ and ]] or in a box")
        start, end, equation = max(written)
        refuse_choice(text, start, end)
        given = re.sub("[ \"'`$]", "", equation)
        try:
            values = {_Expression(side).value() for side in given.split("=")} if pattern.fullmatch(given) else set()
        except (UnreadableError, ZeroDivisionError):
            return Finding(given, False)
        return Finding(given, len(values) == 1)

    return check


class _Expression:
    """Exact arithmetic with + - * / %, parentheses and a sign before a term; numbers have no leading zeros."""

    def __init__(self, text: str) -> None:
        self._tokens = _ARITHMETIC.findall(text)
        if len(text) > MAX_CHARACTERS or "".join(self._tokens) != text:
            raise UnreadableError("not arithmetic")
        self._at = 0

    def value(self) -> Fraction:
        value = self._sum()
        if self._at < len(self._tokens):
            raise UnreadableError("more after the expression")
        return value

    def _take(self, signs: str) -> str:
        """The next token where it is one of the signs, and an empty text elsewhere."""
        token = self._tokens[self._at] if self._at < len(self._tokens) else ""
        if not token or token not in signs:
            return ""
        self._at += 1
        return token

    def _sum(self) -> Fraction:
        value = -self._product() if self._take("-") else self._product()
        while sign := self._take("+-"):
            value += self._product() if sign == "+" else -self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while sign := self._take("*/%"):
            other = self._factor()
            value = value * other if sign == "*" else value / other if sign == "/" else value % other
        return value

    def _factor(self) -> Fraction:
        if self._take("("):
            value = self._sum()
            if not self._take(")"):
                raise UnreadableError("a parenthesis is not closed")
            return value
        token = self._tokens[self._at] if self._at < len(self._tokens) else ""
        if not token.isdigit():
            raise UnreadableError("a number is missing")
        self._at += 1
        return Fraction(token)


def cryptarithm(game: Game) -> Check:
    """The equation in digits, the last one of a response, as the reference answer has it."""
    reference = game.answer.replace(" ", "")
    if not _EQUATION.fullmatch(reference):
        raise GameError("'answer' must be an equation of numbers")

    def check(text: str) -> Finding:
        written = list(_EQUATION.finditer(text))
        if not written:
            raise UnreadableError("no equation of numbers")
        refuse_choice(text, *written[-1].span())
        given = written[-1][0].replace(" ", "")
        return Finding(given, given == reference)

    return check


def operation(game: Game) -> Check:
    """A number, judged as `math` judges: by math-verify, which may take long.

    Of an equation whose left side has a sign that the problem defines, which no parser knows, the right side is read.
    """
    if not game.answer:
        raise GameError("'answer' must be a number")
    gold = math.MathAnswer(game.answer)

    def check(text: str) -> Finding:
        if joined_boxes(text)[1]:
            raise UnreadableError("one box or another")
        for each in boxes(text)[-1:]:
            refuse_choice(text, each.start)
        left, _, right = (last_box(text) or "").rpartition("=")
        verdict = math.verify(f"\\boxed{{{right}}}" if _DEFINED.search(left) else text, gold)
        if verdict.outcome is Outcome.FORMAT:
            raise UnreadableError(verdict.detail)
        return Finding(verdict.canonical_answer or "", verdict.outcome is Outcome.CORRECT)

    return check
