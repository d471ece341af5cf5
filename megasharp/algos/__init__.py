"""Methods, one file each, and the table that names them.

A new method is one file here and one row below. Elsewhere one place names one: the default recipe
(`config/recipe_section.py`). The surrogate and the correction that recipes get by themselves are named below the table.
"""

from __future__ import annotations

from typing import Any

from megasharp.algos.base import Method
from megasharp.algos.bypass import Bypass
from megasharp.algos.casp import CaSP
from megasharp.algos.cispo import CISPO
from megasharp.algos.clip import Clip
from megasharp.algos.clip_cov import ClipCov
from megasharp.algos.dapo import DAPO
from megasharp.algos.differential_entropy import DifferentialEntropy
from megasharp.algos.difficulty_filter import DifficultyFilter
from megasharp.algos.dlc import DLC
from megasharp.algos.dr_grpo import DrGRPO
from megasharp.algos.ds import DS
from megasharp.algos.ds_grpo import DSGRPO
from megasharp.algos.dynamic_sampling import DynamicSampling
from megasharp.algos.entropy_adv import EntropyAdv
from megasharp.algos.entropy_bonus import EntropyBonus
from megasharp.algos.entropy_penalty import EntropyPenalty
from megasharp.algos.forking_tokens import ForkingTokens
from megasharp.algos.grpo import GRPO
from megasharp.algos.grpo_best_of import GRPOBestOf
from megasharp.algos.grpo_n import GRPON
from megasharp.algos.gspo import GSPO
from megasharp.algos.gspo_n import GSPON
from megasharp.algos.iac import IAC
from megasharp.algos.kl import KL
from megasharp.algos.kl_cov import KLCov
from megasharp.algos.negative_only import NegativeOnly
from megasharp.algos.nsr import NSR
from megasharp.algos.off_policy_mask import OffPolicyMask
from megasharp.algos.passk_training import PassKTraining
from megasharp.algos.pkpo import PKPO
from megasharp.algos.psr import PSR
from megasharp.algos.ratio_mask import RatioMask
from megasharp.algos.reinforce import Reinforce
from megasharp.algos.reinforce_pp_baseline import ReinforcePPBaseline
from megasharp.algos.rloo import RLOO
from megasharp.algos.soft_overlong import SoftOverlong
from megasharp.algos.truncated_is import TruncatedIS
from megasharp.algos.turn_returns import TurnReturns
from megasharp.algos.unlikeliness import Unlikeliness
from megasharp.algos.w_reinforce import WReinforce

METHODS: dict[str, type[Method[Any]]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "rloo": RLOO,
    "reinforce_pp_baseline": ReinforcePPBaseline,
    "psr": PSR,
    "nsr": NSR,
    "w_reinforce": WReinforce,
    "passk_training": PassKTraining,
    "gr_pkpo": PassKTraining,
    "pkpo": PKPO,
    "grpo_best_of": GRPOBestOf,
    "turn_returns": TurnReturns,
    "dapo": DAPO,
    "grpo_n": GRPON,
    "gspo_n": GSPON,
    "ds_grpo": DSGRPO,
    "unlikeliness": Unlikeliness,
    "soft_overlong": SoftOverlong,
    "dynamic_sampling": DynamicSampling,
    "difficulty_filter": DifficultyFilter,
    "iac": IAC,
    "ds": DS,
    "entropy_adv": EntropyAdv,
    "negative_only": NegativeOnly,
    "casp": CaSP,
    "clip": Clip,
    "gspo": GSPO,
    "cispo": CISPO,
    "clip_cov": ClipCov,
    "kl_cov": KLCov,
    "reinforce": Reinforce,
    "forking_tokens": ForkingTokens,
    "kl": KL,
    "entropy_bonus": EntropyBonus,
    "entropy_penalty": EntropyPenalty,
    "differential_entropy": DifferentialEntropy,
    "truncated_is": TruncatedIS,
    "bypass": Bypass,
    "ratio_mask": RatioMask,
    "off_policy_mask": OffPolicyMask,
    "dlc": DLC,
}
DEFAULT_SURROGATE = "clip"
DEFAULT_CORRECTION = "truncated_is"
