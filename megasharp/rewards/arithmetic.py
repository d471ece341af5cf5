"""A small bounded parser of arithmetic: the only thing that ever reads what a model wrote as arithmetic.

Grammar, over ASCII only; spaces (U+0020) may stand between tokens and mean nothing:

    expression := term (("+" | "-") term)*
    term       := factor (("*" | "/") factor)*
    factor     := number | "(" expression ")"
    number     := "0" | [1-9][0-9]*

Everything else is refused: unary signs, `**`, `//`, `1e3`, `1.0`, `2(3)`, leading zeros, other scripts'
digits, tabs and newlines, `=`. Unary minus is refused because the problems give positive numbers and four
binary operators, and because `-(a-b)` would be one more spelling of `b-a`.
"""

from __future__ import annotations

import re

from megasharp.rewards.canonical import Form, combine, number

MAX_CHARACTERS = 256
MAX_DEPTH = 32

_TOKEN = re.compile(r" *(0|[1-9][0-9]*|[-+*/()])", re.ASCII)


class NotArithmeticError(ValueError):
    """The text is not an expression of the grammar, or exceeds the bounds on length and depth."""


def tokenize(text: str) -> list[str]:
    """Split `text` into numbers, operators and parentheses.

    Raises NotArithmeticError; a text of more than `MAX_CHARACTERS` is refused unread.
    """
    if len(text) > MAX_CHARACTERS:
        raise NotArithmeticError(f"longer than {MAX_CHARACTERS} characters")
    tokens: list[str] = []
    end = len(text.rstrip(" "))
    position = 0
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            wrong = text[position:].lstrip(" ")[0]
            raise NotArithmeticError(f"unexpected {wrong!r} at character {text.index(wrong, position) + 1}")
        if tokens and tokens[-1].isdigit() and match[1].isdigit():
            raise NotArithmeticError(f"two numbers in a row, or a leading zero, at character {position + 1}")
        tokens.append(match[1])
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent over tokens; recursion happens only at parentheses and is bounded by `MAX_DEPTH`."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0
        self._depth = 0
        self._divided_by_zero = False

    def parse(self) -> Form:
        form = self._chain("+-")
        if self._peek():
            raise NotArithmeticError(f"unexpected {self._peek()!r} after a complete expression")
        if self._divided_by_zero:
            raise ZeroDivisionError("division by zero")
        return form

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self._next += 1
        return token

    def _chain(self, operators: str) -> Form:
        """Operands joined by operators of one precedence, from left to right."""
        operand = self._term if operators == "+-" else self._factor
        form = operand()
        while (operator := self._peek()) and operator in operators:
            self._next += 1
            form = self._combine(operator, form, operand())
        return form

    def _combine(self, operator: str, left: Form, right: Form) -> Form:
        try:
            return combine(operator, left, right)
        except ZeroDivisionError:
            # Reading goes on, so that a text with bad syntax further on is reported as that.
            self._divided_by_zero = True
            return left

    def _term(self) -> Form:
        return self._chain("*/")

    def _factor(self) -> Form:
        token = self._take()
        if token.isdigit():
            return number(int(token))
        if token != "(":
            found = repr(token) if token else "the end"
            raise NotArithmeticError(f"expected a number or '(', found {found}")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotArithmeticError(f"parentheses nested deeper than {MAX_DEPTH}")
        form = self._chain("+-")
        if self._take() != ")":
            raise NotArithmeticError("a parenthesis is not closed")
        self._depth -= 1
        return form


def parse(text: str) -> tuple[Form, tuple[int, ...]]:
    """The canonical form of the expression `text`, and the numbers it uses in the order written.

    Raises NotArithmeticError if the text is no expression, ZeroDivisionError if it is one but divides by
    zero.
    """
    tokens = tokenize(text)
    return _Parser(tokens).parse(), tuple(int(token) for token in tokens if token.isdigit())
