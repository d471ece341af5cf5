"""Correct responses that hold code which failed: the case study of 2510.04028 (section 4.2 and appendix C.6).

There, models that solve mathematics write Python and continue with what it would print; responses that end correct
hold errors such as `TypeError: cannot determine truth value of Relational`, and GRPO reinforces all of their tokens.
The paper shows such responses and gives no rule. Ours: a response reports an error where a line of it begins a Python
traceback, or names an exception and then a colon and its message, as Python prints it.
"""

from __future__ import annotations

import re

_PATTERN = re.compile(
    r"^[ \t>]*(?P<trace>Traceback \(most recent call last\):)"
    r"|^[ \t>]*(?:[A-Za-z_]\w*\.)*(?P<name>[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Iteration|Warning)): \S",
    re.MULTILINE,
)
_WARNING = "Warning"


def code_error(text: str) -> str | None:
    """The first error that `text` reports, such as `TypeError`; None where there is none. Warnings are no errors."""
    trace = False
    for match in _PATTERN.finditer(text):
        if match["name"] is None:
            trace = True
        elif not match["name"].endswith(_WARNING):
            return match["name"]
    return "Traceback" if trace else None
