"""Column mass in Triton: a program keeps one tile of keys and passes over the blocks of queries."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvlearn.kernels.column_mass.reference import block_bounds
from kvlearn.kernels.decode_attention.triton import LOG2_E, scores
from kvlearn.kernels.launch import dim_family, dot_precision, launch, padded, parameters, target
from kvlearn.shapes import GroupReduce


@triton.jit
def load_keys(key, key_pos, b, h, s, k_b, k_h, k_s, p_b, p_h, p_s, slots, D: tl.constexpr, DP: tl.constexpr):
    """Keys ``[SLOTS, DP]`` and their positions; a slot that holds nothing is not read and has position -1."""
    pos = tl.load(key_pos + b * p_b + h * p_h + s * p_s, mask=s < slots, other=-1)
    d = tl.arange(0, DP)
    k = tl.load(
        key + b * k_b + h * k_h + s[:, None] * k_s + d[None, :], mask=(pos >= 0)[:, None] & (d < D)[None, :], other=0.0
    )
    return k, pos


@triton.jit
def first_block(tile_start, own, first, block):
    """The first block that ends after the tile's first key was written; ``own`` keys came before the call."""
    return tl.cdiv(tl.maximum(tile_start + 1 - own - first, 0), block)


@triton.jit
def block_mass(
    k,
    pos,
    query,
    lse,
    query_pos,
    b,
    h,
    start,
    end,
    queries,
    q_b,
    q_h,
    q_c,
    l_b,
    l_h,
    l_c,
    qp_b,
    qp_c,
    scale,
    softcap,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    MAX: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Mass that keys receive from queries ``start..end``.

    Returns:
        Sum and maximum over the queries ``[SLOTS]``, how many queries are tokens, the newest position among them, and
        the mass given by query ``queries - 1`` ``[SLOTS]``.
    """
    # Slots are the rows of the product, so that a thread holds few of them and as few of each slot's statistics.
    d = tl.arange(0, DP)
    total = tl.zeros([SLOTS], tl.float32)
    peak = tl.zeros([SLOTS], tl.float32)
    last = tl.zeros([SLOTS], tl.float32)
    count = tl.sum(tl.zeros([ROWS], tl.int32), 0)
    newest = tl.max(tl.full([ROWS], -1, tl.int32), 0)
    for row in range(start, end, ROWS):
        c = row + tl.arange(0, ROWS)
        at = tl.load(query_pos + b * qp_b + c * qp_c, mask=c < end, other=-1)
        count += tl.sum((at >= 0).to(tl.int32), 0)
        newest = tl.maximum(newest, tl.max(at, 0))
        seen = (pos >= 0)[:, None] & (pos[:, None] <= at[None, :])
        mass = tl.zeros([SLOTS, ROWS], tl.float32)
        for g in range(GROUP):
            head = h * GROUP + g
            q = tl.load(
                query + b * q_b + head * q_h + c[:, None] * q_c + d[None, :],
                mask=(c < end)[:, None] & (d < D)[None, :],
                other=0.0,
            )
            norm = tl.load(lse + b * l_b + head * l_h + c * l_c, mask=c < end, other=0.0)
            logits = scores(k, q, scale, softcap, SOFTCAP, PRECISION) - (norm * LOG2_E)[None, :]
            share = tl.exp2(tl.where(seen, logits, float("-inf")))
            mass = tl.maximum(mass, share) if MAX else mass + share
        if not MAX:
            mass = mass / GROUP
        total += tl.sum(mass, 1)
        peak = tl.maximum(peak, tl.max(mass, 1))
        last += tl.sum(tl.where((c == queries - 1)[None, :], mass, 0.0), 1)
    return total, peak, count, newest, last


@triton.jit(do_not_specialize=["l_b", "l_h", "l_c", "slots", "queries", "own", "first", "from_block", "blocks"])
def record(
    query,
    lse,
    key,
    query_pos,
    key_pos,
    mean,
    peak,
    counts,
    last,
    q_b,
    q_h,
    q_c,
    l_b,
    l_h,
    l_c,
    k_b,
    k_h,
    k_s,
    qp_b,
    qp_c,
    p_b,
    p_h,
    p_s,
    batch,
    slots,
    queries,
    own,
    first,
    block,
    from_block,
    blocks,
    scale,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    MAX: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Mean and maximum mass of one tile of keys, block by block."""
    tile_start = tl.program_id(0) * SLOTS
    b = (tl.program_id(1) // HEADS).to(tl.int64)
    h = (tl.program_id(1) % HEADS).to(tl.int64)
    s = tile_start + tl.arange(0, SLOTS)
    k, pos = load_keys(key, key_pos, b, h, s, k_b, k_h, k_s, p_b, p_h, p_s, slots, D, DP)
    last_mass = tl.zeros([SLOTS], tl.float32)
    begin = tl.minimum(tl.maximum(first_block(tile_start, own, first, block), from_block), blocks)
    nothing = tl.zeros([SLOTS], tl.float32)
    at = (b * HEADS + h) * slots + s
    step = tl.num_programs(1).to(tl.int64) * slots
    for _n in range(from_block, begin):
        tl.store(mean + at, nothing, mask=s < slots)
        tl.store(peak + at, nothing, mask=s < slots)
        at += step
    for n in range(begin, blocks):
        end = first + n * block
        total, most, count, _newest, last_mass = block_mass(
            k, pos, query, lse, query_pos, b, h, tl.maximum(end - block, 0), end, queries, q_b, q_h, q_c, l_b, l_h, l_c,
            qp_b, qp_c, scale, softcap, GROUP, D, DP, ROWS, SLOTS, MAX, SOFTCAP, PRECISION,
        )  # fmt: skip
        tl.store(mean + at, total / tl.maximum(count, 1).to(tl.float32), mask=s < slots)
        tl.store(peak + at, most, mask=s < slots)
        at += step
        if (h == 0) & (tile_start == 0):
            tl.store(counts + (n - from_block) * batch + b, count.to(tl.int64))
    tl.store(last + (b * HEADS + h) * slots + s, last_mass, mask=s < slots)


def column_mass(
    query: Tensor,
    lse: Tensor,
    key: Tensor,
    query_pos: Tensor,
    key_pos: Tensor,
    scale: float,
    block: int,
    softcap: float | None,
    group_reduce: GroupReduce,
    only_last: bool,
    own_keys_last: bool,
    mean: Tensor,
    peak: Tensor,
    counts: Tensor,
    last: Tensor,
) -> None:
    """See :func:`kvlearn.kernels.column_mass.column_mass`; writes the last four arguments."""
    batch, heads, slots, dim = key.shape
    queries = query.shape[2]
    bounds = block_bounds(queries, block)
    chosen = parameters(target(), "mass", dim_family(dim, query.dtype))
    launch(
        record,
        (-(-slots // chosen["slots"]), batch * heads),
        query,
        lse,
        key,
        query_pos,
        key_pos,
        mean,
        peak,
        counts,
        last,
        *query.stride()[:3],
        *lse.stride(),
        *key.stride()[:3],
        *query_pos.stride(),
        *key_pos.expand(batch, heads, slots).stride(),
        batch,
        slots,
        queries,
        slots - queries if own_keys_last else slots,
        bounds[0][1],
        block,
        len(bounds) - 1 if only_last else 0,
        len(bounds),
        scale,
        1.0 if softcap is None else softcap,
        HEADS=heads,
        GROUP=query.shape[1] // heads,
        D=dim,
        DP=padded(dim),
        ROWS=min(chosen["queries"], padded(block)),
        SLOTS=chosen["slots"],
        MAX=group_reduce == "max",
        SOFTCAP=softcap is not None,
        PRECISION=dot_precision(query.dtype, dim),
        num_warps=chosen["num_warps"],
        num_stages=chosen["num_stages"],
    )
