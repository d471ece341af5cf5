"""Differential smoothing, the term of DS-GRPO (arXiv 2511.19942, equation 6).

    A_i' = A_i - gamma_p log pi_old(y_i | x)   if y_i is correct
           A_i + gamma_n log pi_old(y_i | x)   otherwise

The log-prob is a constant. Unlikely correct responses gain most, unlikely wrong ones lose most. Positive-only and
negative-only are `gamma_n` and `gamma_p` at 0; both at 0 is the estimator alone. `form` is what log pi_old means:

    token             A_t' with the token's own log pi_old(y_t): a co-author's code until October 2025, the default
    seq_mean          the mean over the response's tokens, in every token
    seq_sum           their sum: equation 6 to the letter. It grows with length: 1000 tokens of 0.3 nat at 0.01 are 3
    reward_seq_mean   r_i' with the mean, before the estimator subtracts the group's: that code in November 2025

Printed: equation 6, pi_old in place of pi_base, gamma_p and gamma_n per model: 0.01 and 0.01 (Qwen2.5-Math), 0.02 and
0.002 (Qwen3-1.7B, Ministral-8B), 0.03 and 0.01 (Countdown). Unknown: which form made which table. Departures from the
code: its variant of October 2025 divides the term of `seq_mean` once more by the response's length, ours does not;
"correct" is the verdict, where that code asks for a positive reward, which a right format alone may earn. Its first
variant wants -gamma_p in its file; ours are never negative. `logp` picks the record of pi_old: `engine` is what was
recorded of the policy while sampling, at no cost; `policy` is recomputed before the update. `reference` takes pi_base
in its place, as the derivation has it (section 4.2), at the cost of a pass with the reference's weights.

Degenerate cases: outside the reward form the term is not centred, so groups that are all correct or all wrong do get an
advantage. In the reward form the estimator centres it, and should not divide by the deviation: in such a group the term
is all there is, and `grpo` would scale it up to 1 however small gamma is. The code does not divide; take `dr_grpo`.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from megasharp.algos.base import (
    Coefficient,
    Method,
    MethodParams,
    Needs,
    OldLogp,
    TokenMetric,
    TokenMetrics,
    settled,
)
from megasharp.algos.group_statistics import mean_logp
from megasharp.common.records import Group, Outcome, TokenInputs
from megasharp.ops.segment import segment_broadcast, segment_mean, segment_sum


class DSParams(MethodParams):
    """`gamma_p` weighs the term of correct responses, `gamma_n` of all others; `form` and `logp` say what it is."""

    gamma_p: Coefficient = Field(
        default=0.01,
        description="Weight of the log-prob term of correct responses, a number or a ramp; unlikely ones gain most. "
        "The paper uses 0.01 to 0.03. 0: only wrong responses change.",
    )
    gamma_n: Coefficient = Field(
        default=0.01,
        description="Weight of the log-prob term of responses that are not correct, a number or a ramp; unlikely ones "
        "lose most. The paper uses 0.002 to 0.01. 0: only correct responses change.",
    )
    form: Literal["token", "seq_mean", "seq_sum", "reward_seq_mean"] = Field(
        default="token",
        description="Log-prob that the term uses. token: each token's own; seq_mean: the response's mean; seq_sum: "
        "the response's sum, which grows with length; reward_seq_mean: the mean, added to the reward before the group "
        "baseline (use with dr_grpo).",
    )
    logp: Literal["engine", "policy", "reference"] = Field(
        default="engine",
        description="Source of the log-probs: engine takes the old policy's as recorded while sampling, at no cost; "
        "policy recomputes them before the update; reference takes the reference policy's, which costs a pass.",
    )

    @model_validator(mode="after")
    def _recomputed_comes_too_late(self) -> Self:
        if self.form == "reward_seq_mean" and self.logp != "engine":
            raise ValueError("form reward_seq_mean changes rewards before log-probs are computed: set logp: engine")
        return self


LOGP_NEEDS = {
    "engine": Needs(policy_logp=True),
    "policy": Needs(old_logp=OldLogp.BEFORE_STEP),
    "reference": Needs(ref_logp=True),
}


class DS(Method[DSParams]):
    """More advantage for unlikely correct responses, less for unlikely wrong ones."""

    paper = "2511.19942"
    status = "equation 6 as printed; its granularity from the authors' code"
    options = "more advantage for unlikely correct responses, less for unlikely wrong ones."
    Params = DSParams

    def needs(self) -> Needs:
        """Ask for the log-probs that `logp` picks; in the reward form for none, as responses carry them."""
        if self.params.form == "reward_seq_mean":
            return Needs()
        return LOGP_NEEDS[self.params.logp]

    def reshapes_rewards(self) -> bool:
        """Tell if `form` is `reward_seq_mean`; all others change advantages only."""
        return self.params.form == "reward_seq_mean"

    def rewards(self, group: Group, rewards_G: Tensor) -> Tensor:
        """Subtract gamma_p times the mean log-prob (nats) where correct, add gamma_n times it elsewhere; float64 [G].

        Only in the form `reward_seq_mean`, from public code beside 2511.19942; other forms leave rewards as they are.
        """
        if self.params.form != "reward_seq_mean":
            return rewards_G
        terms = [
            self._factor(response.verdict.outcome is Outcome.CORRECT) * mean_logp(response)
            for response in group.responses
        ]
        return rewards_G + rewards_G.new_tensor(terms)

    def calibrate(self, adv_T: Tensor, x: TokenInputs) -> tuple[Tensor, TokenMetrics]:
        """Add -gamma_p log pi_old where correct and gamma_n log pi_old elsewhere, [T] (2511.19942, equation 6).

        The metrics are its means over tokens of correct and of other responses. The reward form adds nothing here.
        """
        if self.params.form == "reward_seq_mean":
            return adv_T, {}
        correct_T = x.correct_T > 0
        logp_T = self._logp(x, adv_T.dtype) * x.mask_T
        term_T = torch.where(correct_T, self._factor(True) * logp_T, self._factor(False) * logp_T)
        metrics = {
            "method/ds/term_correct": TokenMetric(term_T, x.mask_T * correct_T),
            "method/ds/term_other": TokenMetric(term_T, x.mask_T * ~correct_T),
        }
        return adv_T + term_T, metrics

    def _factor(self, correct: bool) -> float:
        return -settled(self.params.gamma_p) if correct else settled(self.params.gamma_n)

    def _logp(self, x: TokenInputs, dtype: torch.dtype) -> Tensor:
        recorded_T = {"engine": x.policy_logp_T, "policy": x.old_logp_T, "reference": x.ref_logp_T}[self.params.logp]
        assert recorded_T is not None
        logp_T = recorded_T.to(dtype)
        if self.params.form == "token":
            return logp_T
        if self.params.form == "seq_mean":
            return segment_broadcast(segment_mean(logp_T, x.seq_T, x.num_sequences, x.mask_T), x.seq_T)
        return segment_broadcast(segment_sum(logp_T * x.mask_T, x.seq_T, x.num_sequences), x.seq_T)
