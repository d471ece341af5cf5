r"""Multiple choice: the label that a response chooses, in the last box or after its last "answer is".

2510.04028 asks for a box for ARC-c and MMLU-Pro alike (appendix C.2). MMLU-Pro's own prompts end in "the answer is
(X)", and its evaluation (evaluate_from_local.py) reads that, then "Answer: X", then any last capital letter, which is a
guess that is not made here. Labels are the problem's: letters, or numbers as in some of ARC's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megasharp.rewards.extraction import last_box, last_stated
from megasharp.types import Outcome, TaskAnswer, Verdict

_COMMAND = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|boldsymbol|mbox|operatorname)\s*\{([^{}]*)\}")
# In mathematics the text of an option is set so, behind a letter that needs no sign: `B \text{ comet}`.
_LETTER_AND_TEXT = re.compile(rf"^(\s*[A-Za-z])\s*(?={_COMMAND.pattern}\s*$)")
_LABEL = re.compile(
    r"[\s$*]*(?i:(?:the\s+)?(?:final\s+|correct\s+)?answer\s*(?:is|:)[\s:]*)?(?i:option|choice)?\s*"
    r"(?:[(\[\"'`]\s*([A-Za-z0-9]{1,2})\s*[)\]\"'`]|([A-Za-z0-9]{1,2})(?![A-Za-z0-9]|(?<=\d)[.,]\d))(.*)",
    re.DOTALL,
)
# A label may be followed by its option's text, as in "B. a comet", or by a reason, but not by more of a sentence, as in
# "A comet".
_END = re.compile(r"[\s$*]*(?:[.:)\],;].*|(?i:because|since)\b.*|[-\u2013\u2014]\s.*)?", re.DOTALL)
# Nor by more labels and nothing else: "(B) or (C)", "B, A", "A. B. C". Who names several chooses none.
_WORD = re.compile(r"[A-Za-z0-9]+")
_BETWEEN = ("and", "or")
# LaTeX's spaces, and its dollar signs in brackets.
_SPACING = re.compile(r"\\[,;:!() ]|~")


@dataclass(frozen=True, slots=True)
class ChoiceAnswer(TaskAnswer):
    """The right label, and all labels of the problem.

    Example: `ChoiceAnswer("B", ("A", "B", "C", "D"))`.
    """

    label: str
    labels: tuple[str, ...]


def verify(text: str, answer: TaskAnswer) -> Verdict:
    r"""Judge which label is chosen. The canonical answer is the label. Rewards are 1.0 or 0.0.

    FORMAT: no box and no "answer is", or neither followed by one of the problem's labels. A box, where there is one, is
    the answer, whatever is said elsewhere.

    Example: `verify(r"... \boxed{\text{(B)}}", ChoiceAnswer("B", ("A", "B", "C", "D")))` is
    `Verdict(Outcome.CORRECT, 1.0, "B", "")`.
    """
    assert isinstance(answer, ChoiceAnswer)
    box = last_box(text)
    chosen = label_in(box if box is not None else last_stated(text) or "", answer.labels)
    if chosen is None:
        return Verdict(Outcome.FORMAT, 0.0, None, f"none of the labels {', '.join(answer.labels)} is chosen")
    right = chosen == answer.label
    return Verdict(Outcome.CORRECT if right else Outcome.WRONG, float(right), chosen)


def label_in(text: str, labels: tuple[str, ...]) -> str | None:
    """The label that an answer starts with; None where it starts with none, or names several. Letters may be small."""
    text = _LETTER_AND_TEXT.sub(r"\1: ", text)
    match = _LABEL.match(_SPACING.sub(" ", _COMMAND.sub(r"\1", text)))
    if match is None or (match[2] and not _END.fullmatch(match[3])):
        return None
    label = (match[1] or match[2]).upper()
    return label if label in labels and not _names_more(match[3], labels) else None


def _names_more(rest: str, labels: tuple[str, ...]) -> bool:
    """Whether what follows a label is made of more labels, to its end; another single letter is taken for one."""
    words = [word for word in _WORD.findall(rest) if word.lower() not in _BETWEEN]
    return any(word.upper() in labels for word in words) and all(
        len(word) == 1 or word.upper() in labels for word in words
    )
