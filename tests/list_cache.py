"""A cache of one layer as plain Python lists of tokens: what :class:`kvlearn.EvictingCache` must agree with.

Written from the description in kvlearn/layer.py, with none of its code: no slots, no masks, no indices. A token sits in
its head's list until it is evicted. Rows are independent but for what a batch decides together: whether a call's
columns fit, and where blocks of queries end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from kvlearn.history import decode_mass, encode_mass

Vector = np.ndarray


@dataclass
class Token:
    """One token of one head, and the mean attention it has received, as a history keeps it."""

    pos: int
    key: Vector
    value: Vector
    mean: float = 0.0
    unseen: list[float] = field(default_factory=list)  # mass by queries of the open block

    def observe(self, mass: list[float], queries: int, length: int) -> None:
        """Fold in a block of ``queries`` of its row, after which the row had ``length`` tokens."""
        if queries == 0 or self.pos >= length:
            return
        block = sum(mass) / queries
        code = float(decode_mass(encode_mass(torch.tensor([block])))[0])
        share = queries / (length - self.pos)  # above 1 where queries of the block came before the token
        self.mean = self.mean * (1 - min(share, 1.0)) + code * share


@dataclass
class Row:
    """One row of the batch: a list of tokens per KV head."""

    heads: list[list[Token]]
    plan: list[list[Token | None]]  # per head, or one for a pool: what the next tokens replace; None is an empty slot
    length: int = 0
    open: int = 0  # its queries in the open block


class ListCache:
    """The cache.

    Args:
        rows, heads, budget, block, sinks, scale: sizes; ``recent`` is one block.
        score: of a head and a position; higher is kept.
        floor: with a pool, the tokens that each head keeps at least; ``None`` gives every head its own budget.
    """

    def __init__(
        self,
        rows: int,
        heads: int,
        budget: int,
        block: int,
        sinks: int,
        scale: float,
        score: Callable[[int, int], float],
        floor: int | None = None,
    ) -> None:
        self.floor = floor
        self.lanes = 1 if floor is None else heads  # of a plan, for each token
        self.budget, self.block, self.sinks, self.scale, self.score = budget, block, sinks, scale, score
        self.rows = [Row([[] for _ in range(heads)], [[] for _ in range(heads)]) for _ in range(rows)]
        self.seen = self.used = self.open = self.planned = 0
        self.padded = False

    def take(self, indices: list[int]) -> None:
        """Rows in another order, some perhaps twice."""
        self.rows = [copy.deepcopy(self.rows[i]) for i in indices]

    def feed(self, query: Vector, key: Vector, value: Vector, valid: Vector) -> Vector:
        """One call: ``[B, H * G, C, D]``, ``[B, H, C, D]`` twice, ``[B, C]`` bool; returns the output."""
        count = query.shape[2]
        if count > 1:
            self.close_block()
        self.padded |= not valid.all()
        cut = not self.make_plan(count)
        out = np.zeros_like(query)
        for b, row in enumerate(self.rows):
            plans = [head[:] for head in row.plan]
            for i in range(count):
                if valid[b, i]:
                    self.put(row, key[b, :, i], value[b, :, i], None if cut else plans)
                    out[b, :, i] = self.attend(row, query[b, :, i], i if count > 1 else None)
            if count == 1:  # a row that sits a step out leaves its slot as it is
                row.plan = [plan[self.lanes :] for plan in row.plan]
                row.open += int(valid[b, 0])
        self.seen, self.used = self.seen + count, min(self.budget, self.used + count)
        if count == 1:
            self.planned, self.open = self.planned - 1, self.open + 1
            if self.open == self.block:
                self.close_block()
        else:
            self.observe_call(valid)
            self.planned = 0
        if cut:
            for row in self.rows:
                for h, gone in self.surplus(row):
                    row.heads[h] = [t for t in row.heads[h] if t is not gone]
        return out

    def make_plan(self, count: int) -> bool:
        """Decide, for all rows together, what the next tokens replace; False if the call is to be cut afterwards."""
        if self.planned >= count:
            return True
        free = self.budget - self.used
        want = count if count > 1 else self.block
        if free < want and count > self.block:
            return False
        if free < want and self.padded:
            self.used = self.budget
        for row in self.rows:
            if self.floor is None:
                for h, held in enumerate(row.heads):
                    empty = min(want, self.budget - len(held))
                    row.plan[h] = [None] * empty + self.victims(row, h, want - empty)
            else:
                all_want = want * len(row.heads)
                empty = min(all_want, -self.over(row))
                gone = self.pool_victims(row, all_want - empty, min(self.floor, self.budget - self.block))
                row.plan = [[None] * empty + [t for _, t in gone]]
        self.planned = want
        return True

    def over(self, row: Row) -> int:
        """Tokens that a row's pool holds beyond its budget; below 0, what it has room for."""
        return sum(len(held) - self.budget for held in row.heads)

    def surplus(self, row: Row) -> list[tuple[int, Token]]:
        """Head and token of what a row holds beyond its budget."""
        if self.floor is not None:
            return self.pool_victims(row, max(0, self.over(row)), self.floor)
        most = [(h, max(0, len(held) - self.budget)) for h, held in enumerate(row.heads)]
        return [(h, t) for h, count in most for t in self.victims(row, h, count)]

    def pool_victims(self, row: Row, count: int, least: int) -> list[tuple[int, Token]]:
        """Head and token of the lowest scores of all heads; no head falls below ``least``."""
        free = []
        for h, held in enumerate(row.heads):
            open_to_all = self.victims(row, h, len(held))
            free += [(h, t) for t in open_to_all[: max(0, len(held) - max(least, len(held) - len(open_to_all)))]]
        return sorted(free, key=lambda one: (self.score(one[0], one[1].pos), one[1].pos, one[0]))[:count]

    def victims(self, row: Row, h: int, count: int) -> list[Token]:
        free = [t for t in row.heads[h] if t.pos >= self.sinks and row.length - t.pos > self.block]
        return sorted(free, key=lambda t: (self.score(h, t.pos), t.pos))[:count]

    def put(self, row: Row, keys: Vector, values: Vector, plans: list[list[Token | None]] | None) -> None:
        for h in range(len(row.heads)):
            victim = None if plans is None else plans[h if self.floor is None else 0].pop(0)
            for other, kept in enumerate(row.heads):
                row.heads[other] = [t for t in kept if t is not victim]
            row.heads[h].append(Token(row.length, keys[h], values[h]))
        row.length += 1

    def attend(self, row: Row, query: Vector, column: int | None) -> Vector:
        """Attention of one query over what its row holds; every token notes the mass it got."""
        group = len(query) // len(row.heads)
        out = np.zeros_like(query)
        for h, held in enumerate(row.heads):
            keys, values = np.stack([t.key for t in held]), np.stack([t.value for t in held])
            logits = query[h * group : (h + 1) * group] @ keys.T * self.scale
            mass = np.exp(logits - logits.max(-1, keepdims=True))
            mass /= mass.sum(-1, keepdims=True)
            out[h * group : (h + 1) * group] = mass @ values
            for token, share in zip(held, mass.mean(0), strict=True):
                if column is not None:  # of a longer call: fill up, so that a place is a column
                    token.unseen += [0.0] * (column - len(token.unseen))
                token.unseen.append(float(share))
        return out

    def close_block(self) -> None:
        """Observe the open block and drop what was planned."""
        if self.open == 0:
            return
        for row in self.rows:
            for held in row.heads:
                for token in held:
                    token.observe(token.unseen, row.open, row.length)
                    token.unseen = []
            row.plan, row.open = [[] for _ in row.heads], 0
        self.open = self.planned = 0

    def observe_call(self, valid: Vector) -> None:
        """Observe a longer call, in blocks that end where it ends."""
        count = valid.shape[1]
        first = count % self.block or self.block
        bounds = [(max(end - self.block, 0), end) for end in range(first, count + 1, self.block)]
        for b, row in enumerate(self.rows):
            before = row.length - int(valid[b].sum())
            for held in row.heads:
                for token in held:
                    for start, end in bounds:
                        length = before + int(valid[b, :end].sum())
                        token.observe(token.unseen[start:end], int(valid[b, start:end].sum()), length)
                    token.unseen = []
