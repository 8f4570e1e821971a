"""Attention over slots in Triton: the slots are split over programs, and a second kernel joins the parts."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlearn.kernels.decode_attention.splits import split_count
from kvlearn.kernels.launch import dim_family, dot_precision, launch, padded, parameters, target

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def scores(a, b, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Logits of ``a`` ``[M, DP]`` and ``b`` ``[N, DP]``, one the queries and one the keys, in units of log 2."""
    logits = tl.dot(a, tl.trans(b), input_precision=PRECISION) * scale
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which saturates without overflow
        logits = softcap * (1 - 2 / (tl.exp2(logits * (2 * LOG2_E) / softcap) + 1))
    return logits * LOG2_E


@triton.jit(do_not_specialize=["l_b", "l_h", "l_c", "slots", "queries", "per_split"])
def attend(
    query,
    key,
    value,
    mask,
    out,
    lse,
    q_b,
    q_h,
    q_c,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    m_b,
    m_h,
    m_c,
    m_s,
    l_b,
    l_h,
    l_c,
    out_split,
    lse_split,
    slots,
    queries,
    per_split,
    scale,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of query rows of one KV head, over one split of the slots.

    A tile holds the query heads of a KV head side by side (row = query * GROUP + head of the group), so K and V are
    read once for all of them.
    """
    split = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    b = (tl.program_id(2) // HEADS).to(tl.int64)
    h = (tl.program_id(2) % HEADS).to(tl.int64)
    c = row // GROUP
    head = h * GROUP + row % GROUP
    in_rows = c < queries
    d = tl.arange(0, DP)
    q = tl.load(
        query + b * q_b + head[:, None] * q_h + c[:, None] * q_c + d[None, :],
        mask=in_rows[:, None] & (d < D)[None, :],
        other=0.0,
    )
    begin = split * per_split
    end = tl.minimum(begin + per_split, slots)
    if MASK == "causal":  # query c sees keys 0..c
        end = tl.minimum(end, (tl.program_id(1) * ROWS + ROWS - 1) // GROUP + 1)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    for start in range(begin, end, SLOTS):
        s = start + tl.arange(0, SLOTS)
        in_slots = s < end
        if MASK == "held":
            in_slots = in_slots & (tl.load(mask + b * m_b + h * m_h + s * m_s, mask=in_slots, other=-1) >= 0)
            seen = in_rows[:, None] & in_slots[None, :]
        elif MASK == "visible":
            at = mask + b * m_b + h * m_h + c[:, None] * m_c + s[None, :] * m_s
            seen = tl.load(at, mask=in_rows[:, None] & in_slots[None, :], other=0) != 0
            in_slots = tl.max(seen.to(tl.int32), 0) > 0
        elif MASK == "causal":
            seen = in_rows[:, None] & in_slots[None, :] & (s[None, :] <= c[:, None])
        else:
            seen = in_rows[:, None] & in_slots[None, :]
        # Slots that no row sees are not read: they may hold anything, NaN included.
        readable = in_slots[:, None] & (d < D)[None, :]
        k = tl.load(key + b * k_b + h * k_h + s[:, None] * k_s + d[None, :], mask=readable, other=0.0)
        logits = tl.where(seen, scores(q, k, scale, softcap, SOFTCAP, PRECISION), float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(logits - base[:, None])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(value + b * v_b + h * v_h + s[:, None] * v_s + d[None, :], mask=readable, other=0.0)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        peak = new_peak
    empty = total == 0.0
    result = acc / tl.where(empty, 1.0, total)[:, None]
    heads = HEADS * GROUP
    at = split.to(tl.int64) * out_split + ((b * heads + head)[:, None] * queries + c[:, None]) * D + d[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=in_rows[:, None] & (d < D)[None, :])
    # A split that saw nothing says so with -inf; a query that saw nothing at all has log-sum-exp 0.
    unseen = tl.where(tl.num_programs(0) == 1, 0.0, float("-inf"))
    log_total = tl.where(empty, unseen, (peak + tl.log2(tl.where(empty, 1.0, total))) * LN_2)
    tl.store(lse + split * lse_split + b * l_b + head * l_h + c * l_c, log_total, mask=in_rows)


@triton.jit(do_not_specialize=["l_b", "l_h", "l_c", "splits", "queries"])
def join(
    parts,
    part_lse,
    out,
    lse,
    l_b,
    l_h,
    l_c,
    out_split,
    lse_split,
    splits,
    queries,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The output of one query of one query head from its splits."""
    row = tl.program_id(0).to(tl.int64)
    c = row % queries
    head = (row // queries) % HEADS
    b = row // queries // HEADS
    d = tl.arange(0, DP)
    peak = tl.max(tl.full([SPLITS], float("-inf"), tl.float32), 0)
    total = tl.sum(tl.zeros([SPLITS], tl.float32), 0)
    acc = tl.zeros([DP], tl.float32)
    for start in range(0, splits, SPLITS):
        n = start + tl.arange(0, SPLITS)
        own = tl.load(part_lse + n * lse_split + row, mask=n < splits, other=float("-inf"))
        part = tl.load(
            parts + n[:, None].to(tl.int64) * out_split + row * D + d[None, :],
            mask=(n < splits)[:, None] & (d < D)[None, :],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(own, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2((own - base) * LOG2_E)
        decay = tl.exp2((peak - base) * LOG2_E)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * part, 0)
        peak = new_peak
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(out + row * D + d, (acc / total).to(out.dtype.element_ty), mask=d < D)
    tl.store(lse + b * l_b + head * l_h + c * l_c, tl.where(empty, 0.0, peak + tl.log2(total) * LN_2))


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    held: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """See :func:`kvlearn.kernels.decode_attention.decode_attention`; writes ``out`` and ``lse``."""
    batch, query_heads, queries, dim = query.shape
    heads, slots = key.shape[1], key.shape[2]
    group = query_heads // heads
    few = queries * group <= 16
    chosen = parameters(target(), "attend", f"{'few' if few else 'many'} {dim_family(dim, query.dtype)}")
    rows, block = chosen["rows"], chosen["slots"]
    tiles = -(-queries * group // rows)
    splits = split_count(batch * heads, tiles, slots, chosen["programs"], 2 * block)
    per_split = -(-slots // splits // block) * block
    splits = -(-slots // per_split)
    mask, kind = key, "none"
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    if visible is not None:
        mask, kind = visible.view(torch.uint8), "visible"
        mask_strides = visible.expand(batch, heads, queries, slots).stride()
    elif held is not None:
        mask, kind = held, "held"
        b, h, s = held.expand(batch, heads, slots).stride()
        mask_strides = (b, h, 0, s)
    elif causal:
        kind = "causal"
    parts, part_lse = out, lse
    if splits > 1:
        parts = out.new_empty((splits, *out.shape), dtype=lse.dtype)
        part_lse = lse.new_empty((splits, *lse.shape))
    launch(
        attend,
        (splits, tiles, batch * heads),
        query,
        key,
        value,
        mask,
        parts,
        part_lse,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *mask_strides,
        *part_lse.stride()[-3:],
        parts.stride(0) if splits > 1 else 0,
        part_lse.stride(0) if splits > 1 else 0,
        slots,
        queries,
        per_split,
        scale,
        1.0 if softcap is None else softcap,
        HEADS=heads,
        GROUP=group,
        D=dim,
        DP=padded(dim),
        ROWS=rows,
        SLOTS=block,
        MASK=kind,
        SOFTCAP=softcap is not None,
        PRECISION=dot_precision(query.dtype, dim),
        num_warps=chosen["num_warps"],
        num_stages=chosen["num_stages"],
    )
    if splits > 1:
        joined = parameters(target(), "join", "all")
        launch(
            join,
            (batch * query_heads * queries,),
            parts,
            part_lse,
            out,
            lse,
            *lse.stride(),
            parts.stride(0),
            part_lse.stride(0),
            splits,
            queries,
            HEADS=query_heads,
            D=dim,
            DP=padded(dim),
            SPLITS=joined["splits"],
            num_warps=joined["num_warps"],
            num_stages=1,
        )
