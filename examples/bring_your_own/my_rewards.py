"""A reward in TRL's style: lists of responses and of the rows' columns come in, a list of numbers goes out."""

from __future__ import annotations

import re


def correct(completions: list[str], answer: list[int], **columns: object) -> list[float]:
    """1 for the right number and nothing else; else half of the share of characters that are digits.

    The second part is there for models that know nothing: it is what they can climb in 20 steps.
    """
    return [
        1.0 if text.strip() == str(right) else 0.5 * len(re.findall("[0-9]", text)) / max(len(text), 1)
        for text, right in zip(completions, answer, strict=True)
    ]
