"""Adam for machines without fused optimizers, in the convention that Megatron's checkpoints expect.

The fused optimizers (Transformer Engine's, NVIDIA apex's) keep the step count in the parameter group; torch's keeps it
beside the moments of each parameter. Megatron's fallback for torch's Adam saves its state but cannot load it
(`KeyError: 'step'` in 0.16). With the count in the group, as the fused ones have it, Megatron's own load path is right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Adam(torch.optim.Optimizer):
    """Adam with decoupled (`adam_w_mode`) or coupled weight decay, and bias correction (arXiv 1412.6980, 1711.05101).

    On a GPU one of torch's kernels updates all of a parameter at once. On a CPU its grouped operations do, whose bits
    the recorded curves have; they need memory for one more copy of the parameters.
    """

    # torch decorates these to keep them out of compiled graphs, for which it imports its compiler: a second of CPU.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        # Megatron 0.19 passes it to every Adam; it asks for CUDA graphs, which this one knows nothing of.
        assert not capturable
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        gradients = [p.grad for p in params if p.grad is not None]
        moments = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]
        self._apply(group, params, gradients, moments, squares)

    def _apply(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        gradients: list[Tensor],
        moments: list[Tensor],
        squares: list[Tensor],
    ) -> None:
        """The update itself; the group's step count is that of this step."""
        beta1, beta2 = group["betas"]
        lr, step = group["lr"], group["step"]
        if params[0].is_cuda:
            self._update_fused(group, params, gradients, moments, squares)
            return
        if group["weight_decay"] and self.adam_w_mode:
            torch._foreach_mul_(params, 1.0 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, params, alpha=group["weight_decay"]))
        torch._foreach_lerp_(moments, gradients, 1.0 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1.0 - beta2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, (1.0 - beta2**step) ** 0.5)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(params, moments, denominators, -lr / (1.0 - beta1**step))

    def _update_fused(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        gradients: list[Tensor],
        moments: list[Tensor],
        squares: list[Tensor],
    ) -> None:
        # Filled on the GPU: a number copied there would wait for all that came before.
        step = torch.full((), float(group["step"]), device=params[0].device)
        update = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        update(
            params,
            gradients,
            moments,
            squares,
            [],
            [step] * len(params),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def use_where_nothing_is_fused() -> None:
    """Make Megatron's optimizers use this Adam when neither Transformer Engine nor apex is installed."""
    import megatron.core.optimizer as optimizers
    import megatron.core.optimizer.distrib_optimizer as distributed

    if not optimizers.USING_PYTORCH_OPTIMIZER:
        return
    optimizers.Adam = Adam
    optimizers.USING_PYTORCH_OPTIMIZER = False
    distributed.Adam = Adam
    distributed.HAVE_APEX_OR_TE = True
    distributed.USING_APEX_OPTIMIZER = True
