"""TOVA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlearn.policies.base import Policy, Slots, by_position


@dataclass
class Tova(Policy):
    """The last query's attention, averaged over the heads of the layer (TOVA, arXiv 2401.06104).

    All heads of a layer therefore hold the same tokens, as published.
    """

    name = "tova"
    summary = "most attention by the last query, mean over heads"
    paper = "TOVA, arXiv 2401.06104"
    reads = frozenset({"last_query"})

    def score(self, slots: Slots) -> Tensor:
        """Mass given by the last query; heads are matched by position, not by slot."""
        assert slots.last_query is not None
        ordered, order = by_position(slots.last_query.masked_fill(~slots.valid, 0.0), slots.pos)
        mean = ordered.mean(dim=1, keepdim=True).expand_as(ordered)
        return torch.empty_like(ordered).scatter_(-1, order, mean)
