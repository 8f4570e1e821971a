"""Replacement in Triton: one program writes one token of one KV head."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvlearn.kernels.launch import launch, padded, parameters, target
from kvlearn.kernels.validate import dense_rows


# The alignment of `plan` changes with every token, so it must not decide which kernel runs.
@triton.jit(do_not_specialize=["t_b", "t_h"], do_not_specialize_on_alignment=["plan"])
def write(
    keys,
    values,
    pos,
    state,
    static,
    last_query,
    plan,
    key,
    value,
    new_pos,
    new_static,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    p_b,
    p_h,
    st_b,
    st_h,
    st_k,
    sc_b,
    sc_h,
    sc_s,
    la_b,
    la_h,
    t_b,
    t_h,
    nk_b,
    nk_h,
    nk_c,
    nv_b,
    nv_h,
    nv_c,
    np_b,
    np_c,
    ns_b,
    ns_h,
    ns_c,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    FIELDS: tl.constexpr,
    FIELDS_P: tl.constexpr,
    STATIC: tl.constexpr,
    STATIC_P: tl.constexpr,
    NEW_STATIC: tl.constexpr,
    LAST: tl.constexpr,
    PADDED: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Store one token with all state of its slot."""
    c = tl.program_id(0)
    b = (tl.program_id(1) // HEADS).to(tl.int64)
    h = (tl.program_id(1) % HEADS).to(tl.int64)
    at = tl.load(new_pos + b * np_b + c * np_c)
    order = c
    if PADDED:  # this token's number among its row's tokens
        earlier = tl.zeros([SCAN], tl.int32)
        for start in range(0, c, SCAN):
            j = start + tl.arange(0, SCAN)
            earlier += (tl.load(new_pos + b * np_b + j * np_c, mask=j < c, other=-1) >= 0).to(tl.int32)
        order = tl.sum(earlier, 0)
    real = at >= 0
    s = tl.load(plan + b * t_b + h * t_h + order, mask=real, other=0)
    d = tl.arange(0, DP)
    own = real & (d < D)
    new_key = tl.load(key + b * nk_b + h * nk_h + c * nk_c + d, mask=own, other=0.0)
    tl.store(keys + b * k_b + h * k_h + s * k_s + d, new_key, mask=own)
    new_value = tl.load(value + b * nv_b + h * nv_h + c * nv_c + d, mask=own, other=0.0)
    tl.store(values + b * v_b + h * v_h + s * v_s + d, new_value, mask=own)
    tl.store(pos + b * p_b + h * p_h + s, at, mask=real)
    if FIELDS > 0:
        f = tl.arange(0, FIELDS_P)
        nothing = tl.zeros([FIELDS_P], state.dtype.element_ty)
        tl.store(state + b * st_b + h * st_h + f * st_k + s, nothing, mask=real & (f < FIELDS))
    if STATIC > 0:
        r = tl.arange(0, STATIC_P)
        fresh = tl.zeros([STATIC_P], static.dtype.element_ty)
        if NEW_STATIC:
            fresh = tl.load(new_static + b * ns_b + h * ns_h + c * ns_c + r, mask=real & (r < STATIC), other=0)
        tl.store(static + b * sc_b + h * sc_h + s * sc_s + r, fresh, mask=real & (r < STATIC))
    if LAST:
        tl.store(last_query + b * la_b + h * la_h + s, 0.0, mask=real)


def replace(
    keys: Tensor,
    values: Tensor,
    pos: Tensor,
    state: Tensor | None,
    static: Tensor | None,
    last_query: Tensor | None,
    plan: Tensor,
    key: Tensor,
    value: Tensor,
    new_pos: Tensor,
    new_static: Tensor | None,
    is_padded: bool,
) -> None:
    """See :func:`kvlearn.kernels.replace.replace`."""
    plan = dense_rows(plan)
    batch, heads, _, dim = keys.shape
    fields = 0 if state is None else state.shape[2]
    inputs = 0 if static is None else static.shape[3]
    launch(
        write,
        (plan.shape[2], batch * heads),
        keys,
        values,
        pos,
        pos if state is None else state,
        pos if static is None else static,
        pos if last_query is None else last_query,
        plan,
        key,
        value,
        new_pos,
        pos if new_static is None else new_static,
        *keys.stride()[:3],
        *values.stride()[:3],
        *pos.stride()[:2],
        *((0, 0, 0) if state is None else state.stride()[:3]),
        *((0, 0, 0) if static is None else static.stride()[:3]),
        *((0, 0) if last_query is None else last_query.stride()[:2]),
        *plan.stride()[:2],
        *key.stride()[:3],
        *value.stride()[:3],
        *new_pos.stride(),
        *((0, 0, 0) if new_static is None else new_static.stride()[:3]),
        HEADS=heads,
        D=dim,
        DP=padded(dim),
        FIELDS=fields,
        FIELDS_P=padded(max(fields, 1)),
        STATIC=inputs,
        STATIC_P=padded(max(inputs, 1)),
        NEW_STATIC=new_static is not None,
        LAST=last_query is not None,
        PADDED=is_padded,
        SCAN=128,
        num_warps=parameters(target(), "write", "all")["num_warps"],
        num_stages=1,
    )
