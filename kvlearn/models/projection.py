"""What a layer's output projection makes of the values of each KV head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def output_projection(
    model: PreTrainedModel, layers: Sequence[int], kv_heads: int, query_heads: int, head_dim: int
) -> Tensor | None:
    """How long a value is once it is part of the layer's output.

    ``W`` stacks the slices of the output projection that the ``G`` query heads of a KV head are read by. Of it the
    lengths alone are kept: ``R`` with ``||R v|| = ||W v||``, its triangular factor. What comes after the projection (a
    norm, a gate, the factor of a residual) is left out.

    Args:
        model: a decoder; only its weights are read.
        layers: indices of layers with attention, ``L`` of them.
        kv_heads: ``H``.
        query_heads: ``H * G``.
        head_dim: ``D`` of values.

    Returns:
        ``[L, H, D, D]`` float32, on the CPU; ``None`` if some layer's projection is not found, or is quantised.
    """
    found = [output_linear(model, layer, query_heads * head_dim) for layer in layers]
    factors = []
    for linear in found:
        if linear is None:
            return None
        weight = linear.weight.detach().cpu().double().unflatten(1, (kv_heads, -1, head_dim))  # [hidden, H, G, D]
        stacked = weight.permute(1, 2, 0, 3).flatten(1, 2)  # [H, G * hidden, D]
        factor = torch.linalg.qr(stacked, mode="r").R  # of fewer rows than D where the hidden size is small
        factors.append(nn.functional.pad(factor, (0, 0, 0, head_dim - factor.shape[1])).float())
    return torch.stack(factors)


def output_linear(model: PreTrainedModel, layer: int, width: int) -> nn.Linear | None:
    """The output projection of a layer: of its attention module's linear maps from ``width`` numbers, the last one.

    Models give it many names (``o_proj``, ``dense``, ``out_proj``); those that take and give as many numbers as it does
    (the query projection, say) are made before it.
    """
    hidden = model.config.get_text_config(decoder=True).hidden_size
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    found = [
        child
        for module in decoder.modules()
        if getattr(module, "layer_idx", None) == layer and "Attention" in type(module).__name__
        for child in module.children()
        if type(child) is nn.Linear and (child.in_features, child.out_features) == (width, hidden)
    ]
    return found[-1] if found else None
