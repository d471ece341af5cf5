r"""One notation for vectors, intervals and sets that are written in several.

`\langle 3,4\rangle`, `3\mathbf{i}+4\mathbf{j}` and a column are the pair (3,4); `]1;2[` is the open interval;
`\{x\mid x<2\}` is `x<2`; `5>x>-3` is `-3<x<5`. What is said of where a value is taken is left out.
"""

from __future__ import annotations

import re

from megasharp.tasks.math_equations import unknowns
from megasharp.tasks.math_lists import members

_FRENCH = re.compile(r"([\[\]])\s*([^;\[\]]+)\s*[;,]\s*([^;,\[\]]+)\s*([\[\]])")
_BUILDER = re.compile(
    r"\\\{\s*([A-Za-z])\s*(?:\\in\s*\\(?:mathbb|mathbf)\s*\{?R\}?\s*)?(?:\\mid|:|\||\\colon)\s*(.+)\\\}"
)
_UNIT_VECTOR = re.compile(
    r"\\(?:mathbf|boldsymbol|hat|vec|bm)\s*\{\s*(?:\\(?:mathbf|boldsymbol)\s*\{)?\\?([ijk])(?:math)?\s*\}{1,2}"
)
_CIS = re.compile(
    r"\\(?:text|operatorname|mathrm)\s*\{\s*cis\s*\}(?:\\[,;: ]|\s)*"
    r"(\([^()]*\)|\\frac\s*\{[^{}]*\}\s*\{[^{}]*\}|\d*\\pi(?![A-Za-z])|\d+\^\\circ)"
)
_TERM = re.compile(r"\s*([+-]?)\s*((?:\\[A-Za-z]+(?:\{[^{}]*\})*|[^+\-@])*?)\s*@([ijk])")
_COLUMN = re.compile(r"\\begin\{[pb]matrix\}([^&]*)\\end\{[pb]matrix\}")
_DOMAIN = re.compile(
    r"(?:[\s,;(]|\\q?quad\b|\\[,;: ]|\\text\{[\s,]*(?:where|for (?:all|every|any|some|each))?\s*\}|\\forall\b)*"
    r"(?<=[\s,;({}a-z])(?P<letter>[A-Za-z])\s*\\in\s*\\(?:mathbb|mathbf)\s*\{?(?P<set>[NZQRC])\}?\s*\)?$"
)
# Where or why a value is taken: `16\text{ at }x=2`.
_PLACE = re.compile(
    r"(?:[\s,;~]|\\q?quad(?![A-Za-z])|\\[,;: ])*\\(?:text|textrm|mathrm|mbox)\s*\{[\s,(]*(?:which )?(?:is |are )?"
    r"(?:(?:attained |achieved |reached |obtained )?(?:when|at)|since|because|as|i\.e\.,?)\s*\}(?P<place>.*)$",
    re.DOTALL,
)
_FALLING = re.compile(r">\s*=?|\\geq?(?![A-Za-z])")
_RISING = re.compile(r"<|\\leq?(?![A-Za-z])")


def one_notation(text: str) -> str:
    r"""A plain answer with vectors as pairs or triples, intervals and inequalities as English books have them."""
    text = re.sub(r"(?:\\left\s*)?\\langle(?![A-Za-z])", "(", re.sub(r"(?:\\right\s*)?\\rangle(?![A-Za-z])", ")", text))
    text = _CIS.sub(r"\\left(\\cos\1+i\\sin\1\\right)", text)
    french = _FRENCH.fullmatch(text.strip())
    if french and (french[1], french[4]) != ("[", "]"):
        left, right = ("(" if french[1] == "]" else "["), (")" if french[4] == "[" else "]")
        return f"{left}{french[2].strip()},{french[3].strip()}{right}"
    builder = _BUILDER.fullmatch(text.strip())
    if builder and not re.search(r"\\in(?![A-Za-z])", builder[2]):
        return builder[2].strip()
    return _rising(_as_tuple(text))


def without_domain(text: str) -> tuple[str, str, str]:
    r"""A plain answer without the set of a letter behind it, that letter and the set; `""` for none.

    Example: `without_domain(r"n\pi,\quad n\in\mathbb{Z}")` is `(r"n\pi", "n", "Z")`.
    """
    match = _DOMAIN.search(text)
    if match is None or not match.start():
        return text, "", ""
    return text[: match.start()].strip(), match["letter"], match["set"]


def without_place(text: str) -> str:
    r"""A plain constant without where or why it is taken. Example: of `36\text{ (when }x=6)` it is `36`.

    A place with words or a list may hold another answer: nothing is left out then.
    """
    match = _PLACE.search(text)
    if match is None or not match.start() or unknowns(text[: match.start()]) or not unknowns(match["place"]):
        return text
    words = r"\text" in match["place"] or re.search(r"\b(?:or|and)\b", match["place"])
    return text if words or len(members(match["place"])[0]) > 1 else text[: match.start()].strip()


def as_row(text: str) -> str:
    r"""A column vector as a pair or triple. Example: `as_row(r"\begin{pmatrix}1\\2\end{pmatrix}")` is `(1,2)`."""
    column = _COLUMN.fullmatch(text.strip())
    return f"({','.join(each.strip() for each in column[1].split(chr(92) * 2) if each.strip())})" if column else text


def _as_tuple(text: str) -> str:
    marked = _UNIT_VECTOR.sub(r"@\1", text)
    if marked == text or "@" in text:
        return text
    found: dict[str, str] = {}
    end = 0
    for term in _TERM.finditer(marked):
        if term.start() != end or term[3] in found:
            return text
        found[term[3]] = term[1].replace("+", "") + (term[2].strip() or "1")
        end = term.end()
    if marked[end:].strip():
        return text
    names = "ijk" if "k" in found else "ij"
    return f"({','.join(found.get(name, '0') for name in names)})"


def _rising(text: str) -> str:
    """An inequality of three members that falls, the other way round."""
    if _RISING.search(text) or len(_FALLING.findall(text)) != 2:
        return text
    parts, signs = _FALLING.split(text), _FALLING.findall(text)
    turned = [r" \le " if "=" in sign or sign.startswith(chr(92)) else " < " for sign in reversed(signs)]
    return f"{parts[2].strip()}{turned[0]}{parts[1].strip()}{turned[1]}{parts[0].strip()}"
