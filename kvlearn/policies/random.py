"""Random eviction: the floor of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlearn.policies.base import Policy, Slots

_WORD = 0xFFFFFFFF


def random_score(pos: Tensor, layer: int, seed: int) -> Tensor:
    """A number in [0, 1) for each token, a hash of the seed, layer, KV head and position and of nothing else.

    So a token draws once, wherever it is stored and whatever else is in the batch, and what is kept at any time is a
    uniform sample of all tokens seen so far.

    Args:
        pos: ``[B, H, S]`` logical positions.
        layer: index of the layer.
        seed: any integer.

    Returns:
        ``[B, H, S]`` float32, multiples of ``2 ** -24``.
    """
    heads = torch.arange(pos.shape[1], device=pos.device).view(1, -1, 1)
    word = torch.zeros_like(pos, dtype=torch.int64)
    for part in (seed & _WORD, seed >> 32 & _WORD, layer, heads, pos.long()):
        word = _mix(word ^ part)
    return (word >> 8).float() * 2.0**-24


def _mix(word: Tensor) -> Tensor:
    """Scramble 32-bit words held in int64 (the constants of MurmurHash3's finalizer, after adding one odd number)."""
    word = (word + 0x9E3779B9) & _WORD
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & _WORD
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & _WORD
    return word ^ (word >> 16)


@dataclass
class Random(Policy):
    """Keeps a uniform random sample of the tokens seen.

    Args:
        seed: another seed, another sample.
    """

    seed: int = 0

    name = "random"
    summary = "a uniform random sample of all tokens"
    paper = "the floor"
    kind = "floor"

    def score(self, slots: Slots) -> Tensor:
        """A hash of the seed and the token's layer, head and position."""
        return random_score(slots.pos, slots.layer, self.seed)
