# mypy: ignore-errors
"""The head's two Triton kernels: one read of the logits forward, one read and one write backward.

A program has a row, or a span of a row's columns, and goes through it in tiles of [GROUPS, VEC] columns. VEC columns
are 16 bytes, which one thread loads at once; the next tile is on its way while one is worked on. Whole tiles are
loaded without a mask, because a mask that ends anywhere would split the loads.

Forward, after a tile: the largest logit so far, the sum of exponentials relative to it (kept per group of a tile, so
that threads meet once a row), the sum weighted with the exponents, and the best TOPN columns. A tile costs a handful
of operations a logit; sums are rescaled and candidates looked for only when the tile's largest logit asks for it,
which after the first tiles is rare. A candidate is one int64: the logit's bits, turned so that they order as integers,
over the inverted column, so that ties go to the lowest id and -inf is a value like any other.

Exponentials are of base 2 with log2(e) / temperature in `scale`. Offsets of rows are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

# 2 ** this is 0, and unlike -inf it may be multiplied by that 0.
_VANISHED = tl.constexpr(-1.0e4)
_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)
_NO_KEY = tl.constexpr(-(2**31))
_NO_ID = tl.constexpr(2**53 - 1)
_LAST_COLUMN = tl.constexpr(2**31 - 1)
_LEAST = tl.constexpr(-(2**63))
_MOST = tl.constexpr(2**63 - 1)


@triton.jit
def _ordered(x):
    """Turn float32 into int32 of the same order; the two zeros become one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(key):
    """Undo `_ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _candidates_of(row_ptr, columns, end):
    """Return the candidates of the row's columns; those beyond `end` are below all."""
    logits = tl.load(row_ptr + columns, mask=columns < end, other=0.0).to(tl.float32)
    candidates = (_ordered(logits).to(tl.int64) << 32) | (columns ^ _LAST_COLUMN).to(tl.int64)
    return tl.where(columns < end, candidates, _LEAST)


@triton.jit
def _add_candidates(row_ptr, group_peaks, at, end, best, least, GROUPS: tl.constexpr, VEC: tl.constexpr):
    """Replace the worst of `best` by what the tile has above it, the best first.

    Only the groups' largest logits are searched; the columns of the group found are loaded once more, from a cache.
    Holding the tile's columns and bits instead took 100 registers a thread more.
    """
    groups = tl.arange(0, GROUPS)
    inside = tl.arange(0, VEC)
    keys = tl.where(at + groups * VEC < end, _ordered(group_peaks), _NO_KEY)
    top = tl.max(keys, axis=0)
    last = tl.full((), _MOST, tl.int64)
    while top > least:
        group = tl.min(tl.where(keys == top, groups, GROUPS), axis=0)
        found = _candidates_of(row_ptr, at + group * VEC + inside, end)
        # What was taken of this tile is not below the last one taken.
        last = tl.max(tl.where(found < last, found, _LEAST), axis=0)
        best = tl.where(best == tl.min(best, axis=0), last, best)
        least = (tl.min(best, axis=0) >> 32).to(tl.int32)
        next_key = (tl.max(tl.where(found < last, found, _LEAST), axis=0) >> 32).to(tl.int32)
        keys = tl.where(groups == group, next_key, keys)
        top = tl.max(keys, axis=0)
    return best, least


@triton.jit
def _absorb(x, row_ptr, at, end, peak, total, weighted, best, least, scale,
            TOPN: tl.constexpr, ENTROPY: tl.constexpr, GROUPS: tl.constexpr, VEC: tl.constexpr):  # fmt: skip
    """Add a tile to the row's state. `x` is float32, -inf beyond `end`; NaN passes into the sums."""
    group_peaks = tl.max(x, axis=1)
    tile_peak = tl.max(group_peaks, axis=0)
    if tile_peak > peak:
        down = tl.maximum((peak - tile_peak) * scale, _VANISHED)
        factor = tl.exp2(down)
        if ENTROPY:
            weighted = (weighted + total * down) * factor
        total = total * factor
        peak = tile_peak
    exponent = (x - tl.where(peak == float("-inf"), 0.0, peak)) * scale
    power = tl.exp2(exponent)
    total += tl.sum(power, axis=1)
    if ENTROPY:
        weighted += tl.sum(power * tl.maximum(exponent, _VANISHED), axis=1)
    if TOPN > 0:  # noqa: SIM102
        if _ordered(tile_peak) > least:
            best, least = _add_candidates(row_ptr, group_peaks, at, end, best, least, GROUPS, VEC)
    return peak, total, weighted, best, least


@triton.jit
def _store_candidates(best, slots, start, logit_ptr, id_ptr, TOPN: tl.constexpr):
    """Store the candidates, best first. A slot that no column filled is -inf with `_NO_ID`."""
    left = tl.where(slots < TOPN, best, _LEAST)
    for n in tl.static_range(TOPN):
        top = tl.max(left, axis=0)
        left = tl.where(left == top, _LEAST, left)
        key = (top >> 32).to(tl.int32)
        column = (top & 0xFFFFFFFF) ^ _LAST_COLUMN
        tl.store(logit_ptr + n, tl.where(key == _NO_KEY, float("-inf"), _unordered(key)))
        tl.store(id_ptr + n, tl.where(key == _NO_KEY, _NO_ID, column + start))


@triton.jit
def forward_kernel(
    logits_ptr,
    target_ptr,
    peak_ptr,
    total_ptr,
    weighted_ptr,
    own_ptr,
    top_logit_ptr,
    top_id_ptr,
    row_stride,
    target_stride,
    tokens,
    start,
    valid,
    span,
    scale,
    TOPN: tl.constexpr,
    SLOTS: tl.constexpr,
    ENTROPY: tl.constexpr,
    GROUPS: tl.constexpr,
    VEC: tl.constexpr,
):
    """Grid (tokens, splits): the part of columns [split * span, + span) of a row, into [splits, tokens] results."""
    BLOCK: tl.constexpr = GROUPS * VEC
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row_ptr = logits_ptr + row * row_stride
    begin = split * span
    end = tl.minimum(begin + span, valid)
    whole_end = begin + (end - begin) // BLOCK * BLOCK
    tile = tl.arange(0, GROUPS)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    slots = tl.arange(0, SLOTS)

    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((GROUPS,), tl.float32)
    weighted = tl.zeros((GROUPS,), tl.float32)
    # Slots beyond TOPN are never the worst; the others begin different, so that one at a time is replaced.
    best = tl.where(slots < TOPN, tl.full((SLOTS,), _LEAST, tl.int64) + slots, _MOST)
    least = tl.full((), _NO_KEY, tl.int32)

    coming = tl.load(row_ptr + begin + tile, mask=begin + tile < whole_end, other=0.0)
    for at in range(begin, whole_end, BLOCK):
        x = coming.to(tl.float32)
        coming = tl.load(row_ptr + tl.minimum(at + BLOCK, whole_end - BLOCK) + tile)
        peak, total, weighted, best, least = _absorb(
            x, row_ptr, at, end, peak, total, weighted, best, least, scale, TOPN, ENTROPY, GROUPS, VEC
        )
    if whole_end < end:
        columns = whole_end + tile
        x = tl.load(row_ptr + columns, mask=columns < end, other=float("-inf")).to(tl.float32)
        peak, total, weighted, best, least = _absorb(
            x, row_ptr, whole_end, end, peak, total, weighted, best, least, scale, TOPN, ENTROPY, GROUPS, VEC
        )

    result = split.to(tl.int64) * tokens + row
    tl.store(peak_ptr + result, peak)
    tl.store(total_ptr + result, tl.sum(total, axis=0))
    if ENTROPY:
        tl.store(weighted_ptr + result, tl.sum(weighted, axis=0) * _LN2)
    if TOPN > 0:
        _store_candidates(best, slots, start, top_logit_ptr + result * TOPN, top_id_ptr + result * TOPN, TOPN)
    if split == 0:
        column = tl.load(target_ptr + row * target_stride) - start
        owned = (column >= 0) & (column < valid)
        tl.store(own_ptr + row, tl.load(row_ptr + column, mask=owned, other=0.0).to(tl.float32))


@triton.jit
def _add_sparse(dz, columns, at, target, target_grad, ids, id_ptr, grad_ptr, grad_stride, start, inverse,
                LOGP: tl.constexpr, TOPN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Add the target's and the candidates' own terms, in the few tiles that have them."""
    if LOGP:  # noqa: SIM102
        # The outer condition is decided when it is compiled, the inner one for each tile.
        if (target >= at) & (target < at + BLOCK):
            dz += tl.where(columns == target, target_grad * inverse, 0.0)
    if TOPN > 0:  # noqa: SIM102
        if tl.max(((ids >= at) & (ids < at + BLOCK)).to(tl.int32), axis=0) > 0:
            for n in tl.static_range(TOPN):
                column = tl.load(id_ptr + n) - start
                dz += tl.where(columns == column, tl.load(grad_ptr + n * grad_stride) * inverse, 0.0)
    return dz


@triton.jit
def _dense(z, peak, log2_sum, constant, slope, scale, ENTROPY: tl.constexpr):
    """Return p (constant + slope log2 p), the part of the gradient that every column has."""
    log2_p = (z.to(tl.float32) - peak) * scale - log2_sum
    if ENTROPY:
        return tl.exp2(log2_p) * (constant + slope * tl.maximum(log2_p, _VANISHED))
    return tl.exp2(log2_p) * constant


@triton.jit
def backward_kernel(
    out_ptr,
    logits_ptr,
    target_ptr,
    peak_ptr,
    log_sum_ptr,
    entropy_ptr,
    id_ptr,
    logp_grad_ptr,
    entropy_grad_ptr,
    topn_grad_ptr,
    out_stride,
    row_stride,
    target_stride,
    id_stride,
    logp_grad_stride,
    entropy_grad_stride,
    topn_grad_row_stride,
    topn_grad_stride,
    start,
    valid,
    width,
    span,
    scale,
    inverse,
    LOGP: tl.constexpr,
    ENTROPY: tl.constexpr,
    TOPN: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (tokens, splits): the gradient in columns [split * span, + span) of a row; `out` may be the logits.

    A tile is loaded whole before any of it is stored: neither a warp's load nor its store has a lane twice (BLOCK is at
    least what the threads hold at once).
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    out_row_ptr = out_ptr + row * out_stride
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, width)
    tile = tl.arange(0, BLOCK)
    slots = tl.arange(0, SLOTS)

    peak = tl.load(peak_ptr + row)
    log2_sum = tl.load(log_sum_ptr + row) * _LOG2E
    target = tl.load(target_ptr + row * target_stride) - start
    incoming = tl.zeros((), tl.float32)
    target_grad = tl.zeros((), tl.float32)
    if LOGP:
        target_grad = tl.load(logp_grad_ptr + row * logp_grad_stride)
        incoming += target_grad
    id_row_ptr = id_ptr
    grad_row_ptr = topn_grad_ptr
    ids = tl.full((SLOTS,), -1, tl.int64)
    if TOPN > 0:
        id_row_ptr = id_ptr + row * id_stride
        grad_row_ptr = topn_grad_ptr + row * topn_grad_row_stride
        ids = tl.load(id_row_ptr + slots, mask=slots < TOPN, other=-1) - start
        incoming += tl.sum(tl.load(grad_row_ptr + slots * topn_grad_stride, mask=slots < TOPN, other=0.0), axis=0)
    slope = tl.zeros((), tl.float32)
    if ENTROPY:
        entropy_grad = tl.load(entropy_grad_ptr + row * entropy_grad_stride)
        incoming += entropy_grad * tl.load(entropy_ptr + row)
        slope = -entropy_grad * inverse * _LN2
    constant = -incoming * inverse

    whole_end = begin + tl.maximum(tl.minimum(end, valid) - begin, 0) // BLOCK * BLOCK
    for at in range(begin, whole_end, BLOCK):
        columns = at + tile
        dz = _dense(tl.load(row_ptr + columns), peak, log2_sum, constant, slope, scale, ENTROPY)
        dz = _add_sparse(dz, columns, at, target, target_grad, ids, id_row_ptr, grad_row_ptr, topn_grad_stride,
                         start, inverse, LOGP, TOPN, BLOCK)  # fmt: skip
        tl.store(out_row_ptr + columns, dz.to(out_ptr.dtype.element_ty))
    # The rest, padding among it.
    for at in range(whole_end, end, BLOCK):
        columns = at + tile
        z = tl.load(row_ptr + columns, mask=columns < tl.minimum(end, valid), other=float("-inf"))
        dz = _dense(z, peak, log2_sum, constant, slope, scale, ENTROPY)
        dz = _add_sparse(dz, columns, at, target, target_grad, ids, id_row_ptr, grad_row_ptr, topn_grad_stride,
                         start, inverse, LOGP, TOPN, BLOCK)  # fmt: skip
        dz = tl.where(columns < valid, dz, 0.0)
        tl.store(out_row_ptr + columns, dz.to(out_ptr.dtype.element_ty), mask=columns < end)
