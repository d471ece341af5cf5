r"""Answers in words, without the dress of LaTeX, Markdown and typography: for verifiers that compare words or labels.

`\boxed{\textbf{(B)}\ \text{a comet}}` says `(B) a comet`, `\mathbf{False}` says `False`, and a full-width letter, a
typographic quote or dash is the plain one.
"""

from __future__ import annotations

import re

# Names of commands that leave their text as it is, and switches of fonts.
_DRESS = (
    r"(?:text(?:bf|rm|it|tt|sf|sc|normal|up|md|sl)?|math(?:bf|rm|it|tt|sf|normal|bb)|mbox|hbox|bm|boldsymbol|pmb|emph"
    r"|underline|operatorname|boxed|fbox)"
)
_COMMAND = re.compile(rf"\\{_DRESS}\*?\s*\{{([^{{}}]*)\}}")
_COLOUR = re.compile(r"\\(?:textcolor|color)\s*\{[^{}]*\}")
_SWITCH = re.compile(r"\\(?:rm|bf|it|tt|sf|bfseries|itshape|displaystyle|textstyle|left|right|big|Big)(?![A-Za-z])\s*")
# LaTeX's spaces, and the comma of thousands `1{,}488`.
_SPACE = re.compile(r"\\(?:[,;:!> ]|quad\b|qquad\b|\\)|~")
_NESTED = 8
# Full-width signs of East Asian keyboards.
FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_SIGNS = {
    **FULL_WIDTH,
    **dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u205f\u3000"), " "),
    **dict.fromkeys(map(ord, "\u201c\u201d\u201e\u201f\u00ab\u00bb\u300c\u300d"), '"'),
    **dict.fromkeys(map(ord, "\u2018\u2019\u201a\u201b\u2032"), "'"),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"), None),
    ord("\u3002"): ".",
    ord("\u3001"): ",",
}


def ascii_signs(text: str) -> str:
    """Return a text with full-width characters, and typographic dashes, quotes and spaces, as plain ones."""
    return text if text.isascii() else text.translate(_SIGNS)


def undressed(text: str) -> str:
    r"""Return a text of a bounded length without commands of fonts and spaces, and dollar signs, on one line.

    Example: `undressed(r"$\mathbf{\text{(B)}}~2$")` is `(B) 2`.
    """
    text = _COLOUR.sub(r"\\mbox", ascii_signs(text).replace("{,}", ","))
    for _ in range(_NESTED):
        less = _COMMAND.sub(r"\1", text)
        if less == text:
            break
        text = less
    text = _SPACE.sub(" ", _SWITCH.sub("", text))
    for sign in ("\\(", "\\)", "\\[", "\\]", "$"):
        text = text.replace(sign, "")
    return " ".join(text.split())
