"""A layer whose KV heads share one pool of slots: heads that need more hold more, and none less than a floor.

Storage is that of a layer with one head and ``H * budget`` slots, so it takes what equal budgets take, to the byte: the
slot of a token says whose it is in the number kept as its position, ``position * H + head`` (:class:`Ragged` reads it).
A token takes one slot for every head, which may have been another head's; what a head holds lies anywhere in the pool.

A decoded query attends over the whole pool with the slots of other heads masked: one product for all heads, which reads
every key once. When a block ends, and for longer calls, the pool is gathered by head for a moment, so that policies and
observation see ``[B, H, S]`` as ever, with as many slots as the head that has most.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvlearn.kernels.decode_attention import decode_attention
from kvlearn.layer import EvictingLayer
from kvlearn.policies.base import Slots
from kvlearn.slots import SLOT_DIM, Call, expand

_NO_HEAD = 1 << 31  # sorts behind every head


@dataclass(frozen=True)
class Ragged:
    """Where the slots of each head lie in a pool.

    Attributes:
        codes: ``[B, P]`` int32, ``position * heads + head`` of each slot's token, -1 where empty.
        heads: how many heads share the pool.
    """

    codes: Tensor
    heads: int

    @cached_property
    def head(self) -> Tensor:
        """``[B, P]`` int64 head of each slot; of an empty one, the last."""
        return self.codes.long() % self.heads

    @cached_property
    def counts(self) -> Tensor:
        """``[B, H]`` int64 slots that each head holds."""
        own = self.head.new_zeros(self.codes.shape[0], self.heads)
        return own.scatter_add(1, self.head, (self.codes >= 0).long())

    @cached_property
    def width(self) -> int:
        """Slots of the head that holds most; padding leaves heads with less than their share, which stays the least."""
        return max(int(self.counts.max()), -(-self.codes.shape[1] // self.heads))

    @cached_property
    def _sorted(self) -> Tensor:
        """``[B, P]`` slots by head, then by position; empty ones last."""
        by = torch.where(self.codes >= 0, self.head, _NO_HEAD) * (1 << 31) + self.codes
        return by.argsort(dim=-1)

    @cached_property
    def held(self) -> Tensor:
        """``[B, H, S]`` bool: the heads that hold fewer than most have nothing at the end."""
        return torch.arange(self.width, device=self.codes.device) < self.counts[..., None]

    @cached_property
    def slots(self) -> Tensor:
        """``[B, H, S]`` int64: the slot of each head's tokens, by position; any slot where there is none."""
        first = self.counts.cumsum(-1) - self.counts
        at = first[..., None] + torch.arange(self.width, device=self.codes.device)
        at = at.clamp(max=self.codes.shape[1] - 1).flatten(1)
        return self._sorted.gather(1, at).view(*self.counts.shape, -1)

    @cached_property
    def _rows(self) -> Tensor:
        """``[B * H * S]`` :attr:`slots`, counted through the pools of all rows."""
        batch, pool = self.codes.shape
        return (self.slots + torch.arange(batch, device=self.codes.device).view(-1, 1, 1) * pool).flatten()

    def split(self, pooled: Tensor, dim: int) -> Tensor:
        """``[B, 1, ..., P, ...]`` by head: ``[B, H, ..., S, ...]``; ``dim`` is that of the slots."""
        if dim == 2 and pooled.ndim == 4:  # whole vectors are copied at once
            return pooled.flatten(0, 2).index_select(0, self._rows).view(*self.slots.shape, pooled.shape[-1])
        pooled = pooled.expand(-1, self.heads, *pooled.shape[2:])
        return pooled.gather(dim, expand(self.slots, pooled, dim))

    def merge(self, by_head: Tensor, dim: int) -> Tensor:
        """What :meth:`split` gave, or the like, as slots of the pool; 0 where the pool is empty."""
        rank = self._sorted.argsort(dim=-1)  # of each slot
        first = self.counts.cumsum(-1) - self.counts
        place = self.head * self.width + rank - first.gather(1, self.head)  # [B, P] in [H * S]
        place = torch.where(self.codes >= 0, place, 0)[:, None]
        flat = flat_heads(by_head, dim)
        found = flat.gather(dim, expand(place, flat, dim))
        return found.masked_fill(expand(self.codes[:, None] < 0, flat, dim), 0)


def flat_heads(by_head: Tensor, dim: int) -> Tensor:
    """``[B, H, ..., S, ...]`` as ``[B, 1, ..., H * S, ...]``: the slots of one head after the other."""
    return by_head.movedim(1, dim - 1).flatten(dim - 1, dim)[:, None]


class ByHead(Slots):
    """Slots of a pool gathered by head, each tensor when it is first read: few read all of them."""

    @classmethod
    def of(cls, ragged: Ragged, pooled: Slots) -> ByHead:
        """What a layer with one head shows, as its heads hold it."""
        told = {field.name: getattr(pooled, field.name) for field in fields(Slots)}
        slots = cls.__new__(cls)
        slots.__dict__.update({name: value for name, value in told.items() if name not in SLOT_DIM or value is None})
        pos = (ragged.split(pooled.pos, SLOT_DIM["pos"]) // ragged.heads).masked_fill(~ragged.held, -1)
        slots.__dict__.update(pos=pos, _ragged=ragged, _pooled=pooled)
        return slots

    def __getattribute__(self, name: str) -> Any:
        if name in SLOT_DIM and name not in self.__dict__:
            self.__dict__[name] = self._ragged.split(getattr(self._pooled, name), SLOT_DIM[name])
        return super().__getattribute__(name)


class PooledLayer(EvictingLayer):
    """:class:`EvictingLayer` over one pool of slots; tensors have one head, and ``pos`` the numbers of Ragged."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the pool."""
        self.lanes = key_states.shape[1]
        super().lazy_initialization(key_states[:, :1], value_states[:, :1])

    def _ragged(self) -> Ragged:
        return Ragged(self.pos[:, 0, : self.used], self.lanes)

    def positions(self) -> Tensor:
        """``[B, H, S]`` int32 logical positions by head, -1 at the end of heads that hold fewer than most."""
        return ByHead.of(self._ragged(), super().held()).pos

    def held(self, static: bool = True) -> Slots:
        """What a policy may read of the slots in use, gathered by head."""
        return ByHead.of(self._ragged(), super().held(static))

    def write(self, target: Tensor, call: Call) -> None:
        """Store the call's tokens, one slot for each head, in the order of ``target`` ``[B, 1, C * H]``."""

        def in_turn(tensor: Tensor | None) -> Any:  # [B, H, C, X] -> [B, 1, C * H, X]
            return None if tensor is None else tensor.transpose(1, 2).flatten(1, 2)[:, None]

        codes = call.pos[..., None] * self.lanes + torch.arange(self.lanes, dtype=torch.int32, device=self.device)
        codes = codes.masked_fill(call.pos[..., None] < 0, -1).flatten(1)
        own = replace(call, key=in_turn(call.key), value=in_turn(call.value), static=in_turn(call.static), pos=codes)
        super().write(target, own)

    def _attend_one(self, call: Call) -> tuple[Tensor, Tensor]:
        """Every query head is a query of the pool's one head, and sees the slots of its own."""
        heads = call.query.shape[1]
        end, codes = self.used, self.pos[:, :, None, : self.used]
        own = torch.arange(self.lanes, device=self.device).repeat_interleave(heads // self.lanes)
        out, lse = decode_attention(
            call.query.transpose(1, 2),
            self.keys[:, :, :end],
            self.values[:, :, :end],
            visible=(codes % self.lanes == own[:, None]) & (codes >= 0),
            scale=self.scale,
            softcap=self.softcap,
            impl=self.config.impl,
        )
        return out.transpose(1, 2), lse.transpose(1, 2)

    def _outlives(self, target: Tensor, count: int) -> Tensor:
        turn = torch.arange(count, device=self.device).repeat_interleave(self.lanes)
        rank = torch.full(self.pos.shape, count, dtype=torch.int64, device=self.device)
        rank = rank.scatter(-1, target, turn.expand_as(target))
        return self._ragged().split(rank[..., : self.used], 2)

    def _flat(self, slots: Slots) -> Slots:
        found: dict[str, Any] = {}
        for name, dim in SLOT_DIM.items():
            tensor = getattr(slots, name)
            found[name] = None if tensor is None else flat_heads(tensor, dim)
        found["pos"] = flat_heads(self._codes(slots.pos), 2)
        return replace(slots, **found)

    def _codes(self, pos: Tensor) -> Tensor:
        head = torch.arange(self.lanes, dtype=torch.int32, device=pos.device)[:, None]
        return torch.where(pos < 0, -1, pos * self.lanes + head)

    def _rated(self, slots: Slots, room: int) -> tuple[Tensor, Tensor]:
        """Score and protection, with the best of each head protected up to its floor.

        ``room``: slots per head that are to be freed; a floor leaves that much even if it is the whole budget.
        """
        score, protected = self._judged(slots)
        budget = self.config.budget.slots
        assert budget is not None
        least = min(round(self.config.floor * budget), budget - room)
        # NaN must reach the selection, which reports it. Of equal scores the newer stays, whatever its slot.
        rating = score.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        rating = rating.masked_fill(protected, torch.inf).masked_fill(~slots.valid, -torch.inf)
        newest = slots.pos.argsort(dim=-1, descending=True, stable=True)
        best = newest.gather(-1, rating.gather(-1, newest).argsort(dim=-1, descending=True, stable=True))
        kept = torch.zeros_like(protected).scatter(-1, best[..., :least], True)
        return score, (protected | kept) & slots.valid

    def _victims(self, slots: Slots, count: int) -> Tensor:
        score, protected = self._rated(slots, 0)
        flat = flat_heads(self._codes(slots.pos), 2)
        return self._chosen(flat_heads(score, 2), flat, flat_heads(protected, 2), count)

    def _next_victims(self, count: int) -> Tensor:
        ragged = self._ragged()
        score, protected = self._rated(ByHead.of(ragged, super().held()), self.config.budget.block)
        return self._chosen(ragged.merge(score, 2), self.pos[..., : self.used], ragged.merge(protected, 2), count)

    def _store_observed(self, slots: Slots) -> None:
        ragged = self._ragged()
        for name in ("state", "last_query"):
            tensor = getattr(slots, name)
            if tensor is not None:
                dim = SLOT_DIM[name]
                getattr(self, name).narrow(dim, 0, self.used).copy_(ragged.merge(tensor, dim))
