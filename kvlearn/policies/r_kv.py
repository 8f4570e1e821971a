"""R-KV."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvlearn.errors import KvlearnError
from kvlearn.policies.base import Policy, Slots, by_position

_SIMILAR = 0.5  # cosine from which two keys count as saying the same
_ROWS = 512  # keys compared with all others at a time


@dataclass
class RKV(Policy):
    """Importance minus redundancy (R-KV, arXiv 2505.24133).

    Importance is attention of the last block to the tokens before it, as a share of all that they get, max-pooled over
    neighbours; the paper's window is 8 queries. Redundancy is the softmax, over the tokens held, of a key's mean cosine
    with the other keys; of the keys much like a given one, the latest is not held to be redundant for it.

    Args:
        mix: weight of importance; redundancy has the rest.
        kernel: tokens pooled together, an odd number.

    Raises:
        KvlearnError: ``mix`` is outside 0 to 1, or the kernel is even or below 1.
    """

    mix: float = 0.1
    kernel: int = 7

    name = "r-kv"
    summary = "attention of the last block minus redundancy of the key"
    paper = "R-KV, arXiv 2505.24133"
    reads = frozenset({"history"})

    def __post_init__(self) -> None:
        if not 0 <= self.mix <= 1:
            raise KvlearnError(f"r-kv: mix is {self.mix}; give a weight in 0 to 1.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise KvlearnError(f"r-kv: kernel is {self.kernel}; give an odd number of tokens, 1 or more.")

    def score(self, slots: Slots) -> Tensor:
        """``mix * importance - (1 - mix) * redundancy``; the block's own tokens rank above all others."""
        window = slots.age <= slots.block
        seen = slots.field("last").masked_fill(window | ~slots.valid, 0.0)
        ordered, order = by_position(seen, slots.pos)
        share = ordered / ordered.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        importance = F.max_pool1d(share, self.kernel, stride=1, padding=self.kernel // 2)
        keys = slots.keys.float().gather(2, order[..., None].expand(slots.keys.shape))
        score = self.mix * importance - (1 - self.mix) * redundancy(keys, slots.valid.gather(-1, order))
        return torch.empty_like(score).scatter_(-1, order, score).masked_fill(window, torch.inf)


def redundancy(keys: Tensor, valid: Tensor) -> Tensor:
    """Softmax of each key's mean cosine with the others.

    Args:
        keys: ``[B, H, S, D]`` float32, in order of position.
        valid: ``[B, H, S]`` bool, which of them there are.

    Returns:
        ``[B, H, S]``, 0 where there is no key.
    """
    direction = F.normalize(keys, dim=-1).masked_fill(~valid[..., None], 0.0)
    count = keys.shape[2]
    column = torch.arange(count, device=keys.device)
    total = torch.zeros_like(keys[..., 0])
    for start in range(0, count, _ROWS):
        cosine = direction[:, :, start : start + _ROWS] @ direction.transpose(-1, -2)  # [B, H, rows, S]
        row = column[start : start + _ROWS, None]
        cosine.masked_fill_(column == row, 0.0)
        latest = torch.where(cosine > _SIMILAR, column, -1).amax(-1, keepdim=True)
        total += cosine.masked_fill_(column == latest, 0.0).sum(-2)
    mean = total / valid.sum(-1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~valid, -torch.inf).softmax(-1)
