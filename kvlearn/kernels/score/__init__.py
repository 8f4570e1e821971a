"""A scorer's forecast for every slot of a layer: features and network in one pass over the state."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlearn import history
from kvlearn.features import DYNAMIC
from kvlearn.kernels.launch import Impl, use_triton
from kvlearn.kernels.score import reference
from kvlearn.kernels.score.reference import Weights, evaluate
from kvlearn.kernels.validate import expect, expect_dense

__all__ = ["Weights", "evaluate", "score"]


def score(
    state: Tensor,
    pos: Tensor,
    length: Tensor,
    static: Tensor,
    weights: Weights,
    *,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Forecast of log future mass; higher is kept.

    The Triton kernel makes the dynamic features in registers and writes no feature tensor.

    Args:
        state: ``[B, H, K, S]`` history, contiguous along ``S``.
        pos: ``[B, H, S]`` int32 logical positions, -1 for empty slots (their scores are finite and meaningless).
        length: ``[B]`` int64 tokens seen by each row.
        static: ``[B, H, S, R]`` of a float type or int8, contiguous along ``R``; for int8, the weights must include
            the scale.
        weights: float32 weights of the layer's heads.
        out: ``[B, H, S]`` float32, contiguous, to write to.
        impl: ``"reference"``, ``"triton"``, or ``"auto"``: see :func:`kvlearn.kernels.launch.use_triton`.

    Returns:
        ``[B, H, S]`` float32.

    Raises:
        KvlearnError: shapes do not fit together, or ``impl="triton"`` cannot run here.
    """
    expect("pos", pos, (-1, -1, -1), torch.int32)
    batch, heads, slots = pos.shape
    expect("state", state, (batch, heads, len(history.FIELDS), slots), history.DTYPE, pos)
    expect("length", length, (batch,), torch.int64, pos)
    expect("static", static, (batch, heads, slots, -1), None, pos)
    expect("weights.dynamic", weights.dynamic, (heads, -1, len(DYNAMIC)), torch.float32, pos)
    units = weights.dynamic.shape[1]
    expect("weights.static", weights.static, (heads, units, static.shape[-1]), torch.float32, pos)
    expect("weights.bias", weights.bias, (heads, units, 1), torch.float32, pos)
    if weights.out is not None:
        expect("weights.out", weights.out, (heads, 1, units - 1), torch.float32, pos)
    if out is not None:
        expect("out", out, (batch, heads, slots), torch.float32, pos)
    if not use_triton(impl, state):
        result = reference.score(state, pos, length, static, weights)
        return result if out is None else out.copy_(result)
    from kvlearn.kernels.score import triton

    for name, tensor in (("state", state), ("static", static), ("out", out)):
        expect_dense(name, tensor)
    out = torch.empty(batch, heads, slots, device=pos.device) if out is None else out
    triton.score(state, pos, length, static, weights, out)
    return out
