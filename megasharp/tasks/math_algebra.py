"""The algebra of mathematical answers: math-verify's parser and sympy, imported only where mathematics is judged.

They take half a second of every process that imports them, which runs of other tasks need not spend.
"""

from __future__ import annotations

import logging
import re

import math_verify
import sympy
from math_verify.grader import is_assignment_relation, is_equation, is_relation, take_last_relation
from sympy.core.function import AppliedUndef

from megasharp.tasks.math_bounds import MAX_LENGTH, stand_ins, with_stand_ins
from megasharp.tasks.math_text import bracket, same_text

# It warns once a process that its limit of time is off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_LATEX = (math_verify.LatexExtractionConfig(boxed_match_priority=0),)
_ROUNDED_DIGITS = 6


def parse(text: str) -> sympy.Basic | sympy.MatrixBase | None:
    """The expression that a plain answer is, decimals as exact fractions; None where it is none.

    A list of equal numbers has as many as are written: `10,10` is no 10.
    """
    found = math_verify.parse(
        rf"\boxed{{{text}}}", _LATEX, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True
    )
    if not found:
        return None
    parsed = found[0]
    if isinstance(parsed, sympy.FiniteSet) and len(parsed.args) == 1 and bracket(text) != "{" and "," in text:
        parsed = sympy.Tuple(*[parsed.args[0]] * (text.count(",") + 1))
    # A decimal in an answer means its exact value, which a float would only come near.
    floats = parsed.atoms(sympy.Float)
    return parsed.xreplace({each: sympy.Rational(str(each)) for each in floats}) if floats else parsed


def equal(gold_text: str, given_text: str) -> bool:
    """Compare two plain answers by math-verify, or as a decimal and a number that rounds to it."""
    capitals = stand_ins(gold_text, given_text)
    gold_text, given_text = with_stand_ins(gold_text, capitals), with_stand_ins(given_text, capitals)
    gold, given = parse(gold_text), parse(given_text)
    if gold is None or given is None or not _answers(gold, given):
        return same_text(gold_text, given_text)
    gold, given = _complex_beside(gold, given), _complex_beside(given, gold)
    if math_verify.verify(gold, given, timeout_seconds=None, allow_set_relation_comp=True, raise_on_error=True):
        return True
    return _rounds(gold_text, given) or _rounds(given_text, gold)


def _complex_beside(
    expression: sympy.Basic | sympy.MatrixBase, other: sympy.Basic | sympy.MatrixBase
) -> sympy.Basic | sympy.MatrixBase:
    """The expression with `i` as the imaginary unit where the other is a number that is not real: `2i` by sqrt(-4)."""
    letters = {each: sympy.I for each in expression.free_symbols if str(each) == "i"}
    if not letters or not isinstance(other, sympy.Expr) or other.free_symbols or other.doit().is_real is not False:
        return expression
    return expression.xreplace(letters)


def _answers(gold: sympy.Basic, given: sympy.Basic) -> bool:
    """Decide if the library's rule, that an equation's right side is its answer, may be applied.

    It may for `x=3` and `f(x)=3`, and for `2+3=5`, which is true, but not for `x^x=5`. Where the known answer names a
    value, no equation is solved for it: that may take for ever.
    """
    if not is_equation(given) or (is_relation(gold) and not is_assignment_relation(gold)):
        return True
    last = take_last_relation(given)
    names = last.lhs.args if last.lhs.is_Mul else (last.lhs,)
    if all(name.is_Symbol or isinstance(name, AppliedUndef) for name in names):
        return True
    return bool(sympy.simplify(last.lhs - last.rhs) == 0)


def _rounds(text: str, expression: sympy.Basic) -> bool:
    """Return True where a text is a decimal of at least six digits, and `expression` rounds to it."""
    number = re.fullmatch(r"-?(\d*)\.(\d+)", text.strip())
    if number is None or len((number[1] + number[2]).lstrip("0")) < _ROUNDED_DIGITS:
        return False
    value = _value(expression)
    half = sympy.Rational(1, 2 * 10 ** len(number[2]))
    return value is not None and bool(abs(value - sympy.Rational(text.strip())) <= half)


def _value(expression: sympy.Basic) -> sympy.Expr | None:
    """The real number that an expression is, to 20 digits; None where it is none."""
    if is_assignment_relation(expression):
        expression = take_last_relation(expression).rhs
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return None
    value = sympy.N(expression.doit(), 20)
    return value if value.is_Float or value.is_Rational else None


def name_of(expression: sympy.Basic | sympy.MatrixBase) -> str:
    """The canonical text of an expression: exact where rational, to 12 digits where not, expanded, sets sorted."""
    if is_assignment_relation(expression):
        expression = take_last_relation(expression).rhs
    if isinstance(expression, sympy.FiniteSet):
        return "{" + ", ".join(sorted(name_of(each) for each in expression.args)) + "}"
    if isinstance(expression, sympy.Tuple):
        return "(" + ", ".join(name_of(each) for each in expression.args) + ")"
    if not isinstance(expression, sympy.Expr):
        return str(expression)[:MAX_LENGTH]
    value = expression.doit()
    if not value.free_symbols:
        return str(value if value.is_Rational else sympy.N(value, 12))[:MAX_LENGTH]
    return str(sympy.expand(value))[:MAX_LENGTH]
