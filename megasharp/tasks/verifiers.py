"""Verifiers: pure functions that judge a response's text against a task's answer, and the table of them."""

from __future__ import annotations

from megasharp.tasks import (
    choice,
    countdown,
    countdown_tags,
    form,
    knights,
    knights_short,
    math,
    short_answer,
    synlogic,
)
from megasharp.tasks.judge import Verifier

VERIFIERS: dict[str, Verifier] = {
    "choice": choice.verify,
    "countdown": countdown.verify,
    "countdown_3": countdown_tags.verify,
    "countdown_3to4": countdown_tags.verify,
    "form": form.verify,
    "knights": knights.verify,
    "knights_short": knights_short.verify,
    "math": math.verify,
    "short_answer": short_answer.verify,
    "synlogic": synlogic.verify,
}
