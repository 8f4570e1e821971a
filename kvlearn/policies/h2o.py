"""H2O: heavy hitters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.policies.base import Policy, Slots


@dataclass
class H2O(Policy):
    """Accumulated attention, half of the budget for recent tokens (H2O, arXiv 2306.14048).

    Args:
        recent_share: share of the budget for the most recent tokens; the paper uses one half.

    Raises:
        KvlearnError: the share is outside 0 to 1.
    """

    recent_share: float = 0.5

    name = "h2o"
    summary = "most attention in total, and the most recent half"
    paper = "H2O, arXiv 2306.14048"
    reads = frozenset({"history"})
    joins = True

    def __post_init__(self) -> None:
        if not 0 <= self.recent_share <= 1:
            raise KvlearnError(f"h2o: recent_share is {self.recent_share}; give a share of the budget in 0 to 1.")

    def score(self, slots: Slots) -> Tensor:
        """Sum of all mass received; tokens of the recent half rank above all others."""
        total = slots.field("mean") * slots.age
        recent = slots.age <= int(slots.budget * self.recent_share)
        return total.masked_fill(recent, float("inf"))
