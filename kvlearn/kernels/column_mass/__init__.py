"""Attention mass that each key receives, block of queries by block of queries."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvlearn.kernels.column_mass import reference
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
) -> ColumnMass:
    """Mass per key without materialising queries x keys.

    A query sees a key when both are tokens of its row and the key's position is not after the query's. Blocks are
    aligned to the end of the call: the first one may be short. The query heads of a KV head are reduced first
    (``group_reduce``), then the block's queries.

    Args:
        query: ``[B, H * G, C, D]``.
        lse: ``[B, H * G, C]`` float32, log-sum-exp of each query's logits over everything it attended to.
        key: ``[B, H, S, D]``.
        query_pos: ``[B, C]`` logical positions, -1 for padding.
        key_pos: ``[B, 1 or H, S]`` logical positions, -1 for empty slots and padding.
        scale: factor on the dot products.
        block: queries per block.
        softcap: see :func:`kvlearn.kernels.decode_attention.decode_attention`.
        group_reduce: ``"mean"`` or ``"max"`` over the query heads of a KV head.
        only_last: compute the last block alone (``N`` is 1).
        own_keys_last: promise that the last ``C`` keys are the queries' own tokens in order, so that a block need not
            look at the keys written after it.

    Returns:
        A :class:`ColumnMass`.
    """
    mean, peak, queries, last = reference.column_mass(
        query, lse, key, query_pos, key_pos, scale, block, softcap, group_reduce, only_last, own_keys_last
    )
    return ColumnMass(mean, peak, queries, last)
