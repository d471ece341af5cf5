"""Bounds on the answers that an algebra system is given; others are compared as text only.

sympy computes what it is given: `9^{9^{9^9}}` and `(10^9)!` until memory ends, an integral for minutes; math-verify's
parser takes a time for nested braces that grows exponentially. No limit of time can be set from within (SIGALRM works
in one thread of a process only), so the bounds are on the text. What they let through may still take long: whoever runs
the verifier in a process that can be killed is the last bound.

Answers with letters of both cases are prepared here too: math-verify reads every letter as its small one, so that `K-k`
would be zero. Its parser hands no option for that down to latex2sympy2, so a capital that must stay apart is written as
a Greek letter that neither answer has. Where an answer uses one case of a letter only, case is ignored as math-verify's
graders do: a lone `X` is `x`. Words are not symbols, and stay without case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_STAND_INS = (
    "xi",
    "zeta",
    "tau",
    "psi",
    "chi",
    "omega",
    "sigma",
    "kappa",
    "iota",
    "upsilon",
    "rho",
    "nu",
    "mu",
    "eta",
    "theta",
    "phi",
    "lambda",
    "delta",
    "beta",
    "alpha",
)
# The first two are no symbols: text, an exponent's E. Then commands, of which some are Greek capitals, then letters.
_SYMBOL = re.compile(
    r"\\(?:text|textbf|textrm|mathrm|mbox|operatorname)\s*\{[^{}]*\}|(?<=\d)[eE](?=[+-]?\d)"
    r"|(?P<symbol>\\(?P<command>[A-Za-z]+)|[A-Za-z])"
)
_GREEK = {*_STAND_INS, "gamma", "epsilon", "pi"}


def stand_ins(*texts: str) -> Mapping[str, str]:
    r"""Map each capital that one of the `texts` has beside its small letter to the Greek letter to write for it.

    Both are without a backslash. Where there are more capitals than free Greek letters, the last ones have none.

    Example: `stand_ins("K-k", "2k")` is `{"K": "xi"}`.
    """
    found: list[set[str]] = []
    for text in texts:
        symbols = [match["command"] or match["symbol"] for match in _SYMBOL.finditer(text) if match["symbol"]]
        found.append({name for name in symbols if len(name) == 1 or name.lower() in _GREEK})
    capitals = sorted({name for names in found for name in names if name[0].isupper() and name.lower() in names})
    used = {name.lower() for names in found for name in names}
    # The library takes a product whose letters make a symbol's name for that symbol.
    free = (name for name in _STAND_INS if name not in used and not set(name) <= used)
    return dict(zip(capitals, free, strict=False))


def with_stand_ins(text: str, names: Mapping[str, str]) -> str:
    r"""The text with each capital's Greek letter. Example: `with_stand_ins("K-k", {"K": "xi"})` is `\xi -k`."""

    def written(match: re.Match[str]) -> str:
        name = names.get(match["command"] or match["symbol"] or "")
        return rf"\{name} " if name else match[0]

    return _SYMBOL.sub(written, text) if names else text


def without_stand_ins(text: str, names: Mapping[str, str]) -> str:
    """The text of an expression with the capitals again. Example: `xi - k` is `K - k`."""
    for capital, name in names.items():
        text = re.sub(rf"(?<![A-Za-z]){name}(?![A-Za-z])", capital, text)
    return text


MAX_LENGTH = 400
MAX_DEPTH = 6
MAX_DIGITS = 200
MAX_EXPONENT = 20_000
MAX_POWER_DIGITS = 100_000
MAX_EXPANSION = 12
MAX_ROOTED = 100
MAX_VARIABLES = 2
MAX_DEGREE = 60
MAX_FACTORIAL_DIGITS = 3
MAX_TOWER_NUMBER = 4
MAX_FRACTIONS = 8
MAX_FUNCTIONS = 2
MAX_SYMBOLIC = 4

_COMPUTES = re.compile(
    r"\\(?:i*int|oint|sum|prod|lim|limsup|liminf|bigcup|bigcap)(?![A-Za-z])|\\frac\{d\}"
    # A factorial of anything but a number or a letter: of a bracket, a bar, `\rfloor`, or another factorial.
    r"|(?:[^\w\s\\]|\\[A-Za-z]+)\s*!"
)
# Factorials that stay as they are, `(2n)!` and `(m+n)!`: a few, with their squares and beside no other powers.
_SYMBOLIC = re.compile(r"\(\s*[23]?\s*[a-z]\s*(?:[+-]\s*[12a-z]\s*)?\)\s*!(?!\s*!)")
_LOW_POWER = re.compile(r"\^\s*(?:2(?!\d)|[a-z]|\{\s*[2a-z]\s*\})")
# Functions that grow as factorials do; the arguments, in braces or brackets, are read up to where they close.
_BINOMIAL = re.compile(r"\\(?:[dt]?binom|choose)(?![A-Za-z])|\\[Gg]amma(?=\s*(?:\\left\s*)?[({\d])")
_GROWING = re.compile(
    r"\\(?:operatorname|mathrm|text)\s*\{\s*(?:\w*(?:gamma|binom|fact|fib|zeta|perm|comb|prime|eye|zeros|ones)\w*)\s*\}",
    re.IGNORECASE,
)
_FUNCTION = re.compile(
    r"\\?(?:arc|ar)?(?:sin|cos|tan|cot|sec|csc)h?(?![A-Za-z])|\\?(?:exp|log|ln|lg)(?![A-Za-z])|\\operatorname\s*\{[^{}]*\}"
)
_MARK = re.compile(rf"{_FUNCTION.pattern}|[-+,=;(){{}}\[\]]")
# `_2` and `^2` are of the function before, and no argument.
_INDEX = re.compile(r"[_^]\s*\w")
_NUMBER = re.compile(r"\d+")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
_FACTORIAL = re.compile(r"(\d+)\s*!")


def beyond(text: str) -> str | None:
    r"""Return why an answer must not be given to sympy, or None.

    Example: `beyond("9^{9^9}")` is `"a tower of exponents"`.
    """
    if len(text) > MAX_LENGTH:
        return f"longer than {MAX_LENGTH} characters"
    deepest = depth = 0
    for sign in text:
        depth += (sign in "{([") - (sign in "})]")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        return f"nested deeper than {MAX_DEPTH}"
    if any(len(number) > MAX_DIGITS for number in _NUMBER.findall(text)):
        return f"a number of more than {MAX_DIGITS} digits"
    if _COMPUTES.search(_without_symbolic(text)) or text.count(r"\frac") > MAX_FRACTIONS:
        return "a computation, no result"
    if _nested_functions(text) > MAX_FUNCTIONS:
        return f"functions of functions, more than {MAX_FUNCTIONS}"
    if any(len(number) > MAX_FACTORIAL_DIGITS for number in _FACTORIAL.findall(text)):
        return "a large factorial"
    if _grows(text):
        return "a large binomial coefficient or gamma function"
    return _exponents(text)


def _without_symbolic(text: str) -> str:
    """The text without the factorials that are not computed, where there are no more than sympy can compare."""
    if text.count("!") + text.count("^") > MAX_SYMBOLIC or text.count("^") > len(_LOW_POWER.findall(text)):
        return text
    return _SYMBOLIC.sub("n", text)


def _grows(text: str) -> bool:
    """Return True where a binomial coefficient, a gamma function or their kin may be given a large argument."""
    for match in (*_BINOMIAL.finditer(text), *_GROWING.finditer(text)):
        # `{n \\choose k}` has an argument before it too.
        arguments = text if match[0] == r"\choose" else _arguments(text, match.end())
        numbers = _NUMBER.findall(arguments)
        if _BINOMIAL.search(arguments) or _GROWING.search(arguments):
            return True
        # sympy multiplies out the product of so many terms.
        if _LETTER.search(arguments) and max(map(int, numbers), default=0) > MAX_DEGREE:
            return True
        # A half as an argument makes a constant whose powers no machine computes.
        if numbers and (any(sign in arguments for sign in "^!.") or max(map(len, numbers)) > MAX_FACTORIAL_DIGITS + 1):
            return True
    return False


def _arguments(text: str, start: int) -> str:
    """The groups in braces or brackets that follow a command, or its first sign."""
    end = start
    for _ in range(2):
        skipped = re.compile(r"(?:\s|\\left|\\[,;:! ])*").match(text, end)
        end = skipped.end() if skipped else end
        if end < len(text) and text[end] in "{(":
            end += len(_balanced(text[end:]))
    number = re.compile(r"[\d.]*").match(text, end)
    return text[start : number.end() if number else end] or text[start : start + 1]


def _balanced(text: str) -> str:
    """The bracket that a text begins with, up to where it closes, or all of the text."""
    depth = 0
    for length, sign in enumerate(text, start=1):
        depth += (sign in "{(") - (sign in "})")
        if not depth:
            return text[:length]
    return text


def _nested_functions(text: str) -> int:
    r"""Count the functions that are within each other at most, by their brackets: 2 in `\sin(\cos 1)\tan 2`.

    A function ends with its argument, which is a bracket or a sign or more before the next function.
    """
    deepest, depth, outer, end = 0, 0, [0], 0
    for mark in _MARK.finditer(text):
        sign, before = mark[0], _INDEX.sub("", text[end : mark.start()])
        end = mark.end()
        if sign in ("(", "[", "{"):
            outer.append(depth)
        elif sign in (")", "]", "}"):
            depth = outer.pop() if len(outer) > 1 else 0
            depth = depth if sign == "}" else outer[-1]
        elif sign in ("+", "-", ",", "=", ";"):
            depth = outer[-1]
        else:
            depth = 1 + (outer[-1] if before.strip() else depth)
            deepest = max(deepest, depth)
    return deepest


def _exponents(text: str) -> str | None:
    """Return why a text's powers are too large, or None."""
    text = text.replace("**", "^")
    exponents = [(place, _group(text, place + 1)) for place, sign in enumerate(text) if sign == "^"]
    rooted = r"\sqrt" in text or any("/" in exponent or "frac" in exponent for _, exponent in exponents)
    for place, exponent in exponents:
        largest = max(map(int, _NUMBER.findall(exponent)), default=0)
        rest = text[place + 1 + len(exponent) :].lstrip()
        if exponent.count("^") > 1 or rest.startswith("^") or ("^" in exponent and largest > MAX_TOWER_NUMBER):
            return "a tower of exponents"
        if largest > MAX_EXPONENT or "!" in exponent:
            return f"an exponent above {MAX_EXPONENT}"
        base = re.search(r"\d+$", text[:place].rstrip())
        if base and len(base[0]) * largest > MAX_POWER_DIGITS:
            return f"a power of more than {MAX_POWER_DIGITS} digits"
        # sympy factors what is under a root.
        if rooted and largest > MAX_ROOTED:
            return f"a root beside an exponent above {MAX_ROOTED}"
        if largest > MAX_EXPANSION and _is_group(text, place) and "^" in text[:place]:
            return f"a power to a power above {MAX_EXPANSION}"
    return _expansion(text, exponents)


def _expansion(text: str, exponents: list[tuple[int, str]]) -> str | None:
    """Return why a text's polynomials are too large to multiply out or to divide, or None."""
    variables = set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)))
    if not variables:
        return None
    powers = [(place, max(map(int, _NUMBER.findall(exponent)), default=0)) for place, exponent in exponents]
    most = MAX_EXPANSION if len(variables) <= MAX_VARIABLES else MAX_EXPANSION // 3
    if sum(power for place, power in powers if _is_group(text, place)) > most:
        return f"sums to powers above {most} in all"
    if any(power > MAX_DEGREE for _, power in powers) and re.search(r"[/(]|frac", text):
        return f"a fraction or product of a degree above {MAX_DEGREE}"
    return None


def _group(text: str, start: int) -> str:
    """The group in braces at `start`, braces included, or the number or the one sign there."""
    rest = text[start:]
    if not rest.startswith("{"):
        digits = re.match(r"\s*(?:-?\d+|\\[A-Za-z]+|.)", rest)
        return digits[0] if digits else ""
    depth = 0
    for length, sign in enumerate(rest, start=1):
        depth += (sign == "{") - (sign == "}")
        if not depth:
            return rest[:length]
    return rest


def _is_group(text: str, place: int) -> bool:
    """Return True where the sign at `place` raises a bracket to a power."""
    return text[:place].rstrip().endswith((")", "]", "}"))
