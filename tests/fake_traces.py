"""Traces made of random numbers, with something in them to learn: which tokens matter shows in their keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvlearn import history
from kvlearn.features import encode_vectors
from kvlearn.traces.collect import pack_bits, to_bytes
from kvlearn.traces.format import VECTORS, Manifest, TraceWriter
from kvlearn.traces.layout import Layout

FINGERPRINT: dict[str, Any] = {
    "architecture": "llama",
    "layers": 2,
    "kv_heads": 2,
    "query_heads": 4,
    "head_dim": 8,
    "rope": None,
    "hidden_size": 32,
    "vocab_size": 200,
    "weights": "0" * 32,
}


def write_trace(
    folder: Path,
    *,
    windows: int = 6,
    window: int = 384,
    block: int = 32,
    layers: tuple[int, ...] = (0, 1),
    heads: int = 2,
    head_dim: int = 8,
    budget: int | None = None,
    seed: int = 0,
    domains: Sequence[str] = ("noise",),
    **manifest: Any,
) -> Path:
    """Write a trace; with ``budget`` it is on-policy, under a cache that keeps tokens at random; domains take turns."""
    layout = Layout(layers=layers, heads=heads, head_dim=head_dim, window=window, block=block)
    recipe: dict[str, Any] = {
        "model": "fake",
        "fingerprint": {**FINGERPRINT, "layers": len(layers), "kv_heads": heads, "head_dim": head_dim},
        "tokenizer": "none",
        "group_reduce": "mean",
        "data": "noise",
        "split": "train",
        "seed": seed,
        "tokens": windows * window,
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
    }
    if budget is not None:
        recipe |= {"policy": "random", "budgets": str(budget)}
    writer = TraceWriter(folder, Manifest(layout=layout, **{**recipe, **manifest}))
    generator = torch.Generator().manual_seed(seed)
    writer.write_shards(
        iter([{**_row(layout, i, budget, generator), "domain": domains[i % len(domains)]} for i in range(windows)])
    )
    writer.finish()
    return folder


def _row(layout: Layout, number: int, budget: int | None, generator: torch.Generator) -> dict[str, Any]:
    shape = (len(layout.layers), layout.heads)
    keys = torch.randn(*shape, layout.window, layout.head_dim, generator=generator)
    values = torch.randn(keys.shape, generator=generator)
    # A token's key says how much it will matter, and it sleeps until a later block wakes it.
    weight = (1.5 * keys[..., 0] + keys[..., 1]).exp()
    wakes = torch.randint(1, layout.blocks + 1, weight.shape, generator=generator)
    packed: list[list[torch.Tensor]] = [[], [], [], [], []]
    for n, end in enumerate(layout.ends, start=1):
        awake = torch.where(n >= wakes, weight, 0.02 * weight)[..., :end]
        noise = torch.rand(awake.shape, generator=generator) + 0.5
        mean = awake * noise / (awake * noise).sum(-1, keepdim=True)
        peak = (mean * 4).clamp(max=1)
        kept = torch.ones_like(mean, dtype=torch.bool)
        if budget is not None and end > budget:
            order = torch.rand(mean.shape, generator=generator)
            order[..., :4] = order[..., -layout.block :] = 2
            kept = torch.zeros_like(kept).scatter_(-1, order.topk(budget, dim=-1).indices, True)
        codes = history.encode_mass(mean), history.encode_mass(peak)
        for part, value in zip(packed, (*codes, kept, *codes), strict=True):
            part.append(value)
    mean_code, peak_code, held, seen_mean, seen_peak = (torch.cat(part, -1) for part in packed)
    row: dict[str, Any] = {
        "input_ids": torch.randint(200, (layout.window,), generator=generator).tolist(),
        "doc": f"noise-{number}",
        "split": "train",
        "start": 0,
        "documents": [f"noise-{number}"],
        **dict(zip(VECTORS, map(to_bytes, (*encode_vectors(keys), *encode_vectors(values))), strict=True)),
        "mean_code": to_bytes(mean_code),
        "peak_code": to_bytes(peak_code),
    }
    if budget is not None:
        row |= {
            "policy": "random",
            "budget": budget,
            "held": to_bytes(pack_bits(held)),
            "seen_mean": to_bytes(seen_mean[held]),
            "seen_peak": to_bytes(seen_peak[held]),
        }
    return row
