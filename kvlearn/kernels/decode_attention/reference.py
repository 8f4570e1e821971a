"""PyTorch meaning of decode attention; on a CPU it runs PyTorch's own flash kernel."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """See :func:`kvlearn.kernels.decode_attention.decode_attention`."""
    if query.device.type == "cpu" and softcap is None and query.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return _flash_cpu(query, key, value, visible, causal, scale)
    return naive(query, key, value, visible, causal, scale, softcap)


def _flash_cpu(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    batch, query_heads, queries, dim = query.shape
    heads, slots = key.shape[1], key.shape[2]
    group = query_heads // heads
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    bias = None
    if visible is not None:
        bias = torch.zeros(visible.shape, dtype=query.dtype).masked_fill_(~visible, -torch.inf)
    if group == 1 or _flash_shares_heads():
        if bias is not None and bias.shape[1] > 1:
            bias = bias.repeat_interleave(group, dim=1)
        return flash(query, key, value, 0.0, causal and queries > 1, attn_mask=bias, scale=scale)
    if causal:  # the triangle cannot be shared by a packed group, so the keys are repeated
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        return flash(query, key, value, 0.0, queries > 1, scale=scale)
    # The group's queries become rows of one KV head: keys are read once and never repeated.
    packed = query.reshape(batch, heads, group * queries, dim)
    if bias is not None:
        bias = bias.expand(batch, heads, queries, slots)[:, :, None]
        bias = bias.expand(batch, heads, group, queries, slots).reshape(batch, heads, group * queries, slots)
    out, lse = flash(packed, key, value, 0.0, False, attn_mask=bias, scale=scale)
    return out.reshape(batch, query_heads, queries, dim), lse.reshape(batch, query_heads, queries)


@lru_cache(maxsize=1)
def _flash_shares_heads() -> bool:
    """Whether this PyTorch's kernel lets several query heads read one KV head; older ones do not say so, nor check."""
    query, key = torch.eye(4, 16)[None, :, None], torch.eye(32, 16).view(1, 2, 16, 16)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    try:
        found, _ = flash(query, key, key, 0.0, False)
    except (RuntimeError, IndexError):
        return False
    return torch.allclose(found, naive(query, key, key, None, False, 16**-0.5, None)[0], atol=1e-5)


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """The definition, in the dtype of the inputs' float32 (or float64) copies."""
    batch, query_heads, queries, dim = query.shape
    heads, slots = key.shape[1], key.shape[2]
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped = query.reshape(batch, heads, -1, queries, dim).to(work)  # [B, H, G, C, D]
    logits = grouped @ key.to(work)[:, :, None].transpose(-1, -2) * scale  # [B, H, G, C, S]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if causal:
        visible = torch.ones(queries, slots, dtype=torch.bool, device=query.device).tril()[None, None]
    if visible is not None:
        logits = logits.masked_fill(~visible[:, :, None], -torch.inf)
    lse = logits.logsumexp(-1)
    sees = lse > -torch.inf
    lse = torch.where(sees, lse, 0.0)
    out = torch.exp(logits - lse[..., None]) @ value.to(work)[:, :, None]
    return (
        out.reshape(batch, query_heads, queries, dim).to(query.dtype),
        lse.reshape(batch, query_heads, queries).float(),
    )
