"""The part of a micro-batch that no gradient comes from: prompts whose response tokens all have an advantage of zero.

Groups of equal rewards have such advantages: all of their responses right, or all wrong. Their loss has a gradient of
zero by every weight unless the recipe has other terms, so a forward pass alone gives their metrics. A run of responses
sees its own prompt only: what is left of the micro-batch computes as before.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from megasharp.common.records import MicroBatch, Segments


def split(micro: MicroBatch, row_multiple: int) -> tuple[MicroBatch | None, MicroBatch | None]:
    """Split into the prompts with an advantage at some token, and those without; None in place of a part without any.

    The parts' rows are padded to `row_multiple`. Responses without tokens are in the first part, else in the second.
    """
    runs = micro.segments
    prompt_of_run = torch.where(runs.prefix >= 0, runs.prefix, torch.arange(runs.prefix.numel()))
    prompt_P = torch.repeat_interleave(prompt_of_run, runs.length)
    prompt_T = prompt_P[micro.rows_T]
    predicting, trained = torch.zeros(2, runs.prefix.numel(), dtype=torch.bool)
    predicting[prompt_T] = True
    trained[prompt_T[micro.advantage_T != 0]] = True
    if not bool(trained.any()):
        return None, micro
    if bool(trained[predicting].all()):
        return micro, None
    silent_S = torch.zeros(micro.inputs.num_sequences, dtype=torch.bool)
    silent_S[micro.inputs.seq_T[~trained[prompt_T]]] = True
    return (
        _select(micro, trained[prompt_of_run], ~silent_S, row_multiple),
        _select(micro, (predicting & ~trained)[prompt_of_run], silent_S, row_multiple),
    )


def _select(micro: MicroBatch, chosen_runs: Tensor, chosen_S: Tensor, row_multiple: int) -> MicroBatch:
    """Return a micro-batch of the chosen runs, prompts and all of their responses, and sequences; masks by number."""
    runs = micro.segments
    chosen_P = torch.repeat_interleave(chosen_runs, runs.length)
    chosen_T = chosen_P[micro.rows_T]
    rows = int(chosen_P.sum())
    padding = -rows % row_multiple
    length, prefix = runs.length[chosen_runs], runs.prefix[chosen_runs]
    prefix = torch.where(prefix >= 0, _numbers(chosen_runs)[prefix.clamp(min=0)], -1)
    if padding:
        length, prefix = torch.cat([length, length.new_tensor([padding])]), torch.cat([prefix, prefix.new_tensor([-1])])
    tokens_P, positions_P, experts_PLK = micro.tokens_P[chosen_P], micro.positions_P[chosen_P], micro.experts_PLK
    if experts_PLK is not None:
        anywhere = torch.arange(experts_PLK.shape[-1], dtype=experts_PLK.dtype)
        experts_PLK = torch.cat([experts_PLK[chosen_P], anywhere.expand(padding, *experts_PLK.shape[1:])])
    values = {field.name: getattr(micro.inputs, field.name) for field in fields(micro.inputs)}
    inputs = {name: value[chosen_T] for name, value in values.items() if isinstance(value, Tensor)}
    inputs["seq_T"] = _numbers(chosen_S)[inputs["seq_T"]]
    return MicroBatch(
        tokens_P=torch.cat([tokens_P, tokens_P.new_zeros(padding)]),
        positions_P=torch.cat([positions_P, torch.arange(padding, dtype=positions_P.dtype)]),
        segments=Segments(length.cumsum(0) - length, length, prefix),
        rows_T=_numbers(chosen_P)[micro.rows_T[chosen_T]],
        targets_T=micro.targets_T[chosen_T],
        length_S=micro.length_S[chosen_S],
        advantage_T=micro.advantage_T[chosen_T],
        inputs=replace(micro.inputs, **inputs, num_sequences=int(chosen_S.sum())),
        sequence_ids=tuple(
            one for one, is_chosen in zip(micro.sequence_ids, chosen_S.tolist(), strict=True) if is_chosen
        ),
        padding=padding,
        experts_PLK=experts_PLK,
    )


def _numbers(chosen: Tensor) -> Tensor:
    """Number the chosen ones from 0; what the others have means nothing."""
    return chosen.cumsum(0) - 1
