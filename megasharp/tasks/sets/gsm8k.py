"""GSM8K (2110.14168), and its mixture with MATH's level 1.

Schema from the card of openai/gsm8k, configuration main: `question` and `answer`, a solution that ends in `#### 72`;
7,473 rows for training, 1,319 for test. 2510.14807 trains Llama-3.2-3B-Instruct on "a combined dataset of GSM8K and
MATH (Level 1)" and does not say how it is combined. Its public code has 8,388 rows of it (data/gsm8k_level1): by their
texts 564 are of MATH's training split, 351 of its test split, and the other 7,473 are as many as GSM8K has. Here MATH's
test split is left out. That file is in verl's format: `set: verl_math` reads it.
"""

from __future__ import annotations

from megasharp.common.errors import UserError
from megasharp.tasks.data_fields import Fields, text_field
from megasharp.tasks.math import MathAnswer
from megasharp.tasks.sets import math_sets
from megasharp.tasks.sets.data_set import DataSet, Part, Problem, Source
from megasharp.tasks.sets.math_sets import boxed_solution

_HUB = "openai/gsm8k"
_REVISION = "740312add88f781978c0658806c59bc2815b9866"


def read(fields: Fields, where: str) -> Problem:
    """The number after the last `####` is the answer, without the commas between thousands."""
    solution = text_field(fields, "answer", where)
    _, marks, number = solution.rpartition("####")
    if not marks or not number.strip():
        raise UserError(f"{where}: 'answer' must end in '#### ' and a number, got {solution[-40:]!r}")
    return Problem(text_field(fields, "question", where), MathAnswer(number.strip().replace(",", "")))


def _part(split: str) -> Part:
    return Part(Source("gsm8k", _HUB, split, config="main", revision=_REVISION), read)


GSM8K = DataSet(
    name="gsm8k",
    task="math",
    about="GSM8K, training split",
    parts=(_part("train"),),
    prompt="boxed_chatml",
    licence="MIT",
    known="card",
    expected=7473,
)
GSM8K_TEST = DataSet(
    name="gsm8k_test",
    task="math",
    about="GSM8K, test split",
    parts=(_part("test"),),
    prompt="boxed_chatml",
    licence="MIT",
    known="card",
    used_by="2601.15609",
    expected=1319,
)
GSM8K_MATH_LEVEL1 = DataSet(
    name="gsm8k_math_level1",
    task="math",
    about="GSM8K and MATH's level 1, both training splits",
    parts=(_part("train"), Part(math_sets.TRAIN, boxed_solution("1"))),
    prompt="boxed_qwen",
    licence="MIT",
    known="rows",
    used_by="2510.14807",
    expected=8037,
    tolerance=0.001,
)
