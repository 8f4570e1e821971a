"""Key norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlearn.policies.base import Policy, Slots


@dataclass
class KeyNorm(Policy):
    """Keeps keys of small Euclidean norm, which tend to be attended to (arXiv 2406.11430). Reads no attention."""

    name = "keynorm"
    summary = "keys of small norm"
    paper = "arXiv 2406.11430"

    def score(self, slots: Slots) -> Tensor:
        """Minus the norm of the key.

        In half precision: the keys of a token that is repeated differ in the last bits of single precision, and not in
        the same way in every batch; here they tie.
        """
        norm = torch.linalg.vector_norm(slots.keys, dim=-1, dtype=torch.float32)
        return -norm.clamp(max=torch.finfo(torch.float16).max).half().float()
