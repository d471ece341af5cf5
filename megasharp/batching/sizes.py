"""What responses and prompts add to a micro-batch: tokens, which the budget counts, and FLOPs, which ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megasharp.batching.flops import Flops


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one optimizer step's responses, numbered from 0, and of the prompts that they share.

    `group[i]` is the prompt of response i. A micro-batch with responses of a group has one copy of its prompt:
    `prompt_tokens`, `prompt_flops` by group; `tokens`, `flops` by response, its prompt left out.
    """

    group: list[int]
    prompt_tokens: list[int]
    prompt_flops: list[float]
    tokens: list[int]
    flops: list[float]


def measure(group: Sequence[int], prompts: Sequence[int], responses: Sequence[int], flops: Flops) -> Sizes:
    """Sizes from lengths in tokens: `prompts` by group, `responses` by response."""
    prompt = torch.tensor(prompts, dtype=torch.int64)
    before = prompt[torch.tensor(group, dtype=torch.int64)]
    tokens = torch.tensor(responses, dtype=torch.int64)
    # The last token of a response predicts nothing, so it has no row.
    rows = (tokens - 1).clamp(min=0)
    return Sizes(
        list(group),
        list(prompts),
        flops.of_runs(torch.zeros_like(prompt), prompt).tolist(),
        list(responses),
        (flops.of_runs(before, rows) + flops.per_token * tokens).tolist(),
    )


@dataclass(slots=True)
class Draft:
    """A micro-batch under planning: responses by group, with their tokens and FLOPs, copies of prompts included."""

    members: dict[int, list[int]] = field(default_factory=dict)
    tokens: int = 0
    flops: float = 0.0

    def add(self, responses: Sequence[int], sizes: Sizes) -> None:
        """Put responses of one group in."""
        group = sizes.group[responses[0]]
        if group not in self.members:
            self.members[group] = []
            self.tokens += sizes.prompt_tokens[group]
            self.flops += sizes.prompt_flops[group]
        self.members[group].extend(responses)
        for i in responses:
            self.tokens += sizes.tokens[i]
            self.flops += sizes.flops[i]

    def remove(self, response: int, sizes: Sizes) -> None:
        """Take a response out, and its prompt with the last of its group."""
        group = sizes.group[response]
        self.tokens, self.flops = self.exchanged(response, None, sizes)
        self.members[group].remove(response)
        if not self.members[group]:
            del self.members[group]

    def exchanged(self, out: int | None, into: int | None, sizes: Sizes) -> tuple[int, float]:
        """Tokens and FLOPs if `out`, which is here, went and `into` came."""
        tokens, flops = self.tokens, self.flops
        if out is not None:
            group = sizes.group[out]
            tokens, flops = tokens - sizes.tokens[out], flops - sizes.flops[out]
            if len(self.members[group]) == 1 and (into is None or sizes.group[into] != group):
                tokens, flops = tokens - sizes.prompt_tokens[group], flops - sizes.prompt_flops[group]
        if into is not None:
            group = sizes.group[into]
            tokens, flops = tokens + sizes.tokens[into], flops + sizes.flops[into]
            if group not in self.members:
                tokens, flops = tokens + sizes.prompt_tokens[group], flops + sizes.prompt_flops[group]
        return tokens, flops

    def responses(self) -> list[int]:
        """All of them."""
        return [i for members in self.members.values() for i in members]
