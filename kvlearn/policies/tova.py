"""TOVA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlearn.policies.base import Policy, Slots


@dataclass
class Tova(Policy):
    """The last query's attention, averaged over the heads of the layer (TOVA, arXiv 2401.06104).

    All heads of a layer therefore hold the same tokens, as published. Where they do not, because another policy chose
    too, a token's average is over the heads that hold it.
    """

    name = "tova"
    summary = "most attention by the last query, mean over heads"
    paper = "TOVA, arXiv 2401.06104"
    reads = frozenset({"last_query"})

    def score(self, slots: Slots) -> Tensor:
        """Mass given by the last query; heads are matched by position, not by slot."""
        assert slots.last_query is not None
        at = slots.pos.clamp(min=0).long().flatten(1)  # [B, H * S]
        # Sums in float64, so that the order of the slots does not show.
        sums = torch.zeros(2, len(at), int(slots.length.max()), dtype=torch.float64, device=at.device)
        sums[0].scatter_add_(1, at, slots.last_query.masked_fill(~slots.valid, 0.0).double().flatten(1))
        sums[1].scatter_add_(1, at, slots.valid.double().flatten(1))
        mean = sums[0] / sums[1].clamp(min=1)
        return mean.gather(1, at).view_as(slots.last_query).float()
