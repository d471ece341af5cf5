r"""Mathematics in Unicode written as LaTeX: the one place where characters that mean the same become one.

Models write an en dash for a minus sign, full-width or Arabic digits, `√3`, `x²` and `1½`. A response and a known
answer pass through here once, before anything looks for an answer in them.
"""

from __future__ import annotations

import re
import unicodedata

from megasharp.tasks.wording import ascii_signs

_KEPT = {
    "": "\N{INVISIBLE TIMES}\N{FUNCTION APPLICATION}\N{LEFT-TO-RIGHT MARK}\N{RIGHT-TO-LEFT MARK}",
    "/": "\N{FRACTION SLASH}\N{DIVISION SLASH}",
    "*": "\N{ASTERISK OPERATOR}",
    r"^\circ": "\N{DEGREE SIGN}",
    r"\cdot ": "\N{MIDDLE DOT}\N{DOT OPERATOR}\N{BULLET OPERATOR}",
    r"\times ": "\N{MULTIPLICATION SIGN}",
    r"\div ": "\N{DIVISION SIGN}",
    r"\pm ": "\N{PLUS-MINUS SIGN}",
    r"\le ": "\N{LESS-THAN OR EQUAL TO}",
    r"\ge ": "\N{GREATER-THAN OR EQUAL TO}",
    r"\neq ": "\N{NOT EQUAL TO}",
    r"\approx ": "\N{ALMOST EQUAL TO}",
    r"\equiv ": "\N{IDENTICAL TO}",
    r"\infty ": "\N{INFINITY}",
    r"\cup ": "\N{UNION}",
    r"\cap ": "\N{INTERSECTION}",
    r"\in ": "\N{ELEMENT OF}",
    r"\emptyset ": "\N{EMPTY SET}",
    r"\therefore ": "\N{THEREFORE}",
    r"\angle ": "\N{ANGLE}",
    r"\Rightarrow ": "\N{RIGHTWARDS DOUBLE ARROW}",
    r"\to ": "\N{RIGHTWARDS ARROW}",
    r"\lfloor ": "\N{LEFT FLOOR}",
    r"\rfloor ": "\N{RIGHT FLOOR}",
    r"\lceil ": "\N{LEFT CEILING}",
    r"\rceil ": "\N{RIGHT CEILING}",
}
_GREEK = {
    ord(unicodedata.lookup(f"GREEK {case} LETTER {name.upper()}")): rf"\{name if case == 'SMALL' else name.title()} "
    for case, names in (
        ("SMALL", "alpha beta gamma delta theta lamda mu pi rho sigma tau phi omega"),
        ("CAPITAL", "gamma delta theta pi sigma phi omega"),
    )
    for name in names.split()
}
_TABLE = {ord(each): kept for kept, each_of in _KEPT.items() for each in each_of} | _GREEK
_TABLE[ord("\N{GREEK SMALL LETTER LAMDA}")] = r"\lambda "

_DIGIT = re.compile(r"(?![0-9])\d")
_VULGAR = re.compile("[\xbc-\xbe\u2150-\u215e]")
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"
_LOWERED = "₀₁₂₃₄₅₆₇₈₉₊₋ₙ"
_PLAIN = str.maketrans(_RAISED + _LOWERED, "0123456789+-n" * 2)
_RAISED_RUN = re.compile(f"[{_RAISED}]+")
_LOWERED_RUN = re.compile(f"[{_LOWERED}]+")
_ROOT = re.compile(r"([√∛])\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))")


def as_latex(text: str) -> str:
    r"""Write Unicode's mathematics as LaTeX, and digits and signs of other widths and scripts as those of ASCII.

    Words stay as they are. Example: `as_latex("5√3 cm²")` is `5\sqrt{3} cm^{2}`.
    """
    if text.isascii():
        return text
    text = _VULGAR.sub(_fraction, text)
    text = _RAISED_RUN.sub(lambda run: "^{" + run[0].translate(_PLAIN) + "}", text)
    text = _LOWERED_RUN.sub(lambda run: "_{" + run[0].translate(_PLAIN) + "}", text)
    text = _ROOT.sub(_radical, text)
    return _DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), ascii_signs(text.translate(_TABLE)))


def _fraction(sign: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", sign[0]).partition("\N{FRACTION SLASH}")
    return rf"\frac{{{above}}}{{{below}}}"


def _radical(root: re.Match[str]) -> str:
    index = "[3]" if root[1] == "∛" else ""
    return rf"\sqrt{index}{{{root[2] or root[3]}}}"
