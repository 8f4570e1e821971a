"""One layer by itself: what a decoded token and a prompt cost there, beside the stock cache at the same slots."""

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
_TURNS = 6


@torch.inference_mode()
def table(
    model: PreTrainedModel, policies: Sequence[str], rows: Sequence[int], budgets: Sequence[int]
) -> list[list[str]]:
    """The least time over some turns of two blocks, all that happens once per block in it, and of a prompt of 2,048.

    The layer is one of the middle; keys, values and queries are random.
    """
    layer = len(shapes(model)) // 2
    heads, dim = shapes(model)[layer]
    group = model.config.get_text_config(decoder=True).num_attention_heads // heads
    lines = []
    for batch in rows:
        token = [random_tensor(model, batch, n, 1, dim) for n in (heads * group, heads, heads)]
        prompt = [random_tensor(model, batch, n, _CONTEXT, dim) for n in (heads * group, heads, heads)]
        for slots in budgets:
            stock = _Stock(group, [random_tensor(model, batch, heads, slots, dim) for _ in range(2)])
            took = _least(partial(stock.steps, *token), 32)
            whole = _least(partial(stock.attend, *prompt), 1)
            lines.append(["stock", str(batch), str(slots), f"{took * 1e6:,.0f}", f"{whole * 1e3:,.1f}"])
            for spec in policies:
                held: Any = Evicting(model, spec, Case(_CONTEXT, batch), slots).cache.layers[layer]
                took = _least(partial(_steps, held, token), 64)
                whole = _least(partial(_read, held, prompt), 1)
                name = resolve(spec).label.rstrip("/").rsplit("/", 1)[-1]
                lines.append([name, str(batch), str(slots), f"{took * 1e6:,.0f}", f"{whole * 1e3:,.1f}"])
    return lines


class _Stock:
    """A layer of the stock cache, cut back before every turn."""

    def __init__(self, group: int, held: Sequence[torch.Tensor]) -> None:
        self.cache: Any = DynamicLayer()
        self.cache.update(*held)
        self.slots = held[0].shape[2]
        self.module: Any = SimpleNamespace(num_key_value_groups=group, is_causal=True)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        sdpa_attention_forward(self.module, query, key, value, None, scaling=query.shape[-1] ** -0.5)

    def steps(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if (extra := self.cache.get_seq_length() - self.slots) > 0:
            self.cache.crop(-extra)
        for _ in range(32):
            self.attend(query, *self.cache.update(key, value))


def _steps(layer: Any, token: Sequence[torch.Tensor]) -> None:
    for _ in range(64):
        _attend(layer, token, layer.seen)


def _read(layer: Any, prompt: Sequence[torch.Tensor]) -> None:
    layer.reset()
    _attend(layer, prompt, 0)


def _attend(layer: Any, tokens: Sequence[torch.Tensor], start: int) -> None:
    query = tokens[0]
    positions = torch.arange(start, start + query.shape[2], device=query.device)[None]
    layer.attend(*tokens, None, scale=query.shape[-1] ** -0.5, softcap=None, position_ids=positions)


def _least(run: Callable[[], object], steps: int) -> float:
    """Seconds a step, of the quickest turn; the first is not counted."""
    best = float("inf")
    run()
    for _ in range(_TURNS if steps > 1 else 2):
        started = time.perf_counter()
        run()
        best = min(best, (time.perf_counter() - started) / steps)
    return best
