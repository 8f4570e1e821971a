"""PyTorch meaning of observation: column mass, rounded to codes, folded into the history."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlearn import history
from kvlearn.kernels.column_mass.reference import block_bounds, block_counts, block_masses
from kvlearn.shapes import GroupReduce


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
    """See :func:`kvlearn.kernels.observe.observe`. Memory is O(block x S)."""
    bounds = block_bounds(query.shape[2], block)
    counts = block_counts(query_pos, bounds)
    decays, positions = history.decays(counts), key_pos.expand(state.shape[0], state.shape[1], -1)
    blocks = block_masses(
        query, lse, key, query_pos, key_pos, scale, bounds, counts, softcap, group_reduce, own_keys_last
    )
    for (start, end), decay, mass in zip(bounds, decays, blocks, strict=True):
        width = mass.last.shape[-1]  # a history does not begin before its token comes
        age = query_pos[:, start:end].amax(-1).view(-1, 1, 1) + 1 - positions[..., :width]
        history.fold(state[..., :width], history.decode_mass(history.encode_mass(mass.both)), decay, age)
        if last is not None and end == query.shape[2]:
            last.copy_(mass.last)


def fold(
    state: Tensor,
    mean_code: Tensor,
    peak_code: Tensor,
    counts: Tensor,
    query_pos: Tensor,
    key_pos: Tensor,
    block: int,
) -> None:
    """Fold observed blocks into a history, in place.

    Args:
        state: ``[B, H, K, S]``; overwritten.
        mean_code: ``[N, B, H, S]`` uint8, see :func:`kvlearn.history.observe`.
        peak_code: ``[N, B, H, S]`` uint8.
        counts: ``[N, B]`` queries of each block.
        query_pos: ``[B, C]`` int32 logical positions of all the blocks' queries, -1 for padding.
        key_pos: ``[B, 1 or H, S]`` int32 logical positions, -1 for empty slots.
        block: queries per block.
    """
    bounds, decays = block_bounds(query_pos.shape[1], block), history.decays(counts)
    for (start, end), decay, mean, peak in zip(bounds, decays, mean_code, peak_code, strict=True):
        age = query_pos[:, start:end].amax(-1).view(-1, 1, 1) + 1 - key_pos.expand(mean.shape)
        history.fold(state, history.decode_mass(torch.stack([mean, peak])), decay, age)
