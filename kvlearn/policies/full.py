"""Keep everything."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.policies.base import Policy, Slots


@dataclass
class Full(Policy):
    """Never evicts: the stock cache's output, at the stock cache's memory."""

    name = "full"
    summary = "every token: the reference for quality and memory"
    paper = "no eviction"
    kind = "full"

    def score(self, slots: Slots) -> Tensor:
        """Refuse: there is nothing to choose."""
        raise KvlearnError(
            f"the full policy evicts nothing and its budget of {slots.budget} slots is used up; "
            "raise the budget, give none, or choose another policy."
        )
