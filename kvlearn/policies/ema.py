"""Exponential moving average of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.history import HALF_LIVES
from kvlearn.policies.base import Policy, Slots


@dataclass
class Ema(Policy):
    """Moving average of mass, corrected for how long the token could be seen.

    Args:
        half_life: in queries; one of :data:`kvlearn.history.HALF_LIVES`.

    Raises:
        KvlearnError: another half-life.
    """

    half_life: int = 64

    name = "ema"
    summary = "most attention lately: an average that decays"
    paper = "decaying counters, as in web caching (LRB, NSDI 2020)"
    reads = frozenset({"history"})
    joins = True

    def __post_init__(self) -> None:
        if self.half_life not in HALF_LIVES:
            raise KvlearnError(
                f"ema: half_life is {self.half_life}; the history keeps {', '.join(map(str, HALF_LIVES))}."
            )

    def score(self, slots: Slots) -> Tensor:
        """The average, divided by the weight it has had time to gather."""
        # Not exp2, whose bits depend on where in a tensor a number lies.
        gathered = -torch.expm1(slots.age.clamp(min=1).float() * (-math.log(2) / self.half_life))
        return slots.field(f"ema{self.half_life}") / gathered
