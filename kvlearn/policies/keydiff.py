"""KeyDiff."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvlearn.policies.base import Policy, Slots


@dataclass
class KeyDiff(Policy):
    """Keeps keys that differ most from the mean direction of the keys held (KeyDiff, arXiv 2504.15364)."""

    name = "keydiff"
    summary = "keys unlike the mean key"
    paper = "KeyDiff, arXiv 2504.15364"

    def score(self, slots: Slots) -> Tensor:
        """Minus the cosine between a key and the mean of the normalised keys."""
        direction = F.normalize(slots.keys.float(), dim=-1).masked_fill(~slots.valid[..., None], 0.0)
        # Summed in float64, so that the order of the slots does not show; a mean would only scale the anchor.
        anchor = F.normalize(direction.sum(dim=2, keepdim=True, dtype=torch.float64), dim=-1).float()
        return -(direction * anchor).sum(-1)
