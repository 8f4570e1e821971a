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
        self.mean += (code - self.mean) * min(queries / (length - self.pos), 1.0)


@dataclass
class Row:
    """One row of the batch: a list of tokens per KV head."""

    heads: list[list[Token]]
    plan: list[list[Token | None]]  # per head, what the next tokens replace; None is an empty slot
    length: int = 0
    open: int = 0  # its queries in the open block


class ListCache:
    """The cache.

    Args:
        rows, heads, budget, block, sinks, scale: sizes; ``recent`` is one block.
        score: of a head and a position; higher is kept.
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
    ) -> None:
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
                row.plan = [head[1:] for head in row.plan]
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
                for h, held in enumerate(row.heads):
                    gone = self.victims(row, h, max(0, len(held) - self.budget))
                    row.heads[h] = [t for t in held if t not in gone]
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
            for h, held in enumerate(row.heads):
                empty = min(want, self.budget - len(held))
                row.plan[h] = [None] * empty + self.victims(row, h, want - empty)
        self.planned = want
        return True

    def victims(self, row: Row, h: int, count: int) -> list[Token]:
        free = [t for t in row.heads[h] if t.pos >= self.sinks and row.length - t.pos > self.block]
        return sorted(free, key=lambda t: (self.score(h, t.pos), t.pos))[:count]

    def put(self, row: Row, keys: Vector, values: Vector, plans: list[list[Token | None]] | None) -> None:
        for h, held in enumerate(row.heads):
            victim = None if plans is None else plans[h].pop(0)
            if victim is not None:
                row.heads[h] = held = [t for t in held if t is not victim]
            held.append(Token(row.length, keys[h], values[h]))
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
