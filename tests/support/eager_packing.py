"""Micro-batches built field by field from sequences, without a share: what views of one must equal bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megasharp.batching.share import Member
from megasharp.common.records import MicroBatch, Segments, TokenInputs
from megasharp.ops.segment import segment_broadcast, segment_sum
from megasharp.ops.uniform import CHOICE_POSITIONS, seeds_to_int64, uniforms


def eager_micro_batch(units: Sequence[Sequence[Member]], row_multiple: int) -> MicroBatch:
    """Pack `units`: the members of one share a copy of their prompt. Without any, the micro-batch is padding alone."""
    rows = _Rows()
    last_prompt_row: list[int] = []
    first_row: list[int] = []
    for unit in units:
        prompt_length = unit[0].sequence.prompt_length
        prompt = rows.add(unit[0].sequence.tokens[:prompt_length], 0, -1)
        last = rows.count - 1
        for member in unit:
            last_prompt_row.append(last)
            first_row.append(rows.count)
            # The last response token predicts nothing, so its row is left out.
            if member.sequence.response_length > 1:
                rows.add(member.sequence.tokens[prompt_length:-1], prompt_length, prompt)
    padding = rows.pad(row_multiple)
    members = [member for unit in units for member in unit]
    sequences = [member.sequence for member in members]
    lengths = torch.tensor([s.response_length for s in sequences], dtype=torch.int64)
    seq_T = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    offset_T = torch.arange(seq_T.numel()) - segment_broadcast(lengths.cumsum(0) - lengths, seq_T)
    inputs = _token_inputs(members, seq_T, offset_T)
    # A response's first token is predicted by its prompt's last row, each further one by the row of the token before.
    prompt_T = segment_broadcast(torch.tensor(last_prompt_row, dtype=torch.int64), seq_T)
    own_T = segment_broadcast(torch.tensor(first_row, dtype=torch.int64) - 1, seq_T) + offset_T
    return MicroBatch(
        tokens_P=torch.cat(rows.tokens),
        positions_P=rows.positions(),
        segments=rows.segments(),
        rows_T=torch.where(offset_T == 0, prompt_T, own_T),
        targets_T=_cat([s.tokens[s.prompt_length :] for s in sequences], torch.int64),
        length_S=segment_sum(inputs.mask_T.double(), inputs.seq_T, len(sequences)),
        advantage_T=_cat([s.advantage_T for s in sequences], torch.float64),
        inputs=inputs,
        sequence_ids=tuple(member.flat for member in members),
        padding=padding,
    )


def _token_inputs(members: Sequence[Member], seq_T: Tensor, offset_T: Tensor) -> TokenInputs:
    sequences = [member.sequence for member in members]
    seeds = seeds_to_int64([sequence.seed for sequence in sequences])

    def per_token(values: list[float]) -> Tensor:
        return segment_broadcast(torch.tensor(values, dtype=torch.float32), seq_T)

    return TokenInputs(
        mask_T=_cat([s.mask_T for s in sequences], torch.float32),
        seq_T=seq_T,
        group_T=segment_broadcast(torch.tensor([member.group for member in members], dtype=torch.int64), seq_T),
        reward_T=per_token([s.reward for s in sequences]),
        correct_T=per_token([float(s.correct) for s in sequences]),
        group_size_T=per_token([float(s.group_size) for s in sequences]),
        group_correct_T=per_token([float(s.group_correct) for s in sequences]),
        num_sequences=len(sequences),
        sampler_logp_T=_cat([s.sampler_logp_T for s in sequences], torch.float32),
        policy_logp_T=_cat([s.policy_logp_T for s in sequences], torch.float32),
        # The same however the step is packed. Sampling draws with positions from 0; these must be other numbers.
        draw_T=uniforms(segment_broadcast(seeds, seq_T), offset_T + CHOICE_POSITIONS),
    )


def _cat(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(list(parts)).to(dtype) if parts else torch.zeros(0, dtype=dtype)


class _Rows:
    """Packed rows under construction: token ids, each run's first position, and segments."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.position: list[int] = []
        self.start: list[int] = []
        self.length: list[int] = []
        self.prefix: list[int] = []
        self.count = 0

    def add(self, tokens: Tensor, first_position: int, prefix: int) -> int:
        """Append a segment behind the one numbered `prefix` (-1: none); returns its index."""
        self.tokens.append(tokens)
        self.position.append(first_position)
        self.start.append(self.count)
        self.length.append(len(tokens))
        self.prefix.append(prefix)
        self.count += len(tokens)
        return len(self.start) - 1

    def pad(self, multiple: int) -> int:
        """Fill up to a positive multiple with a segment of its own, which predicts nothing; returns its rows."""
        missing = max(multiple, math.ceil(self.count / multiple) * multiple) - self.count
        if missing:
            self.add(torch.zeros(missing, dtype=torch.int64), 0, -1)
        return missing

    def positions(self) -> Tensor:
        """Return every row's position, int64 [P]: they count up within a segment."""
        skipped = torch.tensor(self.position) - torch.tensor(self.start)
        return torch.arange(self.count) + torch.repeat_interleave(skipped, torch.tensor(self.length))

    def segments(self) -> Segments:
        """Return the segment table."""
        return Segments(torch.tensor(self.start), torch.tensor(self.length), torch.tensor(self.prefix))
