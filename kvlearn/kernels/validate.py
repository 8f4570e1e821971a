"""Checks that every public function of :mod:`kvlearn.kernels` makes at its door."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlearn.errors import KvlearnError


def expect(
    name: str,
    tensor: Tensor,
    shape: tuple[int | tuple[int, ...], ...],
    dtype: torch.dtype | None = None,
    like: Tensor | None = None,
) -> None:
    """Check one argument.

    Args:
        name: what the message calls it.
        tensor: the argument.
        shape: the length of each axis; a tuple lists the lengths allowed, and -1 allows any.
        dtype: its dtype, if only one will do.
        like: a tensor whose device it must share.

    Raises:
        KvlearnError: it differs.
    """
    if tensor.shape != shape and not _fits(tensor.shape, shape):
        wanted = ", ".join(
            " or ".join(map(str, s)) if isinstance(s, tuple) else "any" if s < 0 else str(s) for s in shape
        )
        raise KvlearnError(f"{name} has shape {list(tensor.shape)}; it must be [{wanted}].")
    if dtype is not None and tensor.dtype != dtype:
        raise KvlearnError(f"{name} is {tensor.dtype}; it must be {dtype}.")
    if like is not None and tensor.device != like.device:
        raise KvlearnError(f"{name} is on {tensor.device}; it must be on {like.device} like the other tensors.")


def _fits(sizes: torch.Size, shape: tuple[int | tuple[int, ...], ...]) -> bool:
    return len(shape) == len(sizes) and all(
        size in allowed if isinstance(allowed, tuple) else allowed in (-1, size)
        for size, allowed in zip(sizes, shape, strict=True)
    )


def expect_heads(query: Tensor, key: Tensor) -> None:
    """Check that ``query`` ``[B, H * G, C, D]`` can attend to ``key`` ``[B, H, S, D]``."""
    shape, found = query.shape, key.shape
    if len(shape) != 4:
        raise KvlearnError(f"query has shape {list(shape)}; it must be [B, H * G, C, D].")
    fits = len(found) == 4 and found[0] == shape[0] and found[3] == shape[3]
    expect("key", key, found if fits else (shape[0], -1, -1, shape[3]), query.dtype, query)
    if found[1] == 0 or shape[1] % found[1]:
        raise KvlearnError(f"{shape[1]} query heads cannot share {found[1]} KV heads evenly.")


def dense_rows(tensor: Tensor) -> Tensor:
    """``tensor``, copied only if its last axis is not contiguous."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def expect_dense(name: str, tensor: Tensor | None) -> None:
    """Check that the last axis of a tensor that a kernel writes is contiguous."""
    if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise KvlearnError(f"{name} must be contiguous along its last axis.")
