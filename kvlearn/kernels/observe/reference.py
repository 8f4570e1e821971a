"""PyTorch meaning of observation: column mass, rounded to codes, folded into the history."""

from __future__ import annotations

from torch import Tensor

from kvlearn import history
from kvlearn.kernels.column_mass import reference
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
    """See :func:`kvlearn.kernels.observe.observe`."""
    mean, peak, counts, last_mass = reference.column_mass(
        query, lse, key, query_pos, key_pos, scale, block, softcap, group_reduce, False, own_keys_last
    )
    fold(state, history.encode_mass(mean), history.encode_mass(peak), counts, query_pos, key_pos, block)
    if last is not None:
        last.copy_(last_mass)


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
    new = state
    bounds = reference.block_bounds(query_pos.shape[1], block)
    for n, (start, end) in enumerate(bounds):
        length = query_pos[:, start:end].amax(-1) + 1
        age = length.view(-1, 1, 1) - key_pos.expand(mean_code.shape[1:])
        new = history.observe(new, mean_code[n], peak_code[n], counts[n], age)
    state.copy_(new)
