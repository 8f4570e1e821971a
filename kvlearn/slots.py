"""Storage of one layer's slots: allocation, writing, growing, moving rows. What to store is the layer's business."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvlearn import history
from kvlearn.kernels.launch import Impl
from kvlearn.kernels.replace import Ahead
from kvlearn.kernels.replace import expand as expand
from kvlearn.kernels.replace import replace as replace_slots
from kvlearn.kernels.replace.reference import store
from kvlearn.policies.base import Faults, Policy
from kvlearn.rotary import Unrotator
from kvlearn.shapes import Budget, GroupReduce

_GROWTH = 1024  # slots added at a time when there is no budget
SLOT_DIM = {"keys": 2, "values": 2, "pos": 2, "state": 3, "static": 2, "last_query": 2, "plain": 2}
_ROW_STATE = (
    *SLOT_DIM,
    "length",
    "prompt_length",
    "order",
    "queries",
    "lse",
    "query_pos",
    "offset",
    "guarded",
    "recent",
    "turned",
    "waiting_ids",
)


class Recorder(Protocol):
    """What a trace collector receives while a cache runs (see :mod:`kvlearn.traces.collect`)."""

    def tokens(self, layer: int, pos: Tensor, keys: Tensor, values: Tensor) -> None:
        """New tokens: positions ``[B, C]``, keys before rotation and values ``[B, H, C, D]``."""

    def blocks(self, layer: int, pos: Tensor, mean_code: Tensor, peak_code: Tensor, queries: Tensor) -> None:
        """Observed blocks: slot positions ``[B, H, S]``, codes ``[N, B, H, S]``, queries per block ``[N, B]``."""


@dataclass(frozen=True)
class Call:
    """The tokens of one call.

    Attributes:
        query: ``[B, H * G, C, D]``.
        key, value: ``[B, H, C, D]``.
        pos: ``[B, C]`` int32 logical positions, -1 for padding.
        valid: ``[B, C]`` bool, or ``None`` when nothing is padding.
        nth: ``[1 or B, C]`` int64, how many of the row's tokens have come by then in this call.
        static: ``[B, H, C, R]`` static score inputs or ``None``.
        plain: ``[B, H, C, D]`` keys before rotation, if they are kept.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pos: Tensor
    valid: Tensor | None
    nth: Tensor
    static: Tensor | None
    plain: Tensor | None = None

    @property
    def count(self) -> int:
        """Columns of the call, padding included."""
        return self.query.shape[2]

    @property
    def tokens(self) -> Tensor:
        """``[1 or B]`` tokens of each row."""
        return self.nth[:, -1]


@dataclass(frozen=True)
class LayerConfig:
    """What an :class:`EvictingLayer` is told once, at construction.

    ``unrotate`` is needed by a recorder and by policies that read keys before rotation; with ``compact``, the layer's
    rotary embedding, positions are those within the cache. ``rotary`` is the same for policies that read queries.
    ``floor`` is the share of the budget that a head of a pool holds at least. ``layers`` are the indices of all layers
    where several go as one (:mod:`kvlearn.together`).
    """

    index: int
    budget: Budget
    policy: Policy
    group_reduce: GroupReduce
    unrotate: Callable[[Tensor, Tensor], Tensor] | None
    recorder: Recorder | None
    impl: Impl = "auto"
    compact: Unrotator | None = None
    rotary: Unrotator | None = None
    floor: float = 0.0
    layers: tuple[int, ...] = ()

    @cached_property
    def observes(self) -> bool:
        """Whether anyone reads what queries give to slots."""
        return bool(self.policy.reads & {"history", "last_query"}) or self.recorder is not None

    @cached_property
    def keeps_ids(self) -> bool:
        """Whether static inputs are made of keys before rotation."""
        return "static" in self.policy.reads

    @cached_property
    def waits(self) -> bool:
        """Whether what only the end of a block reads may be made there: nobody is told of tokens as they come."""
        return self.recorder is None and self.compact is None


class SlotStore(CacheLayerMixin):
    """Slots of one layer, with every piece of state that belongs to them.

    The slot dimension of each tensor is in :data:`SLOT_DIM`; everything in ``_ROW_STATE`` has the batch first. What is
    left for later when a token is decoded is the business of :mod:`kvlearn.waiting`.

    Attributes (``None`` before the first call):
        keys, values: ``[B, H, S, D]``, allocated once.
        pos: ``[B, H, S]`` int32 logical position of each slot's token in its row, -1 where empty.
        state: ``[B, H, K, S]`` history, if the policy reads it.
        static: ``[B, H, S, R]`` static score inputs, if the policy reads them.
        last_query: ``[B, H, S]`` mass given by the latest query, if the policy reads it.
        plain: ``[B, H, S, D]`` keys before rotation, with positions within the cache.
        length: ``[B]`` int64 tokens seen by each row, padding excluded.
        prompt_length: ``[B]`` int64 tokens of each row's prompt.
        order: ``[B, H, M]`` slots to overwrite next, in that order, from ``cursor`` on.
        guarded: ``[B, T]`` bool tokens that the caller protects, by logical position, or ``None``.
        recent: ``[B, H * G, C, D]`` the latest queries, if the policy reads them.
        turned: ``[B, C]`` int64 positions that rotated them, -1 for padding.
        waiting_ids: ``[B, C]`` int64 positions that rotated the keys of the tokens that wait for static inputs.
        offset: ``[B]`` int64 position within the cache less logical position, of tokens written in this block.
    """

    # Tensors once the layer is initialised; Any, because transformers types `keys` and `values` as optional.
    keys: Any
    values: Any
    pos: Any
    state: Any
    static: Any
    last_query: Any
    plain: Any
    length: Any
    prompt_length: Any
    order: Any
    queries: Any
    lse: Any
    query_pos: Any
    offset: Any
    guarded: Any
    recent: Any
    turned: Any
    waiting_ids: Any

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.config = config
        self._clear()

    def _clear(self) -> None:
        for name in _ROW_STATE:
            setattr(self, name, None)
        self.is_initialized = False
        self.lanes = 1  # slots that a token takes in these tensors: one, or in a pool one for each head
        self.seen = 0  # columns fed so far, padding included: what transformers calls the sequence length
        self.used = 0  # slots [0, used) may hold a token in some row
        self.cursor = 0  # next entry of `order`
        self.open = 0  # queries of the block that has not been observed yet
        self.waiting = 0  # latest tokens of the block that have keys and values alone
        self.fresh = False  # `order` names slots that never held a token, from `used` on
        self.bare = 0  # latest tokens, all in slots that were fresh, without static inputs
        self.uneven = False  # some row had padding, so `used` slots are not all valid
        self.decoding = False  # a single-token call has been made: the prompt is over
        self.pending = False  # `update` was called and `attend` was not yet
        self.scale = 1.0  # on the dot products; every call tells it, and the cap of logits
        self.softcap: float | None = None
        self.places: Any = None  # of the block's queries, and of what rotated their keys
        self.id_places: Any = None
        self.faults: Faults | None = None  # made by the first selection on a GPU
        self.ahead: Ahead | None = None  # of `order`, made by its first token

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate all slots."""
        batch, heads, _, _ = key_states.shape
        capacity = (self.config.budget.slots or _GROWTH) * self.lanes
        self.device, self.dtype = key_states.device, key_states.dtype
        self.keys = key_states.new_zeros(batch, heads, capacity, key_states.shape[-1])
        self.values = value_states.new_zeros(batch, heads, capacity, value_states.shape[-1])
        self.pos = torch.full((batch, heads, capacity), -1, dtype=torch.int32, device=self.device)
        self.length = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.prompt_length = torch.zeros_like(self.length)
        self.order = torch.zeros(batch, heads, 0, dtype=torch.int64, device=self.device)
        if "history" in self.config.policy.reads:
            self.state = history.empty((batch, heads, capacity), self.device)
        if "last_query" in self.config.policy.reads:
            self.last_query = torch.zeros(batch, heads, capacity, device=self.device)
        if self.config.compact is not None:
            self.plain = torch.zeros_like(self.keys)
            self.offset = torch.zeros_like(self.length)
        self.is_initialized = True

    def start(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for a first call, whose rows are those that the caller's own protected tokens are given for."""
        guarded = self.config.budget.protect.own_mask(key_states.shape[0], key_states.device)
        self.lazy_initialization(key_states, value_states)
        self.guarded = guarded

    def check_prompt(self, nth: Tensor) -> None:
        """Refuse a prompt that is protected whole and does not fit, before any of this call is stored."""
        first = not self.decoding and (nth.shape[1] > 1 or self.seen == 0)
        if first and self.config.budget.protect.prompt == "whole":
            self.config.budget.check_prompt(int((self.length + nth[:, -1]).max()))

    def _map_rows(self, move: Callable[[Tensor], Tensor]) -> None:
        for name in _ROW_STATE:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, move(tensor))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Move all state with its row (beam search)."""
        self._map_rows(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row with all its state."""
        self._map_rows(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows with all their state."""
        self._map_rows(lambda t: t[indices.to(t.device)])

    def write(self, target: Tensor, call: Call) -> None:
        """Store the call's tokens at ``target`` ``[B, H, C]``; a row's padding leaves its slots as they are."""
        replace_slots(
            self.keys,
            self.values,
            self.pos,
            state=self.state,
            static=self.static,
            last_query=self.last_query,
            target=target,
            key=call.key,
            value=call.value,
            new_pos=call.pos,
            new_static=call.static,
            padded=call.valid is not None,
            impl=self.config.impl,
        )
        if self.plain is not None:
            store(self.plain, 2, target, call.plain, call.pos, call.valid is not None)
        self.used = min(self.keys.shape[2], self.used + target.shape[-1])

    def grow(self, needed: int) -> None:
        """Add slots; only without a budget."""
        capacity = self.keys.shape[2]
        if needed <= capacity:
            return
        extra = max(needed - capacity, _GROWTH)
        for name, dim in SLOT_DIM.items():
            tensor = getattr(self, name)
            if tensor is not None:
                shape = [*tensor.shape]
                shape[dim] = extra
                more = tensor.new_full(shape, -1 if name == "pos" else 0)
                setattr(self, name, torch.cat([tensor, more], dim=dim))

    def keep_recent(self, query: Tensor, positions: Tensor) -> None:
        """Keep the latest of ``[B, H * G, C, D]`` queries and those kept, for a policy that reads them.

        ``positions`` ``[B, C]`` are what rotated them, -1 for padding.
        """
        if self.recent is not None:
            query = torch.cat([self.recent, query], dim=2)
            positions = torch.cat([self.turned, positions], dim=1)
        if self.uneven:  # padding first, so that every row keeps as many queries as it has
            order = (positions >= 0).to(torch.uint8).argsort(dim=-1, stable=True)
            query = query.gather(2, expand(order[:, None].expand(-1, query.shape[1], -1), query, 2))
            positions = positions.gather(-1, order)
        window = self.config.policy.query_window
        self.recent, self.turned = query[:, :, -window:].clone(), positions[:, -window:].clone()
