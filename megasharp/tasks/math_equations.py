r"""Equations as answers: the side that is the value, where the other one is only what was asked for.

`m+n=70` says 70, `|AB|=70` and `N\equiv 70\pmod{1000}` too, and so does a chain whose members agree
(`x=\frac{18}{4}=4.5`). An equation that is still to be solved in one unknown says no value (`x^x=5`, `2x=10`, `r^2=25`,
`x(x+1)=6`), and one of constants says one only where it is true: no `6=5`. A function of one unknown and its sum with
its reciprocal are asked for: `\sin 2\theta=\frac{24}{25}`, `x+\frac1x=3`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_TOKEN = re.compile(
    r"(?P<open>\\\{|[{(\[])|(?P<close>\\\}|[})\]])|(?P<other>[<>:]\s*=|\\(?:le|ge|ne|neq|lt|gt)(?![A-Za-z])|[<>])"
    r"|(?P<relation>=|\\(?:equiv|approx|simeq|sim)(?![A-Za-z]))"
)
_SPACES = r"(?:\\[,;: ]|\\quad|\s)*"
_ARROW = r"\\(?:Rightarrow|implies|Longrightarrow|iff|Leftrightarrow|therefore)(?![A-Za-z])"
# What leads to the equation that counts.
_LEADS = re.compile(rf".*{_ARROW}{_SPACES}", re.DOTALL)
_LEAD = re.compile(rf"{_SPACES}(?:{_ARROW}|\\(?:long)?rightarrow(?![A-Za-z])){_SPACES}")
_MODULUS = re.compile(
    r"(?:\\[,;:! ]|\\quad|\s)*"
    r"(?:\\pmod\s*\{?|\(?\s*(?:\\(?:mathrm|text|operatorname)\{\s*mod\s*\}|\\?b?mod)(?:\\[ ,])*)"
    r"\s*(\d+)\s*\}?\s*\)?$"
)
_NAMED = re.compile(r"\\(?:text|textrm|textbf|mathrm|mathbf|mathit|mbox|operatorname)\s*\{[^{}]*\}")
_SUBSCRIPT = re.compile(r"_\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\\?[A-Za-z]+|\d)")
_GREEK_LETTER = re.compile(
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|(?:var)?phi|chi|psi"
    r"|omega)(?![A-Za-z])"
)
# Without the base of exponentials.
_UNKNOWN = re.compile(rf"{_GREEK_LETTER.pattern}|(?!e\s*\^)[A-Za-z]")
_NO_LETTER = re.compile(rf"(?!{_GREEK_LETTER.pattern})\\[A-Za-z]+")
# Commands of arithmetic, which say nothing of how their argument is asked for.
_ARITHMETIC = re.compile(
    r"\\(?:[dtc]?frac|sqrt|cdot|times|div|left|right|pi|pm|binom|big|Big|quad|displaystyle|[,;:! ])(?![A-Za-z])"
)
# Constants that the algebra does not compute, or that words name: nothing says that such an equation is false.
_COMPUTED = re.compile(
    r"\\(?:sum|prod|i*int|lim|gcd|lcm|max|min|b?mod|det|deg|dim|operatorname|text|mathrm|mathbf|overline|angle)(?![A-Za-z])"
)
_ARGUMENT = (
    r"(?:\s|\^\s*(?:\{[^{}]*\}|\w)|_\s*(?:\{[^{}]*\}|\w))*"
    r"(?:\{[^{}]*\}|\([^()]*\)|\[[^\[\]]*\]|[A-Za-z]\([^()]*\)|\\?[A-Za-z]+|\d+)?"
)
_MARKED = re.compile(
    rf"\|[^|]*\||\\(?:lfloor|lceil).*?\\(?:rfloor|rceil)"
    # `2\theta` is an argument of these; a letter before a bracket that it is in itself is a factor, as in `x(x+1)`.
    r"|\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?(?:\s*\^\s*(?:\{[^{}]*\}|\w))?\s*\d+\s*(?:[A-Za-z](?![A-Za-z])|\\[a-z]+)"
    r"|(?<![A-Za-z\\])(?P<name>[A-Za-z])(?!\s*\([^()]*(?P=name)[^()]*\))(?:'|\^\{?-1\}?|_\{?\w+\}?)*\s*\([^()]*\)"
    r"|\\(?:operatorname|mathrm|mathbb|mathbf|text)\*?\s*\{[^{}]*\}\s*(?:\([^()]*\)|\[[^\[\]]*\])|\\#\s*\(?[A-Za-z]\)?"
    rf"|(?!{_GREEK_LETTER.pattern})\\[A-Za-z]+{_ARGUMENT}"
)
_INTEGER = re.compile(r"-?\d{1,18}")
_INTEGER_FUNCTION = re.compile(
    r"\\?(?:(?:operatorname|text|mathrm)\s*\{\s*)?(gcd|lcm|max|min)\s*\}?\s*(?:\\left)?[({\\]+\s*"
    r"(-?\d{1,18}(?:\s*,\s*-?\d{1,18})*)\s*(?:\\right)?\\?[)}]+"
)
_PURE_NAME = re.compile(r"(?:[A-Za-z]|\\[A-Za-z]+|[\s'{}])+")
_INDEXED = re.compile(r"[A-Za-z]_\s*(?:\{[^{}]*\}|\w)")
# The letter that a sum or product runs over is no unknown.
_RUNS = re.compile(r"\\(?:sum|prod)(?![A-Za-z])\s*(?:\\limits)?\s*_\s*\{\s*([A-Za-z])\s*=")
_WITH_RECIPROCAL = re.compile(
    r"(?P<power>[A-Za-z](?:\^(?:\w|\{\w+\}))?)\s*[+-]\s*(?:\\frac\s*\{?1\}?\s*\{?|1\s*/\s*)\s*(?P=power)\s*\}?"
)
_TUPLE = re.compile(r"(?:\\left)?\(.*,.*\)|\\begin|\\langle", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Side:
    """One side of an equation, and the relation before it; none before the first."""

    relation: str
    text: str


def sides(text: str) -> list[Side]:
    """Split an answer at its equals signs outside of brackets; one side where it is no equation, or an inequality."""
    found, depth, start, relation = [], 0, 0, ""
    for match in _TOKEN.finditer(text):
        depth += (match.lastgroup == "open") - (match.lastgroup == "close")
        if match.lastgroup == "other" and not depth:
            return [Side("", text)]
        if match.lastgroup == "relation" and not depth:
            found.append(Side(relation, text[start : match.start()].strip()))
            relation, start = match[0], match.end()
    found.append(Side(relation, text[start:].strip()))
    return found if all(side.text for side in found) else [Side("", text)]


def concluded(text: str) -> str:
    r"""The equation behind the one arrow of an answer. Example: of `m=27, n=43 \implies m+n=70` `m+n=70`.

    An answer with several arrows may be a list, and so may what stands behind the arrow: they are returned as they are.
    """
    parts = _LEAD.split(text)
    if len(parts) != 2 or "=" not in parts[1] or "," in parts[1] or parts[0].count("{") != parts[0].count("}"):
        return text
    return parts[1]


def with_values(text: str, named: Mapping[str, str]) -> str:
    """An expression with the values of its letters in brackets for them."""
    return re.sub(r"\\[A-Za-z]+|[A-Za-z]", lambda name: f"({named[name[0]]})" if name[0] in named else name[0], text)


def values(text: str, agree: Callable[[str, str], bool]) -> list[str] | None:
    r"""The values that an equation states: its right side, or that and the exact one before `\approx`.

    None where it states none. What is no equation is its own value. `agree` compares constants.

    Example: `values("m+n=70", ...)` is `["70"]`.
    """
    text = _LEADS.sub("", text).strip() or text
    modulus = _MODULUS.search(text)
    chain = sides(text[: modulus.start()] if modulus else text)
    if len(chain) == 1:
        return [text]
    if unknowns(chain[-1].text) and not unknowns(chain[0].text) and len(chain) == 2:
        chain = [Side("", chain[1].text), Side(chain[1].relation, chain[0].text)]
    value = chain[-1].text
    stated = [value]
    if "approx" in chain[-1].relation or "sim" in chain[-1].relation:
        if _INTEGER.fullmatch(value) and _INTEGER.fullmatch(chain[-2].text) and int(value) != int(chain[-2].text):
            return None
        stated += [chain[-2].text] if not unknowns(chain[-2].text) else []
        chain = chain[:-1]
        value = chain[-1].text
    congruent = modulus is not None or any("equiv" in side.relation for side in chain)
    for side in chain if chain[-1].text != value else chain[:-1]:
        if congruent and not unknowns(side.text):
            if _is_no_residue(side.text, value, modulus):
                return None
        elif not _is_asked_for(side.text, value) and (unknowns(side.text) or not agree(side.text, value)):
            return None
    return stated


def _is_no_residue(side: str, value: str, modulus: re.Match[str] | None) -> bool:
    """Return whether two integers of a congruence are plainly incongruent."""
    if modulus is None or not (_INTEGER.fullmatch(side) and _INTEGER.fullmatch(value)) or not int(modulus[1]):
        return False
    return (int(side) - int(value)) % int(modulus[1]) != 0


def modulus_of(text: str) -> tuple[str, int] | None:
    r"""The residue and the modulus that a congruence states. Example: of `x\equiv 9 \pmod{7}` `("9", 7)`."""
    match = _MODULUS.search(text)
    if match is None or r"\equiv" not in text:
        return None
    return sides(text[: match.start()])[-1].text, int(match[1])


def residue_of(text: str) -> str:
    r"""The residue that an answer is. Example: of `3 \pmod 7` it is `3`, of `10 \bmod 7`, which is no residue, `""`."""
    match = _MODULUS.search(text)
    residue = text[: match.start()].strip() if match else ""
    return residue if match and residue.isdecimal() and int(residue) < int(match[1]) else ""


def unknowns(text: str) -> set[str]:
    """The letters of a text that are no command's and no index's."""
    return set(_letters(text))


def _letters(text: str) -> list[str]:
    return _UNKNOWN.findall(_NO_LETTER.sub(" ", _SUBSCRIPT.sub("", _NAMED.sub("", text))))


def _is_asked_for(side: str, value: str) -> bool:
    """Decide if a side names what a problem asks for: anything but constants and an equation in one unknown.

    A name, an expression in several unknowns, a function or another mark around one unknown, and the sum of an unknown
    or its power with the reciprocal are asked for.
    """
    remainder = _MODULUS.search(side)
    side = side[: remainder.start()] if remainder else side
    letters = [letter for letter in _letters(side) if letter not in _RUNS.findall(side)]
    if not letters:
        computed = _of_integers(side)
        named = remainder is not None or _COMPUTED.search(side) is not None
        return named if computed is None else str(computed) == value
    # x_1+x_2 has two unknowns.
    if len(set(letters)) > 1 or len(set(_INDEXED.findall(side))) > 1 or _TUPLE.match(value):
        return True
    if (len(letters) == 1 and _PURE_NAME.fullmatch(_SUBSCRIPT.sub("", side))) or _WITH_RECIPROCAL.fullmatch(side):
        return True
    # In `x+\sin x` the unknown stands alone too.
    left, inner = _ARITHMETIC.sub(" ", side), ""
    while left != inner:
        left, inner = _MARKED.sub(" ", left), left
    return not _letters(left)


def _of_integers(text: str) -> int | None:
    r"""The value of `\gcd(6,12)` and its kin; None of anything else."""
    match = _INTEGER_FUNCTION.fullmatch(text.strip())
    if match is None:
        return None
    function: Callable[..., int] = {"gcd": math.gcd, "lcm": math.lcm}.get(match[1]) or {"max": max, "min": min}[
        match[1]
    ]
    return function(*map(int, match[2].split(",")), *([] if "," in match[2] else [int(match[2])]))
