"""One full-attention layer of an :class:`kvlearn.cache.EvictingCache`: slots, observation, eviction.

The layer attends, because only it knows its slots. A call goes one of two ways:

* **decoding** (one token, or as many as the empty slots or one block can take): new tokens overwrite slots one by one,
  in an order fixed when the block began, so exactly ``budget`` slots are in use at any moment. A chunk of tokens gives
  what its tokens would have given one at a time: query ``i`` sees the slots that tokens ``0..i`` had not yet replaced.
* **prompt** (more): attended in full together with what is held, then cut to the budget.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvlearn.attention import tag
from kvlearn.errors import KvlearnError
from kvlearn.kernels.decode_attention import decode_attention
from kvlearn.kernels.launch import use_triton
from kvlearn.observation import Observer
from kvlearn.policies.base import Faults, Slots, select_victims
from kvlearn.slots import SLOT_DIM, Call, expand
from kvlearn.support import NO_ROLLBACK, own_validity


class EvictingLayer(Observer):
    """Attention and eviction over the slots of one layer."""

    is_sliding = False
    is_croppable = False

    # ---- transformers' cache layer interface -------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand this call's keys to the attention function, tagged with this layer, which then stores them."""
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

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]  # a class attribute in transformers
        """Refused: only ``generate`` of the oldest releases asks a layer, when it is about to decode with an assistant.

        Later ones call :meth:`EvictingCache.activate_past_recording` then; all others ask the cache.
        """
        raise KvlearnError(NO_ROLLBACK)

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
        count = query.shape[2]
        valid = own_validity(mask, count)
        if count == 1 and valid is None and self._may_wait(key, position_ids):
            self.scale, self.softcap = scale, softcap
            return self._decode(query, key, value, position_ids)
        if not self.is_initialized:
            self.start(key, value)
        if key.shape[0] != self.pos.shape[0]:
            raise KvlearnError(
                f"this cache holds {self.pos.shape[0]} rows and was called with {key.shape[0]}; "
                "use one cache per batch."
            )
        self.scale, self.softcap = scale, softcap
        nth = torch.arange(1, count + 1, device=key.device)[None] if valid is None else valid.cumsum(-1)
        self.check_prompt(nth)
        self.complete()
        if count > 1 or self.ended:
            self.close_block()
        pos = (self.length[:, None] + (nth - 1)).int()
        if valid is not None:
            pos = pos.masked_fill(~valid, -1)
            self._expect_padding()
        plain, static = self._unrotated(key, value, pos, position_ids)
        fits = self.plan(count)
        if self.config.compact is not None:
            assert plain is not None  # compact positions keep keys before rotation
            query, key = self._compact(query, plain, pos, position_ids, fits)
        if "queries" in self.config.policy.reads:
            self._keep_recent(query, pos, position_ids)
        call = Call(query, key, value, pos, valid, nth, static, plain if self.config.compact is not None else None)
        out = self._overwrite(call) if fits else self._cut(call)
        self.seen += count
        self.decoding |= count == 1 and self.seen > count
        if not self.decoding:
            self.prompt_length = self.length
        return out

    def _unrotated(
        self, key: Tensor, value: Tensor, pos: Tensor, position_ids: Tensor | None
    ) -> tuple[Any, Tensor | None]:
        """Keys before rotation if anyone reads them, and what the policy makes of them."""
        recorder, policy = self.config.recorder, self.config.policy
        if self.config.unrotate is None:
            return None, None
        plain = self.config.unrotate(key, self._positions(key, position_ids))
        if recorder is not None:
            recorder.tokens(self.config.index, pos, plain, value)
        if "static" not in policy.reads:
            return plain, None
        return plain, self.static_of(plain, value)

    def _positions(self, key: Tensor, position_ids: Tensor | None) -> Tensor:
        if position_ids is not None:
            return position_ids
        return torch.arange(self.seen, self.seen + key.shape[2], device=key.device)[None]

    def _compact(
        self, query: Tensor, plain: Tensor, pos: Tensor, position_ids: Tensor | None, fits: bool
    ) -> tuple[Tensor, Tensor]:
        """Query and key rotated by positions within the cache.

        When a block begins, the tokens that its first query sees are numbered in order; those that come during the
        block go on from there. Within a block nothing moves, so that what its queries gave can be observed at its end.
        """
        rotary = self.config.compact
        assert rotary is not None
        if self.open == 0 and self.used > 0:
            held = self.pos
            if fits:  # the first token's own slot
                held = held.scatter(-1, self.order[..., self.cursor, None], -1)
            held = held[..., : self.used]
            empty = (held < 0).sum(-1, keepdim=True)  # first in the order of positions
            number = (held.argsort(-1).argsort(-1) - empty).clamp(min=0)
            self.keys[:, :, : self.used] = rotary.rotate(self.plain[:, :, : self.used], number)
            self.offset = self.used - empty[:, 0, 0] - self.length  # every head of a row holds as many
        place = (pos + self.offset[:, None]).clamp(min=0)
        unrotated = rotary(query, self._positions(query, position_ids))
        return rotary.rotate(unrotated, place), rotary.rotate(plain, place)

    def _keep_recent(self, query: Tensor, pos: Tensor, position_ids: Tensor | None) -> None:
        turned = self._positions(query, position_ids)
        if self.config.compact is not None:
            turned = pos + self.offset[:, None]
        self.keep_recent(query, turned.expand(pos.shape).long().masked_fill(pos < 0, -1))

    def plan(self, count: int) -> bool:
        """Have ``order`` name the slots that the next ``count`` tokens overwrite; False if only a cut will do."""
        if self.order.shape[-1] - self.cursor >= count * self.lanes:
            return True
        self.settle()
        budget = self.config.budget
        if budget.slots is None:
            self.grow(self.used + count * self.lanes)
        free = self.keys.shape[2] - self.used
        want, self.fresh = (count if count > 1 else budget.block) * self.lanes, False
        if self.config.policy.kind == "full" or budget.slots is None:  # no victims while one more token fits
            want = min(want, max(free, count * self.lanes))
        if free >= want:
            if self.uneven:  # rows have different empty slots: the lowest index first
                self.order = (self.pos >= 0).to(torch.uint8).sort(dim=-1, stable=True).indices[..., :want]
            else:
                self.fresh = not use_triton(self.config.impl, self.keys)  # a kernel writes all that a token has
                order = torch.arange(self.used, self.used + want, device=self.device)
                self.order = order.expand(*self.pos.shape[:2], want)
        elif count > budget.block:
            return False
        elif self.uneven:  # victims are empty slots first; a row is full sooner or later than the others
            self.used += free
            self.order = self._next_victims(want)
        else:
            empty = torch.arange(self.used, self.used + free, device=self.device).expand(*self.pos.shape[:2], free)
            self.order = torch.cat([empty, self._next_victims(want - free)], dim=-1)
        self.cursor = 0
        return True

    def _may_wait(self, key: Tensor, position_ids: Tensor | None) -> bool:
        """Whether a decoded token is stored in two steps: nobody is told of it, and its keys stay as they come."""
        return (
            self.decoding
            and self.lanes == 1
            and self.config.waits
            and (position_ids is None or position_ids.ndim == 2)
            and key.shape[0] == self.pos.shape[0]
        )

    def _decode(self, query: Tensor, key: Tensor, value: Tensor, position_ids: Tensor | None) -> Tensor:
        """A single token per row, none of it padding; its slots are settled when the block ends."""
        if self.ended:
            self.close_block()
        if self.cursor == self.order.shape[-1]:
            self.plan(1)
        if "queries" in self.config.policy.reads:
            self._keep_recent(query, self.length[:, None], position_ids)
        self.write_waiting(key, value, position_ids)
        out, lse = self._attend_query(query)
        self.length = self.length + 1
        self.seen += 1
        self._keep_query(query, lse)
        return out

    def _overwrite(self, call: Call) -> Tensor:
        """Put the call's tokens over slots one by one; see the module's docstring."""
        self.settle()
        self.ahead = None  # padding breaks its count of positions
        count, taken = call.count, call.count * self.lanes
        evicts = self.used + taken > self.keys.shape[2]
        target = self.order[..., self.cursor : self.cursor + taken]  # [B, H, C]
        self.cursor += taken
        if count == 1 and call.valid is None:
            self.write(target, call)
            out, lse = self._attend_one(call)
        else:
            out, lse = self._attend_all(call, target if evicts or self.uneven else None)
            self.write(target, call)
        self.length = self.length + call.tokens
        if count == 1:
            self._keep_query(call.query, lse, call.pos)
        elif self.config.observes:
            slots = self.held()
            self._observe(call.query, lse, call.pos, slots, own_keys_last=not (evicts or self.uneven))
            self._store_observed(slots)
        return out

    def _cut(self, call: Call) -> Tensor:
        """Attend to a prompt in full, then keep as many slots as the budget allows."""
        out, lse = self._attend_all(call, None)
        slots = self.joined(call)
        self.length = self.length + call.tokens
        if self.config.observes:
            self._observe(call.query, lse, call.pos, slots, own_keys_last=True)
        slots = replace(slots, length=self.length, prompt_length=self.first_prompt)
        by_head, slots = slots, self._flat(slots)
        capacity = self.keys.shape[2]
        gone = torch.zeros_like(slots.pos, dtype=torch.bool)
        gone.scatter_(-1, self._victims(by_head, slots.pos.shape[-1] - capacity), True)
        # What stays is laid out by position.
        keep = torch.where(gone, torch.iinfo(torch.int32).max, slots.pos).argsort(dim=-1, stable=True)[..., :capacity]
        for name, dim in SLOT_DIM.items():
            tensor = getattr(slots, name)
            if tensor is not None:
                getattr(self, name).copy_(tensor.gather(dim, expand(keep, tensor, dim)))
        self.used, self.cursor, self.order = capacity, 0, self.order[..., :0]
        return out

    def _attend_one(self, call: Call) -> tuple[Tensor, Tensor]:
        """Attention of a single query over the slots held, its own among them."""
        return self._attend_query(call.query)

    def _attend_query(self, query: Tensor) -> tuple[Tensor, Tensor]:
        keys, values, end = self.keys, self.values, self.used
        if end < keys.shape[2]:
            keys, values = keys.narrow(2, 0, end), values.narrow(2, 0, end)
        return decode_attention(
            query,
            keys,
            values,
            held=self.pos[:, :, :end] if self.uneven else None,
            scale=self.scale,
            softcap=self.softcap,
            impl=self.config.impl,
        )

    def _attend_all(self, call: Call, target: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attention of the call's queries over the slots held and the call's own tokens.

        ``target`` ``[B, H, C]`` names slots that the call's tokens overwrite one by one: a query does not see the ones
        that its own and earlier tokens replace.
        """
        count = call.count
        how: Any = {"scale": self.scale, "softcap": self.softcap, "impl": self.config.impl}
        if self.used == 0 and call.valid is None:
            return decode_attention(call.query, call.key, call.value, causal=True, **how)
        own = torch.ones(count, count, dtype=torch.bool, device=self.device).tril()[None]
        slots = self.held()
        held = slots.valid[:, :, None].expand(-1, -1, count, -1)
        if target is not None:
            held = held & (self._outlives(target, count)[:, :, None] >= call.nth[:, None, :, None])
        if call.valid is not None:  # padding sees itself alone
            own = own & call.valid[:, None, :] & call.valid[:, :, None]
            own = own | torch.eye(count, dtype=torch.bool, device=self.device)
            held = held & call.valid[:, None, :, None]
        visible = torch.cat([held, own[:, None].expand(*held.shape[:3], count)], dim=-1)
        keys = torch.cat([slots.keys, call.key], dim=2)
        values = torch.cat([slots.values, call.value], dim=2)
        return decode_attention(call.query, keys, values, visible=visible, **how)

    def _outlives(self, target: Tensor, count: int) -> Tensor:
        """``[B, H, S]`` how many of the call's tokens come before the one that replaces each slot held."""
        rank = torch.full(self.pos.shape, count, dtype=torch.int64, device=self.device)
        rank = rank.scatter(-1, target, torch.arange(count, device=self.device).expand_as(target))
        return rank[..., : self.used]

    # ---- eviction ----------------------------------------------------------------------------------------------

    def _judged(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """The policy's score and what is protected from it, ``[B, H, S]`` both."""
        protect = self.config.budget.protect
        protected = protect.mask(slots.pos, slots.length, slots.prompt_length, self.guarded)
        return self.config.policy.score(slots), protected

    def _chosen(self, score: Tensor, pos: Tensor, protected: Tensor, count: int) -> Tensor:
        if score.is_cuda and self.faults is None:
            self.faults = Faults(score.device)
        return select_victims(score, pos, protected, count, faults=self.faults, impl=self.config.impl)

    def _victims(self, slots: Slots, count: int) -> Tensor:
        """``[B, H, count]`` slots of ``slots`` that go, in that order, as indices of what :meth:`_flat` makes of it."""
        score, protected = self._judged(slots)
        return self._chosen(score, slots.pos, protected, count)

    def _next_victims(self, count: int) -> Tensor:
        """``[B, H, count]`` slots in use that go next."""
        return self._victims(self.held(), count)

    def _flat(self, slots: Slots) -> Slots:
        """What is by head, as it is stored."""
        return slots
