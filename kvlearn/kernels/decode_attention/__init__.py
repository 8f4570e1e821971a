"""Attention of a few queries over cache slots: output and log-sum-exp."""

from __future__ import annotations

from torch import Tensor

from kvlearn.kernels.decode_attention import reference


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor | None = None,
    causal: bool = False,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Grouped-query attention with float32 accumulation.

    Args:
        query: ``[B, H * G, C, D]``; query head ``h * G + g`` reads KV head ``h``.
        key: ``[B, H, S, D]``.
        value: ``[B, H, S, D]``.
        visible: ``[B, 1 or H, C, S]`` bool, which slots each query sees; ``None`` means all (or ``causal``). A query
            that sees nothing gets output 0 and log-sum-exp 0.
        causal: query ``i`` sees slots ``0..i``; needs ``C == S`` and no ``visible``.
        scale: factor on the dot products.
        softcap: if given, logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).

    Returns:
        Output ``[B, H * G, C, D]`` in the dtype of ``query``, and the log-sum-exp of the logits
        ``[B, H * G, C]`` float32.
    """
    return reference.decode_attention(query, key, value, visible, causal, scale, softcap)
