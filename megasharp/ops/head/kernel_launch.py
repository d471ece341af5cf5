"""The two passes over a shard's logits as Triton kernels: their limits, their launch and the sizes of their tiles.

Imported only where the kernels are used. On a CPU they run under Triton's interpreter (TRITON_INTERPRET=1 before the
first import of triton), which is how they are tested there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from megasharp.ops.head.kernels import backward_kernel, forward_kernel
from megasharp.ops.head.records import Arithmetic, Incoming, Request, ShardPart, Softmax, best, rescaled

MOST_CANDIDATES = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Columns are int32 in the kernels. Splits of a row are rounded up to tiles, and so end below 2**31.
_MOST_COLUMNS = 2**30
_LOG2E = 1.0 / math.log(2.0)


@dataclass(slots=True)
class Tuning:
    """Columns a tile and warps a program, forward and backward, and the least number of programs of a launch.

    Not measured on a GPU yet; chosen by counting. At full memory speed a Hopper multiprocessor has about 15
    instructions for each bfloat16 logit it reads; the forward kernel's machine code has 12, the search for candidates
    left out. One warp a program reduces a tile by shuffles alone, and needs 95 registers a thread for 1,024 columns: 21
    programs fit, whose next tiles are 42 KB on their way. Backward has no reduction and twice the bytes: four warps,
    two loads a thread. A thread must have 8 columns of a tile or more. `tools/bench_head.py --tune` tries others.
    """

    forward_block: int = 1024
    forward_warps: int = 1
    backward_block: int = 2048
    backward_warps: int = 4
    programs: int = 2112


TUNING = Tuning()


def why_not(logits_TVp: Tensor, topn: int) -> str | None:
    """Return the reason why the kernels cannot read these logits; None where they can."""
    if logits_TVp.dtype not in _DTYPES:
        return f"the kernels read float32, bfloat16 and float16, not {logits_TVp.dtype}"
    if topn > MOST_CANDIDATES:
        return f"topn = {topn}: the kernels keep at most {MOST_CANDIDATES} candidates"
    if logits_TVp.stride(1) != 1 and logits_TVp.shape[1] > 1:
        return "each token's logits must be contiguous"
    if logits_TVp.shape[1] > _MOST_COLUMNS:
        return f"more than {_MOST_COLUMNS} columns"
    if not logits_TVp.is_cuda and isinstance(forward_kernel, triton.runtime.JITFunction):
        return "logits on a CPU need Triton's interpreter: TRITON_INTERPRET=1"
    return None


def part(logits_TVp: Tensor, target_T: Tensor, request: Request) -> ShardPart:
    """Compute the shard's sums and candidates (`ShardPart`) in one read."""
    tokens, topn, shard = logits_TVp.shape[0], request.topn, request.shard
    vec = 16 // logits_TVp.element_size()
    splits, span = _split(tokens, shard.valid, TUNING.forward_block)

    def results(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(splits, tokens, *shape, dtype=dtype, device=logits_TVp.device)

    peak_ST, total_ST, own_T = results(), results(), results()[0]
    weighted_ST = results() if request.entropy else None
    logit_STN = results(topn) if topn else None
    id_STN = results(topn, dtype=torch.int64) if topn else None
    if tokens:
        forward_kernel[(tokens, splits)](
            logits_TVp,
            target_T,
            peak_ST,
            total_ST,
            _pointer(weighted_ST, peak_ST),
            own_T,
            _pointer(logit_STN, peak_ST),
            _pointer(id_STN, target_T),
            logits_TVp.stride(0),
            target_T.stride(0),
            tokens,
            shard.start,
            shard.valid,
            span,
            _LOG2E / request.temperature,
            TOPN=topn,
            SLOTS=triton.next_power_of_2(max(topn, 1)),
            ENTROPY=request.entropy,
            GROUPS=max(TUNING.forward_block // vec, 1),
            VEC=vec,
            num_warps=TUNING.forward_warps,
        )
    return _joined(peak_ST, total_ST, weighted_ST, own_T, logit_STN, id_STN, request)


def gradient(
    out_TVp: Tensor, logits_TVp: Tensor, target_T: Tensor, softmax: Softmax, incoming: Incoming, request: Request
) -> None:
    """Write the loss's gradient by the logits into `out_TVp`, which may be the logits themselves, in one pass."""
    tokens, width = logits_TVp.shape
    if not tokens or not width:
        return
    splits, span = _split(tokens, width, TUNING.backward_block)
    topn = request.topn if incoming.topn_TN is not None else 0
    unused = softmax.max_T
    ids_TN = softmax.topn_id_TN if topn else None
    backward_kernel[(tokens, splits)](
        out_TVp,
        logits_TVp,
        target_T,
        softmax.max_T,
        softmax.log_sum_T,
        _pointer(softmax.entropy_T, unused),
        _pointer(ids_TN, target_T),
        _pointer(incoming.logp_T, unused),
        _pointer(incoming.entropy_T, unused),
        _pointer(incoming.topn_TN, unused),
        out_TVp.stride(0),
        logits_TVp.stride(0),
        target_T.stride(0),
        0 if ids_TN is None else ids_TN.stride(0),
        0 if incoming.logp_T is None else incoming.logp_T.stride(0),
        0 if incoming.entropy_T is None else incoming.entropy_T.stride(0),
        *((0, 0) if incoming.topn_TN is None else incoming.topn_TN.stride()),
        request.shard.start,
        request.shard.valid,
        width,
        span,
        _LOG2E / request.temperature,
        1.0 / request.temperature,
        LOGP=incoming.logp_T is not None,
        ENTROPY=incoming.entropy_T is not None,
        TOPN=topn,
        SLOTS=triton.next_power_of_2(max(topn, 1)),
        BLOCK=TUNING.backward_block,
        num_warps=TUNING.backward_warps,
    )


TRITON = Arithmetic(part, gradient)


def _split(tokens: int, columns: int, block: int) -> tuple[int, int]:
    """Return the number of programs that share a row, and the columns, whole tiles, that each has.

    Rows are the grid's first dimension, which holds 2^31 - 1; splits the second, which holds 65,535 and never gets
    there: there are more only where rows are few.
    """
    tiles = max(triton.cdiv(columns, block), 1)
    splits = min(triton.cdiv(TUNING.programs, max(tokens, 1)), tiles)
    tiles_each = triton.cdiv(tiles, splits)
    return triton.cdiv(tiles, tiles_each), tiles_each * block


def _pointer(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """Return the tensor or a stand-in: a kernel's argument must be some tensor, even where its code is left out."""
    return unused if tensor is None else tensor


def _joined(
    peak_ST: Tensor,
    total_ST: Tensor,
    weighted_ST: Tensor | None,
    own_T: Tensor,
    logit_STN: Tensor | None,
    id_STN: Tensor | None,
    request: Request,
) -> ShardPart:
    """Join the splits of a shard's rows, by the arithmetic that joins shards."""
    if len(peak_ST) == 1:
        weighted_T = None if weighted_ST is None else weighted_ST[0]
        logit_TN, id_TN = (None, None) if logit_STN is None or id_STN is None else (logit_STN[0], id_STN[0])
        return ShardPart(peak_ST[0], total_ST[0], weighted_T, own_T, logit_TN, id_TN)
    peak_T = peak_ST.amax(0)
    splits = ShardPart(peak_ST, total_ST, weighted_ST, own_T, None, None)
    total_ST, weighted_ST = rescaled(splits, peak_T.masked_fill(peak_T == -math.inf, 0), request.temperature)
    weighted_T = None if weighted_ST is None else weighted_ST.sum(0)
    logit_TN = id_TN = None
    if logit_STN is not None and id_STN is not None:
        logit_TN, id_TN = best(_side_by_side(logit_STN), _side_by_side(id_STN), request.topn)
    return ShardPart(peak_T, total_ST.sum(0), weighted_T, own_T, logit_TN, id_TN)


def _side_by_side(x_STN: Tensor) -> Tensor:
    """Return the candidates of all splits of a token in one row: [T, splits * N]."""
    splits, tokens, candidates = x_STN.shape
    return x_STN.transpose(0, 1).reshape(tokens, splits * candidates)
