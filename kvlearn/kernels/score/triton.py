"""A scorer in Triton: the features of a tile of slots are made in registers and go straight into the network."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvlearn import features, history
from kvlearn.kernels.launch import dot_precision, launch, padded, parameters, target
from kvlearn.kernels.score.reference import Weights

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def read(state, at, st_k, field: tl.constexpr, held):
    """One field of the history of a tile of slots, in float32."""
    return tl.load(state + field * st_k + at, mask=held, other=0.0).to(tl.float32)


@triton.jit
def put(x, index: tl.constexpr, feature):
    """Make ``feature`` ``[SLOTS]`` column ``index`` of ``x``."""
    return tl.where((tl.arange(0, x.shape[1]) == index)[None, :], feature[:, None], x)


@triton.jit
def exposure(age, HALF_LIFE: tl.constexpr):
    """``1 - 2 ** (-age / HALF_LIFE)``, by its series where the difference would lose digits."""
    y = age * (LN_2 / HALF_LIFE)
    series = y * (1 - y / 2 * (1 - y / 3 * (1 - y / 4 * (1 - y / 5))))
    return tl.where(y < 0.1, series, 1 - tl.exp(-y))


@triton.jit(do_not_specialize=["slots"])
def forecast(
    state,
    pos,
    length,
    static,
    w_dynamic,
    w_static,
    bias,
    w_out,
    out,
    st_b,
    st_h,
    st_k,
    p_b,
    p_h,
    p_s,
    sc_b,
    sc_h,
    sc_s,
    o_b,
    o_h,
    slots,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    DYNAMIC: tl.constexpr,
    DYNAMIC_P: tl.constexpr,
    STATIC: tl.constexpr,
    STATIC_TILE: tl.constexpr,
    UNITS: tl.constexpr,
    UNITS_TILE: tl.constexpr,
    UNIT_TILES: tl.constexpr,
    FLOOR: tl.constexpr,
    EMA_0: tl.constexpr,
    EMA_1: tl.constexpr,
    EMA_2: tl.constexpr,
    EMA_3: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores of one tile of slots of one KV head.

    Hidden units and static inputs come a tile at a time, so that a scorer of any size fits in registers.
    """
    b = (tl.program_id(1) // HEADS).to(tl.int64)
    h = (tl.program_id(1) % HEADS).to(tl.int64)
    s = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    inside = s < slots
    at = tl.load(pos + b * p_b + h * p_h + s * p_s, mask=inside, other=-1)
    held = at >= 0
    state += b * st_b + h * st_h
    w_dynamic += h * ((1 + UNITS) * DYNAMIC)
    w_static += h * ((1 + UNITS) * STATIC)
    bias += h * (1 + UNITS)
    total = tl.load(length + b).to(tl.float32)
    position = tl.maximum(at, 0).to(tl.float32)
    age = tl.maximum(total - position, 1.0)

    # In the order of kvlearn.features.DYNAMIC.
    x = tl.zeros([SLOTS, DYNAMIC_P], tl.float32)
    x = put(x, 0, tl.log(read(state, s, st_k, 0, held) + FLOOR))
    x = put(x, 1, tl.log(read(state, s, st_k, 1, held) / exposure(age, EMA_0) + FLOOR))
    x = put(x, 2, tl.log(read(state, s, st_k, 2, held) / exposure(age, EMA_1) + FLOOR))
    x = put(x, 3, tl.log(read(state, s, st_k, 3, held) / exposure(age, EMA_2) + FLOOR))
    x = put(x, 4, tl.log(read(state, s, st_k, 4, held) / exposure(age, EMA_3) + FLOOR))
    x = put(x, 5, tl.log(read(state, s, st_k, 5, held) + FLOOR))
    x = put(x, 6, tl.log(read(state, s, st_k, 6, held) + FLOOR))
    x = put(x, 7, read(state, s, st_k, 7, held))
    x = put(x, 8, tl.log(1 + read(state, s, st_k, 8, held)))
    x = put(x, 9, tl.log(1 + read(state, s, st_k, 9, held)))
    x = put(x, 10, tl.log(age))
    x = put(x, 11, tl.log(1 + position))
    x = put(x, 12, (position < 4).to(tl.float32))
    x = put(x, 13, tl.zeros([SLOTS], tl.float32) + tl.log(tl.maximum(total, 1.0)))

    f = tl.arange(0, DYNAMIC_P)
    result = tl.sum(x * tl.load(w_dynamic + f, mask=f < DYNAMIC, other=0.0)[None, :], 1) + tl.load(bias)
    for tile in range(UNIT_TILES):
        unit = 1 + tile * UNITS_TILE + tl.arange(0, UNITS_TILE)
        real = unit <= UNITS
        hidden = tl.zeros([SLOTS, UNITS_TILE], tl.float32)
        if UNITS > 0:
            dynamic_part = tl.load(
                w_dynamic + unit[None, :] * DYNAMIC + f[:, None], mask=real[None, :] & (f < DYNAMIC)[:, None], other=0.0
            )
            hidden = tl.dot(x, dynamic_part, hidden, input_precision=PRECISION)
        for begin in range(0, STATIC, STATIC_TILE):
            r = begin + tl.arange(0, STATIC_TILE)
            own = tl.load(
                static + b * sc_b + h * sc_h + s[:, None] * sc_s + r[None, :],
                mask=held[:, None] & (r < STATIC)[None, :],
                other=0,
            ).to(tl.float32)
            linear = tl.load(w_static + r, mask=(r < STATIC) & (tile == 0), other=0.0)
            result += tl.sum(own * linear[None, :], 1)
            if UNITS > 0:
                static_part = tl.load(
                    w_static + unit[None, :] * STATIC + r[:, None],
                    mask=real[None, :] & (r < STATIC)[:, None],
                    other=0.0,
                )
                hidden = tl.dot(own, static_part, hidden, input_precision=PRECISION)
        if UNITS > 0:
            hidden += tl.load(bias + unit, mask=real, other=0.0)[None, :]
            active = hidden * 0.5 * (1 + tl.erf(hidden * 0.7071067811865476))
            result += tl.sum(active * tl.load(w_out + h * UNITS + unit - 1, mask=real, other=0.0)[None, :], 1)
    tl.store(out + b * o_b + h * o_h + s, result, mask=inside)


def score(state: Tensor, pos: Tensor, length: Tensor, static: Tensor, weights: Weights, out: Tensor) -> None:
    """See :func:`kvlearn.kernels.score.score`; writes ``out``."""
    batch, heads, slots = pos.shape
    chosen = parameters(target(), "forecast", "all")
    units = weights.dynamic.shape[1] - 1
    units_tile = min(chosen["units"], padded(max(units, 1)))
    launch(
        forecast,
        (-(-slots // chosen["slots"]), batch * heads),
        state,
        pos,
        length,
        static,
        weights.dynamic.contiguous(),
        weights.static.contiguous(),
        weights.bias.contiguous(),
        weights.bias if weights.out is None else weights.out.contiguous(),
        out,
        *state.stride()[:3],
        *pos.stride(),
        *static.stride()[:3],
        *out.stride()[:2],
        slots,
        HEADS=heads,
        SLOTS=chosen["slots"],
        DYNAMIC=len(features.DYNAMIC),
        DYNAMIC_P=padded(len(features.DYNAMIC)),
        STATIC=static.shape[3],
        STATIC_TILE=min(chosen["inputs"], padded(static.shape[3])),
        UNITS=units,
        UNITS_TILE=units_tile,
        UNIT_TILES=max(1, -(-units // units_tile)),
        FLOOR=features.FLOOR,
        **feature_constants(),
        PRECISION=dot_precision(weights.dynamic.dtype, chosen["inputs"]),
        num_warps=chosen["num_warps"],
        num_stages=1,
    )


def feature_constants() -> dict[str, int]:
    """The half-lives that :func:`forecast` is compiled for; its features are those of :mod:`kvlearn.features`."""
    ema = [f"log_ema{half_life}" for half_life in history.HALF_LIVES]
    rest = ("log_mean", "log_peak", "hits", "log_idle", "log_gap", "log_age", "log_position", "sink", "log_length")
    if ("log_last", *ema, *rest) != features.DYNAMIC or len(ema) != 4:
        raise RuntimeError(f"the score kernel does not know the features {features.DYNAMIC}")
    return {f"EMA_{i}": half_life for i, half_life in enumerate(history.HALF_LIVES)}
