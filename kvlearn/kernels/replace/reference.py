"""PyTorch meaning of replacement."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


def replace(
    keys: Tensor,
    values: Tensor,
    pos: Tensor,
    state: Tensor | None,
    static: Tensor | None,
    last_query: Tensor | None,
    target: Tensor,
    key: Tensor,
    value: Tensor,
    new_pos: Tensor,
    new_static: Tensor | None,
    padded: bool,
) -> None:
    """See :func:`kvlearn.kernels.replace.replace`."""
    new = {0: key, 1: value, 2: new_pos[:, None].expand_as(target), 4: new_static}
    rows = None if padded else flat_rows(target, keys.shape[2])
    for n, slots in enumerate((keys, values, pos, state, static, last_query)):
        fresh = new.get(n)
        if slots is not None and rows is not None and fresh is not None and slots.is_contiguous():
            copy_rows(slots, rows, fresh)
        elif slots is not None:
            store(slots, 3 if n == 3 else 2, target, fresh, new_pos, padded)


def copy_rows(slots: Tensor, rows: Tensor, fresh: Tensor) -> None:
    """Write ``fresh``, as many rows as ``rows`` of :func:`flat_rows`, to contiguous ``[B, H, S, ...]``.

    Whole rows of memory are copied: many times as fast as a scatter of single numbers.
    """
    tail = slots.shape[3:]
    put_rows(slots.view(-1, *tail), rows, fresh)


def put_rows(flat: Tensor, rows: Tensor, fresh: Tensor) -> None:
    """:func:`copy_rows` to a view ``[B * H * S, ...]`` of the slots."""
    flat.index_copy_(0, rows, fresh.reshape(-1, *flat.shape[1:]))


def append(slots: Tensor, at: int, fresh: Tensor) -> None:
    """Write ``fresh`` ``[B, H, 1, D]`` to the same slot of every row and head of ``[B, H, S, D]``."""
    slots.narrow(2, at, 1).copy_(fresh)


class Ahead(NamedTuple):
    """Where the tokens of a block will go, one of every row at a time, made at once for all of them.

    Attributes:
        order: ``[B, H, M]`` the slots that this was made of.
        keys, values: ``[B * H * S, D]`` views of them.
        rows: ``[M, B * H]`` int64 rows of :func:`put_rows`.
        each: its ``M`` rows.
        pos: ``[M, B * H]`` int32 logical positions, or ``None``.
    """

    order: Tensor
    keys: Tensor
    values: Tensor
    rows: Tensor
    each: tuple[Tensor, ...]
    pos: Tensor | None

    @classmethod
    def of(cls, order: Tensor, first: Tensor | None, keys: Tensor, values: Tensor) -> Ahead:
        """For an order of which entry 0 takes position ``first`` ``[B]``, if asked, among ``[B, H, S, D]`` slots."""
        _, heads, count = order.shape
        rows = flat_rows(order, keys.shape[2]).view(-1, count).t().contiguous()
        pos = None
        if first is not None:
            pos = (first + torch.arange(count, device=order.device)[:, None]).int()
            pos = pos[..., None].expand(-1, -1, heads).reshape(count, -1)
        flat_keys, flat_values = (slots.view(-1, slots.shape[-1]) for slots in (keys, values))
        return cls(order, flat_keys, flat_values, rows, rows.unbind(0), pos)


def flat_rows(target: Tensor, slots: int) -> Tensor:
    """``[B * H * C]`` int64: the slots of ``target`` ``[B, H, C]`` among all slots of all rows and heads."""
    batch, heads, count = target.shape
    return (target.reshape(-1, count) + _first_rows(batch * heads, slots, target.device)).flatten()


@lru_cache(maxsize=32)
def _first_rows(pairs: int, slots: int, device: torch.device) -> Tensor:
    return torch.arange(0, pairs * slots, slots, device=device)[:, None]


def store(slots: Tensor, dim: int, target: Tensor, fresh: Tensor | None, new_pos: Tensor, padded: bool) -> None:
    """One kind of slot state: ``fresh`` ``[B, H, C, ...]``, or zeros, to the slots that :func:`replace` describes.

    Args:
        slots: ``[B, H, S]``, ``[B, H, S, X]``, or with ``dim=3`` ``[B, H, K, S]`` (zeros only).
        dim: the slot dimension.
        target, new_pos, padded: as for :func:`kvlearn.kernels.replace.replace`.
    """
    index = expand(target, slots, dim)
    if not padded:
        slots.scatter_(dim, index, slots.new_zeros(()).expand(index.shape) if fresh is None else fresh)
        return
    # Tokens to the front: the i-th token of each row takes the i-th slot of its plan.
    front = (new_pos < 0).to(torch.uint8).sort(dim=-1, stable=True).indices
    padding = (new_pos < 0).gather(1, front)[:, None].expand_as(target)
    if fresh is None:
        fresh = slots.new_zeros(()).expand(index.shape)
    else:
        fresh = fresh.gather(2, expand(front[:, None].expand_as(target), fresh, 2))
    slots.scatter_(dim, index, torch.where(expand(padding, slots, dim), slots.gather(dim, index), fresh))


def expand(index: Tensor, like: Tensor, dim: int) -> Tensor:
    """``[B, H, M]`` broadcast to the shape of ``like`` with ``M`` along its slot dimension ``dim``."""
    if like.ndim == 3:
        return index
    shape = [*like.shape]
    shape[dim] = index.shape[-1]
    return (index[..., None] if dim == 2 else index[:, :, None]).expand(shape)
