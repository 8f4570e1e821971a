"""One full-attention layer of an :class:`kvlearn.cache.EvictingCache`: slots, observation, eviction.

The layer attends, because only it knows its slots. A call goes one of two ways:

* **decoding** (one token, or as many as the empty slots or one block can take): new tokens overwrite slots one by one,
  in an order fixed when the block began, so exactly ``budget`` slots are in use at any moment. A chunk of tokens gives
  what its tokens would have given one at a time: query ``i`` sees the slots that tokens ``0..i`` had not yet replaced.
* **prompt** (more): attended in full together with what is held, then cut to the budget.

Queries and their log-sum-exps are kept for one block; when it ends, one matrix product gives the mass that every slot
received from the block, which is folded into the history. That is exact, and costs nothing in the steps between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvlearn import history
from kvlearn.attention import tag
from kvlearn.errors import KvlearnError
from kvlearn.kernels.column_mass import column_mass
from kvlearn.kernels.decode_attention import decode_attention
from kvlearn.policies.base import Policy, Slots, select_victims
from kvlearn.shapes import Budget, GroupReduce

_GROWTH = 1024  # slots added at a time when there is no budget
_SLOT_DIM = {"keys": 2, "values": 2, "pos": 2, "state": 3, "static": 2, "last_query": 2}
_ROW_STATE = (*_SLOT_DIM, "length", "prompt_length", "order", "queries", "lse", "query_pos")


class Recorder(Protocol):
    """What a trace collector receives while a cache runs (see :mod:`kvlearn.traces.collect`)."""

    def tokens(self, layer: int, pos: Tensor, keys: Tensor, values: Tensor) -> None:
        """New tokens: positions ``[B, C]``, keys before rotation and values ``[B, H, C, D]``."""

    def blocks(self, layer: int, pos: Tensor, mean_code: Tensor, peak_code: Tensor, queries: Tensor) -> None:
        """Observed blocks: slot positions ``[B, H, S]``, codes ``[N, B, H, S]``, queries per block ``[N, B]``."""


@dataclass(frozen=True)
class _Call:
    """The tokens of one call.

    Attributes:
        query: ``[B, H * G, C, D]``.
        key, value: ``[B, H, C, D]``.
        pos: ``[B, C]`` int32 logical positions, -1 for padding.
        valid: ``[B, C]`` bool, or ``None`` when nothing is padding.
        nth: ``[1 or B, C]`` int64, how many of the row's tokens have come by then in this call.
        static: ``[B, H, C, R]`` static score inputs or ``None``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pos: Tensor
    valid: Tensor | None
    nth: Tensor
    static: Tensor | None

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
    """What an :class:`EvictingLayer` is told once, at construction."""

    index: int
    budget: Budget
    policy: Policy
    group_reduce: GroupReduce
    unrotate: Callable[[Tensor, Tensor], Tensor] | None
    recorder: Recorder | None


class EvictingLayer(CacheLayerMixin):
    """Slots of one layer, with every piece of state that belongs to them.

    Attributes (``None`` before the first call):
        keys, values: ``[B, H, S, D]``, allocated once.
        pos: ``[B, H, S]`` int32 logical position of each slot's token in its row, -1 where empty.
        state: ``[B, H, K, S]`` history, if the policy reads it.
        static: ``[B, H, S, R]`` static score inputs, if the policy reads them.
        last_query: ``[B, H, S]`` mass given by the latest query, if the policy reads it.
        length: ``[B]`` int64 tokens seen by each row, padding excluded.
        prompt_length: ``[B]`` int64 tokens of each row's prompt.
        order: ``[B, H, M]`` slots to overwrite next, in that order, from ``cursor`` on.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.config = config
        self._clear()

    def _clear(self) -> None:
        for name in _ROW_STATE:
            setattr(self, name, None)
        self.is_initialized = False
        self.seen = 0  # columns fed so far, padding included: what transformers calls the sequence length
        self.used = 0  # slots [0, used) may hold a token in some row
        self.cursor = 0  # next entry of `order`
        self.open = 0  # queries of the block that has not been observed yet
        self.uneven = False  # some row had padding, so `used` slots are not all valid
        self.decoding = False  # a single-token call has been made: the prompt is over
        self.pending = False  # `update` was called and `attend` was not yet

    # ---- transformers' cache layer interface -------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate all slots."""
        batch, heads, _, _ = key_states.shape
        capacity = self.config.budget.slots or _GROWTH
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
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand this call's keys to the attention function, tagged with this layer, which then stores them."""
        if self.pending:
            raise KvlearnError(
                "the model's attention bypassed kvlearn, so its output would be wrong; call kvlearn.enable(model) and "
                "leave attn_implementation as it is."
            )
        self.pending = True
        return tag(key_states, self), value_states

    def get_seq_length(self) -> int:
        """Logical length: columns fed so far, evicted ones and padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """The mask covers this call's own tokens; which slots are visible is the layer's business."""
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return length, self.seen

    def get_max_length(self) -> int:
        """-1: any number of tokens may pass through."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.13

    def reset(self) -> None:
        """Forget everything; the next call allocates anew."""
        self._clear()

    def crop(self, *args: Any) -> None:
        """Refused: evicted tokens and folded observations cannot be brought back."""
        raise KvlearnError(
            "an EvictingCache cannot be cropped, so assisted and prompt-lookup decoding cannot use it; generate without "
            "assistant_model and prompt_lookup_num_tokens."
        )

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

    # ---- attention ---------------------------------------------------------------------------------------------

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scale: float,
        softcap: float | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Attend to what is held and to this call's tokens, observe, store, evict.

        Args:
            query: ``[B, H * G, C, D]``.
            key: ``[B, H, C, D]``.
            value: ``[B, H, C, D]``.
            mask: ``[B, 1, C, C]`` bool over this call's tokens, or ``None`` when none is padding.
            scale: factor on the dot products.
            softcap: logit cap or ``None``.
            position_ids: ``[1 or B, C]`` the model's positions, or ``None``.

        Returns:
            ``[B, H * G, C, D]``.
        """
        self.pending = False
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        if key.shape[0] != self.pos.shape[0]:
            raise KvlearnError(
                f"this cache holds {self.pos.shape[0]} rows and was called with {key.shape[0]}; use one cache per batch."
            )
        self.scale, self.softcap = scale, softcap
        count = query.shape[2]
        if count > 1:
            self.close_block()
        valid = _own_validity(mask, count)
        nth = torch.arange(1, count + 1, device=key.device)[None] if valid is None else valid.cumsum(-1)
        pos = (self.length[:, None] + nth - 1).int()
        if valid is not None:
            pos = pos.masked_fill(~valid, -1)
            self.uneven = True
        call = _Call(query, key, value, pos, valid, nth, self._static(key, value, pos, position_ids))
        fits = self._plan(count)
        out = self._overwrite(call) if fits else self._cut(call)
        self.seen += count
        self.decoding |= count == 1
        if not self.decoding:
            self.prompt_length = self.length
        return out

    def _static(self, key: Tensor, value: Tensor, pos: Tensor, position_ids: Tensor | None) -> Tensor | None:
        recorder, policy = self.config.recorder, self.config.policy
        if recorder is None and "static" not in policy.reads:
            return None
        assert self.config.unrotate is not None
        if position_ids is None:
            position_ids = torch.arange(self.seen, self.seen + key.shape[2], device=key.device)[None]
        keys = self.config.unrotate(key, position_ids)
        if recorder is not None:
            recorder.tokens(self.config.index, pos, keys, value)
        if "static" not in policy.reads:
            return None
        static = policy.static(self.config.index, keys, value)
        if static is not None and self.static is None:
            self.static = static.new_zeros(*self.pos.shape, static.shape[-1])
        return static

    def _plan(self, count: int) -> bool:
        """Have ``order`` name the slots that the next ``count`` tokens overwrite; False if only a cut will do."""
        if self.order.shape[-1] - self.cursor >= count:
            return True
        budget = self.config.budget
        if budget.slots is None:
            self._grow(self.used + count)
        free = self.keys.shape[2] - self.used
        if free >= count:
            want = count if count > 1 else min(budget.block, free)
            if self.uneven:  # rows have different empty slots: the lowest index first
                self.order = (self.pos >= 0).to(torch.uint8).sort(dim=-1, stable=True).indices[..., :want]
            else:
                order = torch.arange(self.used, self.used + want, device=self.device)
                self.order = order.expand(*self.pos.shape[:2], want)
        elif count <= budget.block:
            self.used = self.keys.shape[2]
            self.order = self._victims(self._slots(), budget.block if count == 1 else count)
        else:
            return False
        self.cursor = 0
        return True

    def _overwrite(self, call: _Call) -> Tensor:
        """Put the call's tokens over slots one by one; see the module's docstring."""
        count, full = call.count, self.used == self.keys.shape[2]
        target = self.order[..., self.cursor : self.cursor + count]  # [B, H, C]
        self.cursor += count
        if count == 1 and call.valid is None:
            self._write(target, call)
            end = self.used
            visible = (self.pos[:, :, None, :end] >= 0) if self.uneven else None
            out, lse = decode_attention(
                call.query,
                self.keys[:, :, :end],
                self.values[:, :, :end],
                visible=visible,
                scale=self.scale,
                softcap=self.softcap,
            )
        else:
            out, lse = self._attend_all(call, target if full or self.uneven else None)
            self._write(target, call)
        before, self.length = self.length, self.length + call.tokens
        if count == 1:
            self._keep_query(call, lse)
        elif self._observing:
            slots = self._slots()
            own_last = not (full or self.uneven)
            self._store(*self._observe(call.query, lse, call.pos, slots, before, own_keys_last=own_last))
        return out

    def _cut(self, call: _Call) -> Tensor:
        """Attend to a prompt in full, then keep as many slots as the budget allows."""
        out, lse = self._attend_all(call, None)
        slots = self._joined(call)
        before, self.length = self.length, self.length + call.tokens
        state, last = slots.state, None
        if self._observing:
            state, last = self._observe(call.query, lse, call.pos, slots, before, own_keys_last=True)
        slots = replace(slots, length=self.length, state=state, last_query=last)
        capacity = self.keys.shape[2]
        gone = torch.zeros_like(slots.pos, dtype=torch.bool)
        gone.scatter_(-1, self._victims(slots, slots.pos.shape[-1] - capacity), True)
        # What stays is laid out by position.
        keep = torch.where(gone, torch.iinfo(torch.int32).max, slots.pos).argsort(dim=-1, stable=True)[..., :capacity]
        for name, dim in _SLOT_DIM.items():
            tensor = getattr(slots, name)
            if tensor is not None:
                getattr(self, name).copy_(tensor.gather(dim, _expand(keep, tensor, dim)))
        self.used, self.cursor, self.order = capacity, 0, self.order[..., :0]
        return out

    def _attend_all(self, call: _Call, target: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attention of the call's queries over the slots held and the call's own tokens.

        ``target`` ``[B, H, C]`` names slots that the call's tokens overwrite one by one: a query does not see the ones
        that its own and earlier tokens replace.
        """
        count, end = call.count, self.used
        if end == 0 and call.valid is None:
            return decode_attention(
                call.query, call.key, call.value, causal=True, scale=self.scale, softcap=self.softcap
            )
        own = torch.ones(count, count, dtype=torch.bool, device=self.device).tril()[None]
        held = (self.pos[:, :, None, :end] >= 0).expand(-1, -1, count, -1)
        if target is not None:
            rank = torch.full(self.pos.shape, count, dtype=torch.int64, device=self.device)
            rank = rank.scatter(-1, target, torch.arange(count, device=self.device).expand_as(target))
            held = held & (rank[:, :, None, :end] >= call.nth[:, None, :, None])
        if call.valid is not None:  # padding sees itself alone
            own = own & call.valid[:, None, :] & call.valid[:, :, None]
            own = own | torch.eye(count, dtype=torch.bool, device=self.device)
            held = held & call.valid[:, None, :, None]
        visible = torch.cat([held, own[:, None].expand(*held.shape[:3], count)], dim=-1)
        keys = torch.cat([self.keys[:, :, :end], call.key], dim=2)
        values = torch.cat([self.values[:, :, :end], call.value], dim=2)
        return decode_attention(call.query, keys, values, visible=visible, scale=self.scale, softcap=self.softcap)

    # ---- slots -------------------------------------------------------------------------------------------------

    def _write(self, target: Tensor, call: _Call) -> None:
        """Store the call's tokens at ``target`` ``[B, H, C]``; a row's padding leaves its slots as they are."""
        new = {
            "keys": call.key,
            "values": call.value,
            "pos": call.pos[:, None].expand_as(target),
            "static": call.static,
        }
        padding = None
        if call.valid is not None:  # tokens to the front: the i-th token of each row takes the i-th slot of its plan
            front = (~call.valid).to(torch.uint8).sort(dim=-1, stable=True).indices
            pick = front[:, None].expand_as(target)
            new = {n: t if t is None else t.gather(2, _expand(pick, t, 2)) for n, t in new.items()}
            padding = ~call.valid.gather(1, front)[:, None].expand_as(target)
        for name, dim in _SLOT_DIM.items():
            slots, fresh = getattr(self, name), new.get(name)
            if slots is None:
                continue
            index = _expand(target, slots, dim)
            if fresh is None:
                fresh = slots.new_zeros(()).expand(index.shape)
            if padding is not None:
                fresh = torch.where(_expand(padding, slots, dim), slots.gather(dim, index), fresh)
            slots.scatter_(dim, index, fresh)
        self.used = min(self.keys.shape[2], self.used + call.count)

    def _grow(self, needed: int) -> None:
        """Add slots; only without a budget."""
        capacity = self.keys.shape[2]
        if needed <= capacity:
            return
        extra = max(needed - capacity, _GROWTH)
        for name, dim in _SLOT_DIM.items():
            tensor = getattr(self, name)
            if tensor is not None:
                shape = [*tensor.shape]
                shape[dim] = extra
                more = tensor.new_full(shape, -1 if name == "pos" else 0)
                setattr(self, name, torch.cat([tensor, more], dim=dim))

    def _slots(self) -> Slots:
        def held(name: str) -> Tensor:
            tensor = getattr(self, name)
            return tensor if tensor is None else tensor.narrow(_SLOT_DIM[name], 0, self.used)

        return Slots(
            layer=self.config.index,
            length=self.length,
            budget=self.config.budget.slots or self.keys.shape[2],
            block=self.config.budget.block,
            **{name: held(name) for name in _SLOT_DIM},
        )

    def _joined(self, call: _Call) -> Slots:
        """What is held and the call's own tokens, as one."""
        held = self._slots()
        shape = (*call.key.shape[:2], call.count)
        own = {
            "keys": call.key,
            "values": call.value,
            "pos": call.pos[:, None].expand(shape),
            "static": call.static,
            "state": None if held.state is None else history.empty(shape, self.device),
            "last_query": None if held.last_query is None else held.last_query.new_zeros(shape),
        }
        return replace(
            held, **{n: t if t is None else torch.cat([getattr(held, n), t], dim=_SLOT_DIM[n]) for n, t in own.items()}
        )

    def _victims(self, slots: Slots, count: int) -> Tensor:
        """``[B, H, count]`` slots that go next: protection, then the policy's score."""
        prompt_length = self.prompt_length if self.decoding else self.length
        protected = self.config.budget.protect.mask(slots.pos, slots.length, prompt_length)
        return select_victims(self.config.policy.score(slots), slots.pos, protected, count)

    # ---- observation -------------------------------------------------------------------------------------------

    @property
    def _observing(self) -> bool:
        return bool(self.config.policy.reads & {"history", "last_query"}) or self.config.recorder is not None

    def _keep_query(self, call: _Call, lse: Tensor) -> None:
        """Remember a decoded query until its block ends."""
        block = self.config.budget.block
        if self._observing:
            if self.queries is None:
                batch, query_heads, _, dim = call.query.shape
                self.queries = call.query.new_zeros(batch, query_heads, block, dim)
                self.lse = lse.new_zeros(batch, query_heads, block)
                self.query_pos = call.pos.new_full((batch, block), -1)
            self.queries[:, :, self.open] = call.query[:, :, 0]
            self.lse[:, :, self.open] = lse[:, :, 0]
            self.query_pos[:, self.open] = call.pos[:, 0]
        self.open += 1
        if self.open == block:
            self.close_block()

    def close_block(self) -> None:
        """Observe the queries kept since the last block ended, and drop what was planned for the rest of the block."""
        if self.open == 0:
            return
        count, self.open = self.open, 0
        self.order, self.cursor = self.order[..., :0], 0
        if self._observing:
            pos = self.query_pos[:, :count]
            before = self.length - (pos >= 0).sum(-1)
            query, lse = self.queries[:, :, :count], self.lse[:, :, :count]
            self._store(*self._observe(query, lse, pos, self._slots(), before, own_keys_last=False))

    def _store(self, state: Tensor | None, last: Tensor | None) -> None:
        if state is not None:
            self.state[..., : self.used] = state
        if last is not None:
            self.last_query[..., : self.used] = last

    def _observe(
        self, query: Tensor, lse: Tensor, query_pos: Tensor, slots: Slots, before: Tensor, *, own_keys_last: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """History and last-query mass of ``slots`` after ``query``; ``before`` ``[B]`` is the length before it."""
        reads, recorder = self.config.policy.reads, self.config.recorder
        folds = "history" in reads
        observed = column_mass(
            query,
            lse,
            slots.keys,
            query_pos=query_pos,
            key_pos=slots.pos,
            scale=self.scale,
            softcap=self.softcap,
            block=self.config.budget.block,
            group_reduce=self.config.group_reduce,
            only_last=not folds and recorder is None,
            own_keys_last=own_keys_last,
        )
        last = observed.last if "last_query" in reads else None
        if not folds and recorder is None:
            return None, last
        mean_code, peak_code = history.encode_mass(observed.mean), history.encode_mass(observed.peak)
        if recorder is not None:
            recorder.blocks(self.config.index, slots.pos, mean_code, peak_code, observed.queries)
        if not folds:
            return None, last
        state, length = slots.state, before
        for n in range(mean_code.shape[0]):
            length = length + observed.queries[n]
            age = length.view(-1, 1, 1) - slots.pos
            state = history.observe(state, mean_code[n], peak_code[n], observed.queries[n], age)
        return state, last


def _expand(index: Tensor, like: Tensor, dim: int) -> Tensor:
    """``[B, H, M]`` broadcast to the shape of ``like`` with ``M`` along its slot dimension ``dim``."""
    if like.ndim == 3:
        return index
    shape = [*like.shape]
    shape[dim] = index.shape[-1]
    return (index[..., None] if dim == 2 else index[:, :, None]).expand(shape)


def _own_validity(mask: Tensor | None, count: int) -> Tensor | None:
    """``[B, C]`` bool, which of the call's columns are tokens; ``None`` when all are."""
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[-2:] != (count, count):
        raise KvlearnError(
            f"an EvictingCache takes a 2D attention mask [batch, tokens]; this model passed one of shape "
            f"{tuple(mask.shape)} and dtype {mask.dtype}."
        )
    valid = mask[:, 0].diagonal(dim1=-2, dim2=-1)
    return None if bool(valid.all()) else valid
