"""The head's kernels compile for Hopper, which needs no GPU: 16 bytes of logits at a time, all in registers."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="no Triton here")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from megasharp.ops.head.kernel_launch import TUNING  # noqa: E402
from megasharp.ops.head.kernels import backward_kernel, forward_kernel  # noqa: E402

VEC = 8
CONSTANTS: dict[str, dict[str, Any]] = {
    "forward": {"TOPN": 3, "SLOTS": 4, "ENTROPY": True, "GROUPS": TUNING.forward_block // VEC, "VEC": VEC},
    "backward": {"LOGP": True, "ENTROPY": True, "TOPN": 3, "SLOTS": 4, "BLOCK": TUNING.backward_block},
}
INTEGERS = ("start", "valid", "width", "span", "tokens")


def kind(name: str) -> str:
    """The type of a kernel's argument, as `launch` passes it for bfloat16 logits."""
    if name in ("target_ptr", "id_ptr", "top_id_ptr"):
        return "*i64"
    if name in ("logits_ptr", "out_ptr"):
        return "*bf16"
    if name.endswith("_ptr"):
        return "*fp32"
    return "i32" if name.endswith("stride") or name in INTEGERS else "fp32"


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_for_hopper(which: str, tmp_path: Path) -> None:
    kernel, warps = {
        "forward": (forward_kernel, TUNING.forward_warps),
        "backward": (backward_kernel, TUNING.backward_warps),
    }[which]
    constants = CONSTANTS[which]
    names = kernel.arg_names
    # What torch's allocations and vocabularies of a multiple of 16 have.
    aligned = ("logits_ptr", "out_ptr", "row_stride", "out_stride", "span")
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else kind(name) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in names},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert len(compiled.asm["cubin"]) > 1000
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert ("st.global.v4.b32" in compiled.asm["ptx"]) == (which == "backward")
    # Where registers do not suffice, values go to the stack, in memory.
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    used = subprocess.run([tool, "-res-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True)
    assert "STACK:0 " in used.stdout and "LOCAL:0 " in used.stdout
