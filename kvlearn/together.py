"""Blocks that end together: layers that are alike go through the end of a block as one layer with the heads of all.

With few rows, what happens once per block is hundreds of calls for small tensors, and it is the calls that take the
time: ten layers at once take little longer than one. Their tensors are copied into one, and what has changed is copied
back, so this is done only where they are small; elsewhere a layer goes on alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kvlearn.layer import EvictingLayer
from kvlearn.slots import SLOT_DIM

MOST = 2**13
"""Slots, of all rows and heads, that go together at most: more takes memory, and no less time."""

_ALIKE = ("used", "cursor", "waiting", "bare", "fresh", "uneven", "decoding", "seen", "scale", "softcap")
_CHANGED = ("open", "cursor", "waiting", "bare", "fresh", "faults")


def end_blocks(layers: Sequence[EvictingLayer]) -> None:
    """Observe the blocks that are complete and choose what goes next, where layers can do so together.

    Args:
        layers: the managed layers of a cache, in order, before the first of them takes its next token.
    """
    start = 0
    while start < len(layers):
        first, end = layers[start], start + 1
        if first.ended and _joins(first):
            most = start + MOST // first.pos.numel()
            kind = _kind(first)
            while end < min(most, len(layers)) and layers[end].ended and _kind(layers[end]) == kind:
                end += 1
            if end - start > 1:
                _end(layers[start:end])
        start = end


def _joins(layer: EvictingLayer) -> bool:
    config = layer.config
    return type(layer) is EvictingLayer and config.policy.joins and config.budget.slots is not None


def _kind(layer: EvictingLayer) -> tuple[Any, ...]:
    """What must be the same in layers that go together."""
    config = layer.config
    return (
        type(layer),
        *(getattr(layer, name) for name in _ALIKE),
        *(None if (tensor := getattr(layer, name)) is None else (tensor.shape, tensor.dtype) for name in SLOT_DIM),
        layer.keys.device,
        id(config.policy),
        id(config.unrotate),
        config.budget,
    )


def _end(layers: Sequence[EvictingLayer]) -> None:
    together = _Together(layers)
    together.close_block()
    together.plan(1)
    for name in ("pos", "state", "static", "last_query", "order"):
        tensor = getattr(together, name)
        if tensor is not None:
            for layer, part in zip(layers, tensor.chunk(len(layers), dim=1), strict=True):
                own = getattr(layer, name)
                if own is None or name == "order":  # the first static inputs
                    setattr(layer, name, part.clone())
                else:
                    own.copy_(part)
    for layer in layers:
        for name in _CHANGED:
            setattr(layer, name, getattr(together, name))
        if together.waiting_ids is None:
            layer.waiting_ids = layer.id_places = None


class _Together(EvictingLayer):
    """Several layers for the end of a block. What they do not have by head is the first one's."""

    def __init__(self, layers: Sequence[EvictingLayer]) -> None:
        self.__dict__.update(vars(layers[0]))
        self.config = replace(self.config, layers=tuple(layer.config.index for layer in layers))
        for name in (*SLOT_DIM, "order", "queries", "lse"):
            if getattr(self, name) is not None:
                setattr(self, name, torch.cat([getattr(layer, name) for layer in layers], dim=1))
