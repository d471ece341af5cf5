"""Prompts whose responses are judged by their form alone.

A data file holds prompts, as one's own text, and the form that each asks for. The verifier checks that a response
thinks and answers in tags, or that it puts its answer into a box.

DeepSeek-R1 (2501.12948, section 2.2.2) rewards `<think>...</think>` beside accuracy, TinyZero answer tags. The paper
gives no pattern; open-r1's `format_reward` is `^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$`: nothing stands
before the thinking, which may be empty, as in the responses of models whose thinking is switched off. Unlike it, line
breaks are free here and an answer must be seen: white space and characters without a shape (a zero-width space) are
none. The text in the tags is not judged; the method `soft_overlong` judges the length of responses.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks.data_fields import check_names, name_of, read_objects, text_field
from megasharp.tasks.extraction import ending, last_box
from megasharp.tasks.judge import TaskItem


@dataclass(frozen=True, slots=True)
class FormRecord:
    """One line of a data file. Example: `{"prompt": "Answer in a box: what is 1+1?", "form": "box"}`."""

    id: str
    prompt: str
    answer: FormAnswer


def read_records(path: Path) -> list[FormRecord]:
    """Read a JSONL file of prompts. Raises UserError, naming the file and the line, for what it must not hold."""
    records: list[FormRecord] = []
    for where, fields in read_objects(path, "write lines with 'prompt' and 'form'"):
        named = text_field(fields, "form", where)
        form: Form | None = next((each for each in get_args(Form) if each == named), None)
        if form is None:
            raise UserError(f"{where}: 'form' must be one of {', '.join(get_args(Form))}, got {named!r}")
        name = name_of(fields, ("id",), path, where)
        records.append(FormRecord(name, text_field(fields, "prompt", where), FormAnswer(form)))
    check_names([record.id for record in records], path)
    return records


Form = Literal["tags", "box"]

_TAG = re.compile(r"</?(?:think|answer)>")
# A prompt such as TinyZero's ends in "<think>", and a response then starts inside.
_ORDERS = (["<think>", "</think>", "<answer>", "</answer>"], ["</think>", "<answer>", "</answer>"])
# Letters by Unicode's categories that are drawn as nothing: Hangul's fillers, and the blank of Braille.
_FILLERS = "\u115f\u1160\u2800\u3164\uffa0"

# LaTeX's spaces, of which a box may hold nothing else.
_SPACE = re.compile(r"\\(?:[,;:!> ]|q?quad\b)|~")


@dataclass(frozen=True, slots=True)
class FormAnswer(TaskAnswer):
    """The form that is asked for. Example: `FormAnswer("tags")`, `FormAnswer("box")`."""

    form: Form


def verify(text: str, answer: TaskAnswer) -> Verdict:
    r"""CORRECT with reward 1.0 where the form is kept, FORMAT with 0.0 elsewhere; there is no canonical answer.

    `tags`: thinking (maybe empty), closed, then an answer that is not empty, closed, each once, and nothing before,
    between and after them. Where the prompt has opened the thinking, the response starts inside it. `box`: the last
    `\boxed{}` is not empty. Invisible characters are nothing.

    Example: `verify("<think>2+2</think> <answer>4</answer>", FormAnswer("tags"))` is `Verdict(Outcome.CORRECT, 1.0)`.
    """
    assert isinstance(answer, FormAnswer)
    if answer.form == "tags":
        kept = _tags(text)
    else:
        # The last closed box counts, empty ones included.
        last = last_box(text[max(text.rfind("\\boxed"), text.rfind("\\fbox"), 0) :])
        kept = _seen((last_box(text) or "") if last is None else last)
    return Verdict(Outcome.CORRECT, 1.0) if kept else Verdict(Outcome.FORMAT, 0.0, detail=f"not the form {answer.form}")


def _tags(text: str) -> bool:
    found = [match[0] for match in _TAG.finditer(text)]
    if found not in _ORDERS or not ending(text).rstrip().endswith("</answer>"):
        return False
    before, opened, _ = text.partition("<think>")
    if opened and _seen(before):
        return False
    between = text[text.index("</think>") + len("</think>") : text.index("<answer>")]
    inside = text[text.index("<answer>") + len("<answer>") : text.index("</answer>")]
    return not between.strip() and _seen(inside)


def _seen(text: str) -> bool:
    """Find a character with a shape in a text: no white space, no control, no format character and no filler."""
    return any(
        not (each.isspace() or each in _FILLERS or unicodedata.category(each) in ("Cc", "Cf", "Mn"))
        for each in _SPACE.sub("", text)
    )


def load_items(path: Path) -> list[TaskItem]:
    """Prompts whose responses are judged by their form alone. Raises UserError as `read_records` does."""
    return [
        TaskItem(record.id, "form", record.prompt, record.answer, path.name, question=record.prompt)
        for record in read_records(path)
    ]
