"""PyTorch meaning of column mass."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlearn.shapes import GroupReduce


def block_bounds(queries: int, block: int) -> list[tuple[int, int]]:
    """Start and end of each block of a call, aligned to the call's end."""
    first = queries % block or block
    return [(max(end - block, 0), end) for end in range(first, queries + 1, block)]


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
    grouped = (query.to(work) * scale).reshape(batch, heads, group, queries, dim)
    grouped_lse = lse.reshape(batch, heads, group, queries, 1)
    transposed = key.to(work).transpose(-1, -2)  # [B, H, D, S]
    mean = torch.zeros(len(bounds), batch, heads, slots, dtype=torch.float32, device=query.device)
    peak = torch.zeros_like(mean)
    counts = torch.stack([(query_pos[:, start:end] >= 0).sum(-1) for start, end in bounds])
    for n, (start, end) in enumerate(bounds):
        width = slots - (queries - end) if own_keys_last else slots
        size = end - start
        rows = grouped[:, :, :, start:end].reshape(batch, heads, group * size, dim)
        logits = (rows @ transposed[..., :width]).view(batch, heads, group, size, width)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        positions = query_pos[:, None, start:end, None]
        columns = key_pos[:, :, None, :width]
        hidden = (columns > positions) | (columns < 0)
        mass = logits.sub_(grouped_lse[:, :, :, start:end]).masked_fill_(hidden[:, :, None], -torch.inf).exp_()
        mass = mass.mean(2) if group_reduce == "mean" else mass.amax(2)  # [B, H, size, S]
        mean[n, ..., :width] = mass.sum(2) / counts[n].clamp(min=1).view(batch, 1, 1)
        peak[n, ..., :width] = mass.amax(2)
    last = torch.zeros_like(mean[0])
    last[..., :width] = mass[:, :, -1]
    return mean, peak, counts, last
