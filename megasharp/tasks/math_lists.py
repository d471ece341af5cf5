r"""Answers that are lists: their members, with multiplicity, in the many ways in which lists are written.

math-verify makes a set of a list, for which `1,1,2` is `1,2`. Here members are told apart in the text: by commas,
semicolons, "and" and "or" outside of brackets. `\pm` stands for two members.
"""

from __future__ import annotations

import re

_AND = r"\\(?:text|textrm|mathrm|mbox)\s*\{\s*,?\s*(?:and|und|et|y|e)\s*\}|(?<![A-Za-z\\])and(?![A-Za-z])"
_OR = (
    r"\\(?:text|textrm|mathrm|mbox)\s*\{\s*,?\s*(?:or|oder|ou|o)\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])"
    r"|\\(?:lor|vee)(?![A-Za-z])"
)
_TOKEN = re.compile(
    rf"(?P<comma>[,;])|(?P<and>{_AND})|(?P<or>{_OR})|(?P<skip>\\[,;:! ])|(?P<open>\\\{{|[{{(\[]|\\langle)"
    r"|(?P<close>\\\}|[})\]]|\\rangle)|(?P<begin>\\begin\s*\{)|(?P<end>\\end\s*\{)"
)
_SPACES = re.compile(r"^(?:\\[,;:! ]|\\q?quad(?![A-Za-z])|[\s~])+|(?:\\[,;:! ]|\\q?quad|[\s~\\])+$")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
MOST = 30


def members(text: str) -> tuple[list[str], bool]:
    r"""Split a list at its commas and words, and say if "or" is the one word between its members.

    What is no list is one member. Braces around all of it are left out: `\{1, 2\}` has two members.
    """
    inner = inside_braces(text)
    if inner is not None:
        text = inner
    found, depth, start, alternatives, joined = [], 0, 0, False, False
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or ""
        # The brace that closes an environment's name is counted too.
        depth += {"open": 1, "close": -1, "begin": 2}.get(kind, 0)
        if depth == 0 and kind in ("comma", "and", "or"):
            alternatives |= kind == "or"
            joined |= kind in ("comma", "and") and bool(text[start : match.start()].strip())
            found.append(text[start : match.start()])
            start = match.end()
    found = [_SPACES.sub("", each) for each in [*found, text[start:]]]
    found = [each for each in found if each]
    return found or [text], alternatives and not joined


def inside_braces(text: str) -> str | None:
    r"""The text within the set braces that are around all of a text; None where there are none."""
    stripped = text.replace(r"\left", "").replace(r"\right", "").strip()
    if not (stripped.startswith(r"\{") and stripped.endswith(r"\}")) or stripped.count(r"\{") != 1:
        return None
    return stripped[2:-2].strip()


def with_both_signs(texts: list[str]) -> list[str]:
    r"""Members with each `\pm` written as its two members: `1\pm\sqrt2` is `1+\sqrt2` and `1-\sqrt2`."""
    found: list[str] = []
    for text in texts:
        if _PLUS_MINUS.search(text):
            upper, lower = re.sub(r"\\pm(?![A-Za-z])", " +", text), re.sub(r"\\pm(?![A-Za-z])", " -", text)
            found += [re.sub(r"\\mp(?![A-Za-z])", " -", upper), re.sub(r"\\mp(?![A-Za-z])", " +", lower)]
        else:
            found.append(text)
    return found
