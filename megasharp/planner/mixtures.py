"""Formulas of mixtures of experts: plain numbers in and out, as in `formulas`.

Every expert is taken to get as many tokens as any other. A rank's own tokens are those of its data-, context- and
tensor-parallel place; with as many tokens for every expert it computes as many copies as its own tokens send out.
Megatron-core is read in 0.16, `transformer/moe`; nothing here was measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from megasharp.config.policy import Dispatcher, PolicyConfig
from megasharp.convert.architecture import Architecture, Experts

_FP32 = 4


def expert_parameters(arch: Architecture) -> int:
    """Number of weights of all experts, without routers; 0 in a dense model."""
    experts = arch.experts
    return arch.num_layers * experts.count * 3 * arch.hidden * experts.ffn if experts else 0


def expert_flops_per_token(arch: Architecture) -> float:
    """FLOPs of a token's experts in a forward pass: 2 for each weight of the `per_token` that it goes to."""
    experts = arch.experts
    return 6.0 * arch.num_layers * experts.per_token * arch.hidden * experts.ffn if experts else 0.0


def kept_bytes_per_token(experts: Experts, hidden: int, width: int, *, etp: int = 1, on_gpu: bool) -> int:
    """Bytes that autograd keeps of one of a rank's own tokens in one layer's router and experts.

    With k experts a token, E in all, h hidden, f an expert's width:

        router        E probabilities in float32 and their mask: 5 E; of the chosen ones the softmax's output, or of all
                      E where it comes before the choice: 4 k or 4 E; numbers of experts and of rows: 16 k
        copies        inputs of experts, gathered over `etp` ranks: k h etp in `width` bytes, and weights 4 k etp
        experts       gate and up side by side, and the product that the last map multiplies: 3 k f; beside a GPU's
                      fused kernel also the product before the router's weight: k f

    Outputs of experts are not kept: the router's weights multiply the product inside an expert. Counted on a CPU at
    ep 1, as on a CPU and as on a GPU: equal to the byte. What is sent and received before it is sorted is freed.
    """
    k = experts.per_token
    router = 5 * experts.count + _FP32 * (k if experts.normalised else experts.count) + 16 * k
    return router + copied_bytes_per_token(experts, hidden, width, etp=etp, on_gpu=on_gpu)


def copied_bytes_per_token(experts: Experts, hidden: int, width: int, *, etp: int, on_gpu: bool) -> int:
    """Bytes of `kept_bytes_per_token` that are of copies in experts: they grow with the tokens that a rank is sent."""
    maps = (3 if on_gpu else 4) * experts.ffn
    return experts.per_token * (etp * (width * hidden + _FP32) + width * maps)


def computes_experts_again(split: PolicyConfig) -> bool:
    """Return whether backward repeats a layer's routing, exchange and experts."""
    return split.recompute == "full" or (split.recompute == "selective" and "mlp" in split.recompute_modules)


def dispatched_bytes_per_token(
    experts: Experts, hidden: int, width: int, dispatcher: Dispatcher, *, ep: int, etp: int
) -> int:
    """Bytes that the exchange of one layer holds at once for one of a rank's own tokens, beside what is kept.

    Copies that were sent and received, outputs of experts, and these on their way back (`MoELayer.forward`): 4 k h, of
    which `etp` ranks' copies three times. allgather has the tokens of all ranks, outputs for all of them, and these in
    float32.
    """
    k, ranks = experts.per_token, ep * etp
    if dispatcher == "allgather":
        return hidden * (ranks * (2 * width + _FP32) + k * etp * width)
    return hidden * width * k * (1 + 3 * etp)


def exchanged_bytes_per_token(
    experts: Experts, hidden: int, width: int, dispatcher: Dispatcher, *, ep: int, etp: int
) -> float:
    """Bytes that a rank receives for one of its own tokens in one layer's forward pass; backward moves as many.

    Tokens go to their experts (dispatch), outputs come back (combine).

        alltoall      k copies there and back, (ep - 1) / ep of them from other ranks; over `etp` ranks copies are
                      gathered, and outputs reduced in float32, the type of the router's weights
        allgather     tokens, probabilities and mask of all other ranks; outputs reduced in float32
        deepep        there and back one copy for each rank that has any of the token's experts
    """
    k, ranks = experts.per_token, ep * etp
    if dispatcher == "allgather":
        return (ranks - 1) * (hidden * (width + _FP32) + 5 * experts.count)
    if dispatcher == "deepep":
        with_experts = ep * (1.0 - (1.0 - 1.0 / ep) ** k)
        return 2.0 * width * hidden * with_experts * etp * (ranks - 1) / ranks
    return k * hidden * (2.0 * width * (ep - 1) / ep + (width + _FP32) * (etp - 1))


def weights_read(weights: float, experts: float, share: float, tokens: float) -> float:
    """Bytes of `weights` that a decode step of `tokens` reads; of its `experts` those that any token goes to.

    Each token goes to a `share` of the experts, independently of the others: of 128 experts 8 tokens with 8 each read
    40 %, 64 tokens 98 %.
    """
    unread: float = (1.0 - share) ** tokens
    return weights - experts * unread


def replay_bytes_per_token(arch: Architecture) -> int:
    """Bytes of a token's route: the number of each of its experts in each layer."""
    return arch.routing.bytes_per_token if arch.routing else 0


def faults_of_layout(policy: PolicyConfig) -> Iterator[str]:
    """Yield why a mixture of experts cannot be trained under this split, in words that name keys."""
    layout, keys = policy.layout, policy.experts
    if keys.dispatcher == "allgather" and layout.tp * layout.cp % (layout.ep * layout.etp):
        yield (
            "policy.experts.dispatcher=allgather needs ranks with equally many tokens, and micro-batches of "
            f"data-parallel ranks differ: policy.ep={layout.ep} x policy.etp={layout.etp} must divide tp x cp = "
            f"{layout.tp * layout.cp}; set it to alltoall"
        )
    if keys.dispatcher == "deepep" and layout.ep * layout.etp == 1:
        yield (
            "policy.experts.dispatcher=deepep exchanges tokens between ranks, but policy.ep and policy.etp are 1: set "
            "it to alltoall"
        )
    asked = "replay" if keys.replay else "balance_loss" if keys.balance_loss else None
    if asked and policy.recompute == "selective" and "mlp" in policy.recompute_modules and policy.pp > 1:
        yield (
            f"policy.experts.{asked} with policy.recompute=selective and policy.pp above 1: experts computed again "
            "would be another micro-batch's; set policy.recompute to full or none"
        )
