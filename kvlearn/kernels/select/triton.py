"""Exact selection in Triton, over integer keys of which no two are alike.

A few victims (one block) come from a bitonic top-k by one program per row and head. Many (a prompt's cut) are ranked:
each slot counts the slots that go before it, which needs no sorting and costs S comparisons a slot, a small part of
what attention over such a prompt costs.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlearn.kernels.launch import launch, padded, parameters, target
from kvlearn.kernels.select.reference import INFEASIBLE, NAN

FEW = 64  # the most victims that the top-k kernel is compiled for

LARGEST = tl.constexpr(3.4028234663852886e38)
NEVER = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # the key of a slot that does not exist


@triton.jit
def sort_keys(score, pos, protected, s, slots, s_s, p_s, r_s):
    """64-bit keys ``[SLOTS]`` in the order in which slots go, and which slots are protected or NaN.

    The upper half orders as the score does (its bits, the lower ones inverted where it is negative), with values beyond
    all finite scores for empty and protected slots; the lower half is the position, or the index of an empty slot.
    """
    inside = s < slots
    value = tl.load(score + s * s_s, mask=inside, other=0.0).to(tl.float32)
    at = tl.load(pos + s * p_s, mask=inside, other=-1)
    kept = (tl.load(protected + s * r_s, mask=inside, other=0) != 0) & (at >= 0)
    nan = (value != value) & (at >= 0)
    value = tl.where(value != value, -LARGEST, tl.minimum(tl.maximum(value, -LARGEST), LARGEST))
    value = tl.where(value == 0.0, 0.0, value)  # -0 equals 0
    bits = value.to(tl.int32, bitcast=True)
    upper = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    upper = tl.where(kept, 0x7FFFFFFF, tl.where(at < 0, -0x80000000, upper))
    lower = tl.where(at < 0, s, at)
    key = (upper.to(tl.int64) << 32) | lower.to(tl.int64)
    return tl.where(inside, key, NEVER), kept, nan


@triton.jit(do_not_specialize=["slots", "count"])
def smallest(
    score,
    pos,
    protected,
    out,
    fault,
    s_b,
    s_h,
    s_s,
    p_b,
    p_h,
    p_s,
    r_b,
    r_h,
    r_s,
    slots,
    count,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    PART: tl.constexpr,
    FEW: tl.constexpr,
    FAULT: tl.constexpr,
    NAN: tl.constexpr,
    INFEASIBLE: tl.constexpr,
):
    """The ``count`` first slots of one row and head; ``FEW`` is a power of two that holds ``count``."""
    b = (tl.program_id(0) // HEADS).to(tl.int64)
    h = (tl.program_id(0) % HEADS).to(tl.int64)
    score += b * s_b + h * s_h
    pos += b * p_b + h * p_h
    protected += b * r_b + h * r_h
    # topk takes the largest; inverting all bits turns the order round.
    first = tl.full([FEW], ~NEVER, tl.int64)
    kept_count = tl.sum(tl.zeros([FEW], tl.int32), 0)
    nan_count = tl.sum(tl.zeros([FEW], tl.int32), 0)
    for start in range(0, slots, SLOTS):
        keys, kept, nan = sort_keys(score, pos, protected, start + tl.arange(0, SLOTS), slots, s_s, p_s, r_s)
        kept_count += tl.sum(kept.to(tl.int32), 0)
        nan_count += tl.sum(nan.to(tl.int32), 0)
        first = tl.topk(tl.reshape(tl.join(first, tl.topk(~keys, FEW)), [2 * FEW]), FEW)
    first = ~first
    for start in range(0, slots, PART):
        s = start + tl.arange(0, PART)
        keys, _kept, _nan = sort_keys(score, pos, protected, s, slots, s_s, p_s, r_s)
        rank = tl.sum((first[None, :] < keys[:, None]).to(tl.int32), 1)
        tl.store(out + tl.program_id(0) * count + rank, s.to(tl.int64), mask=(rank < count) & (s < slots))
    if FAULT:
        found = tl.where(nan_count > 0, NAN, 0) | tl.where(slots - kept_count < count, INFEASIBLE, 0)
        if found > 0:
            tl.atomic_or(fault, found)


@triton.jit(do_not_specialize=["slots", "count"])
def rank(
    score,
    pos,
    protected,
    out,
    fault,
    s_b,
    s_h,
    s_s,
    p_b,
    p_h,
    p_s,
    r_b,
    r_h,
    r_s,
    slots,
    count,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    OTHERS: tl.constexpr,
    FAULT: tl.constexpr,
    NAN: tl.constexpr,
    INFEASIBLE: tl.constexpr,
):
    """How many slots go before each slot of one tile; those among the first ``count`` are written."""
    b = (tl.program_id(1) // HEADS).to(tl.int64)
    h = (tl.program_id(1) % HEADS).to(tl.int64)
    score += b * s_b + h * s_h
    pos += b * p_b + h * p_h
    protected += b * r_b + h * r_h
    s = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    own, _kept, _nan = sort_keys(score, pos, protected, s, slots, s_s, p_s, r_s)
    before = tl.zeros([SLOTS], tl.int32)
    kept_count = tl.sum(tl.zeros([SLOTS], tl.int32), 0)
    nan_count = tl.sum(tl.zeros([SLOTS], tl.int32), 0)
    for start in range(0, slots, OTHERS):
        keys, kept, nan = sort_keys(score, pos, protected, start + tl.arange(0, OTHERS), slots, s_s, p_s, r_s)
        before += tl.sum((keys[None, :] < own[:, None]).to(tl.int32), 1)
        kept_count += tl.sum(kept.to(tl.int32), 0)
        nan_count += tl.sum(nan.to(tl.int32), 0)
    tl.store(out + (b * HEADS + h) * count + before, s.to(tl.int64), mask=(before < count) & (s < slots))
    if FAULT:
        found = tl.where(nan_count > 0, NAN, 0) | tl.where(slots - kept_count < count, INFEASIBLE, 0)
        if (found > 0) & (tl.program_id(0) == 0):
            tl.atomic_or(fault, found)


def select(score: Tensor, pos: Tensor, protected: Tensor, count: int, fault: Tensor | None, out: Tensor) -> None:
    """See :func:`kvlearn.kernels.select.select`; writes ``out``."""
    batch, heads, slots = score.shape
    if count == 0:
        return
    few = count <= FEW
    chosen = parameters(target(), "smallest" if few else "rank", "all")
    arguments = (
        score,
        pos,
        protected.view(torch.uint8),
        out,
        pos if fault is None else fault,
        *score.stride(),
        *pos.stride(),
        *protected.stride(),
        slots,
        count,
    )
    options = {
        "HEADS": heads,
        "FAULT": fault is not None,
        "NAN": NAN,
        "INFEASIBLE": INFEASIBLE,
        "num_warps": chosen["num_warps"],
    }
    if few:
        size = padded(count)
        tile = max(size, min(chosen["slots"], padded(slots)))
        launch(
            smallest,
            (batch * heads,),
            *arguments,
            SLOTS=tile,
            PART=max(16, chosen["pairs"] // size),
            FEW=size,
            **options,
        )
    else:
        tiles = -(-slots // chosen["slots"])
        launch(rank, (tiles, batch * heads), *arguments, SLOTS=chosen["slots"], OTHERS=chosen["others"], **options)
