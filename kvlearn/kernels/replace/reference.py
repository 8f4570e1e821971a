"""PyTorch meaning of replacement."""

from __future__ import annotations

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
    new = {2: new_pos[:, None].expand_as(target), 0: key, 1: value, 4: new_static}
    padding = None
    if padded:  # tokens to the front: the i-th token of each row takes the i-th slot of its plan
        front = (new_pos < 0).to(torch.uint8).sort(dim=-1, stable=True).indices
        pick = front[:, None].expand_as(target)
        new = {n: t if t is None else t.gather(2, expand(pick, t, 2)) for n, t in new.items()}
        padding = (new_pos < 0).gather(1, front)[:, None].expand_as(target)
    for n, slots in enumerate((keys, values, pos, state, static, last_query)):
        if slots is None:
            continue
        dim = 3 if n == 3 else 2
        index = expand(target, slots, dim)
        fresh = new.get(n)
        if fresh is None:
            fresh = slots.new_zeros(()).expand(index.shape)
        if padding is not None:
            fresh = torch.where(expand(padding, slots, dim), slots.gather(dim, index), fresh)
        slots.scatter_(dim, index, fresh)


def expand(index: Tensor, like: Tensor, dim: int) -> Tensor:
    """``[B, H, M]`` broadcast to the shape of ``like`` with ``M`` along its slot dimension ``dim``."""
    if like.ndim == 3:
        return index
    shape = [*like.shape]
    shape[dim] = index.shape[-1]
    return (index[..., None] if dim == 2 else index[:, :, None]).expand(shape)
