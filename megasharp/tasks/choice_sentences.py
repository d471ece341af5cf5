r"""Sentences that choose an option, beside "the answer is": "C is the correct answer", "I'd go with C", "Hence (C).".

A sentence is found by its words, and returned from its label on, so that `labels.py` reads what else is in it: "C or D"
chooses nothing. What is only supposed, denied, or said to be a first impression is no choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megasharp.tasks.extraction import sentence_start

_THING = r"(?:option|choice|letter|selection)"
_IS = r"(?: is| should be| must be| would be|\s*:)"
# Each sentence leaves one option: of several such sentences the last counts.
_CHOSEN = re.compile(
    rf"\b(?:correct|right|best|final) {_THING}(?:\*\*)?{_IS}[\s:*]+(?=(?P<named>[^\n]+))"
    r"|^\W{0,8}(?:the )?letter(?:\*\*)?(?: is|:)[\s:*]+(?P<letter>[^\n]+)"
    r"|\bI(?: would|'d| will|'ll|'m| am)? (?:choose|pick|select|go with|going with)[\s:*]+(?=(?P<picked>[^\n]+))"
    r'|"answer"\s*:\s*(?P<field>[^\n,}]+)',
    re.IGNORECASE | re.MULTILINE,
)
_LABEL = r"[(\[\"'*]{0,4}(?-i:[A-Z]|[1-9]\d?)\b[)\]\"'*]{0,4}"
_CONCLUDES = r"(?:so|thus|hence|therefore|then|clearly|consequently|in conclusion|this means|it follows)\b,?\s+"
# "C is correct", "so option C is the right choice": where a sentence begins, behind a word that concludes, or "option".
_CALLED = re.compile(
    rf"(?:^[ \t#*-]*(?:{_CONCLUDES})?|(?<=[.!?*,])[ \t]+(?:{_CONCLUDES})?|\b{_CONCLUDES})(?:that\s+)?(?:only\s+)?"
    rf"(?:(?:the\s+)?(?:option|choice|answer)\s+)?(?P<first>{_LABEL})(?P<verb>\s+is (?:clearly |indeed )?(?:"
    r"the (?:only |single |most )?(?:correct|right|best)\b(?: (?:answer|option|choice|one)\b)?|(?:correct|right)\b)"
    r"(?: here\b| to (?:this|the) question\b)?)(?=(?P<rest>[^\n]*))"
    rf"|\b(?:option|choice|answer)\s+(?P<named>{_LABEL})(?P<is>\s+is (?:the )?(?:correct|right|best)\b"
    r"(?: (?:answer|option|choice|one)\b)?)(?=(?P<more>[^\n]*))",
    re.IGNORECASE | re.MULTILINE,
)
_THE_ONE = re.compile(r"is (?:\w+ )?the\b", re.IGNORECASE)
_CONCLUDING = re.compile(_CONCLUDES, re.IGNORECASE)
_LAST = re.compile(
    r"(?:^|[.!?\n,;])\W*(?:so|thus|hence|therefore)\b,?\s+(?:(?:it(?:'s| is| must be)|option|choice)\s+)?"
    rf"(?P<label>{_LABEL})[\s.!*]*\Z",
    re.IGNORECASE,
)
_SUPPOSED = re.compile(
    r"\b(?:if|unless|whether|suppose|assum\w+|claims?|says?|at first|initially|originally|normally|according to"
    r"|(?:you|some|many|people|students?|others) (?:\w+ )?(?:think|believe|pick|choose|say))\b",
    re.IGNORECASE,
)
_DENIED = re.compile(r"\b(?:not|never|cannot|nobody|doubt)\b|n't\b|\bfalse that\b", re.IGNORECASE)
_INSTEAD = re.compile(
    r"(?:[\s.,;:!?$*)\]}-]|\b(?:oh|hmm)\b)*\b(?:wait|actually|sorry|correction|oops|no|I meant?)\b"
    r"(?:[\s.,;:!-]|\b(?:no|wait|actually|sorry|it's|it is|that's|it should be|I meant?|rather|option|choice)\b)*"
    rf"(?P<label>{_LABEL})[\s.!*]*",
    re.IGNORECASE,
)
# What ends the answer to the problem that was asked, before one that the response makes up.
ANSWERS = re.compile(rf"{_CHOSEN.pattern}|{_CALLED.pattern.replace('named>', 'option>')}", re.IGNORECASE | re.MULTILINE)


def chosen(text: str, only: bool = False) -> str | None:
    """Return the last sentence that chooses an option, from its label on; None where there is none.

    `only`: a sentence that leaves no other option, as "C is the correct answer" and not "C is correct". Without one, ""
    where options of different labels are called correct.

    Example: `chosen("Thus, C is the correct answer, not B.")` is `C, not B.`
    """
    said: list[tuple[int, str]] = [
        (match.start(), next(filter(None, match.groups()))) for match in _CHOSEN.finditer(text) if _meant(text, match)
    ]
    called = list(_called(text))
    said += [(start, label + rest) for start, label, rest, the_one in called if the_one]
    if said:
        return max(said)[1]
    if only or not called:
        return None
    labels = {label.strip("()[]\"'*") for _, label, _, _ in called}
    return called[-1][1] + called[-1][2] if len(labels) == 1 else ""


def concluded(text: str) -> str | None:
    """Return the label that ends a response behind a word that concludes, as in "Hence (C)."; else None."""
    match = _LAST.search(text[-200:])
    return match["label"] if match else None


def instead(behind: str) -> str | None:
    """Return the label that replaces an answer, where nothing else is behind it: "No wait, B."; else None."""
    match = _INSTEAD.fullmatch(behind)
    return match["label"] if match else None


def _called(text: str) -> Iterator[tuple[int, str, str, bool]]:
    """Where a label is called correct, the label, what follows on the line, and if it is called the only one."""
    for match in _CALLED.finditer(text):
        if _meant(text, match):
            label, verb = match["first"] or match["named"], match["verb"] or match["is"]
            yield match.start(), label, match["rest"] or match["more"] or "", bool(_THE_ONE.search(verb))


def _meant(text: str, match: re.Match[str]) -> bool:
    """Return whether the sentence up to a match has nothing that makes it a supposition or a denial."""
    begin = match.start() + len(match[0]) - len(match[0].lstrip())
    start = sentence_start(text, begin)
    clause = max(text.rfind(mark, start, begin) for mark in ",;:") + 1
    concludes = _CONCLUDING.match(text, begin)
    return not _SUPPOSED.search(text, start, begin) and not (
        not concludes and _DENIED.search(text, max(start, clause), begin)
    )
