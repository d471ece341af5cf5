"""Compare what several ranks hold copies of, so that a bit that one machine's memory or link has flipped is found.

Copies are, bit for bit: every weight on the data and context ranks, but experts on those that expert parallelism leaves
(`ParallelLayout.expert_shards`); what tensor parallelism does not cut (norms, biases after a sum) on the tensor ranks,
with its main weights and moments; a tied embedding on the first and last pipeline stage, with the same. All other
moments exist once, as Megatron's distributed optimizer shares them out.

A rank takes a 64-bit checksum of each tensor on its device (`checksum`), and the driver compares those of one name
(`difference`): no tensor leaves its device, and no collective is needed.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megasharp.common.layout import ParallelLayout
from megasharp.convert.families.family import is_of_expert
from megasharp.learner.optimizer import parts
from megasharp.learner.parallel import Place
from megasharp.learner.weights import global_parameters
from megasharp.ops.uniform import splitmix64

# Words of 8 bytes that are summed at once: on a GPU few launches, on a CPU what its cache holds.
_WORDS, _WORDS_ON_CPU = 1 << 20, 1 << 18
_WORD = 8
_EMBEDDING = "embedding.word_embeddings.weight"
_RANKS_NAMED = 4


@dataclass(frozen=True, slots=True)
class Checksums:
    """A rank's sums, by names that are equal on two ranks exactly where these hold copies."""

    host: str
    sums: dict[str, int]


class _Summing:
    """Sums of tensors on one device; the numbers that positions count with are made once."""

    def __init__(self) -> None:
        self._weights: dict[torch.device, Tensor] = {}

    def checksum(self, tensor: Tensor) -> Tensor:
        """Return the 64-bit sum of a tensor's bytes in their order: int64, no dimension.

        Each word of 8 bytes counts with an odd number that depends on its place, modulo 2^64. So one changed word, by
        whichever bits, always changes the sum; several ones leave it with a chance of 2^-64.
        """
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        at_once = _WORDS_ON_CPU if flat.device.type == "cpu" else _WORDS
        weights = self._weights.get(flat.device)
        if weights is None:
            weights = splitmix64(torch.arange(at_once, device=flat.device)) | 1
            self._weights[flat.device] = weights
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for number, start in enumerate(range(0, flat.numel(), at_once * _WORD)):
            words = _words(flat[start : start + at_once * _WORD])
            total += (words * weights[: len(words)]).sum() * (2 * number + 1)
        return total


def _words(piece: Tensor) -> Tensor:
    """Return bytes as int64, the last word filled up with zeros."""
    if piece.numel() % _WORD or piece.storage_offset() % _WORD:
        filled = piece.new_zeros(-(-piece.numel() // _WORD) * _WORD)
        filled[: piece.numel()] = piece
        piece = filled
    return piece.view(torch.int64)


@torch.no_grad()
def checksums(
    chunks: Sequence[GPTModel], optimizer: MegatronOptimizer, place: Place, layout: ParallelLayout
) -> Checksums:
    """Sum what this rank holds copies of: weights, and of the optimizer's state what has copies.

    Weights must be whole: not while Megatron leaves their gathering to the next forward pass.
    """
    summing = _Summing()
    sums = {name: summing.checksum(tensor) for name, tensor in _copies(chunks, optimizer, place, layout)}
    by_device: dict[torch.device, list[str]] = {}
    for name, total in sums.items():
        by_device.setdefault(total.device, []).append(name)
    # One wait for each device.
    found = {
        name: value
        for names in by_device.values()
        for name, value in zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True)
    }
    return Checksums(socket.gethostname(), {name: found[name] for name in sums})


def _copies(
    chunks: Sequence[GPTModel], optimizer: MegatronOptimizer, place: Place, layout: ParallelLayout
) -> Iterator[tuple[str, Tensor]]:
    names: dict[int, str] = {}
    for own, parameter in global_parameters(chunks):
        if is_of_expert(own):
            if layout.expert_shards > 1:
                yield own + (f" (part {place.etp} of {layout.etp})" if layout.etp > 1 else ""), parameter
            continue
        tied = layout.pp > 1 and getattr(parameter, "shared_embedding", False)
        cut = layout.tp > 1 and getattr(parameter, "tensor_model_parallel", False)
        name = (_EMBEDDING if tied else own) + (f" (part {place.tp} of {layout.tp})" if cut else "")
        elsewhere = tied or (layout.tp > 1 and not cut)
        if elsewhere or layout.shards > 1:
            yield name, parameter
        if elsewhere:
            names[id(parameter)] = name
    for part in parts(optimizer):
        yield from _optimizer_copies(part, names)


def _optimizer_copies(part: MegatronOptimizer, names: dict[int, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield main weights and moments of the named parameters, as far as this rank has them."""
    if part.optimizer is None:
        return
    models = chain(*part.model_float16_groups, *part.model_fp32_groups)
    mains = chain(*part.shard_fp32_from_float16_groups, *part.shard_fp32_groups)
    for parameter, main in zip(models, mains, strict=True):
        name = names.get(id(parameter))
        if name is None or main is None:
            continue
        span = part._get_model_param_range_map(parameter)["param"]
        where = f"of {name}, elements {span.start} to {span.end}"
        # Main weights in the model's own memory have been summed.
        if main.dtype is not parameter.dtype:
            yield f"main weights {where}", main
        for kind, tensor in part.optimizer.state.get(main, {}).items():
            if torch.is_tensor(tensor):
                yield f"{kind} {where}", tensor


def difference(ranks: Sequence[Checksums]) -> str | None:
    """Say which ranks, in the order of `ranks`, hold another copy of what; None where all copies are equal."""
    holders: dict[str, dict[int, list[int]]] = {}
    for number, rank in enumerate(ranks):
        for name, value in rank.sums.items():
            holders.setdefault(name, {}).setdefault(value, []).append(number)
    compared = [name for name, by_value in holders.items() if sum(map(len, by_value.values())) > 1]
    differing = [name for name in compared if len(holders[name]) > 1]
    if not differing:
        return None
    first = differing[0]
    most, *others = sorted(holders[first].values(), key=len, reverse=True)
    if len(most) > len(others[0]):
        where = f"on {_named(sorted(chain(*others)), ranks)} is not what it is on {_named(most, ranks)}"
    else:
        where = f"differs between {' and '.join(_named(each, ranks) for each in (most, *others))}"
    return f"{first} {where} ({len(differing)} of {len(compared)} compared tensors)"


def _named(numbers: Sequence[int], ranks: Sequence[Checksums]) -> str:
    texts = [f"{number} ({ranks[number].host})" for number in numbers[:_RANKS_NAMED]]
    more = f" and {len(numbers) - _RANKS_NAMED} more" if len(numbers) > _RANKS_NAMED else ""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(texts)}{more}"
