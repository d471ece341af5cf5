"""The table of data sets that the papers train and evaluate on, one row each; `base.py` says what a row holds."""

from __future__ import annotations

from megasharp.data.sets.base import DataSet
from megasharp.data.sets.bbh import BBH
from megasharp.data.sets.competitions import AIME24, AIME25, AMC23
from megasharp.data.sets.countdown_tasks import COUNTDOWN_3, COUNTDOWN_3_TEST, COUNTDOWN_3TO4, COUNTDOWN_3TO4_TEST
from megasharp.data.sets.dapo import DAPO_EN_MATH12K, DAPO_MATH_17K, DAPO_MATH_17K_EN
from megasharp.data.sets.deepcoder import DEEPCODER
from megasharp.data.sets.deepscaler import DEEPSCALER
from megasharp.data.sets.gsm8k import GSM8K, GSM8K_MATH_LEVEL1, GSM8K_TEST
from megasharp.data.sets.humaneval_plus import HUMANEVAL_PLUS
from megasharp.data.sets.livecodebench import LIVECODEBENCH
from megasharp.data.sets.math_sets import LIGHTEVAL_MATH, MATH12K, MATH500, MATH_LEVELS_3TO5, MATH_TRAIN
from megasharp.data.sets.minerva import MINERVA
from megasharp.data.sets.multiple_choice import ARC_C, MMLU_PRO
from megasharp.data.sets.olympiadbench import OLYMPIADBENCH
from megasharp.data.sets.synlogic_sets import SYNLOGIC_EASY, SYNLOGIC_EASY_VALIDATION
from megasharp.data.sets.verl_math import VERL_MATH

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
)
SETS: dict[str, DataSet] = {each.name: each for each in _ALL}
