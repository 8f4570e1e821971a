"""PyTorch meaning of selection."""

from __future__ import annotations

import torch
from torch import Tensor

NAN, INFEASIBLE = 1, 2  # bits of a fault


def select(score: Tensor, pos: Tensor, protected: Tensor, count: int, fault: Tensor | None) -> Tensor:
    """See :func:`kvlearn.kernels.select.select`."""
    held = pos >= 0
    score = score.float()
    if fault is not None:
        nan = (torch.isnan(score) & held).any()
        infeasible = (~(protected & held)).sum(-1).min() < count
        fault.bitwise_or_(nan * NAN + infeasible * INFEASIBLE)
    finite = torch.finfo(torch.float32).max
    score = score.nan_to_num(nan=-finite, posinf=finite, neginf=-finite)
    score = score.masked_fill(protected, torch.inf).masked_fill(~held, -torch.inf)
    # One number orders slots by score, then by age: a top-k of it takes a tenth of the time of two stable sorts.
    bits = (score + 0.0).view(torch.int32)  # 0.0 makes -0.0 equal to 0.0
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    tie = torch.where(held, pos, torch.arange(pos.shape[-1], dtype=torch.int32, device=pos.device))
    return torch.topk((rank.long() << 32) | tie, count, largest=False).indices
