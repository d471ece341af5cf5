r"""What an algebra system may be asked: everything else is compared as text only.

sympy computes what it is given: `9^{9^{9^9}}` and `(10^9)!` until memory ends, an integral for minutes; math-verify's
parser takes a time for nested braces that grows exponentially. No limit of time can be set from within (SIGALRM works
in one thread of a process only), so the bounds are on the text. What they let through may still take long: whoever runs
the verifier in a process that can be killed is the last bound.
"""

from __future__ import annotations

import re

MAX_LENGTH = 400
MAX_DEPTH = 6
MAX_DIGITS = 200
MAX_EXPONENT = 20_000
MAX_EXPANSION = 12
MAX_FACTORIAL_DIGITS = 3
MAX_TOWER_NUMBER = 4
MAX_FRACTIONS = 8

_COMPUTES = re.compile(
    r"\\(?:i*int|oint|sum|prod|lim|limsup|liminf|bigcup|bigcap)(?![A-Za-z])|\\frac\{d\}|!\s*!|\)\s*!|\}\s*!"
)
_BINOMIAL = re.compile(r"\\(?:d|t)?binom\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_NUMBER = re.compile(r"\d+")
_FACTORIAL = re.compile(r"(\d+)\s*!")


def beyond(text: str) -> str | None:
    r"""Why an answer must not be given to sympy, or None. Example: `beyond("9^{9^9}")` is `"a tower of exponents"`."""
    if len(text) > MAX_LENGTH:
        return f"longer than {MAX_LENGTH} characters"
    if _depth(text) > MAX_DEPTH:
        return f"nested deeper than {MAX_DEPTH}"
    if any(len(number) > MAX_DIGITS for number in _NUMBER.findall(text)):
        return f"a number of more than {MAX_DIGITS} digits"
    if _COMPUTES.search(text) or text.count(r"\frac") > MAX_FRACTIONS:
        return "a computation, no result"
    if any(len(number) > MAX_FACTORIAL_DIGITS for number in _FACTORIAL.findall(text)):
        return "a large factorial"
    if any(_large_binomial(*match) for match in _BINOMIAL.findall(text)):
        return "a large binomial coefficient"
    return _exponents(text)


def _depth(text: str) -> int:
    deepest = depth = 0
    for sign in text:
        depth += (sign in "{([") - (sign in "})]")
        deepest = max(deepest, depth)
    return deepest


def _large_binomial(above: str, below: str) -> bool:
    return "^" in above + below or any(
        len(number) > MAX_FACTORIAL_DIGITS + 1 for number in _NUMBER.findall(above + below)
    )


def _exponents(text: str) -> str | None:
    """Why its powers are too large, or None."""
    text = text.replace("**", "^")
    for place, sign in enumerate(text):
        if sign != "^":
            continue
        exponent = _group(text, place + 1)
        numbers = [int(number) for number in _NUMBER.findall(exponent)]
        if exponent.count("^") > 1 or ("^" in exponent and max(numbers, default=0) > MAX_TOWER_NUMBER):
            return "a tower of exponents"
        if text[place + 1 + len(exponent) :].lstrip().startswith("^"):
            return "a tower of exponents"
        largest = max(numbers, default=0)
        if largest > MAX_EXPONENT or "!" in exponent:
            return f"an exponent above {MAX_EXPONENT}"
        if largest > MAX_EXPANSION and text[:place].rstrip()[-1:] in (")", "]", "}") and _has_variable(text):
            return f"a sum to a power above {MAX_EXPANSION}"
    return None


def _group(text: str, start: int) -> str:
    """What stands in braces at `start`, braces included, or the number or the one sign there."""
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


def _has_variable(text: str) -> bool:
    return re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)) is not None
