"""PyTorch meaning of a scorer's forecast."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvlearn.features import dynamic_features


class Weights(NamedTuple):
    """A scorer of ``H`` heads, acting on raw features (the standardisation is folded in).

    Row 0 of the products is the linear part, the ``M`` others enter the hidden units.

    Attributes:
        dynamic: ``[H, 1 + M, F]`` for :func:`kvlearn.features.dynamic_features`.
        static: ``[H, 1 + M, R]`` for the static inputs.
        bias: ``[H, 1 + M, 1]``.
        out: ``[H, 1, M]`` from the hidden units to the score, or ``None`` for a linear scorer.
    """

    dynamic: Tensor
    static: Tensor
    bias: Tensor
    out: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> Weights:
        """The same change to every tensor."""
        out = None if self.out is None else change(self.out)
        return Weights(change(self.dynamic), change(self.static), change(self.bias), out)


def score(state: Tensor, pos: Tensor, length: Tensor, static: Tensor, weights: Weights) -> Tensor:
    """See :func:`kvlearn.kernels.score.score`."""
    batch, heads, slots = pos.shape
    dynamic = dynamic_features(state, pos, length).reshape(batch * heads, slots, -1)
    if batch > 1:
        weights = weights.map(lambda weight: weight.repeat(batch, 1, 1))
    return evaluate(weights, dynamic, static.reshape(batch * heads, slots, -1)).view(batch, heads, slots)


def evaluate(weights: Weights, dynamic: Tensor, static: Tensor) -> Tensor:
    """``[X, S]`` scores of ``[X, S, F]`` and ``[X, S, R]`` raw features, for weights of ``X`` heads.

    Slots are the last axis of the products, so that the linear and the hidden part are contiguous.
    """
    z = torch.baddbmm(weights.bias, weights.dynamic, dynamic.transpose(1, 2))
    z.baddbmm_(weights.static, static.float().transpose(1, 2))
    if weights.out is None:
        return z[:, 0]
    linear, hidden = z.split([1, z.shape[1] - 1], dim=1)  # two slices would each fill a gradient of the whole
    return torch.baddbmm(linear, weights.out, functional.gelu(hidden))[:, 0]
