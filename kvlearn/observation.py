"""What the slots of a layer are given by its queries, block by block.

Queries and their log-sum-exps are kept for one block; when it ends, one matrix product gives the mass that every slot
received from the block, which is folded into the history. That is exact, and costs nothing in the steps between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from kvlearn import history
from kvlearn.kernels.column_mass import column_mass
from kvlearn.kernels.observe import fold, observe
from kvlearn.policies.base import Slots
from kvlearn.waiting import WaitingStore, as_made, each


class Places(NamedTuple):
    """Views of where the queries of a block are kept; see :func:`kvlearn.waiting.each`.

    Attributes:
        queries: ``[B, H * G, W, D]`` what they are views of.
        query: for each of the block's queries, ``[B, H * G, 1, D]``.
        norm: for each, ``[B, H * G, 1]`` of the log-sum-exps.
    """

    queries: Tensor
    query: tuple[Tensor, ...]
    norm: tuple[Tensor, ...]

    @classmethod
    def of(cls, queries: Tensor, lse: Tensor) -> Places:
        """For tensors of a whole block."""
        return cls(queries, each(queries, 2), each(lse, 2))


class Observer(WaitingStore):
    """Slots whose history follows what they are given."""

    def _keep_query(self, query: Tensor, lse: Tensor, pos: Tensor | None = None) -> None:
        """Remember a decoded query until its block ends; ``pos`` ``[B, 1]`` unless it is the row's latest token."""
        block, at = self.config.budget.block, self.open
        if self.config.observes:
            if self.queries is None:
                batch, query_heads, _, dim = query.shape
                # In memory what comes together lies together.
                self.queries = query.new_zeros(batch, block, query_heads, dim).transpose(1, 2)
                self.lse = lse.new_zeros(batch, block, query_heads).transpose(1, 2)
            if self.places is None or self.places.queries is not self.queries:
                self.places = Places.of(self.queries, self.lse)
            if query.requires_grad:
                query, lse = query.detach(), lse.detach()
            self.places.query[at].copy_(query)
            self.places.norm[at].copy_(lse)
            if self.uneven:
                self.query_pos[:, at : at + 1] = self.length[:, None] - 1 if pos is None else pos
        self.open = at + 1
        if self.open == block and not self.config.waits:
            self.close_block()  # these are told at once; all else can wait for the next token, or for who looks

    def _expect_padding(self) -> None:
        """From now on positions are kept query by query; without padding they are known without."""
        if not self.uneven:
            self.query_pos = self.pos.new_full((self.pos.shape[0], self.config.budget.block), -1)
            self.query_pos[:, : self.open] = self._latest(self.open)
        self.uneven, self.fresh = True, False

    @as_made
    def close_block(self) -> None:
        """Observe the queries kept since the last block ended, and drop what was planned for the rest of the block."""
        self.settle()
        count, self.open = self.open, 0
        self.order, self.cursor = self.order[..., :0], 0
        if count == 0:
            return
        if self.config.observes:
            query, lse, slots = self.queries[:, :, :count], self.lse[:, :, :count], self.held(static=False)
            query_pos = self.query_pos[:, :count] if self.uneven else self._latest(count)
            self._observe(query, lse, query_pos, slots, own_keys_last=False)
            self._store_observed(slots)

    @property
    def ended(self) -> bool:
        """Whether a block is complete and has not been observed."""
        return self.open == self.config.budget.block

    def held(self, static: bool = True) -> Slots:
        """What a policy may read of the slots in use; without ``static``, static inputs may be missing."""
        if self.ended:
            self.close_block()
        return super().held(static)

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
