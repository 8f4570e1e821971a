"""What a decoded token leaves for later: all that no query reads is made for many tokens at once.

Keys and values are stored at every step, because the next query reads them. Positions and an empty history are given to
the tokens of a block together, when it ends. Static score inputs are read by selection alone: while slots are free
nothing is selected, so they wait until the first block that evicts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvlearn import history
from kvlearn.kernels.launch import use_triton
from kvlearn.kernels.replace import Ahead, append, copy_rows, expand, put_rows
from kvlearn.kernels.replace import replace as replace_slots
from kvlearn.kernels.replace.reference import flat_rows
from kvlearn.policies.base import Queries, Slots
from kvlearn.slots import SLOT_DIM, Call, SlotStore

_AT_ONCE = 256  # tokens whose static inputs are made at once; more would take memory and no less time


def as_made(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Run in inference mode what writes slots that were made in it: outside of it they cannot be written."""

    @functools.wraps(method)
    def run(self: WaitingStore) -> None:
        made = self.pos is not None and self.pos.is_inference() and not torch.is_inference_mode_enabled()
        with torch.inference_mode() if made else contextlib.nullcontext():
            method(self)

    return run


def each(tensor: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Views of the places along ``dim``, made once: making one takes as long as writing to it."""
    return tuple([tensor.narrow(dim, i, 1) for i in range(tensor.shape[dim])])


class WaitingStore(SlotStore):
    """Slots whose latest tokens may have keys and values alone.

    :meth:`settle` brings all but static inputs up to date, :meth:`complete` these too.
    """

    def write_waiting(self, key: Tensor, value: Tensor, position_ids: Tensor | None) -> None:
        """Store what the next query needs of a single token per row."""
        if self.config.keeps_ids:
            self._keep_ids(position_ids)
        at = self.cursor
        if use_triton(self.config.impl, self.keys):
            replace_slots(
                self.keys,
                self.values,
                self.pos,
                target=self.order[..., at : at + 1],
                key=key,
                value=value,
                new_pos=self.length[:, None].int(),
                impl=self.config.impl,
            )
        elif self.fresh:
            append(self.keys, self.used, key)
            append(self.values, self.used, value)
        else:
            if self.ahead is None or self.ahead.order is not self.order:
                first = self.length - at if self.uneven else None
                self.ahead = Ahead.of(self.order, first, self.keys, self.values)
            rows = self.ahead.each[at]
            put_rows(self.ahead.keys, rows, key)
            put_rows(self.ahead.values, rows, value)
            if self.ahead.pos is not None:  # attention asks which slots are empty
                copy_rows(self.pos, rows, self.ahead.pos[at])
        self.cursor = at + 1
        self.waiting += 1
        self.used = min(self.keys.shape[2], self.used + 1)

    def _keep_ids(self, position_ids: Tensor | None) -> None:
        """Remember what rotated a token's key until its static inputs are made."""
        if self.waiting_ids is not None and self.bare == self.waiting_ids.shape[1]:
            self.complete()
        at = self.bare if self.fresh else self.waiting
        if position_ids is None:
            position_ids = torch.full((1, 1), self.seen, device=self.device)
        if self.waiting_ids is None:
            free = self.keys.shape[2] - self.used if self.fresh else 0
            room = max(self.config.budget.block, free)
            self.waiting_ids = position_ids.new_zeros(self.pos.shape[0], room)
        if self.fresh:  # as many places as there were free slots, each of them used once
            self.waiting_ids.narrow(1, at, 1).copy_(position_ids)
            self.bare += 1
            return
        if self.id_places is None or self.id_places[0] is not self.waiting_ids:
            self.id_places = (self.waiting_ids, each(self.waiting_ids, 1))
        self.id_places[1][at].copy_(position_ids)

    @as_made
    def settle(self) -> None:
        """Give the tokens that wait their positions, and their slots an empty history.

        Nothing reads these before the block ends, and for all of its tokens at once they cost little more than for one.
        Where slots are reused, static inputs are made as well.
        """
        if self.waiting == 0:
            return
        self._place_waiting()
        count, self.waiting = self.waiting, 0
        # What never held a token has an empty history.
        if self.fresh or not self.config.policy.reads & {"history", "last_query", "static"}:
            return
        target = self.order[..., self.cursor - count : self.cursor]
        rows = flat_rows(target, self.keys.shape[2])
        static = self._waiting_static(target, rows, count) if self.waiting_ids is not None else None
        if use_triton(self.config.impl, self.keys):
            key, value = (self._slots_at(slots, target, rows) for slots in (self.keys, self.values))
            replace_slots(
                self.keys,
                self.values,
                self.pos,
                state=self.state,
                static=None if static is None else self.static,
                last_query=self.last_query,
                target=target,
                key=key,
                value=value,
                new_pos=self.pos.gather(-1, target)[:, 0],
                new_static=static,
                impl=self.config.impl,
            )
            return
        if static is not None:
            copy_rows(self.static, rows, static)
        for slots, dim in ((self.state, 3), (self.last_query, 2)):
            if slots is not None:
                slots.scatter_(dim, expand(target, slots, dim), 0)

    @as_made
    def complete(self) -> None:
        """Leave nothing for later."""
        self.settle()
        count, self.bare = self.bare, 0
        for start in range(0, count, _AT_ONCE):
            ids = self.waiting_ids[:, start : min(start + _AT_ONCE, count)]
            slots = slice(self.used - count + start, self.used - count + start + ids.shape[1])
            static = self._static_at(self.keys[:, :, slots], self.values[:, :, slots], ids)
            if static is not None:
                self.static[:, :, slots] = static
        if count:
            self.waiting_ids = self.id_places = None  # it had room for every free slot

    @as_made
    def _place_waiting(self) -> None:
        """Positions of the tokens that wait, where they were not told as they came."""
        count = self.waiting
        if count == 0 or self.uneven or use_triton(self.config.impl, self.keys):
            return
        pos = self._latest(count)[:, None]
        if self.fresh:
            self.pos[:, :, self.used - count : self.used] = pos
        else:
            target = self.order[..., self.cursor - count : self.cursor]
            copy_rows(self.pos, flat_rows(target, self.keys.shape[2]), pos.expand_as(target))

    def _latest(self, count: int) -> Tensor:
        """``[B, count]`` int32 positions of each row's latest tokens."""
        return (self.length[:, None] + torch.arange(-count, 0, device=self.device)).int()

    def _waiting_static(self, target: Tensor, rows: Tensor, count: int) -> Tensor | None:
        key, value = (self._slots_at(slots, target, rows) for slots in (self.keys, self.values))
        return self._static_at(key, value, self.waiting_ids[:, :count])

    def _static_at(self, key: Tensor, value: Tensor, ids: Tensor) -> Tensor | None:
        return None if self.config.unrotate is None else self.static_of(self.config.unrotate(key, ids), value)

    @staticmethod
    def _slots_at(slots: Tensor, target: Tensor, rows: Tensor) -> Tensor:
        """``[B, H, C, D]`` what lies at ``target``."""
        return slots.flatten(0, 2).index_select(0, rows).view(*target.shape, -1)

    def static_of(self, plain: Tensor, value: Tensor) -> Tensor | None:
        """``[B, H, C, R]`` static score inputs of tokens, for which there is room from the first ones on."""
        static = self.config.policy.static(self.config.layers or self.config.index, plain, value)
        if static is not None and self.static is None:
            self.static = static.new_zeros(*self.pos.shape, static.shape[-1])
        return static

    # ---- what others see ---------------------------------------------------------------------------------------

    @property
    def first_prompt(self) -> Tensor:
        """``[B]`` int64 tokens of each row's first prompt, which goes on growing until decoding begins."""
        return self.prompt_length if self.decoding else self.length

    def positions(self) -> Tensor:
        """``[B, H, S]`` int32 logical position of the token in each slot, -1 where empty."""
        self._place_waiting()
        return self.pos

    def held(self, static: bool = True) -> Slots:
        """What a policy may read of the slots in use; without ``static``, static inputs may be missing."""
        if static:
            self.complete()
        else:
            self.settle()

        def narrow(name: str) -> Any:
            tensor = getattr(self, name)
            return tensor if tensor is None else tensor.narrow(SLOT_DIM[name], 0, self.used)

        return Slots(
            layer=self.config.index,
            length=self.length,
            prompt_length=self.first_prompt,
            budget=self.config.budget.slots or self.keys.shape[2],
            block=self.config.budget.block,
            impl=self.config.impl,
            queries=None if self.recent is None else Queries(self.recent, self.turned, self.scale, self.config.rotary),
            layers=self.config.layers,
            **{name: narrow(name) for name in SLOT_DIM},
        )

    def joined(self, call: Call) -> Slots:
        """What is held and the call's own tokens, as one."""
        held = self.held()
        shape = (*call.key.shape[:2], call.count)
        own: dict[str, Any] = {
            "keys": call.key,
            "values": call.value,
            "pos": call.pos[:, None].expand(shape),
            "static": call.static,
            "plain": call.plain,
            "state": None if held.state is None else history.empty(shape, self.device),
            "last_query": None if held.last_query is None else held.last_query.new_zeros(shape),
        }
        for name, tensor in own.items():
            if tensor is not None:
                own[name] = torch.cat([getattr(held, name), tensor], dim=SLOT_DIM[name])
        return replace(held, **own)
