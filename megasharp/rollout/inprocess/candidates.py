"""What the policy might have said instead: the most probable tokens at each position of a text that is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The next-token distributions before T given tokens, at temperature 1; log-probs and entropies in nats, float32.

    `logp_T` is the given token's, `rank_T` (int64) how many tokens are more probable than it, `entropy_T` that of the
    whole distribution. `tokens_TN` (int64) and `topn_logp_TN` are the N most probable tokens, the most probable first.
    """

    logp_T: Tensor
    rank_T: Tensor
    entropy_T: Tensor
    tokens_TN: Tensor
    topn_logp_TN: Tensor


def candidates_of(logits_TV: Tensor, given_T: Tensor, n: int) -> Candidates:
    """The candidates in `logits_TV`, where `given_T` (int64) was said; sums are float64, ties go to the lower id."""
    logp_TV = torch.log_softmax(logits_TV.double(), dim=-1)
    given_T1 = logp_TV.gather(1, given_T[:, None])
    entropy_T = torch.special.entr(logp_TV.exp()).sum(dim=-1)
    ranked_TV, token_of_rank_TV = logp_TV.sort(dim=-1, descending=True, stable=True)
    return Candidates(
        logp_T=given_T1.squeeze(1).float(),
        rank_T=(logp_TV > given_T1).sum(dim=-1),
        entropy_T=entropy_T.float(),
        tokens_TN=token_of_rank_TV[:, :n],
        topn_logp_TN=ranked_TV[:, :n].float(),
    )


def joined(parts: list[Candidates]) -> Candidates:
    """Parts of one text, in order."""
    return Candidates(
        torch.cat([part.logp_T for part in parts]),
        torch.cat([part.rank_T for part in parts]),
        torch.cat([part.entropy_T for part in parts]),
        torch.cat([part.tokens_TN for part in parts]),
        torch.cat([part.topn_logp_TN for part in parts]),
    )
