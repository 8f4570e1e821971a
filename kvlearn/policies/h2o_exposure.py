"""H2O without its bias for old tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlearn.policies.base import Policy, Slots


@dataclass
class H2OExposure(Policy):
    """Accumulated attention divided by the queries that could have given it: the mean mass over a token's life.

    A sum grows with age whatever the token is worth (H2O's own bias); the mean does not.
    """

    name = "h2o-exposure"
    summary = "most attention per query that could see the token"
    paper = "H2O, arXiv 2306.14048, without its age bias"
    reads = frozenset({"history"})
    joins = True

    def score(self, slots: Slots) -> Tensor:
        """Mean mass since the token was written."""
        return slots.field("mean")
