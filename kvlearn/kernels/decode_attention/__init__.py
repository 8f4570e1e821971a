"""Attention of a few queries over cache slots: output and log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.kernels.decode_attention import reference
from kvlearn.kernels.launch import Impl, use_triton
from kvlearn.kernels.validate import dense_rows, expect, expect_heads


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor | None = None,
    held: Tensor | None = None,
    causal: bool = False,
    scale: float,
    softcap: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Grouped-query attention with float32 accumulation.

    At most one of ``visible``, ``held`` and ``causal`` says what a query does not see. A query that sees nothing gets
    output 0 and log-sum-exp 0. Keys and values that no query sees are not read by the Triton kernel.

    Args:
        query: ``[B, H * G, C, D]``; query head ``h * G + g`` reads KV head ``h``.
        key: ``[B, H, S, D]``.
        value: ``[B, H, S, D]``.
        visible: ``[B, 1 or H, C, S]`` bool, which slots each query sees.
        held: ``[B, 1 or H, S]`` int32 positions; no query sees a slot whose position is negative.
        causal: query ``i`` sees slots ``0..i``; needs ``C == S``.
        scale: factor on the dot products.
        softcap: if given, logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).
        out: contiguous ``[B, H * G, C, D]`` to write the output to.
        lse: ``[B, H * G, C]`` float32, of any strides, to write the log-sum-exp to.
        impl: ``"reference"``, ``"triton"``, or ``"auto"``: see :func:`kvlearn.kernels.launch.use_triton`.

    Returns:
        Output ``[B, H * G, C, D]`` in the dtype of ``query``, and the log-sum-exp of the logits
        ``[B, H * G, C]`` float32 (natural logarithm).

    Raises:
        KvlearnError: shapes do not fit together, or ``impl="triton"`` cannot run here.
    """
    _check(query, key, value, visible, held, causal, out, lse)
    if not use_triton(impl, query):
        if held is not None:
            visible = (held >= 0)[:, :, None].expand(-1, -1, query.shape[2], -1)
        result, sums = reference.decode_attention(query, key, value, visible, causal, scale, softcap)
        return (result if out is None else out.copy_(result)), (sums if lse is None else lse.copy_(sums))
    from kvlearn.kernels.decode_attention import triton

    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device) if lse is None else lse
    query, key, value = dense_rows(query), dense_rows(key), dense_rows(value)
    triton.decode_attention(query, key, value, visible, held, causal, scale, softcap, out, lse)
    return out, lse


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    held: Tensor | None,
    causal: bool,
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    expect_heads(query, key)
    batch, heads, slots, _ = key.shape
    queries = query.shape[2]
    expect("value", value, tuple(key.shape), query.dtype, query)
    if (visible is not None) + (held is not None) + causal > 1:
        raise KvlearnError("give at most one of visible, held and causal.")
    if visible is not None:
        expect("visible", visible, (batch, (1, heads), queries, slots), torch.bool, query)
    if held is not None:
        expect("held", held, (batch, (1, heads), slots), torch.int32, query)
    if causal and queries != slots:
        raise KvlearnError(f"causal attention needs as many keys as queries, not {slots} and {queries}.")
    if out is not None:
        expect("out", out, tuple(query.shape), query.dtype, query)
        if not out.is_contiguous():
            raise KvlearnError("out must be contiguous.")
    if lse is not None:
        expect("lse", lse, tuple(query.shape[:3]), torch.float32, query)
