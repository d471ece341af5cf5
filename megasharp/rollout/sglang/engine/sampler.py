"""Drawing tokens in an engine, and the log-probs that come back with them.

Every token returns with `sampler_logprob` (of the distribution it was drawn from), `policy_logprob` and, in an engine
with a memory network, `memory_logprob`, all at the sampling temperature; there also with `argmax_moved` and
`calibration_kl`, which are 0 for a request without a mu. Where a request asks for candidates, `policy_entropy` and
`candidate_logprob_1` and so on are the policy's own, before any cut. SGLang's own `output_token_logprobs` are after the
subtraction and before top-k and top-p. Greedy is temperature 0, as everywhere in megasharp: log-probs are
then at temperature 1. A request for SGLang's sampling mask makes SGLang cut its batch, and `sampler_logprob` is then
before the cut.

The subtraction is not part of the model's forward, and so outside the CUDA graph: mu is each request's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megasharp.ops.uniform import uniforms
from megasharp.rollout.sglang.engine.engine_config import published
from megasharp.rollout.sglang.engine.requests import Columns
from megasharp.rollout.sglang.engine.sampling_math import (
    Drawn,
    argmax_moved,
    at,
    calibration_kl,
    candidates,
    draw,
    drawable,
    held,
    logp_at,
    subtract_memory,
    truncate,
)
from megasharp.rollout.sglang.engine.sglang_internals import Sampler


class EngineSampler(Sampler):  # type: ignore[misc]
    """SGLang's sampler with the memory's subtraction before it, and our own draw where tokens are cut or seeded."""

    def __init__(self) -> None:
        super().__init__()
        self._deterministic = published().deterministic
        self._columns: Columns | None = None
        self._drawn_logp_S: Tensor | None = None

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: Tensor,
    ) -> Tensor:
        """One token per row of `logits_output.next_token_logits` [S, V], int32 or int64 [S]."""
        logits_SV = logits_output.next_token_logits
        memory_SV = held(logits_SV.shape[0])
        columns = self._columns = sampling_info.megasharp
        self._drawn_logp_S = None
        values: dict[str, Tensor] = {}
        if return_logprob and columns is not None and columns.most_candidates:
            # Now: SGLang turns the logits it is given into probabilities, in place.
            entropy_S, logp_SN = candidates(logits_SV, _temperature(sampling_info), columns.most_candidates)
            values["policy_entropy"] = entropy_S
            # SGLang collects no lists, so each rank has a name of its own.
            values |= {
                f"candidate_logprob_{rank}": logp_S for rank, logp_S in enumerate(logp_SN.unbind(dim=1), start=1)
            }
        if memory_SV is not None and columns is not None:
            # A tensor of its own, so that the policy's stay.
            calibrated_SV = subtract_memory(logits_SV, memory_SV, columns, sampling_info.temperatures)
            logits_output.next_token_logits = calibrated_SV
            if return_logprob:
                values["argmax_moved"] = argmax_moved(logits_SV, calibrated_SV)
        tokens_S: Tensor = super().forward(
            logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
        )
        if return_logprob:
            values |= self._log_probs(logits_output, sampling_info, logits_SV, memory_SV, tokens_S.long())
            logits_output.customized_info = {name: OnHost(value) for name, value in values.items()}
        return tokens_S

    def _sample_from_probs(
        self, probs: Tensor, sampling_info: Any, positions: Tensor, simple_sampling_case: bool
    ) -> tuple[Tensor, Any]:
        """SGLang's own draw wherever ours would only repeat it."""
        wants_mask = sampling_info.sampling_mask_batch_indices is not None
        if wants_mask or (simple_sampling_case and not self._deterministic):
            drawn: tuple[Tensor, Any] = super()._sample_from_probs(
                drawable(probs), sampling_info, positions, simple_sampling_case
            )
            return drawn
        uniform_S = None
        if self._deterministic and self._columns is not None:
            # `positions` are those of the tokens that were fed; the first response token follows the prompt's last.
            uniform_S = uniforms(self._columns.seed_S, positions.long() + 1 - self._columns.prompt_S)
        if simple_sampling_case:
            return draw(probs, uniform_S).int(), None
        kept_SV, token_of_rank_SV = truncate(probs, sampling_info.top_ks, sampling_info.top_ps, sampling_info.min_ps)
        rank_S = draw(kept_SV, uniform_S)
        # A request that cuts nothing draws as it would alone: by token id, whatever others in its batch cut.
        whole_S = (sampling_info.top_ks >= probs.shape[1]) & (sampling_info.top_ps >= 1) & (sampling_info.min_ps <= 0)
        tokens_S = torch.where(whole_S, draw(probs, uniform_S), at(token_of_rank_SV, rank_S))
        drawn_S = at(kept_SV, rank_S).log() - kept_SV.sum(dim=-1).log()
        self._drawn_logp_S = torch.where(_greedy(sampling_info) | whole_S, at(probs, tokens_S).log(), drawn_S)
        return tokens_S.int(), None

    def _log_probs(
        self, logits_output: Any, sampling_info: Any, policy_SV: Tensor, memory_SV: Tensor | None, tokens_S: Tensor
    ) -> dict[str, Tensor]:
        own_S = logits_output.next_token_logprobs
        values = {"sampler_logprob": own_S if self._drawn_logp_S is None else self._drawn_logp_S}
        if memory_SV is None or self._columns is None:
            # Before truncation, and nothing was subtracted.
            return values | {"policy_logprob": own_S}
        temperature_S = _temperature(sampling_info)
        policy_S = logp_at(policy_SV, tokens_S, temperature_S)
        probs_SV = logits_output.next_token_logits
        if sampling_info.is_all_greedy:
            # Then SGLang has left logits.
            probs_SV = probs_SV.softmax(dim=-1)
        drawn = Drawn(tokens_S, own_S, policy_S)
        return values | {
            "policy_logprob": policy_S,
            "memory_logprob": logp_at(memory_SV, tokens_S, temperature_S),
            "calibration_kl": calibration_kl(probs_SV, memory_SV, self._columns, temperature_S, drawn),
        }


class OnHost:
    """Numbers on their way to the host, as SGLang's result processing reads them: by row, one step later.

    The copy is queued on the stream on which SGLang waits before it reads a step's results. Rows are Python floats,
    which pass through its process queues and JSON.
    """

    def __init__(self, values_S: Tensor) -> None:
        self._host_S = torch.empty(values_S.shape, dtype=torch.float32, pin_memory=values_S.is_cuda)
        self._host_S.copy_(values_S, non_blocking=True)
        self._rows: list[float] | None = None

    def __getitem__(self, row: int) -> float:
        if self._rows is None:
            self._rows = self._host_S.tolist()
        return self._rows[row]


def _temperature(sampling_info: Any) -> Tensor:
    """float32 [S], the temperature of the reported log-probs: 1 for greedy."""
    return torch.where(_greedy(sampling_info), 1.0, sampling_info.temperatures.view(-1))


def _greedy(sampling_info: Any) -> Tensor:
    """bool [S]; SGLang writes temperature 0 as top-k 1."""
    greedy: Tensor = sampling_info.top_ks <= 1
    return greedy
