"""The table of data sets that the papers train and evaluate on; `data_set.py` has the record of a row."""

from __future__ import annotations

from megasharp.tasks.sets.bbh import BBH
from megasharp.tasks.sets.countdown_tasks import COUNTDOWN_3, COUNTDOWN_3_TEST, COUNTDOWN_3TO4, COUNTDOWN_3TO4_TEST
from megasharp.tasks.sets.dapo_math import DAPO_EN_MATH12K, DAPO_MATH_17K, DAPO_MATH_17K_EN
from megasharp.tasks.sets.data_set import DataSet
from megasharp.tasks.sets.deepcoder import DEEPCODER
from megasharp.tasks.sets.gsm8k import GSM8K, GSM8K_MATH_LEVEL1, GSM8K_TEST
from megasharp.tasks.sets.ifeval import IFEVAL
from megasharp.tasks.sets.livecodebench import HUMANEVAL_PLUS, LIVECODEBENCH
from megasharp.tasks.sets.math_sets import (
    AIME24,
    AIME25,
    AMC23,
    DEEPSCALER,
    LIGHTEVAL_MATH,
    MATH12K,
    MATH500,
    MATH_LEVELS_3TO5,
    MATH_TRAIN,
    MINERVA,
    OLYMPIADBENCH,
    VERL_MATH,
)
from megasharp.tasks.sets.multiple_choice import ARC_C, MMLU_PRO
from megasharp.tasks.sets.synlogic_sets import SYNLOGIC_EASY, SYNLOGIC_EASY_VALIDATION

_ALL = (
    DEEPSCALER,
    DAPO_MATH_17K,
    DAPO_MATH_17K_EN,
    DAPO_EN_MATH12K,
    MATH12K,
    MATH_TRAIN,
    MATH_LEVELS_3TO5,
    GSM8K_MATH_LEVEL1,
    GSM8K,
    COUNTDOWN_3TO4,
    COUNTDOWN_3,
    SYNLOGIC_EASY,
    DEEPCODER,
    VERL_MATH,
    MATH500,
    AIME24,
    AIME25,
    AMC23,
    MINERVA,
    OLYMPIADBENCH,
    LIGHTEVAL_MATH,
    GSM8K_TEST,
    COUNTDOWN_3TO4_TEST,
    COUNTDOWN_3_TEST,
    SYNLOGIC_EASY_VALIDATION,
    ARC_C,
    MMLU_PRO,
    BBH,
    LIVECODEBENCH,
    HUMANEVAL_PLUS,
    IFEVAL,
)
SETS: dict[str, DataSet] = {each.name: each for each in _ALL}
