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
    by_age = pos.argsort(dim=-1, stable=True)
    order = score.gather(-1, by_age).sort(dim=-1, stable=True).indices[..., :count]
    return by_age.gather(-1, order)
