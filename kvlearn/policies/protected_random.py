"""Random eviction that keeps the ends of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.policies.base import Policy, Slots
from kvlearn.policies.random import random_score


@dataclass
class ProtectedRandom(Policy):
    """Random eviction that keeps both ends of the first prompt: how far protection alone gets (arXiv 2605.18053).

    The first ``m`` and the last ``m`` tokens of the prompt outrank all others, with ``m`` the lesser of ``ends`` and a
    quarter of the budget, so at most half of the budget is set aside. While a prompt is still being read, its end is
    the latest token. All other tokens are drawn as ``random`` with the same seed draws them.

    Args:
        seed: another seed, another sample.
        ends: tokens kept at each end of the prompt.

    Raises:
        KvlearnError: ``ends`` is negative.
    """

    seed: int = 0
    ends: int = 32

    name = "protected-random"
    summary = "ends of the prompt, and a random sample of the rest"
    paper = "arXiv 2605.18053"
    kind = "floor"

    def __post_init__(self) -> None:
        if self.ends < 0:
            raise KvlearnError(f"protected-random: ends is {self.ends}; give a number of tokens, 0 or more.")

    def score(self, slots: Slots) -> Tensor:
        """As ``random``, with the ends of the prompt above everything."""
        ends = min(self.ends, slots.budget // 4)
        prompt = slots.prompt_length.view(-1, 1, 1)
        at_ends = (slots.pos < ends) | ((slots.pos < prompt) & (slots.pos >= prompt - ends))
        return random_score(slots.pos, slots.layer, self.seed).masked_fill(at_ends, torch.inf)
