"""PyTorch meaning of column mass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvlearn.shapes import GroupReduce

_LOG2_E = math.log2(math.e)

TILE = 2**19
"""Masses worked on at a time: at 4 bytes each, what the second-level cache of a core holds."""


def block_bounds(queries: int, block: int) -> list[tuple[int, int]]:
    """Start and end of each block of a call, aligned to the call's end."""
    first = queries % block or block
    return [(max(end - block, 0), end) for end in range(first, queries + 1, block)]


def block_counts(query_pos: Tensor, bounds: list[tuple[int, int]]) -> Tensor:
    """``[N, B]`` int64 queries of each block, padding excluded."""
    return torch.stack([(query_pos[:, start:end] >= 0).sum(-1) for start, end in bounds])


class BlockMass(NamedTuple):
    """Mass that one block of queries gives to the first ``width`` keys; the others get none.

    Attributes:
        both: ``[2, B, H, width]``, mean and maximum over the block's queries.
        last: ``[B, H, width]``, what the block's last query gives.
    """

    both: Tensor
    last: Tensor


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
    """See :func:`kvlearn.kernels.column_mass.column_mass`. Beside the result, memory is O(block x S)."""
    bounds = block_bounds(query.shape[2], block)[-1 if only_last else 0 :]
    counts = block_counts(query_pos, bounds)
    both = torch.zeros(2, len(bounds), *key.shape[:3], dtype=torch.float32, device=query.device)
    last = torch.zeros_like(both[0, 0])
    blocks = block_masses(
        query, lse, key, query_pos, key_pos, scale, bounds, counts, softcap, group_reduce, own_keys_last
    )
    for n, mass in enumerate(blocks):
        both[:, n, ..., : mass.last.shape[-1]] = mass.both
        if n == len(bounds) - 1:
            last[..., : mass.last.shape[-1]] = mass.last
    return both[0], both[1], counts, last


@torch.no_grad()
def block_masses(
    query: Tensor,
    lse: Tensor,
    key: Tensor,
    query_pos: Tensor,
    key_pos: Tensor,
    scale: float,
    bounds: list[tuple[int, int]],
    counts: Tensor,
    softcap: float | None,
    group_reduce: GroupReduce,
    own_keys_last: bool,
) -> Iterator[BlockMass]:
    """The mass of one block after the other; a result may be overwritten by the next.

    Args:
        bounds: start and end of the blocks, from :func:`block_bounds`.
        counts: ``[N, B]`` their numbers of queries.
        query, lse, key, query_pos, key_pos, scale, softcap, group_reduce, own_keys_last: see
            :func:`kvlearn.kernels.column_mass.column_mass`.
    """
    queries, (batch, heads, slots, _) = query.shape[2], key.shape
    group, pairs = query.shape[1] // heads, batch * heads
    rows, columns, norm = _operands(query, lse, key, scale, softcap, group_reduce)
    work = rows.dtype
    # Allocated once: fresh memory costs more than what is computed in it.
    largest = group * slots * max(end - start for start, end in bounds)
    space = torch.empty(max(min(TILE, pairs * group * slots * queries), largest), dtype=work, device=query.device)
    done = 0
    whole = bool((key_pos >= 0).all())  # no empty slot among the keys
    # Then all keys before the queries' own are visible to them, and a triangle of these.
    dense = own_keys_last and whole and bool((query_pos >= 0).all())
    positions = key_pos.expand(batch, heads, slots)
    if not whole:  # an empty slot comes after all queries
        positions = positions.masked_fill(positions < 0, torch.iinfo(torch.int32).max // 2)
    for strip in _strips(bounds, group * slots):
        start, end, size = strip[0][0], strip[-1][1], strip[0][1] - strip[0][0]
        width, length = slots - (queries - end) if own_keys_last else slots, end - start
        own_rows = rows[:, :, start:end].reshape(pairs, group * length, -1)
        if dense:
            own_pos = torch.arange(length, device=query.device)
            most = _most(own_pos[None], own_pos[None], work)
        else:
            most = _most(query_pos[:, None, start:end], positions[..., :width], work).flatten(0, 1)
        both = torch.empty(2, pairs, len(strip), width, dtype=work, device=query.device)
        last = torch.empty(pairs, width, dtype=work, device=query.device)
        step = max(1, TILE // (group * length * width))
        for first in range(0, pairs, step):
            these = slice(first, min(first + step, pairs))
            mass = space[: (these.stop - first) * group * length * width].view(-1, group * length, width)
            torch.bmm(own_rows[these], columns[these, :width].transpose(1, 2), out=mass)
            mass = mass.view(-1, group, length, width)
            if softcap is not None:
                mass.div_(softcap).tanh_().mul_(softcap * _LOG2_E).sub_(norm[these, :, start:end, None])
            mass.exp2_()
            reduced = _reduce_group(mass, group_reduce)
            if dense:
                own = reduced[..., width - length :]
                torch.minimum(own, most, out=own)
            else:
                torch.minimum(reduced, most[these], out=reduced)
            reduced = reduced.view(-1, len(strip), size, width)
            torch.sum(reduced, 2, out=both[0, these])
            torch.amax(reduced, 2, out=both[1, these])
            last[these] = reduced[:, -1, -1]
        for n, (_, stop) in enumerate(strip):
            seen = width - (end - stop) if own_keys_last else width
            mass = both[:, :, n, :seen].view(2, batch, heads, seen)
            mass[0].div_(counts[done + n].clamp(min=1).view(batch, 1, 1))
            yield BlockMass(mass, last[:, :seen].view(batch, heads, seen))
        done += len(strip)


def _operands(
    query: Tensor, lse: Tensor, key: Tensor, scale: float, softcap: float | None, group_reduce: GroupReduce
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows ``[X, G, C, D']`` and columns ``[X, S, D']`` whose products are logits, and ``[X, G, C]`` what they lack.

    In units of log 2: exp2 is fast down to its smallest results, exp is not. A group's mean is a sum of shares. Without
    a cap one more dimension lets the product subtract the norm: [q, -norm] . [k, 1].
    """
    pairs, dim = key.shape[0] * key.shape[1], key.shape[3]
    group, extra = query.shape[1] // key.shape[1], 1 if softcap is None else 0
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    norm = (lse.to(work) * _LOG2_E + (math.log2(group) if group_reduce == "mean" else 0.0)).reshape(pairs, group, -1)
    rows = query.new_empty(pairs, group, query.shape[2], dim + extra, dtype=work)
    rows[..., :dim].copy_(query.reshape(pairs, group, -1, dim)).mul_(scale * _LOG2_E if softcap is None else scale)
    columns = key.new_empty(pairs, key.shape[2], dim + extra, dtype=work)
    columns[..., :dim] = key.reshape(pairs, -1, dim)
    if extra:
        torch.neg(norm, out=rows[..., dim])
        columns[..., dim] = 1.0
    return rows, columns, norm


def _most(query_pos: Tensor, key_pos: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., C, S]`` no less than any mass where a query sees the key, and 0 where it does not.

    A minimum with it hides what is not seen: after the group's heads are joined, one pass over a third of the numbers.
    What a hidden key would have been given may be infinite, so that a product with 0 would not do.
    """
    first = query_pos.amin(-1, keepdim=True)  # small numbers stay exact
    ahead = ((query_pos - first).clamp_(min=-1) + 1).to(dtype).mul_(2)  # padding sees nothing
    behind = (key_pos - first).clamp_(min=-2).to(dtype).mul_(2)
    return (ahead[..., None] - behind[..., None, :]).clamp_(0, 2)


def _strips(bounds: list[tuple[int, int]], masses: int) -> Iterator[list[tuple[int, int]]]:
    """Consecutive blocks of one size, as many as fit a tile where each query gives ``masses``."""
    strip: list[tuple[int, int]] = []
    for start, end in bounds:
        if strip and (strip[0][1] - strip[0][0] != end - start or (end - strip[0][0]) * masses > TILE):
            yield strip
            strip = []
        strip.append((start, end))
    yield strip


def _reduce_group(mass: Tensor, group_reduce: GroupReduce) -> Tensor:
    """``[X, W, S]`` mass of KV heads from that of their query heads ``[X, G, W, S]``, in place of the first of them."""
    reduced = mass[:, 0]
    for g in range(1, mass.shape[1]):
        if group_reduce == "mean":
            reduced += mass[:, g]
        else:
            torch.maximum(reduced, mass[:, g], out=reduced)
    return reduced
