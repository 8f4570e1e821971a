"""Scissorhands."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlearn.history import HIT_HALF_LIFE
from kvlearn.policies.base import Policy, Slots


@dataclass
class Scissorhands(Policy):
    """Evicts the tokens that were passed over most often of late (Scissorhands, arXiv 2305.17118).

    The paper counts, over the last 400 queries, those that gave a token less than average attention. Here the count is
    of blocks without a hit (:data:`kvlearn.history.HIT_MASS`), halved every 256 queries, which weighs about as many. A
    young token has had few chances to be passed over, as in the paper.
    """

    name = "scissorhands"
    summary = "fewest blocks that passed the token over"
    paper = "Scissorhands, arXiv 2305.17118"
    reads = frozenset({"history"})
    joins = True

    def score(self, slots: Slots) -> Tensor:
        """Minus the decayed number of blocks without a hit."""
        rate = -math.log(2) / HIT_HALF_LIFE
        # Not exp2, whose bits depend on where in a tensor a number lies.
        chances = torch.expm1(slots.age.clamp(min=0).float() * rate) / math.expm1(slots.block * rate)
        return slots.field("hits") - chances
