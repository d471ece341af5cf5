"""Training sequences of random lengths, and the cut that tests of packing start from."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from megasharp.batching.packing import PackLayout
from megasharp.common.records import MicroBatch, Routing, Sequence, StepBatch


def sequence(group: int, index: int, prompt: list[int], response: list[int], masked: int = 0) -> Sequence:
    """All numbers derive from the place, so that a swapped one is seen; the first `masked` tokens do not train."""
    length = len(response)
    place = 100.0 * group + 10.0 * index
    return Sequence(
        group_id=f"g{group}",
        index=index,
        group_size=5,
        group_correct=3,
        seed=int(place),
        tokens=torch.tensor(prompt + response),
        prompt_length=len(prompt),
        reward=place,
        correct=index % 2 == 0,
        advantage_T=place + torch.arange(length) / 100,
        mask_T=(torch.arange(length) >= masked).float(),
        sampler_logp_T=-place - torch.arange(length) / 100,
        policy_logp_T=torch.zeros(length),
    )


def random_sequences(seed: int, groups: int = 7, longest: int = 12) -> list[Sequence]:
    """Groups of one to five; token ids are unique over all responses."""
    generator = torch.Generator().manual_seed(seed)
    ids = itertools.count(1000)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    made = []
    for group in range(groups):
        prompt = [10 * group + i for i in range(draw(1, 9))]
        for index in range(draw(1, 5)):
            response = [next(ids) for _ in range(draw(0, longest))]
            made.append(sequence(group, index, prompt, response, masked=draw(0, 3)))
    return made


ROUTING = Routing(layers=2, per_token=3, experts=300)


def routed(tokens: Tensor, routing: Routing = ROUTING) -> Tensor:
    """[tokens, layers, per_token]: numbers that a token's id determines, no two alike."""
    sizes = torch.arange(routing.layers * routing.per_token).reshape(routing.layers, routing.per_token)
    return (10 * tokens[:, None, None] + sizes).to(routing.dtype)


def with_experts(sequences: list[Sequence]) -> list[Sequence]:
    """The same with experts by `routed`."""
    return [replace(one, experts=routed(one.tokens)) for one in sequences]


def layout(**overrides: object) -> PackLayout:
    values = {"dp": 1, "micro_batch_tokens": 40, "mini_batches": 1, "row_multiple": 1, "constant": 32.0}
    return PackLayout(**{**values, **overrides})


def micros(batch: StepBatch) -> list[MicroBatch]:
    return [micro for mini in batch.mini_batches for rank in mini.per_rank for micro in rank]
