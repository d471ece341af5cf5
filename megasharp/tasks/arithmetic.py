"""Arithmetic that a model wrote: a small bounded parser, and canonical forms that count equal expressions once.

Nothing else reads a model's text as arithmetic. Grammar, over ASCII only; spaces (U+0020) may stand between tokens and
mean nothing:

    expression := term (("+" | "-") term)*
    term       := factor (("*" | "/") factor)*
    factor     := number | "(" expression ")"
    number     := "0" | [1-9][0-9]*

With `signed`, a minus sign may also stand before an expression's first term: `-3+27` is `27-3`.

Everything else is refused: other unary signs, `**`, `//`, `1e3`, `1.0`, `2(3)`, leading zeros, other scripts'
digits, tabs and newlines, `=`.

Two expressions get the same canonical form exactly when they differ by
- the order of the terms of a sum or of the factors of a product: `3+5`, `5+3`; `a*(b+c)`, `(c+b)*a`,
- how sums and products nest: `(a+b)+c`, `a+(b+c)`; `a-(b-c)`, `a-b+c`; `a/(b/c)`, `a*c/b`,
- where a sign sits: `(a-b)*(c-d)`, `(b-a)*(d-c)`; `a-(b-c)*d`, `a+(c-b)*d`.
Equal numbers used alike are one. Identities of values are NOT used: `a*1`, `a/1`, `2*2` and `2+2` stay
different. For n distinct operands this leaves 1, 6, 68, 1170 expressions, the known counts (OEIS A140606).

An expression becomes a sum of signed products, each product a multiset of factors over another, each factor
a number or a sum of its own. Every product is oriented to be non-negative; its sign moves outward to the
sum it stands in.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class _Product:
    """A term of non-negative value: factors `times` over factors `over`, sorted, each as canonical text."""

    value: Fraction
    times: tuple[str, ...]
    over: tuple[str, ...]

    @property
    def text(self) -> str:
        return "*".join(self.times) + "".join(f"/{factor}" for factor in self.over)


@dataclass(frozen=True, slots=True)
class Form:
    """A canonical expression: its exact value and its terms, those added and those subtracted."""

    value: Fraction
    plus: tuple[_Product, ...]
    minus: tuple[_Product, ...]

    @property
    def text(self) -> str:
        """The form as text, for instance `5*(7-4)+3`; it starts with `-` only if its value is negative."""
        return "+".join(term.text for term in self.plus) + "".join(f"-{term.text}" for term in self.minus)


def number(value: int) -> Form:
    """The form of a non-negative number."""
    fraction = Fraction(value)
    return Form(fraction, (_Product(fraction, (str(value),), ()),), ())


def _sum(value: Fraction, plus: tuple[_Product, ...], minus: tuple[_Product, ...]) -> Form:
    """A sum in canonical order. A term worth zero is its own negative, so it is always counted as added."""
    zeros = tuple(term for term in minus if not term.value)
    nonzero = tuple(term for term in minus if term.value)
    return Form(value, _sorted(plus + zeros), _sorted(nonzero))


def _sorted(terms: tuple[_Product, ...]) -> tuple[_Product, ...]:
    return tuple(sorted(terms, key=lambda term: term.text))


def _add(left: Form, right: Form) -> Form:
    return _sum(left.value + right.value, left.plus + right.plus, left.minus + right.minus)


def _subtract(left: Form, right: Form) -> Form:
    return _sum(left.value - right.value, left.plus + right.minus, left.minus + right.plus)


def negated(form: Form) -> Form:
    """The form of minus an expression, the same as of a subtraction from what follows."""
    return _sum(-form.value, form.minus, form.plus)


def _as_product(form: Form) -> tuple[_Product, bool]:
    """The form as one non-negative product, and whether a minus sign was taken out of it."""
    if len(form.plus) + len(form.minus) == 1:
        return (form.plus or form.minus)[0], bool(form.minus)
    negative = form.value < 0
    if not form.value:
        # A sum worth zero has no sign of its own: of the two ways to write it, keep the first in text order.
        zeros = tuple(term for term in form.plus if not term.value)
        signed = tuple(term for term in form.plus if term.value)
        form = min(form, Form(form.value, _sorted(form.minus + zeros), signed), key=lambda each: each.text)
    elif negative:
        form = _sum(-form.value, form.minus, form.plus)
    return _Product(form.value, (f"({form.text})",), ()), negative


def _signed(value: Fraction, times: tuple[str, ...], over: tuple[str, ...], negative: bool) -> Form:
    product = _Product(value, tuple(sorted(times)), tuple(sorted(over)))
    return _sum(-value, (), (product,)) if negative else _sum(value, (product,), ())


def _multiply(left: Form, right: Form) -> Form:
    (a, a_negative), (b, b_negative) = _as_product(left), _as_product(right)
    return _signed(a.value * b.value, a.times + b.times, a.over + b.over, a_negative != b_negative)


def _divide(left: Form, right: Form) -> Form:
    (a, a_negative), (b, b_negative) = _as_product(left), _as_product(right)
    return _signed(a.value / b.value, a.times + b.over, a.over + b.times, a_negative != b_negative)


_COMBINE: dict[str, Callable[[Form, Form], Form]] = {
    "+": _add,
    "-": _subtract,
    "*": _multiply,
    "/": _divide,
}


def combine(operator: str, left: Form, right: Form) -> Form:
    """The form of `left operator right`, operator one of `+ - * /`.

    Raises ZeroDivisionError when `right` is worth zero and the operator is `/`.
    """
    return _COMBINE[operator](left, right)


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

    def __init__(self, tokens: list[str], signed: bool) -> None:
        self._tokens = tokens
        self._signed = signed
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
        negative = self._signed and operators == "+-" and self._peek() == "-"
        self._next += negative
        form = negated(operand()) if negative else operand()
        while (operator := self._peek()) and operator in operators:
            self._next += 1
            right = operand()
            try:
                form = combine(operator, form, right)
            except ZeroDivisionError:
                # Reading goes on, so that a text with bad syntax further on is reported as that.
                self._divided_by_zero = True
        return form

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


def parse(text: str, signed: bool = False) -> tuple[Form, tuple[int, ...]]:
    """The canonical form of the expression `text`, and the numbers it uses in the order written.

    `signed` allows a minus sign before the first term, also in parentheses.

    Raises NotArithmeticError if the text is no expression, ZeroDivisionError if it is one but divides by
    zero.
    """
    tokens = tokenize(text)
    return _Parser(tokens, signed).parse(), tuple(int(token) for token in tokens if token.isdigit())
