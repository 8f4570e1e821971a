"""SnapKV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvlearn.errors import KvlearnError
from kvlearn.policies.base import Policy, Slots, by_position


@dataclass
class SnapKV(Policy):
    """Attention from an observation window, smoothed over neighbouring tokens (SnapKV, arXiv 2404.14469).

    The window is the last observed block; its own tokens are kept and lend their neighbours nothing. Neighbours are the
    tokens next to each other among those held, as in a compacted cache.

    Args:
        kernel: tokens pooled together, an odd number; 5 is the default of the authors' code (7 with ``max`` pooling in
            their LongBench runs).
        pooling: ``"avg"`` or ``"max"``.

    Raises:
        KvlearnError: the kernel is even or below 1, or the pooling is another word.
    """

    kernel: int = 5
    pooling: Literal["avg", "max"] = "avg"

    name = "snapkv"
    summary = "most attention by the last block, neighbours pooled"
    paper = "SnapKV, arXiv 2404.14469"
    reads = frozenset({"history"})
    joins = True

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise KvlearnError(f"{self.name}: kernel is {self.kernel}; give an odd number of tokens, 1 or more.")
        if self.pooling not in ("avg", "max"):
            raise KvlearnError(f"{self.name}: pooling is {self.pooling!r}; use 'avg' or 'max'.")

    def score(self, slots: Slots) -> Tensor:
        """Pooled mean mass of the last block; the block's own tokens rank above all others."""
        window = slots.age <= slots.block
        seen = slots.field("last").masked_fill(window | ~slots.valid, 0.0)
        ordered, order = by_position(seen, slots.pos)
        pool = F.avg_pool1d if self.pooling == "avg" else F.max_pool1d
        pooled = pool(ordered, self.kernel, stride=1, padding=self.kernel // 2)
        return torch.empty_like(pooled).scatter_(-1, order, pooled).masked_fill(window, torch.inf)
