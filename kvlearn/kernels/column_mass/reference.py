"""PyTorch meaning of column mass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvlearn.shapes import GroupReduce

_LOG2_E = math.log2(math.e)


def block_bounds(queries: int, block: int) -> list[tuple[int, int]]:
    """Start and end of each block of a call, aligned to the call's end."""
    first = queries % block or block
    return [(max(end - block, 0), end) for end in range(first, queries + 1, block)]


@torch.no_grad()
def column_mass(
    query: Tensor,
    lse: Tensor,
    key: Tensor,
    query_pos: Tensor,
    key_pos: Tensor,
    scale: float,
    block: int,
    softcap: float | None,
    group_reduce: GroupReduce,
    only_last: bool,
    own_keys_last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`kvlearn.kernels.column_mass.column_mass`. Memory is O(block x S)."""
    batch, query_heads, queries, dim = query.shape
    heads, slots = key.shape[1], key.shape[2]
    group = query_heads // heads
    bounds = block_bounds(queries, block)
    if only_last:
        bounds = bounds[-1:]
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    # In units of log 2, because exp2 takes a third of the time of exp. The mean over a group is a sum of shares.
    norm = lse.to(work) * _LOG2_E + (math.log2(group) if group_reduce == "mean" else 0.0)
    factor = scale * _LOG2_E if softcap is None else scale
    rows = (query.to(work) * factor).view(batch, heads, group, queries, dim)
    columns = key.to(work).transpose(-1, -2)  # [B, H, D, S]
    if softcap is None:  # one more dimension lets the product subtract the norm: [q, -norm] . [k, 1]
        rows = torch.cat([rows, -norm.view(batch, heads, group, queries, 1)], dim=-1)
        columns = torch.cat([columns, columns.new_ones(batch, heads, 1, slots)], dim=2)
    mean = torch.zeros(len(bounds), batch, heads, slots, dtype=torch.float32, device=query.device)
    peak = torch.zeros_like(mean)
    last = torch.zeros_like(mean[0])
    counts = torch.stack([(query_pos[:, start:end] >= 0).sum(-1) for start, end in bounds])
    # Without padding or empty slots, all keys before the block's own are visible to it.
    dense = own_keys_last and bool((key_pos >= 0).all()) and bool((query_pos >= 0).all())
    space = rows.new_empty(batch * query_heads * min(block, queries) * slots)  # the same for all blocks
    for n, (start, end) in enumerate(bounds):
        size, width = end - start, slots - (queries - end) if own_keys_last else slots
        shape = (batch * heads, group * size, width)
        mass = space[: math.prod(shape)].view(shape)
        own_rows = rows[:, :, :, start:end].reshape(*shape[:2], -1)
        torch.bmm(own_rows, columns[..., :width].flatten(0, 1), out=mass)
        mass = mass.view(batch, heads, group, size, width)
        if softcap is not None:
            mass.div_(softcap).tanh_().mul_(softcap * _LOG2_E)
            mass.sub_(norm.view(batch, heads, group, queries, 1)[:, :, :, start:end])
        mass.exp2_()
        first = width - size if dense else 0
        key_positions = key_pos[:, :, None, first:width]
        hidden = (key_positions > query_pos[:, None, start:end, None]) | (key_positions < 0)
        mass[..., first:].masked_fill_(hidden[:, :, None], 0.0)
        mass = mass.sum(2) if group_reduce == "mean" else mass.amax(2)  # [B, H, size, width]
        mean[n, ..., :width] = mass.sum(2) / counts[n].clamp(min=1).view(batch, 1, 1)
        peak[n, ..., :width] = mass.amax(2)
        if end == queries:
            last[..., :width] = mass[:, :, -1]
    return mean, peak, counts, last
