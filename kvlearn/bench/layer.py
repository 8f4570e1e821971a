"""Attention and cache without the model: what a decoded token and a prompt cost in a layer, beside the stock cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvlearn.bench.contenders import Case, Evicting, random_tensor, shapes
from kvlearn.policies import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COLUMNS = ("policy", "rows", "slots", "us a step", "ms a prompt")
"""Of :func:`table`."""

_CONTEXT = 2048
_STEPS = 32  # of a turn: a block
_TURNS = 6


@torch.inference_mode()
def table(
    model: PreTrainedModel, policies: Sequence[str], rows: Sequence[int], budgets: Sequence[int]
) -> list[list[str]]:
    """The least time over some turns of a block, all that happens once per block in it, and of a prompt of 2,048.

    A step goes through all layers, as in a model, because layers share work and caches of the processor; its time is
    told per layer. A prompt goes through one layer of the middle. Keys, values and queries are random.
    """
    layers = len(shapes(model))
    heads, dim = shapes(model)[layers // 2]
    group = model.config.get_text_config(decoder=True).num_attention_heads // heads
    lines = []
    for batch in rows:
        token = [random_tensor(model, batch, n, 1, dim) for n in (heads * group, heads, heads)]
        prompt = [random_tensor(model, batch, n, _CONTEXT, dim) for n in (heads * group, heads, heads)]
        for slots in budgets:
            stock = _Stock(group, [random_tensor(model, batch, heads, slots, dim) for _ in range(2)], layers)
            took = _least(partial(stock.steps, *token), _STEPS * layers)
            whole = _least(partial(stock.attend, *prompt), 1)
            lines.append(["stock", str(batch), str(slots), f"{took * 1e6:,.0f}", f"{whole * 1e3:,.1f}"])
            for spec in policies:
                cache: Any = Evicting(model, spec, Case(_CONTEXT, batch), slots).cache
                took = _least(partial(_steps, cache, token), _STEPS * layers)
                whole = _least(partial(_read, cache.layers[layers // 2], prompt), 1)
                name = resolve(spec).label.rstrip("/").rsplit("/", 1)[-1]
                lines.append([name, str(batch), str(slots), f"{took * 1e6:,.0f}", f"{whole * 1e3:,.1f}"])
    return lines


class _Stock:
    """Layers of the stock cache, cut back before every turn."""

    def __init__(self, group: int, held: Sequence[torch.Tensor], layers: int) -> None:
        self.layers: list[Any] = [DynamicLayer() for _ in range(layers)]
        for layer in self.layers:
            layer.update(*held)
        self.slots = held[0].shape[2]
        self.module: Any = SimpleNamespace(num_key_value_groups=group, is_causal=True)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        sdpa_attention_forward(self.module, query, key, value, None, scaling=query.shape[-1] ** -0.5)

    def steps(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        for layer in self.layers:
            if (extra := layer.get_seq_length() - self.slots) > 0:
                layer.crop(-extra)
        for _ in range(_STEPS):
            for layer in self.layers:
                self.attend(query, *layer.update(key, value))


def _steps(cache: Any, token: Sequence[torch.Tensor]) -> None:
    query, key, value = token
    for _ in range(_STEPS):
        position = torch.tensor([[cache.get_seq_length()]], device=query.device)
        for i, layer in enumerate(cache.layers):
            _attend(layer, (query, *cache.update(key, value, i)), position)


def _read(layer: Any, prompt: Sequence[torch.Tensor]) -> None:
    layer.reset()
    _attend(layer, prompt, torch.arange(prompt[0].shape[2], device=prompt[0].device)[None])


def _attend(layer: Any, tokens: Sequence[torch.Tensor], positions: torch.Tensor) -> None:
    layer.attend(*tokens, None, scale=tokens[0].shape[-1] ** -0.5, softcap=None, position_ids=positions)


def _least(run: Callable[[], object], steps: int) -> float:
    """Seconds a step, of the quickest turn; the first is not counted."""
    best = float("inf")
    run()
    for _ in range(_TURNS if steps > 1 else 2):
        started = time.perf_counter()
        run()
        best = min(best, (time.perf_counter() - started) / steps)
    return best
