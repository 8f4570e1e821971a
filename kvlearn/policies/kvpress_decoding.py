"""Presses of kvpress within kvpress's own way of decoding, for comparison."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvlearn.errors import KvlearnError
from kvlearn.policies.base import Policy, Slots
from kvlearn.policies.kvpress import load_kvpress, make_press, rotated_queries
from kvlearn.shapes import Budget

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ALWAYS, _NEVER = 1, 2**62  # calls between compressions
_HOOKED: weakref.WeakSet[Any] = weakref.WeakSet()  # models whose attention calls a PressCache that comes by


@dataclass
class KVPressDecoding(Policy):
    """A scorer press run by kvpress's ``DecodingPress`` over transformers' own cache; for ``kvlearn compare``.

    After every block of decoded tokens the press cuts the cache to the budget, so that up to one block more is held in
    between; a prompt beyond the budget is cut to it at once, as ``PrefillDecodingPress`` does.

    Args:
        press: class of the press, such as ``SnapKVPress``.
        options: its arguments, such as ``window_size=16``. A window that is not shorter than a block is cut to that,
            because ``DecodingPress`` keeps no more queries.
        hard: cut to a block less than the budget, which then holds at any moment, as for kvlearn's own policies.

    Raises:
        KvlearnError: kvpress is missing, has no such press, or it is used elsewhere.
    """

    press: str = ""
    options: str = ""
    hard: bool = False

    name = "kvpress-decoding"
    summary = "a press under kvpress's own DecodingPress, in comparisons"
    paper = "kvpress (github.com/NVIDIA/kvpress)"

    def __post_init__(self) -> None:
        make_press(self.press, self.options)

    @property
    def label(self) -> str:
        """As it is typed."""
        told = [self.options and f"options={self.options}", "hard=true" if self.hard else ""]
        return ":".join(filter(None, [self.name, self.press, *told]))

    def bind(self, model: PreTrainedModel) -> None:
        """Refused: an EvictingCache does not run it."""
        raise KvlearnError(
            f"{self.name} brings a cache of its own, which only kvlearn compare makes; use kvpress:{self.press}."
        )

    def score(self, slots: Slots) -> Tensor:
        """Never called; see :meth:`open_cache`."""
        raise KvlearnError(f"{self.name} does not score slots; use kvpress:{self.press}.")

    def open_cache(self, model: PreTrainedModel, budget: Budget) -> PressCache:
        """A cache for ``model`` (enabled for kvlearn) that the press cuts to ``budget``."""
        assert budget.slots is not None
        press = make_press(self.press, self.options)
        if getattr(press, "window_size", 0) >= budget.block:
            press.window_size = budget.block - 1
        target = budget.slots - budget.block if self.hard else budget.slots
        _hook(model)
        return PressCache(model, press, target, budget)


class PressCache(DynamicCache):
    """transformers' growing cache, cut by a press; positions stay those of the text.

    Fed in pieces that end where blocks end, it holds what it would hold if every token were a call of its own: queries
    see all that is held, since nothing goes within a block, and the press sees the last token's positions and attention
    as it would after a single step.

    Attributes:
        seen: tokens fed.
        most: the most slots that a head held at any moment.
    """

    def __init__(self, model: PreTrainedModel, press: Any, target: int, budget: Budget) -> None:
        super().__init__()
        self.block, self.budgets = budget.block, [budget] * _layers(model)
        self.managed: list[int] = []  # by kvlearn
        self.press = _block_press(load_kvpress())(press, compression_interval=_NEVER, target_size=target)
        self.press.post_init_from_model(model)
        self.seen = self.open = self.most = 0
        self._layer_count = _layers(model)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens fed so far, as the model must count positions."""
        return self.seen

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        """Keys that the mask covers, and the position of the first of them: those held come just before the call's."""
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        held = self.held(layer_idx)
        return held + count, self.seen - held

    def held(self, layer: int) -> int:
        """Slots that each head of a layer holds."""
        layers: list[Any] = self.layers
        keys = layers[layer].keys if layer < len(layers) else None
        return 0 if keys is None or not keys.numel() else keys.shape[2]

    def step(self, layer: int, count: int) -> None:
        """Count a call of ``count`` tokens when its last layer is done."""
        if layer == self._layer_count - 1:
            self.open = 0 if self.due(count) else self.open + (count if self.seen else 0)
            self.seen += count

    def due(self, count: int) -> bool:
        """Whether a block is complete after ``count`` more tokens."""
        return self.seen > 0 and self.open + count >= self.block

    def evicting_layers(self) -> list[Any]:
        """None: no layer is managed by kvlearn."""
        return []

    def stats(self) -> dict[str, Any]:
        """What rows tell of a cache (see :meth:`kvlearn.EvictingCache.stats`), at its fullest."""
        layers: list[Any] = self.layers
        kv = sum(layer.keys[:, :, 0].nbytes + layer.values[:, :, 0].nbytes for layer in layers) * self.most
        buffered = sum(t.nbytes for kept in self.press.hidden_states_buffer.values() for t in kept)
        rows = layers[0].keys.shape[0] if layers else 0
        return {
            "length": [self.seen] * rows,
            "slots": self.most,
            "mean_slots": float(self.most),
            "bytes": kv + buffered,
            "state_bytes": buffered,
        }


def _layers(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


@functools.cache
def _block_press(kvpress: Any) -> type[Any]:
    """DecodingPress of kvpress, fed with pieces of several tokens."""

    class BlockPress(kvpress.DecodingPress):
        def forward_hook(self, module: Any, inputs: Any, kwargs: dict[str, Any], output: Any) -> Any:
            cache: PressCache = kwargs["past_key_values"]
            hidden = kwargs["hidden_states"]
            count = hidden.shape[1]
            cache.most = max(cache.most, cache.held(module.layer_idx))
            attends = isinstance(self.base_press, kvpress.ObservedAttentionPress)
            if cache.seen == 0:
                self._cut_prompt(module, kwargs, cache)
            else:
                self.compression_interval = _ALWAYS if cache.due(count) else _NEVER
                cos, sin = kwargs["position_embeddings"]
                last = {**kwargs, "position_embeddings": (cos[:, -1:], sin[:, -1:])}
                mass = _attention(module, hidden[:, -1:], last, cache) if attends and cache.due(count) else None
                super().forward_hook(module, inputs, last, [output[0], mass])
            cache.step(module.layer_idx, count)
            return output

        def _cut_prompt(self, module: Any, kwargs: dict[str, Any], cache: PressCache) -> None:
            layer = cache.layers[module.layer_idx]
            if layer.keys.shape[2] <= self.target_size:
                return
            hidden, mass = kwargs["hidden_states"], None
            if isinstance(self.base_press, kvpress.ObservedAttentionPress):
                mass = _attention(module, hidden, kwargs, cache)
            layer.keys, layer.values = self.compress(module, hidden, layer.keys, layer.values, mass, kwargs)

    return BlockPress


def _attention(module: Any, hidden: Tensor, kwargs: dict[str, Any], cache: PressCache) -> Tensor:
    """``[B, H * G, C, S]`` attention of the latest ``C`` tokens, as an eager model would return it."""
    from transformers.models.llama.modeling_llama import repeat_kv

    query = rotated_queries(module, hidden, kwargs)
    held: Any = cache.layers[module.layer_idx].keys
    keys = repeat_kv(held, query.shape[1] // held.shape[1])
    logits = query @ keys.transpose(2, 3) * module.scaling
    count = query.shape[2]
    hide = torch.ones(count, keys.shape[2], dtype=torch.bool, device=keys.device).triu(keys.shape[2] - count + 1)
    return logits.masked_fill(hide, -torch.inf).softmax(-1, dtype=torch.float32).to(query.dtype)


def _hook(model: PreTrainedModel) -> None:
    """Let the model's attention call the press of a :class:`PressCache`, and of no other cache."""
    if model in _HOOKED:
        return
    _HOOKED.add(model)
    base: Any = model.base_model

    def call(module: Any, inputs: Any, kwargs: dict[str, Any], output: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if isinstance(cache, PressCache):
            return cache.press.forward_hook(module, inputs, kwargs, output)
        return output

    for layer in base.layers:
        layer.self_attn.register_forward_hook(call, with_kwargs=True)
        if not hasattr(layer.self_attn, "rotary_emb"):  # as presses expect to find it
            layer.self_attn.__dict__["rotary_emb"] = base.rotary_emb
