"""DAPO-Math-17k (2503.14476): competition problems with whole numbers for answers; all of it, and the English part.

BytedTsinghua-SIA/DAPO-Math-17k holds every problem about a hundred times by accident (its issue 36), in verl's format,
each inside of an instruction that is taken away here; the set's template `dapo` puts it back.
open-r1/DAPO-Math-17k-Processed holds each once, `prompt` and `solution` as text, in the configurations all, en and cn
of 17,398, 14,116 and 3,282 rows (a public note that quotes its card). Either shape is read, from either set.

English is what has no Chinese sign, a rule of ours: what 2511.19942 filtered by is not said; it has 14,053 (section
4.3) or 14,042 (appendix C.3) problems.
"""

from __future__ import annotations

import re
from dataclasses import replace

from megasharp.tasks.data_fields import Fields, number_field, text_field
from megasharp.tasks.math import MathAnswer
from megasharp.tasks.prompts import TEMPLATES
from megasharp.tasks.sets.data_set import DataSet, LeftOut, Part, Problem, Source
from megasharp.tasks.sets.math_sets import MATH12K_TRAIN, verl

_BEFORE, _AFTER = TEMPLATES["dapo"].text.split("{question}")
_CHINESE = re.compile("[\u3400-\u9fff\uf900-\ufaff]")
_LICENCE = "Apache-2.0"
_ENGLISH = 14053


def read(fields: Fields, where: str) -> Problem:
    """A row of either repository, without the instruction around the question."""
    if isinstance(fields.get("prompt"), str):
        answer = MathAnswer(number_field(fields, "solution", where))
        return Problem(_bare(text_field(fields, "prompt", where)), answer)
    found = verl(fields, where)
    return replace(found, question=_bare(found.question))


def read_english(fields: Fields, where: str) -> Problem | LeftOut:
    """The same, where the question has no Chinese sign."""
    found = read(fields, where)
    return LeftOut("not in English") if _CHINESE.search(found.question) else found


def _bare(text: str) -> str:
    return text.removeprefix(_BEFORE).removesuffix(_AFTER).strip()


_ENGLISH_PART = Part(Source("dapo", "open-r1/DAPO-Math-17k-Processed", "train", config="en"), read_english)

DAPO_MATH_17K = DataSet(
    name="dapo_math_17k",
    task="math",
    about="DAPO-Math-17k, each problem once",
    parts=(Part(Source("dapo", "BytedTsinghua-SIA/DAPO-Math-17k", "train"), read),),
    prompt="dapo",
    licence=_LICENCE,
    known="rows",
    used_by="2601.15609",
    expected=17398,
    tolerance=0.01,
    repeats=True,
)
DAPO_MATH_17K_EN = DataSet(
    name="dapo_math_17k_en",
    task="math",
    about="DAPO-Math-17k in English",
    parts=(_ENGLISH_PART,),
    prompt="boxed_verl",
    licence=_LICENCE,
    known="code",
    used_by="2511.19942",
    expected=_ENGLISH,
    tolerance=0.01,
    repeats=True,
)
DAPO_EN_MATH12K = DataSet(
    name="dapo_en_math12k",
    task="math",
    about="DAPO-Math-17k in English, and MATH12k",
    parts=(_ENGLISH_PART, MATH12K_TRAIN),
    prompt="boxed_verl",
    licence=f"{_LICENCE}, MIT",
    known="code",
    used_by="2511.19942",
    expected=_ENGLISH + 12000,
    tolerance=0.01,
    repeats=True,
)
