"""CAOTE: any attention score, made aware of values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.policies.base import Policy, Slots

INNER = ("h2o", "h2o-exposure", "tova", "snapkv", "ema", "g-kv")
"""Policies whose score is an amount of attention, as the wrapper needs."""

_SMALLEST = 1e-6  # what at least remains of the attention when a token is gone


@dataclass
class Caote(Policy):
    """How far the attention output moves when a token goes (CAOTE, arXiv 2504.14051).

    With the inner policy's scores as shares ``a`` of one, evicting token ``j`` moves the output by
    ``a_j / (1 - a_j) * |output - v_j|``. Tokens that the inner policy keeps whatever comes stay so, and are left out of
    the shares.

    Args:
        inner: the policy that scores attention, one of :data:`INNER`; from Python, with options.
        fast: take the mean of the values for the output, as FastCAOTE does.

    Raises:
        KvlearnError: the inner policy does not score attention.
    """

    inner: str = "h2o"
    fast: bool = False

    name = "caote"
    summary = "attention by another policy, times what the value adds"
    paper = "CAOTE, arXiv 2504.14051"
    reads = frozenset({"history", "last_query"})

    def __post_init__(self) -> None:
        from kvlearn.policies import resolve

        name = self.inner.partition(":")[0]
        if name not in INNER:
            raise KvlearnError(f"caote: inner is {name!r}, which is not attention; use one of {', '.join(INNER)}.")
        self._policy = resolve(self.inner)

    def score(self, slots: Slots) -> Tensor:
        """Change of the attention output, as a Euclidean norm."""
        attention = self._policy.score(slots).double()
        kept = attention.isinf() & slots.valid
        counted = slots.valid & ~kept
        # Sums in float64, so that the order of the slots does not show.
        attention = attention.masked_fill(~counted, 0.0)
        share = attention / attention.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        values = slots.values.double().masked_fill(~counted[..., None], 0.0)
        weight = counted / counted.sum(-1, keepdim=True).clamp(min=1) if self.fast else share
        output = (weight[..., None] * values).sum(2, keepdim=True)
        moved = share / (1 - share).clamp(min=_SMALLEST) * torch.linalg.vector_norm(output - values, dim=-1)
        return moved.float().masked_fill(kept, torch.inf)
