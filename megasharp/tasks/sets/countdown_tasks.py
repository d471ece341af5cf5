"""Countdown-Tasks-3to4, cut as TinyZero cuts it: rows 0 to 327,679 for training, the next 1,024 for test.

Schema and cut from TinyZero (examples/data_preprocess/countdown.py): `target` and `nums`. 2511.19942 uses "the dataset
released by tinyzero" (appendix C.1), and for Countdown-3 the rows of three numbers (C.4).
"""

from __future__ import annotations

from megasharp.tasks.countdown_tags import TaggedCountdownAnswer, question_of
from megasharp.tasks.data_fields import Fields, positive_field, positives_field
from megasharp.tasks.sets.data_set import DataSet, LeftOut, Part, Problem, Read, Source

_TRAIN, _TEST = 327_680, 1_024


def reader(count: int | None = None) -> Read:
    """A reader of rows with `count` numbers, or with any number of them."""

    def read(fields: Fields, where: str) -> Problem | LeftOut:
        numbers, target = positives_field(fields, "nums", where), positive_field(fields, "target", where)
        if count not in (None, len(numbers)):
            return LeftOut("another number of numbers")
        return Problem(question_of(numbers, target), TaggedCountdownAnswer(numbers, target))

    return read


def _set(name: str, about: str, rows: tuple[int, int], count: int | None, expected: int | None) -> DataSet:
    return DataSet(
        name=name,
        task="countdown_3" if count else "countdown_3to4",
        about=about,
        parts=(Part(Source("countdown", "Jiayi-Pan/Countdown-Tasks-3to4", "train", rows=rows), reader(count)),),
        prompt="countdown_qwen",
        licence="not read",
        known="code",
        used_by="2511.19942",
        expected=expected,
    )


COUNTDOWN_3TO4 = _set("countdown_3to4", "TinyZero's Countdown, training", (0, _TRAIN), None, _TRAIN)
COUNTDOWN_3 = _set("countdown_3", "of it, three numbers", (0, _TRAIN), 3, None)
COUNTDOWN_3TO4_TEST = _set("countdown_3to4_test", "TinyZero's Countdown, test", (_TRAIN, _TRAIN + _TEST), None, _TEST)
COUNTDOWN_3_TEST = _set("countdown_3_test", "of it, three numbers", (_TRAIN, _TRAIN + _TEST), 3, None)
