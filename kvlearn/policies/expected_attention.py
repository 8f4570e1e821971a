"""Expected attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.policies.base import Policy, Queries, Slots

_SINKS = 4  # first tokens, kept whatever comes; their own queries are outliers


@dataclass
class ExpectedAttention(Policy):
    """The attention that the queries to come are expected to give, times the norm of the value (arXiv 2510.00636).

    Queries before rotation are taken for normally distributed, with the mean ``m`` and the covariance ``C`` of the
    latest 128 (what the authors keep while decoding). Turned by the mean rotation over the next ``future`` positions,
    they give a key ``k`` the expected weight ``exp(k·m / sqrt(D) + k·C·k / 2D)``, which is made a share of one over the
    slots and averaged over the query heads of a group.

    Args:
        future: positions ahead that are averaged; 512 in the authors' code.
        covariance: whether ``C`` counts.
        value_norm: whether the value's norm does.

    Raises:
        KvlearnError: ``future`` is below 1.
    """

    future: int = 512
    covariance: bool = True
    value_norm: bool = True

    name = "expected-attention"
    summary = "attention expected of queries like the latest, times the value's norm"
    paper = "Expected Attention, arXiv 2510.00636"
    reads = frozenset({"queries"})
    query_window = 128

    def __post_init__(self) -> None:
        if self.future < 1:
            raise KvlearnError(f"{self.name}: future is {self.future}; give a number of positions that is 1 or more.")

    def score(self, slots: Slots) -> Tensor:
        """Expected share of the attention, times the norm of the value; infinite for the first tokens."""
        assert slots.queries is not None
        first = slots.pos < _SINKS
        counted = slots.valid & ~first
        mean, covariance = self._moments(slots.queries)  # float64, so that the order of the slots does not show
        keys = slots.keys.double().masked_fill(~counted[..., None], 0.0)[:, :, None]  # [B, H, 1, S, D]
        batch, heads = slots.pos.shape[:2]
        scale = slots.queries.scale
        logits = scale * (keys * mean.view(batch, heads, -1, 1, mean.shape[-1])).sum(-1)  # [B, H, G, S]
        if self.covariance:
            spread = covariance.view(batch, heads, -1, *covariance.shape[-2:])
            logits = logits + 0.5 * scale**2 * (keys @ spread * keys).sum(-1)
        share = logits.masked_fill(~counted[:, :, None], -torch.inf).softmax(-1).nan_to_num().mean(2)
        if self.value_norm:
            share = share * torch.linalg.vector_norm(slots.values.double(), dim=-1)
        return share.float().masked_fill(first, torch.inf)

    def _moments(self, queries: Queries) -> tuple[Tensor, Tensor]:
        """Mean ``[B, H * G, D]`` and covariance ``[B, H * G, D, D]`` of queries, turned to the positions to come."""
        counted = (queries.positions >= _SINKS)[:, None, :, None].double()
        count = counted.sum(2).clamp(min=1)  # [B, 1, 1]
        plain = queries.plain.double()
        mean = (plain * counted).sum(2) / count
        centred = (plain - mean[:, :, None]) * counted
        covariance = centred.transpose(2, 3) @ centred / count[..., None]
        if queries.rotary is None:
            return mean, covariance
        ahead = queries.positions[:, -1:] + 1 + torch.arange(self.future, device=mean.device)
        turn = queries.rotary.rotate_mean
        mean = turn(mean[:, :, None], ahead)[:, :, 0]
        return mean, turn(turn(covariance, ahead).transpose(2, 3), ahead)
