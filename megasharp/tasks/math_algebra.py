"""The algebra of mathematical answers: math-verify's parser and sympy, imported only where mathematics is judged.

They take half a second of every process that imports them, which runs of other tasks need not spend.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import math_verify
import sympy
from math_verify.grader import is_assignment_relation, is_equation, is_relation, take_last_relation
from sympy.core.function import AppliedUndef

from megasharp.tasks.math_bounds import MAX_LENGTH, stand_ins, with_stand_ins
from megasharp.tasks.math_text import bracket, same_text

# It warns once a process that its limit of time is off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# The library's own list of units has letters (`5t` for 5) and words that change a value: `math_units` knows better.
_NO_UNITS = replace(math_verify.LatexExtractionConfig().normalization_config, units=False)
_LATEX = (math_verify.LatexExtractionConfig(boxed_match_priority=0, normalization_config=_NO_UNITS),)
_ROUNDED_DIGITS = 6
# A float has 15 to 17 digits; a computation may be wrong in the last of them.
_FLOAT_DIGITS, _MOST_FLOAT_DIGITS = 15, 17
_FLOAT_ERROR = sympy.Rational(1, 10**15)

_DECIMAL = re.compile(
    r"(?P<decimal>-?(?P<whole>\d*)\.(?P<places>\d+))(?:\\(?:times|cdot)\s*10\s*\^\s*\{?\s*(?P<power>-?\d{1,3})\s*\}?)?"
)


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
    if gold is None or given is None:
        return same_text(gold_text, given_text)
    if _proportional(gold, given):
        return True
    if not _answers(gold, given):
        return same_text(gold_text, given_text)
    gold, given = _complex_beside(gold, given), _complex_beside(given, gold)
    if _same_numbers(gold, given):
        return True
    if math_verify.verify(gold, given, timeout_seconds=None, allow_set_relation_comp=True, raise_on_error=True):
        return True
    return _rounds(gold_text, given) or _rounds(given_text, gold)


def _complex_beside(
    expression: sympy.Basic | sympy.MatrixBase, other: sympy.Basic | sympy.MatrixBase
) -> sympy.Basic | sympy.MatrixBase:
    """The expression with `i` as the imaginary unit where it is the one letter and the other is complex.

    The other is so where it is a number that is not real (`2i` by sqrt(-4)) or has `i` as its one letter too.
    """
    letters = {each: sympy.I for each in expression.free_symbols if str(each) == "i"}
    if not letters or not isinstance(other, sympy.Expr):
        return expression
    alone = (
        {str(each) for each in expression.free_symbols}
        == {"i"}
        == {str(each) for each in other.free_symbols | {*letters}}
    )
    if alone and (other.free_symbols or other.has(sympy.I) or other.doit().is_real is False):
        return expression.xreplace(letters)
    return expression


def _same_numbers(gold: sympy.Basic, given: sympy.Basic) -> bool:
    """Compare two complex numbers that are not real, to 15 digits; False for anything else."""
    if not all(isinstance(each, sympy.Expr) and not each.free_symbols and each.has(sympy.I) for each in (gold, given)):
        return False
    return bool(abs(sympy.N(gold.doit() - given.doit(), 20)) < _FLOAT_ERROR)


def _proportional(gold: sympy.Basic, given: sympy.Basic) -> bool:
    """Return True for equations in several unknowns of which one is the other times a constant, as of a line."""
    if not all(isinstance(each, sympy.Eq) and len(each.free_symbols) > 1 for each in (gold, given)):
        return False
    if gold.free_symbols != given.free_symbols:
        return False
    one, other = (sympy.expand(each.lhs - each.rhs) for each in (gold, given))
    if not (one.is_polynomial() and other.is_polynomial()) or other == 0:
        return False
    ratio = sympy.cancel(one / other)
    return bool(ratio.is_number and ratio != 0)


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
    """Return True where a text is a decimal of at least six digits that `expression` rounds to, or a float of it."""
    number = _DECIMAL.fullmatch(text.strip())
    digits = len((number["whole"] + number["places"]).lstrip("0")) if number else 0
    if number is None or digits < _ROUNDED_DIGITS:
        return False
    value = _value(expression)
    if value is None:
        return False
    scale = sympy.Rational(10) ** int(number["power"] or 0)
    half = scale * sympy.Rational(1, 2 * 10 ** len(number["places"]))
    if _FLOAT_DIGITS <= digits <= _MOST_FLOAT_DIGITS:
        half = max(half, abs(value) * _FLOAT_ERROR)
    return bool(abs(value - sympy.Rational(number["decimal"]) * scale) <= half)


def _value(expression: sympy.Basic) -> sympy.Expr | None:
    """The real number that an expression is, to 20 digits; None where it is none."""
    if is_assignment_relation(expression):
        expression = take_last_relation(expression).rhs
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return None
    value = sympy.N(expression.doit(), 30)
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
