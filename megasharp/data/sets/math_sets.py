"""MATH (2103.03874) and its subsets.

Schema of DigitalLearningGmbH/MATH-lighteval, the copy of lighteval/MATH that verl's math_dataset.py reads: `problem`,
`level` ("Level 1" to "Level 5", and "Level ?" twice), `type`, `solution`. Rows of it, as parquet, are in the public
code of 2510.14807 and 2506.01347 (data/math): 7,500 and 5,000, of which 564, 1,348, 1,592, 1,690 and 2,304 of the
levels 1 to 5 in training. 2510.04028 trains on the 7,500 (section 4.1); 2510.14807 on levels 3 to 5, and does not say
of which split: here it is training. 2601.15609's LightEval is read as the 5,000, which its name stands for in verl.

MATH12k is hiyouga/math12k, `problem` and `answer`, the training split of 12,000 that leaves MATH-500 out (2511.19942
says 12,000 and 11,998). MATH-500 is HuggingFaceH4/MATH-500; its rows are in public code (simpleRL-reason,
data/math500).
"""

from __future__ import annotations

from megasharp.data.sets.base import DataSet, Part, Source
from megasharp.data.sets.mathematics import answered, boxed_solution

_HUB = "DigitalLearningGmbH/MATH-lighteval"
_REVISION = "0530c78699ea5e8eb5530600900e1f328b48acad"
_LICENCE = "MIT"
TRAIN = Source("math", _HUB, "train", revision=_REVISION)
MATH12K_TRAIN = Part(Source("math12k", "hiyouga/math12k", "train"), answered("problem", "answer"))

MATH_TRAIN = DataSet(
    name="math_train",
    task="math",
    about="MATH, training split",
    parts=(Part(TRAIN, boxed_solution()),),
    prompt="boxed_chatml",
    licence=_LICENCE,
    known="rows",
    used_by="2510.04028",
    expected=7500,
    tolerance=0.001,
)
MATH_LEVELS_3TO5 = DataSet(
    name="math_levels_3to5",
    task="math",
    about="MATH, training split, levels 3 to 5",
    parts=(Part(TRAIN, boxed_solution("345")),),
    prompt="boxed_qwen",
    licence=_LICENCE,
    known="rows",
    used_by="2510.14807",
    expected=5586,
    tolerance=0.001,
)
LIGHTEVAL_MATH = DataSet(
    name="lighteval_math",
    task="math",
    about="MATH, test split",
    parts=(Part(Source("math", _HUB, "test", revision=_REVISION), boxed_solution()),),
    prompt="boxed_chatml",
    licence=_LICENCE,
    known="rows",
    used_by="2601.15609",
    expected=5000,
    tolerance=0.001,
)
MATH12K = DataSet(
    name="math12k",
    task="math",
    about="MATH without MATH-500",
    parts=(MATH12K_TRAIN,),
    prompt="boxed_verl",
    licence="MIT (MATH's; the copy's card was not read)",
    known="code",
    used_by="2511.19942",
    expected=12000,
    tolerance=0.001,
)
MATH500 = DataSet(
    name="math500",
    task="math",
    about="500 test problems of MATH",
    parts=(Part(Source("math500", "HuggingFaceH4/MATH-500", "test"), answered("problem", "answer", "unique_id")),),
    prompt="boxed_chatml",
    licence="MIT (MATH's; the copy's card was not read)",
    known="rows",
    used_by="2510.14807, 2601.15609, 2511.19942, 2510.04028",
    expected=500,
)
