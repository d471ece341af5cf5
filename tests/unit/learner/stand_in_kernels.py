"""Stand-ins, for tests only, for the kernels of flash_attn_3, flash-attn-4 and Transformer Engine, which need CUDA.

They have the interfaces of `kernel_interfaces.py`, compute in float32 as `stand_in_flash.py` does, and record how they
were called. torch's own registration of FA3 and FA4 is real: `registered` puts it under the CPU's operators too, and
lets its checks of the device see a Hopper GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import kernel_interfaces
import pytest
import stand_in_flash
import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import _fa3, _fa4

from megasharp.learner import attention_setup, engine_attention, flash_varlen
from megasharp.learner.flash_varlen import VarlenPlan
from megasharp.ops.attention_kernels import KernelName

Call = dict[str, Any]
ENGINE_LAYERS = Path(__file__).parents[2] / "stand_ins" / "transformer_engine" / "pytorch" / "layers.py"


class Recorded(list[Call]):
    """The arguments of each call by name, of those that were given."""

    def bind(self, names: str, args: tuple[Any, ...], kwargs: Call) -> Call:
        """Bind a call to parameters, as Python would: a name that is not there raises TypeError."""
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in names.split()]
        self.append(dict(Signature(parameters).bind(*args, **kwargs).arguments))
        return self[-1]


def attended(call: Call, causal: bool, scale: float | None, left: int | None, right: int | None) -> tuple[Tensor, ...]:
    """Forward, of bfloat16 stretches: the output, and log-sum-exps in float32."""
    query, key, value = (call[name] for name in ("q", "k", "v"))
    plan = plan_of(call, causal, left, right)
    out, log_sum, *_ = stand_in_flash.forward(query.float(), key.float(), value.float(), plan, scale)
    return out.to(query.dtype), log_sum


def gradients(call: Call, causal: bool, scale: float | None, left: int | None, right: int | None) -> list[Tensor]:
    """Backward: the gradients of queries, keys and values."""
    names = ("dout", "q", "k", "v", "out")
    gradient, query, key, value, out = (call[name].float() for name in names)
    log_sum = call["lse"] if "lse" in call else call["softmax_lse"]
    plan = plan_of(call, causal, left, right)
    found = stand_in_flash.backward(gradient, query, key, value, out, [log_sum], plan, scale)
    return [x.to(call["q"].dtype) for x in found]


def plan_of(call: Call, causal: bool, left: int | None, right: int | None) -> VarlenPlan:
    """The kernels' rules: a causal mask and a window are aligned at the end of the keys; None and -1 are no limit."""
    left, right = (None if side is None or side < 0 else side for side in (left, right))
    right = 0 if causal else right
    assert right in (0, None) and (left is None or right == 0)
    starts = [call[name] for name in ("cu_seqlens_q", "cu_seqlens_k")]
    assert all(start.dtype is torch.int32 for start in starts)
    most = [int(start.diff().max()) for start in starts]
    window = None if left is None else left + 1
    return VarlenPlan(starts[0], starts[1], most[0], most[1], None, 0, window, None, right == 0)


@contextmanager
def registered(name: KernelName, monkeypatch: pytest.MonkeyPatch, version: str = "") -> Iterator[Recorded]:
    """Put FA3 (`fa3`) or FA4 (`fa4`, of a `version`) in place as a run does, on the CPU."""
    calls, module = Recorded(), _fa3 if name == "fa3" else _fa4
    see_hopper(module, monkeypatch)
    monkeypatch.setattr(flash_varlen, "supports", lambda query: query.dtype is torch.bfloat16)
    with torch.library._scoped_library("aten", "IMPL") as operators:
        if name == "fa3":
            packages = fa3_package(calls)
        else:
            packages = fa4_package(calls, version)
            monkeypatch.delitem(sys.modules, "megasharp.learner.fa4_interface", raising=False)
            _fa4._fa4_import_module.cache_clear()
        for path, package in packages.items():
            monkeypatch.setitem(sys.modules, path, package)
        libraries = fa3_operators(calls) if name == "fa3" else []
        attention_setup.put_in_place(name)
        put_on_cpu(operators, name)
        try:
            yield calls
        finally:
            attention_setup.put_in_place("fa2")
            for library in libraries:
                library._destroy()
            _fa4._fa4_import_module.cache_clear()


def see_hopper(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's checks see CUDA tensors on a card of capability 9.0; all else that they check stays."""
    prefix = "_fa3" if module is _fa3 else "_fa4"
    real = getattr(module, f"{prefix}_common_support_error")

    def as_cuda(x: Any) -> Any:
        return SimpleNamespace(is_cuda=True, device="cuda:0", dtype=x.dtype, dim=x.dim) if isinstance(x, Tensor) else x

    def check(query: Tensor, tensors: tuple[Tensor, ...], *rest: Any, **named: Any) -> Any:
        return real(as_cuda(query), tuple(map(as_cuda, tensors)), *rest, **named)

    monkeypatch.setattr(module, f"{prefix}_common_support_error", check)
    monkeypatch.setattr(module, "_get_device_major", lambda device: 9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def put_on_cpu(operators: Library, name: KernelName) -> None:
    """Put under the CPU's operators the functions that torch has put under CUDA's."""
    if name == "fa3":
        forward, backward = _fa3._fa3_flash_attention_forward_impl_default, _fa3._fa3_flash_attention_backward_impl
    else:
        forward, backward = _fa4._fa4_flash_attention_forward_impl, _fa4._fa4_flash_attention_backward_impl
    operators.impl("_flash_attention_forward", forward, "CPU")
    operators.impl("_flash_attention_backward", backward, "CPU")


def fa3_package(calls: Recorded) -> dict[str, ModuleType]:
    """The module whose import registers FA3's operators; here `fa3_operators` has."""
    return {"flash_attn_interface": ModuleType("flash_attn_interface")}


def fa3_operators(calls: Recorded) -> list[Library]:
    """FA3's operators, by their schemas."""
    library = Library("flash_attn_3", "DEF")
    library.define(kernel_interfaces.FA3_FORWARD)
    library.define(kernel_interfaces.FA3_BACKWARD)

    def bound(schema: str, args: tuple[Any, ...]) -> Call:
        # The dispatcher leaves out what equals its default, at the end.
        arguments = torch._C.parse_schema(f"flash_attn_3::{schema}").arguments
        given = (*args, *(argument.default_value for argument in arguments[len(args) :]))
        return calls.bind(" ".join(argument.name for argument in arguments), given, {})

    def forward(*args: Any) -> tuple[Tensor, ...]:
        call = bound(kernel_interfaces.FA3_FORWARD, args)
        sides = call.get("window_size_left"), call.get("window_size_right")
        found = attended(call, call["is_causal"], call["softmax_scale"], *sides)
        return *found, torch.empty(0), torch.empty(0)

    def backward(*args: Any) -> tuple[Tensor, ...]:
        call = bound(kernel_interfaces.FA3_BACKWARD, args)
        sides = call.get("window_size_left"), call.get("window_size_right")
        found = gradients(call, call["is_causal"], call["softmax_scale"], *sides)
        for name, gradient in zip(("dq", "dk", "dv"), found, strict=True):
            call[name].copy_(gradient)
        return tuple(torch.empty(0) for _ in range(5))

    library.impl("fwd", forward, "CPU")
    library.impl("bwd", backward, "CPU")
    return [library]


def fa4_package(calls: Recorded, version: str) -> dict[str, ModuleType]:
    """flash-attn-4 of a version, of which only the interface is there."""
    (results, backward_results), forward_names, backward_names = kernel_interfaces.FA4[version]
    package, cute, interface = (ModuleType(f"flash_attn{end}") for end in ("", ".cute", ".cute.interface"))

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        call = calls.bind(forward_names, args, kwargs)
        sides = call.get("window_size_left"), call.get("window_size_right")
        assert -1 not in sides, "to FA4 -1 is a side of a window"
        found = attended(call, call["causal"], call["softmax_scale"], *sides)
        return *found, *[None] * (results - 2)

    def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        call = calls.bind(backward_names, args, kwargs)
        sides = call.get("window_size_left"), call.get("window_size_right")
        found = gradients(call, call["causal"], call["softmax_scale"], *sides)
        assert len(found) == backward_results
        return tuple(found)

    interface._flash_attn_fwd, interface._flash_attn_bwd = forward, backward  # type: ignore[attr-defined]
    package.cute, cute.interface = cute, interface  # type: ignore[attr-defined]
    return {"flash_attn": package, "flash_attn.cute": cute, "flash_attn.cute.interface": interface}


def engine_stand_in() -> type[torch.nn.Module]:
    """Return the stand-in for Transformer Engine's module, from the package that stands for it elsewhere."""
    spec = util.spec_from_file_location("stand_in_engine_layers", ENGINE_LAYERS)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: type[torch.nn.Module] = module.DotProductAttention
    return found


class EngineAttention:
    """Transformer Engine's DotProductAttention, differentiated by autograd: records, then computes."""

    calls = Recorded()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls.bind(kernel_interfaces.ENGINE_MADE, args, kwargs)
        self.module = engine_stand_in()(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return [P, heads * head_dim]."""
        self.calls.bind(kernel_interfaces.ENGINE_CALLED, args, kwargs)
        out: Tensor = self.module(*args, **kwargs)
        return out


@contextmanager
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """Put the stand-in where Transformer Engine would be imported from."""
    package, module = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    module.DotProductAttention = EngineAttention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    monkeypatch.setattr(EngineAttention, "calls", Recorded())
    engine_attention.operator.cache_clear()
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    try:
        yield EngineAttention.calls
    finally:
        engine_attention.operator.cache_clear()
