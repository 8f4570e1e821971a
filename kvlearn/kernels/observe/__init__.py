"""Observation: the mass that slots receive from blocks of queries, folded into their history."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlearn import history
from kvlearn.kernels.column_mass import check_observation
from kvlearn.kernels.launch import Impl, use_triton
from kvlearn.kernels.observe import reference
from kvlearn.kernels.observe.reference import fold
from kvlearn.kernels.validate import dense_rows, expect, expect_dense
from kvlearn.shapes import GroupReduce

__all__ = ["fold", "observe"]


def observe(
    state: Tensor,
    query: Tensor,
    lse: Tensor,
    key: Tensor,
    *,
    query_pos: Tensor,
    key_pos: Tensor,
    scale: float,
    block: int,
    softcap: float | None = None,
    group_reduce: GroupReduce = "mean",
    own_keys_last: bool = False,
    last: Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Fold what ``query`` gave to each slot into ``state``, block by block, in place.

    The result is that of :func:`kvlearn.kernels.column_mass.column_mass`, encoded by
    :func:`kvlearn.history.encode_mass` and folded by :func:`kvlearn.history.observe`; the Triton kernel writes no mass
    to memory in between. What empty slots remember is not specified.

    Args:
        state: ``[B, H, K, S]`` history, contiguous along ``S``; overwritten.
        query: ``[B, H * G, C, D]``.
        lse: ``[B, H * G, C]`` float32, log-sum-exp of each query's logits over everything it attended to.
        key: ``[B, H, S, D]``.
        query_pos: ``[B, C]`` int32 logical positions, -1 for padding; a row's tokens have consecutive positions.
        key_pos: ``[B, 1 or H, S]`` int32 logical positions, -1 for empty slots and padding.
        scale: factor on the dot products.
        block: queries per block; blocks are aligned to the end of the call.
        softcap: see :func:`kvlearn.kernels.decode_attention.decode_attention`.
        group_reduce: ``"mean"`` or ``"max"`` over the query heads of a KV head.
        own_keys_last: promise that the last ``C`` keys are the queries' own tokens in order, with an empty history.
        last: ``[B, H, S]`` float32, contiguous along ``S``, to write the mass given by the last query to.
        impl: ``"reference"``, ``"triton"``, or ``"auto"``: see :func:`kvlearn.kernels.launch.use_triton`.

    Raises:
        KvlearnError: shapes do not fit together, or ``impl="triton"`` cannot run here.
    """
    check_observation(query, lse, key, query_pos, key_pos, block, group_reduce, own_keys_last)
    batch, heads, slots, _ = key.shape
    expect("state", state, (batch, heads, len(history.FIELDS), slots), history.DTYPE, query)
    if last is not None:
        expect("last", last, (batch, heads, slots), torch.float32, query)
    arguments = (query_pos, key_pos, scale, block, softcap, group_reduce, own_keys_last, last)
    if not use_triton(impl, query):
        reference.observe(state, query, lse, key, *arguments)
        return
    from kvlearn.kernels.observe import triton

    for name, tensor in (("state", state), ("last", last)):
        expect_dense(name, tensor)
    triton.observe(state, dense_rows(query), lse, dense_rows(key), *arguments)
