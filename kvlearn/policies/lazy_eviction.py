"""LazyEviction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlearn.policies.base import Policy, Slots


@dataclass
class LazyEviction(Policy):
    """Keeps tokens that may be due again, judged by their longest silence so far (LazyEviction, arXiv 2506.15969).

    A token is thought gone when it has been silent for longer than ever before. Silences are measured in whole blocks,
    between hits of :data:`kvlearn.history.HIT_MASS`; the paper's threshold is 0.0001 and its window 175 queries.
    """

    name = "lazy-eviction"
    summary = "tokens silent for less than their longest silence"
    paper = "LazyEviction, arXiv 2506.15969"
    reads = frozenset({"history"})
    joins = True

    def score(self, slots: Slots) -> Tensor:
        """``2 sigmoid(-idle / gap) + 2 sigmoid(-1 / gap)``: how likely a return is, and how well proven."""
        idle, gap = slots.field("idle"), slots.field("gap")
        longest = gap.clamp(min=1)
        # 2 sigmoid(x) is 1 + tanh(x / 2), and tanh's bits do not depend on where in a tensor a number lies.
        proven = 2 + torch.tanh(-0.5 * idle / longest) + torch.tanh(-0.5 / longest)
        return torch.where(gap > 0, proven, (idle == 0).float())
