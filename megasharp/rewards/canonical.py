"""Canonical forms of arithmetic expressions, so that trivially equal ones can be counted as one answer.

Two expressions get the same form exactly when they differ by
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


def _negated(form: Form) -> Form:
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
        form = _negated(form)
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
