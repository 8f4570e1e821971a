"""StreamingLLM."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlearn.policies.base import Policy, Slots


@dataclass
class Streaming(Policy):
    """Sinks and the most recent tokens; the sinks are kept by protection (StreamingLLM, arXiv 2309.17453)."""

    name = "streaming"
    summary = "sinks and the most recent tokens"
    paper = "StreamingLLM, arXiv 2309.17453"
    joins = True

    def score(self, slots: Slots) -> Tensor:
        """The newer, the better."""
        return slots.pos.float()
