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


@torch.no_grad()
def score(state: Tensor, pos: Tensor, length: Tensor, static: Tensor, weights: Weights) -> Tensor:
    """See :func:`kvlearn.kernels.score.score`. What :func:`evaluate` gives, in fewer passes."""
    batch, heads, slots = pos.shape
    count = weights.dynamic.shape[-1]
    inputs = pos.new_empty(batch, heads, count + static.shape[-1] + 1, slots, dtype=torch.float32)
    dynamic_features(state, pos, length, out=inputs[:, :, :count])
    inputs[:, :, count:-1] = static.transpose(2, 3)
    inputs[:, :, -1] = 1.0  # for the bias
    weight, out = torch.cat([weights.dynamic, weights.static, weights.bias], dim=-1), weights.out
    if batch > 1:
        weight, out = weight.repeat(batch, 1, 1), None if out is None else out.repeat(batch, 1, 1)
    z = torch.bmm(weight, inputs.flatten(0, 1))
    if out is None:
        return z[:, 0].view(batch, heads, slots)
    linear = z[:, :1].clone()
    hidden = torch.ops.aten.gelu_(z)[:, 1:]  # in place and in one piece: a third of the time
    return torch.baddbmm(linear, out, hidden).view(batch, heads, slots)


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
