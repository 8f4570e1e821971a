"""G-KV."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlearn.policies.base import Policy, Slots


@dataclass
class GKV(Policy):
    """The highest attention so far, decaying: the larger of what was, decayed, and what is (G-KV).

    G-KV takes the mean over a window, relative to the window's largest, and multiplies what was by 0.8 at each
    compression. Here it is the history's ``peak``: the maximum over a block, as it is, halved every 512 queries.
    """

    name = "g-kv"
    summary = "highest attention so far, decaying"
    paper = "G-KV (microsoft/G-KV)"
    reads = frozenset({"history"})
    joins = True

    def score(self, slots: Slots) -> Tensor:
        """Decayed maximum of block maximum mass."""
        return slots.field("peak")
