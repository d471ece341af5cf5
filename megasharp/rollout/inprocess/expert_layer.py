"""A mixture of experts in place of a layer's MLP, as the decoder computes it.

Every expert computes all rows that were sent to it in one product. Its row count is rounded up as that of a decode
step is (`row_count`), for two reasons. Few shapes are prepared. And a row's numbers do not depend on the rows beside
it: oneDNN's products of 2 rows or more compute each row alike, bit for bit, only that of a single row differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megasharp.convert.architecture import Architecture, Experts
from megasharp.convert.families import family_of
from megasharp.ops.chunked_head import choose_linear
from megasharp.rollout.inprocess.decode_loop import row_count


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """`router`: [experts, H]. `gate_up`: [experts, 2 * ffn, H], gate, then up. `down`: [experts, H, ffn]."""

    router: Tensor
    gate_up: Tensor
    down: Tensor


def router_name(architecture: Architecture, layer: int) -> str:
    """Return the Hugging Face name of a layer's router."""
    (name,) = _names(architecture, f"decoder.layers.{layer}.mlp.router.weight")
    return name


def expert_names(architecture: Architecture, layer: int, expert: int) -> tuple[str, str, str]:
    """Return the Hugging Face names of an expert's gate, up and down projections."""
    prefix = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}"
    gate, up = _names(architecture, f"{prefix}.linear_fc1.weight")
    (down,) = _names(architecture, f"{prefix}.linear_fc2.weight")
    return gate, up, down


def _names(architecture: Architecture, megatron: str) -> list[str]:
    rule, location = family_of(architecture).rule_for(architecture, megatron)
    return [location.name(pattern) for pattern in rule.hf]


class Mixture:
    """Sends rows to their experts, and adds up what these make of them."""

    def __init__(self, experts: Experts, dtype: torch.dtype, device: torch.device) -> None:
        self._experts = experts
        self._linear = choose_linear(dtype, device)
        # Sums in half precision would choose other experts than sums in another order.
        self._wide = torch.promote_types(dtype, torch.float32)
        self._route = choose_linear(self._wide, device)

    def __call__(self, rows_TH: Tensor, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
        """Return the experts' sum [T, H], and the experts of every row, int64 [T, per_token], the weightiest first."""
        logits = self._route(rows_TH.to(self._wide), weights.router.to(self._wide), None)
        share_TK, chosen_TK = torch.softmax(logits, dim=-1).topk(self._experts.per_token, dim=-1)
        if self._experts.normalised:
            share_TK = share_TK / share_TK.sum(dim=-1, keepdim=True)
        made_TKH = self._computed(rows_TH, chosen_TK, weights)
        return made_TKH.mul_(share_TK.to(rows_TH.dtype)[:, :, None]).sum(dim=1), chosen_TK

    def _computed(self, rows_TH: Tensor, chosen_TK: Tensor, weights: ExpertWeights) -> Tensor:
        """[T, K, H]: what each of a row's experts makes of it."""
        chosen = chosen_TK.flatten()
        # Choices expert by expert, and each one's place when every expert's part is padded.
        order = chosen.argsort(stable=True)
        counts_E = torch.bincount(chosen, minlength=self._experts.count)
        counts = counts_E.tolist()
        padded = [row_count(count) if count else 0 for count in counts]
        skipped_E = torch.tensor(padded, device=chosen.device).cumsum(0) - counts_E.cumsum(0)
        # Of an expert the padding comes after its rows: before it stands that of the experts before.
        skipped_E = torch.cat([skipped_E.new_zeros(1), skipped_E[:-1]])
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        place += skipped_E[chosen]
        source = order.new_zeros(sum(padded))
        source[place] = torch.arange(chosen.numel(), device=order.device) // chosen_TK.shape[1]
        parts = torch.split(rows_TH.index_select(0, source), padded)
        made = [self._mlp(part, weights, expert) for expert, part in enumerate(parts) if counts[expert]]
        return torch.cat(made).index_select(0, place).view(*chosen_TK.shape, -1)

    def _mlp(self, rows: Tensor, weights: ExpertWeights, expert: int) -> Tensor:
        gate, up = self._linear(rows, weights.gate_up[expert], None).chunk(2, dim=-1)
        return self._linear(F.silu(gate).mul_(up), weights.down[expert], None)
