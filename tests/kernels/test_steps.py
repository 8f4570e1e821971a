"""Once the budget is full, a decode step of the reference allocates nothing that lasts.

Slots stay where they are, and the temporaries of a step are as large as those of the same step a block before, so that
an allocator that keeps what is freed, as PyTorch's does on a GPU, asks the driver for nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kvlearn
from kvlearn.attention import cache_argument

BLOCK = 4


class Made(TorchDispatchMode):
    """The sizes in bytes of all storages that operations make, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.sizes.append(tensor.untyped_storage().nbytes())
        return result


def alive() -> int:
    """Bytes of all tensors that Python can reach."""
    gc.collect()
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) is Tensor
    }
    return sum(storages.values())


def stores(cache: Any) -> list[tuple[int, int]]:
    names = ("keys", "values", "pos", "state", "static", "last_query")
    tensors = (getattr(layer, name) for layer in cache.evicting_layers() for name in names)
    return [(t.data_ptr(), t.untyped_storage().nbytes()) for t in tensors if t is not None]


@pytest.mark.parametrize("policy", ["streaming", "ema", "learned"])
def test_nothing_grows(policy: str, tiny_llama: Callable[..., Any]) -> None:
    model = kvlearn.enable(tiny_llama())
    chosen = kvlearn.Scorer.for_model(model, hidden=4, key_rank=2) if policy == "learned" else policy
    cache = kvlearn.EvictingCache(model, chosen, budget=20, block=BLOCK, impl="reference")
    argument = cache_argument(model)
    made: list[list[int]] = []
    held: list[int] = []
    placed: list[list[tuple[int, int]]] = []
    with torch.no_grad():
        model(torch.randint(1, 200, (2, 30)), **{argument: cache})
        for step in range(1, 5 * BLOCK + 1):
            with Made() as counter:
                model(torch.randint(1, 200, (2, 1)), **{argument: cache})
            made.append(counter.sizes)
            placed.append(stores(cache))
            if step in (3 * BLOCK, 4 * BLOCK, 5 * BLOCK):
                held.append(alive())
    assert all(one == placed[0] for one in placed), "slots were moved or allocated anew"
    blocks = [slice(n * BLOCK, (n + 1) * BLOCK) for n in range(2, 4)]
    assert made[blocks[0]] == made[blocks[1]], "a step makes other tensors than the same step of the block before"
    assert held[0] == held[1] == held[2], "a block of steps leaves something behind"
