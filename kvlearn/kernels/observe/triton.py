"""Observation in one Triton kernel: masses stay in registers, and history is read and written once."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvlearn import history
from kvlearn.kernels.column_mass.reference import block_bounds
from kvlearn.kernels.column_mass.triton import block_mass, first_block, load_keys
from kvlearn.kernels.launch import dim_family, dot_precision, launch, padded, parameters, target
from kvlearn.shapes import GroupReduce


@triton.jit
def through_code(mass, STEPS: tl.constexpr):
    """Mass as it comes back from its one-byte code."""
    log_mass = tl.log2(tl.maximum(mass, 1e-30))
    code = tl.floor(tl.minimum(tl.maximum(log_mass * STEPS + 255.5, 0.0), 255.0))
    return tl.where(code == 0.0, 0.0, tl.exp2((code - 255.0) / STEPS))


@triton.jit
def stored(value):
    """``value`` rounded as the history stores it."""
    return value.to(tl.float16).to(tl.float32)


@triton.jit
def average(old, mean, n, HALF_LIFE: tl.constexpr):
    """An exponential moving average after ``n`` more queries."""
    decay = tl.exp2(-n / HALF_LIFE)
    return stored(old * decay + mean * (1 - decay))


@triton.jit(do_not_specialize=["l_b", "l_h", "l_c", "slots", "queries", "own", "first", "blocks"])
def fold(
    state,
    query,
    lse,
    key,
    query_pos,
    key_pos,
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
    st_b,
    st_h,
    st_k,
    la_b,
    la_h,
    slots,
    queries,
    own,
    first,
    block,
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
    LAST: tl.constexpr,
    STEPS: tl.constexpr,
    EMA_0: tl.constexpr,
    EMA_1: tl.constexpr,
    EMA_2: tl.constexpr,
    EMA_3: tl.constexpr,
    PEAK: tl.constexpr,
    HITS: tl.constexpr,
    HIT_MASS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Fold all blocks of a call into the history of one tile of slots."""
    tile_start = tl.program_id(0) * SLOTS
    b = (tl.program_id(1) // HEADS).to(tl.int64)
    h = (tl.program_id(1) % HEADS).to(tl.int64)
    s = tile_start + tl.arange(0, SLOTS)
    k, pos = load_keys(key, key_pos, b, h, s, k_b, k_h, k_s, p_b, p_h, p_s, slots, D, DP)
    held = pos >= 0
    at = state + b * st_b + h * st_h + s
    latest = tl.load(at, mask=held, other=0.0).to(tl.float32)
    ema_0 = tl.load(at + st_k, mask=held, other=0.0).to(tl.float32)
    ema_1 = tl.load(at + 2 * st_k, mask=held, other=0.0).to(tl.float32)
    ema_2 = tl.load(at + 3 * st_k, mask=held, other=0.0).to(tl.float32)
    ema_3 = tl.load(at + 4 * st_k, mask=held, other=0.0).to(tl.float32)
    lifelong = tl.load(at + 5 * st_k, mask=held, other=0.0).to(tl.float32)
    highest = tl.load(at + 6 * st_k, mask=held, other=0.0).to(tl.float32)
    hits = tl.load(at + 7 * st_k, mask=held, other=0.0).to(tl.float32)
    idle = tl.load(at + 8 * st_k, mask=held, other=0.0).to(tl.float32)
    gap = tl.load(at + 9 * st_k, mask=held, other=0.0).to(tl.float32)
    last_mass = tl.zeros([SLOTS], tl.float32)
    # A block that ended before the tile's first key was written leaves no trace in the history of its keys.
    for i in range(tl.minimum(first_block(tile_start, own, first, block), blocks), blocks):
        end = first + i * block
        total, most, count, newest, last_mass = block_mass(
            k, pos, query, lse, query_pos, b, h, tl.maximum(end - block, 0), end, queries, q_b, q_h, q_c, l_b, l_h, l_c,
            qp_b, qp_c, scale, softcap, GROUP, D, DP, ROWS, SLOTS, MAX, SOFTCAP, PRECISION,
        )  # fmt: skip
        if count > 0:
            n = count.to(tl.float32)
            mean = through_code(total / n, STEPS)
            peak = through_code(most, STEPS)
            age = tl.maximum(newest + 1 - pos, 1).to(tl.float32)
            hit = peak >= HIT_MASS
            waited = tl.minimum(idle + n, age)
            latest = stored(mean)
            ema_0 = average(ema_0, mean, n, EMA_0)
            ema_1 = average(ema_1, mean, n, EMA_1)
            ema_2 = average(ema_2, mean, n, EMA_2)
            ema_3 = average(ema_3, mean, n, EMA_3)
            lifelong = stored(lifelong * (1 - tl.minimum(n / age, 1.0)) + mean * (n / age))
            highest = stored(tl.maximum(highest * tl.exp2(-n / PEAK), peak))
            hits = stored(hits * tl.exp2(-n / HITS) + hit.to(tl.float32))
            gap = stored(tl.minimum(tl.where(hit, tl.maximum(gap, waited), gap), MOST))
            idle = stored(tl.where(hit, 0.0, tl.minimum(waited, MOST)))
    tl.store(at, latest.to(tl.float16), mask=held)
    tl.store(at + st_k, ema_0.to(tl.float16), mask=held)
    tl.store(at + 2 * st_k, ema_1.to(tl.float16), mask=held)
    tl.store(at + 3 * st_k, ema_2.to(tl.float16), mask=held)
    tl.store(at + 4 * st_k, ema_3.to(tl.float16), mask=held)
    tl.store(at + 5 * st_k, lifelong.to(tl.float16), mask=held)
    tl.store(at + 6 * st_k, highest.to(tl.float16), mask=held)
    tl.store(at + 7 * st_k, hits.to(tl.float16), mask=held)
    tl.store(at + 8 * st_k, idle.to(tl.float16), mask=held)
    tl.store(at + 9 * st_k, gap.to(tl.float16), mask=held)
    if LAST:
        tl.store(last + b * la_b + h * la_h + s, last_mass, mask=s < slots)


def observe(
    state: Tensor,
    query: Tensor,
    lse: Tensor,
    key: Tensor,
    query_pos: Tensor,
    key_pos: Tensor,
    scale: float,
    block: int,
    softcap: float | None,
    group_reduce: GroupReduce,
    own_keys_last: bool,
    last: Tensor | None,
) -> None:
    """See :func:`kvlearn.kernels.observe.observe`."""
    batch, heads, slots, dim = key.shape
    queries = query.shape[2]
    bounds = block_bounds(queries, block)
    chosen = parameters(target(), "mass", dim_family(dim, query.dtype))
    launch(
        fold,
        (-(-slots // chosen["slots"]), batch * heads),
        state,
        query,
        lse,
        key,
        query_pos,
        key_pos,
        state if last is None else last,
        *query.stride()[:3],
        *lse.stride(),
        *key.stride()[:3],
        *query_pos.stride(),
        *key_pos.expand(batch, heads, slots).stride(),
        *state.stride()[:3],
        *((0, 0) if last is None else last.stride()[:2]),
        slots,
        queries,
        slots - queries if own_keys_last else slots,
        bounds[0][1],
        block,
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
        LAST=last is not None,
        **history_constants(),
        num_warps=chosen["num_warps"],
        num_stages=chosen["num_stages"],
    )


def history_constants() -> dict[str, float]:
    """The definition of :mod:`kvlearn.history` as compile-time constants of :func:`fold`."""
    ema = {f"EMA_{i}": half_life for i, half_life in enumerate(history.HALF_LIVES)}
    fields = ("last", *(f"ema{h}" for h in history.HALF_LIVES), "mean", "peak", "hits", "idle", "gap")
    if fields != history.FIELDS or len(ema) != 4:
        raise RuntimeError(f"the observe kernel does not know the history fields {history.FIELDS}")
    return {
        **ema,
        "PEAK": history.PEAK_HALF_LIFE,
        "HITS": history.HIT_HALF_LIFE,
        "HIT_MASS": history.HIT_MASS,
        "MOST": history.COUNT_MAX,
        "STEPS": history.OCTAVE_STEPS,
    }
