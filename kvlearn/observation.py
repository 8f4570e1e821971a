"""What the slots of a layer are given by its queries, block by block.

Queries and their log-sum-exps are kept for one block; when it ends, one matrix product gives the mass that every slot
received from the block, which is folded into the history. That is exact, and costs nothing in the steps between.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvlearn import history
from kvlearn.kernels.column_mass import column_mass
from kvlearn.kernels.observe import fold, observe
from kvlearn.policies.base import Slots
from kvlearn.waiting import WaitingStore


class Observer(WaitingStore):
    """Slots whose history follows what they are given."""

    @property
    def _observing(self) -> bool:
        return bool(self.config.policy.reads & {"history", "last_query"}) or self.config.recorder is not None

    def _keep_query(self, query: Tensor, lse: Tensor, pos: Tensor | None = None) -> None:
        """Remember a decoded query until its block ends; ``pos`` ``[B, 1]`` unless it is the row's latest token."""
        block, at = self.config.budget.block, self.open
        if self._observing:
            if self.queries is None:
                batch, query_heads, _, dim = query.shape
                self.queries = query.new_zeros(batch, query_heads, block, dim)
                self.lse = lse.new_zeros(batch, query_heads, block)
            self.queries.narrow(2, at, 1).copy_(query)
            self.lse.narrow(2, at, 1).copy_(lse)
            if self.uneven:
                self.query_pos[:, at : at + 1] = self.length[:, None] - 1 if pos is None else pos
        self.open = at + 1
        if self.open == block:
            self.close_block()

    def _expect_padding(self) -> None:
        """From now on positions are kept query by query; without padding they are known without."""
        if not self.uneven:
            self.query_pos = self.pos.new_full((self.pos.shape[0], self.config.budget.block), -1)
            self.query_pos[:, : self.open] = self._latest(self.open)
        self.uneven, self.fresh = True, False

    def close_block(self) -> None:
        """Observe the queries kept since the last block ended, and drop what was planned for the rest of the block."""
        if self.open == 0:
            return
        self.settle()
        count, self.open = self.open, 0
        self.order, self.cursor = self.order[..., :0], 0
        if self._observing:
            query, lse, slots = self.queries[:, :, :count], self.lse[:, :, :count], self.held(static=False)
            query_pos = self.query_pos[:, :count] if self.uneven else self._latest(count)
            self._observe(query, lse, query_pos, slots, own_keys_last=False)
            self._store_observed(slots)

    def _store_observed(self, slots: Slots) -> None:
        """Take back what was observed into :meth:`held` slots: here they are the stored ones."""

    def _observe(self, query: Tensor, lse: Tensor, query_pos: Tensor, slots: Slots, *, own_keys_last: bool) -> None:
        """Bring history and last-query mass of ``slots`` up to date with ``query``, in place."""
        recorder, block = self.config.recorder, self.config.budget.block
        how: Any = {
            "query_pos": query_pos,
            "key_pos": slots.pos,
            "scale": self.scale,
            "softcap": self.softcap,
            "block": block,
            "group_reduce": self.config.group_reduce,
            "own_keys_last": own_keys_last,
            "impl": self.config.impl,
        }
        if slots.state is not None and recorder is None:
            observe(slots.state, query, lse, slots.keys, last=slots.last_query, **how)
            return
        observed = column_mass(query, lse, slots.keys, only_last=recorder is None, **how)
        if slots.last_query is not None:
            slots.last_query.copy_(observed.last)
        if recorder is None:
            return
        mean_code, peak_code = history.encode_mass(observed.mean), history.encode_mass(observed.peak)
        recorder.blocks(self.config.index, slots.pos, mean_code, peak_code, observed.queries)
        if slots.state is not None:
            fold(slots.state, mean_code, peak_code, observed.queries, query_pos, slots.pos, block)
