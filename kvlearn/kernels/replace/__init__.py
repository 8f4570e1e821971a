"""Replacement: new tokens take the slots of evicted ones, in place, with every piece of slot state."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.kernels.launch import Impl, use_triton
from kvlearn.kernels.replace import reference
from kvlearn.kernels.replace.reference import Ahead, append, copy_rows, expand, put_rows
from kvlearn.kernels.validate import dense_rows, expect, expect_dense

__all__ = ["Ahead", "append", "copy_rows", "expand", "put_rows", "replace"]


def replace(
    keys: Tensor,
    values: Tensor,
    pos: Tensor,
    *,
    state: Tensor | None = None,
    static: Tensor | None = None,
    last_query: Tensor | None = None,
    target: Tensor,
    key: Tensor,
    value: Tensor,
    new_pos: Tensor,
    new_static: Tensor | None = None,
    padded: bool = False,
    impl: Impl = "auto",
) -> None:
    """Store tokens in slots, in place. History and last-query mass of the slots written become 0.

    The ``i``-th token of a row (padding not counted) takes the ``i``-th slot of its row and head in ``target``; slots
    that no token takes stay as they are.

    Args:
        keys: ``[B, H, S, D]`` slots.
        values: ``[B, H, S, D]``.
        pos: ``[B, H, S]`` int32.
        state: ``[B, H, K, S]`` history, if there is one.
        static: ``[B, H, S, R]`` static score inputs, if there are any.
        last_query: ``[B, H, S]``, if there is one.
        target: ``[B, H, C]`` int64 slot indices, no two alike in a row and head.
        key: ``[B, H, C, D]`` of the new tokens.
        value: ``[B, H, C, D]``.
        new_pos: ``[B, C]`` int32 logical positions, negative for padding.
        new_static: ``[B, H, C, R]``; needed with ``static``; without, the static inputs become 0.
        padded: whether ``new_pos`` marks any padding.
        impl: ``"reference"``, ``"triton"``, or ``"auto"``: see :func:`kvlearn.kernels.launch.use_triton`.

    Raises:
        KvlearnError: shapes do not fit together, or ``impl="triton"`` cannot run here.
    """
    expect("keys", keys, (-1, -1, -1, -1))
    batch, heads, slots, dim = keys.shape
    count = target.shape[-1]
    expect("values", values, (batch, heads, slots, dim), keys.dtype, keys)
    expect("pos", pos, (batch, heads, slots), torch.int32, keys)
    expect("target", target, (batch, heads, count), torch.int64, keys)
    for name, tensor in (("key", key), ("value", value)):
        expect(name, tensor, (batch, heads, count, dim), keys.dtype, keys)
    expect("new_pos", new_pos, (batch, count), torch.int32, keys)
    if state is not None:
        expect("state", state, (batch, heads, -1, slots), None, keys)
    if last_query is not None:
        expect("last_query", last_query, (batch, heads, slots), None, keys)
    if static is not None:
        expect("static", static, (batch, heads, slots, -1), None, keys)
    if new_static is not None:
        if static is None:
            raise KvlearnError("new_static needs the slots' static inputs.")
        expect("new_static", new_static, (batch, heads, count, static.shape[-1]), static.dtype, keys)
    stores = (keys, values, pos, state, static, last_query)
    if not use_triton(impl, keys):
        reference.replace(*stores, target, key, value, new_pos, new_static, padded)
        return
    from kvlearn.kernels.replace import triton

    for name, slots_of in zip(("keys", "values", "pos", "state", "static", "last_query"), stores, strict=True):
        expect_dense(name, slots_of)
    new_static = None if new_static is None else dense_rows(new_static)
    triton.replace(*stores, target, dense_rows(key), dense_rows(value), new_pos, new_static, padded)
