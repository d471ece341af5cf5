r"""The form of a response alone: whether it thinks and answers in tags, or puts its answer into a box.

DeepSeek-R1 (2501.12948, section 2.2.2) rewards `<think>...</think>` beside accuracy, TinyZero answer tags. What is in
them is not judged here; that responses come close to the length limit is the method `soft_overlong`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from megasharp.rewards.extraction import ending, last_box
from megasharp.types import Outcome, TaskAnswer, Verdict

Form = Literal["tags", "box"]

_TAG = re.compile(r"</?(?:think|answer)>")
# A prompt such as TinyZero's ends in "<think>", and a response then starts inside.
_ORDERS = (["<think>", "</think>", "<answer>", "</answer>"], ["</think>", "<answer>", "</answer>"])


@dataclass(frozen=True, slots=True)
class FormAnswer(TaskAnswer):
    """The form that is asked for. Example: `FormAnswer("tags")`, `FormAnswer("box")`."""

    form: Form


def verify(text: str, answer: TaskAnswer) -> Verdict:
    r"""CORRECT with reward 1.0 where the form is kept, FORMAT with 0.0 elsewhere; there is no canonical answer.

    `tags`: thinking, closed, then an answer that is not empty, closed, each once, and nothing after them. `box`: the
    last `\boxed{}` is not empty.

    Example: `verify("<think>2+2</think> <answer>4</answer>", FormAnswer("tags"))` is `Verdict(Outcome.CORRECT, 1.0)`.
    """
    assert isinstance(answer, FormAnswer)
    kept = _tags(text) if answer.form == "tags" else bool(last_box(text))
    return Verdict(Outcome.CORRECT, 1.0) if kept else Verdict(Outcome.FORMAT, 0.0, detail=f"not the form {answer.form}")


def _tags(text: str) -> bool:
    found = [match[0] for match in _TAG.finditer(text)]
    if found not in _ORDERS or not ending(text).rstrip().endswith("</answer>"):
        return False
    between = text[text.index("</think>") + len("</think>") : text.index("<answer>")]
    inside = text[text.index("<answer>") + len("<answer>") : text.index("</answer>")]
    return not between.strip() and bool(inside.strip())
