"""Methods, one file each, and the table that names them.

A new method is one file here and one row below; nothing else in the package knows a method by name.
"""

from __future__ import annotations

from typing import Any

from megasharp.algos.base import Method
from megasharp.algos.bypass import Bypass
from megasharp.algos.casp import CaSP
from megasharp.algos.cispo import CISPO
from megasharp.algos.clip import Clip
from megasharp.algos.clip_cov import ClipCov
from megasharp.algos.differential_entropy import DifferentialEntropy
from megasharp.algos.dlc import DLC
from megasharp.algos.ds import DS
from megasharp.algos.ds_grpo import DSGRPO
from megasharp.algos.entropy_adv import EntropyAdv
from megasharp.algos.entropy_bonus import EntropyBonus
from megasharp.algos.entropy_penalty import EntropyPenalty
from megasharp.algos.forking_tokens import ForkingTokens
from megasharp.algos.grpo import GRPO
from megasharp.algos.grpo_n import GRPON
from megasharp.algos.gspo import GSPO
from megasharp.algos.gspo_n import GSPON
from megasharp.algos.iac import IAC
from megasharp.algos.kl import KL
from megasharp.algos.kl_cov import KLCov
from megasharp.algos.negative_only import NegativeOnly
from megasharp.algos.reinforce import Reinforce
from megasharp.algos.truncated_is import TruncatedIS

METHODS: dict[str, type[Method[Any]]] = {
    "grpo": GRPO,
    "grpo_n": GRPON,
    "gspo_n": GSPON,
    "ds_grpo": DSGRPO,
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
    "dlc": DLC,
}
DEFAULT_SURROGATE = "clip"
