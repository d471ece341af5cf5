"""The routers of a mixture of experts: what they choose is counted, and can be given to them.

Megatron's router asks its `router_replay` for the experts of each token. Here that is `Choice`, which returns the
experts that the engine chose while it sampled (routing replay, R3, arXiv 2510.11370), or the router's own. The weights
of the given experts are the router's present ones, so it gets gradients as without replay.

A hook before every layer hands the router the experts of the rows at hand: layers that are computed again in backward
find those of their own micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megasharp.common.records import Maximum, Mean, Metrics, MicroBatch
from megasharp.learner.packed import PackedRows

TopK = tuple[Tensor, Tensor]
# A grouped product of a GPU's reads 16 bytes at once: rows of so many numbers in bfloat16.
_ALIGNED = 8


def route_without_transformer_engine() -> None:
    """Let Megatron 0.16's routers ask for Transformer Engine's matrix product where that is not installed."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """Megatron's experts with the same parameters, and one grouped product of torch's for all of them on this rank.

    For GPUs without Transformer Engine, whose own grouped experts are taken where it is. Not measured on a GPU.
    """

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Compute each expert on its rows: `hidden` [rows, H], in order of experts, and the rows' `weights`."""
        ends = tokens_per_expert.to(hidden.device).cumsum(0).to(torch.int32)
        gate, up = self._product("linear_fc1", hidden, ends).chunk(2, dim=-1)
        inner = F.silu(gate) * up * weights[:, None].to(hidden.dtype)
        return self._product("linear_fc2", inner, ends), None

    def _product(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiply runs of rows, which end at `ends`, by the experts' weights of one map.

        The weights side by side are a copy. It is made again in backward: kept until then, every layer had one.
        """
        weights = [getattr(expert, name).weight for expert in self.local_experts]
        stacked = torch.stack(weights)
        place = stacked.data_ptr()

        def pack(tensor: Tensor) -> Tensor | tuple[torch.Size, tuple[int, ...]]:
            return (tensor.shape, tensor.stride()) if tensor.data_ptr() == place else tensor

        def unpack(packed: Tensor | tuple[torch.Size, tuple[int, ...]]) -> Tensor:
            return packed if isinstance(packed, Tensor) else torch.stack(weights).detach().as_strided(*packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return F.grouped_mm(rows, stacked.transpose(1, 2), offs=ends)


def groups_products(config: TransformerConfig) -> bool:
    """Decide whether torch's grouped product computes this rank's experts: on GPUs, in bfloat16, with even sizes."""
    sizes = (config.hidden_size, config.moe_ffn_hidden_size // config.expert_tensor_parallel_size)
    even = not any(size % _ALIGNED for size in sizes)
    return bool(torch.cuda.is_available() and config.params_dtype is torch.bfloat16 and even)


class Choice:
    """The choice of a router's experts. `given` [rows, per token] (int64): those of the rows at hand, None: its own.

    `is_other` (bool, by row): the router itself would have chosen other experts than it was given.
    """

    def __init__(self) -> None:
        self.given: Tensor | None = None
        self.is_other: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., TopK] | None = None,
    ) -> TopK:
        """Return the experts' scores and numbers, both [rows, topk]; Megatron calls it by this name."""
        assert default_compute_topk is not None
        own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.given is None:
            return own
        assert self.given.shape == own[1].shape, f"experts {tuple(self.given.shape)} for {tuple(own[1].shape)}"
        self.is_other = (self.given.sort(dim=1).values != own[1].sort(dim=1).values).any(dim=1)
        return scores.gather(1, self.given), self.given


class Router(TopKRouter):  # type: ignore[misc]
    """Megatron's router with counts of its choices: rows by expert, rows, the sum of entropies (nats), rows moved.

    `is_real` (bool): the rows at hand that are no padding. `counts`: they are to be counted, once. `balance` is the
    weight of a row in the load-balancing loss; 0: there is none. Megatron's own loss is scaled for gradients that are
    divided by all tokens at the end, by each version in another way.
    """

    balance = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.choice = self.router_replay = Choice()
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self.load: Tensor | float = 0.0
        self.rows: Tensor | float = 0.0
        self.entropy: Tensor | float = 0.0
        self.moved: Tensor | float = 0.0
        self.is_real: Tensor | None = None
        self.counts = False
        self.choice.given = self.choice.is_other = None

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the experts' weights and the map of choices, both [rows, experts], of `logits` [..., experts]."""
        weights, chosen = super().routing(logits, *args, **kwargs)
        if self.is_real is not None and self.counts:
            self.counts = False
            with torch.no_grad():
                logp_PE = logits.float().view(chosen.shape).log_softmax(-1)
                self.load = self.load + (chosen & self.is_real[:, None]).sum(0)
                self.rows = self.rows + self.is_real.sum()
                self.entropy = self.entropy - ((logp_PE.exp() * logp_PE).sum(1) * self.is_real).sum()
                if self.choice.is_other is not None:
                    self.moved = self.moved + (self.choice.is_other & self.is_real).sum()
        if self.is_real is not None and self.balance and torch.is_grad_enabled():
            # This rank's part of experts * sum(share of choices * probability), over rows (arXiv 2101.03961).
            real_P1 = self.is_real[:, None]
            counts_E = (chosen & real_P1).sum(dim=0, dtype=torch.float32)
            dist.all_reduce(counts_E, group=self.tp_cp_group)
            probability_E = (logits.view(chosen.shape).softmax(-1, dtype=torch.float32) * real_P1).sum(0)
            share_E = counts_E / counts_E.sum().clamp(min=1.0)
            loss = self.balance * len(share_E) * (share_E * probability_E).sum()
            weights = MoEAuxLossAutoScaler.apply(weights, loss)
        return weights, chosen


class Routers:
    """All routers of this rank's chunks.

    `replays`: micro-batches bring the experts of their rows. `balance`: coefficient of the load-balancing loss, whose
    value is the mean over a mini-batch's rows of each micro-batch's, added up over layers.
    """

    def __init__(self, chunks: Sequence[GPTModel], replays: bool, balance: float) -> None:
        self._replays = replays
        self._config: TransformerConfig = chunks[0].config
        self._balance = balance
        self._counts_now = False
        self._layers = self._config.num_layers
        self._routers: dict[int, Router] = {
            layer.layer_number - 1: layer.mlp.router for chunk in chunks for layer in chunk.decoder.layers
        }
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                layer.register_forward_pre_hook(self._tell, with_kwargs=True)

    @property
    def balances(self) -> bool:
        """True where there is a load-balancing loss."""
        return self._balance > 0

    def _tell(self, layer: Any, args: object, kwargs: dict[str, Any]) -> None:
        """Tell a layer's router which of its rows are real, and which experts they are given."""
        rows, number = kwargs["packed_seq_params"], layer.layer_number - 1
        assert isinstance(rows, PackedRows) and rows.is_real_P is not None
        router = self._routers[number]
        # A layer that is computed again in backward has been counted in forward, where no gradient was recorded.
        again = self._config.recompute_granularity == "full" and torch.is_grad_enabled()
        router.is_real, router.counts = self._own(rows.is_real_P), self._counts_now and not again
        if self._replays:
            assert rows.experts_PLK is not None, "a micro-batch without its experts"
            router.choice.given = self._own(rows.experts_PLK[:, number]).long()

    def _own(self, values_P: Tensor) -> Tensor:
        """Return the rows that this tensor-parallel rank's routers get."""
        if not self._config.sequence_parallel:
            return values_P
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        number: int = parallel_state.get_tensor_model_parallel_rank()
        return values_P.chunk(ranks)[number]

    def begin(self, micros: Sequence[MicroBatch]) -> None:
        """Begin to count anew, before the update by a mini-batch; all ranks must call it."""
        weight, self._counts_now = 0.0, True
        if self.balances:
            real = sum(micro.rows - micro.padding for micro in micros)
            rows = torch.tensor([real], device=torch.cuda.current_device())
            dist.all_reduce(rows, group=parallel_state.get_data_parallel_group())
            weight = self._balance / float(rows)
        for router in self._routers.values():
            router.forget()
            router.balance = weight

    def metrics(self) -> Metrics:
        """Sum the counts since `begin` over all ranks, on every one of them; all must call it.

        Loads are relative to the mean of a layer's experts.
        """
        self._counts_now = False
        counts_LC = self._counts()
        for router in self._routers.values():
            router.forget()
        load_LE, (rows_L, entropy_L, moved_L) = counts_LC[:, :-3], counts_LC[:, -3:].unbind(1)
        sent_L, experts = load_LE.sum(1), load_LE.shape[1]
        share_LE = load_LE / sent_L[:, None].clamp(min=1.0)
        spread_L = -(share_LE * share_LE.clamp(min=1e-30).log()).sum(1)
        largest_L = (share_LE.max(1).values * experts).tolist()
        wanted = float(rows_L.sum()) * next(iter(self._routers.values())).topk
        found: dict[str, Mean | Maximum] = {
            "experts/load_max": Maximum(max(largest_L)),
            "experts/load_entropy": Mean(float(spread_L.exp().sum()) / experts, self._layers),
            "experts/unused": Mean(float((load_LE == 0).sum()), float(load_LE.numel())),
            "experts/router_entropy": Mean(float(entropy_L.sum()), float(rows_L.sum())),
            "experts/dropped": Mean(wanted - float(sent_L.sum()), wanted),
            **{f"experts/load_max_{layer}": Maximum(largest) for layer, largest in enumerate(largest_L)},
        }
        return {**found, "experts/moved": Mean(float(moved_L.sum()), float(rows_L.sum()))} if self._replays else found

    def _counts(self) -> Tensor:
        """Return each layer's tokens by expert, then its rows, its entropy and its moved rows: float64."""
        some = next(iter(self._routers.values()))
        width = some.config.num_moe_experts
        counts_LC = torch.zeros(self._layers, width + 3, dtype=torch.float64, device=some.weight.device)
        for layer, router in self._routers.items():
            counts_LC[layer, :width] += router.load
            counts_LC[layer, width:] = torch.stack(
                [torch.as_tensor(value).to(counts_LC) for value in (router.rows, router.entropy, router.moved)]
            )
        dist.all_reduce(counts_LC)
        return counts_LC
