r"""Letters of both cases in one answer: math-verify reads every letter as its small one, so that `K-k` would be zero.

Its parser hands no option for that down to latex2sympy2, so a capital that must stay apart is written as a Greek letter
that neither answer has. Where an answer uses one case of a letter only, case is ignored as math-verify's graders do:
a lone `X` is `x`. Words are not symbols, and stay without case.
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
# What is no symbol comes first: text, an exponent's E. Then commands, of which some are Greek capitals, then letters.
_SYMBOL = re.compile(
    r"\\(?:text|textbf|textrm|mathrm|mbox|operatorname)\s*\{[^{}]*\}|(?<=\d)[eE](?=[+-]?\d)"
    r"|(?P<symbol>\\(?P<command>[A-Za-z]+)|[A-Za-z])"
)
_GREEK = {*_STAND_INS, "gamma", "epsilon", "pi"}


def stand_ins(*texts: str) -> Mapping[str, str]:
    r"""By capital, the Greek letter to write for it: of those that one of the `texts` has beside their small letter.

    Both are without a backslash. Where there are more capitals than free Greek letters, the last ones have none.

    Example: `stand_ins("K-k", "2k")` is `{"K": "xi"}`.
    """
    found = [_symbols(text) for text in texts]
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


def _symbols(text: str) -> set[str]:
    found = [match["command"] or match["symbol"] for match in _SYMBOL.finditer(text) if match["symbol"]]
    return {name for name in found if len(name) == 1 or name.lower() in _GREEK}
