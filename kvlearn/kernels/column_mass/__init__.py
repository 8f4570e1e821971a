"""Attention mass that each key receives, block of queries by block of queries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.kernels.column_mass import reference
from kvlearn.kernels.launch import Impl, use_triton
from kvlearn.kernels.validate import dense_rows, expect, expect_heads
from kvlearn.shapes import GroupReduce


class ColumnMass(NamedTuple):
    """Observed mass of ``N`` consecutive blocks of queries.

    Attributes:
        mean: ``[N, B, H, S]`` float32, mean over the block's queries (0 for queries that could not see the key).
        peak: ``[N, B, H, S]`` float32, maximum over the block's queries.
        queries: ``[N, B]`` int64, queries of each block, padding excluded.
        last: ``[B, H, S]`` float32, mass given by the last query.
    """

    mean: Tensor
    peak: Tensor
    queries: Tensor
    last: Tensor


def column_mass(
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
    only_last: bool = False,
    own_keys_last: bool = False,
    out: ColumnMass | None = None,
    impl: Impl = "auto",
) -> ColumnMass:
    """Mass per key without materialising queries x keys.

    A query sees a key when both are tokens of its row and the key's position is not after the query's. Blocks are
    aligned to the end of the call: the first one may be short. The query heads of a KV head are reduced first
    (``group_reduce``), then the block's queries.

    Args:
        query: ``[B, H * G, C, D]``.
        lse: ``[B, H * G, C]`` float32, log-sum-exp of each query's logits over everything it attended to.
        key: ``[B, H, S, D]``.
        query_pos: ``[B, C]`` int32 logical positions, -1 for padding.
        key_pos: ``[B, 1 or H, S]`` int32 logical positions, -1 for empty slots and padding.
        scale: factor on the dot products.
        block: queries per block.
        softcap: see :func:`kvlearn.kernels.decode_attention.decode_attention`.
        group_reduce: ``"mean"`` or ``"max"`` over the query heads of a KV head.
        only_last: compute the last block alone (``N`` is 1).
        own_keys_last: promise that the last ``C`` keys are the queries' own tokens in order, so that a block need not
            look at the keys written after it.
        out: contiguous tensors to write the result to.
        impl: ``"reference"``, ``"triton"``, or ``"auto"``: see :func:`kvlearn.kernels.launch.use_triton`.

    Returns:
        A :class:`ColumnMass`.

    Raises:
        KvlearnError: shapes do not fit together, or ``impl="triton"`` cannot run here.
    """
    check_observation(query, lse, key, query_pos, key_pos, block, group_reduce, own_keys_last)
    count = 1 if only_last else len(reference.block_bounds(query.shape[2], block))
    shapes = ((count, *key.shape[:3]), (count, *key.shape[:3]), (count, key.shape[0]), tuple(key.shape[:3]))
    dtypes = (torch.float32, torch.float32, torch.int64, torch.float32)
    if out is not None:
        for name, tensor, shape, dtype in zip(ColumnMass._fields, out, shapes, dtypes, strict=True):
            expect(f"out.{name}", tensor, shape, dtype, query)
            if not tensor.is_contiguous():
                raise KvlearnError(f"out.{name} must be contiguous.")
    if not use_triton(impl, query):
        result = reference.column_mass(
            query, lse, key, query_pos, key_pos, scale, block, softcap, group_reduce, only_last, own_keys_last
        )
        if out is None:
            return ColumnMass(*result)
        for tensor, own in zip(out, result, strict=True):
            tensor.copy_(own)
        return out
    from kvlearn.kernels.column_mass import triton

    if out is None:
        out = ColumnMass(*(torch.empty(s, dtype=d, device=key.device) for s, d in zip(shapes, dtypes, strict=True)))
    query, key = dense_rows(query), dense_rows(key)
    triton.column_mass(
        query, lse, key, query_pos, key_pos, scale, block, softcap, group_reduce, only_last, own_keys_last, *out
    )
    return out


def check_observation(
    query: Tensor,
    lse: Tensor,
    key: Tensor,
    query_pos: Tensor,
    key_pos: Tensor,
    block: int,
    group_reduce: str,
    own_keys_last: bool,
) -> None:
    """Check what :func:`column_mass` and :func:`kvlearn.kernels.observe.observe` are given.

    Raises:
        KvlearnError: shapes do not fit together.
    """
    expect_heads(query, key)
    batch, heads, slots, _ = key.shape
    queries = query.shape[2]
    expect("lse", lse, tuple(query.shape[:3]), torch.float32, query)
    expect("query_pos", query_pos, (batch, queries), torch.int32, query)
    expect("key_pos", key_pos, (batch, (1, heads), slots), torch.int32, query)
    if queries < 1 or block < 1:
        raise KvlearnError(f"there are {queries} queries in blocks of {block}; both must be 1 or more.")
    if group_reduce not in ("mean", "max"):
        raise KvlearnError(f"group_reduce is {group_reduce!r}; use 'mean' or 'max'.")
    if own_keys_last and slots < queries:
        raise KvlearnError(f"own_keys_last promises a key for each of the {queries} queries; there are {slots}.")
