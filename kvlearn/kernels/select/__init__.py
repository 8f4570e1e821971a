"""Selection of the slots to overwrite next."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.kernels.launch import Impl, use_triton
from kvlearn.kernels.select import reference
from kvlearn.kernels.select.reference import INFEASIBLE, NAN
from kvlearn.kernels.validate import expect

__all__ = ["INFEASIBLE", "NAN", "select"]


def select(
    score: Tensor,
    pos: Tensor,
    protected: Tensor,
    count: int,
    *,
    fault: Tensor | None = None,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """The slots to overwrite next, in the order in which they go.

    Empty slots come first, by index; then unprotected ones from the lowest score up, of equal scores the older token
    first; protected ones last. So the result does not depend on the layout of slots, and there is no tie to break.
    -inf ranks as the lowest finite number, +inf as the highest, NaN as the lowest. Nothing waits for the GPU.

    Args:
        score: ``[B, H, S]`` float.
        pos: ``[B, H, S]`` int32 logical positions, no two alike in a row and head; -1 for empty slots.
        protected: ``[B, H, S]`` bool; ignored at empty slots.
        count: victims per row and head, at most ``S``.
        fault: int32 ``[1]``; :data:`NAN` is added (by "or") when a slot that holds a token has score NaN,
            :data:`INFEASIBLE` when fewer than ``count`` slots are not protected.
        out: contiguous ``[B, H, count]`` int64 to write to.
        impl: ``"reference"``, ``"triton"``, or ``"auto"``: see :func:`kvlearn.kernels.launch.use_triton`.

    Returns:
        ``[B, H, count]`` int64 slot indices.

    Raises:
        KvlearnError: shapes do not fit together, or ``impl="triton"`` cannot run here.
    """
    expect("score", score, (-1, -1, -1))
    shape = tuple(score.shape)
    expect("pos", pos, shape, torch.int32, score)
    expect("protected", protected, shape, torch.bool, score)
    if not 0 <= count <= shape[2]:
        raise KvlearnError(f"count is {count}; it must be from 0 to the {shape[2]} slots there are.")
    if fault is not None:
        expect("fault", fault, (1,), torch.int32, score)
    if out is not None:
        expect("out", out, (*shape[:2], count), torch.int64, score)
        if not out.is_contiguous():
            raise KvlearnError("out must be contiguous.")
    if not use_triton(impl, score):
        result = reference.select(score, pos, protected, count, fault)
        return result if out is None else out.copy_(result)
    from kvlearn.kernels.select import triton

    out = torch.empty(*shape[:2], count, dtype=torch.int64, device=score.device) if out is None else out
    triton.select(score, pos, protected, count, fault, out)
    return out
