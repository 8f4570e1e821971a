"""The policy contract, and everything that policies have in common: selection and position order.

A policy is a small dataclass with one method, ``score(slots) -> [B, H, S]``; higher is kept. It must be pure in what
it reads and must read positions, never slot indices, so that any layout of slots gives the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from kvlearn import history
from kvlearn.errors import KvlearnError
from kvlearn.kernels.launch import Impl
from kvlearn.kernels.select import INFEASIBLE, NAN, select
from kvlearn.rotary import Unrotator
from kvlearn.shapes import GroupReduce, Layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Reads = Literal["history", "last_query", "static", "queries"]
Kind = Literal["full", "floor", "heuristic", "learned", "oracle"]


@dataclass(frozen=True)
class Queries:
    """The latest queries of a layer, oldest first.

    Args:
        rotated: ``[B, H * G, C, D]`` as they attended; ``C`` is at most the policy's ``query_window``.
        positions: ``[B, C]`` int64 positions that rotated them, -1 where a row has had fewer queries.
        scale: factor on the dot products.
        rotary: turns queries by positions, and back; ``None`` where the layer rotates nothing.
    """

    rotated: Tensor
    positions: Tensor
    scale: float
    rotary: Unrotator | None

    @property
    def plain(self) -> Tensor:
        """``[B, H * G, C, D]`` before the rotary embedding."""
        return self.rotated if self.rotary is None else self.rotary(self.rotated, self.positions.clamp(min=0))


@dataclass(frozen=True)
class Slots:
    """What a policy may read of one layer when it scores.

    Args:
        layer: index of the layer in the model; of the first, where several are scored as one with the heads of all.
        pos: ``[B, H, S]`` int32 logical position of each slot's token in its row, -1 where the slot is empty.
        length: ``[B]`` int64 tokens seen by each row.
        prompt_length: ``[B]`` int64 tokens of each row's first prompt; equal to ``length`` until decoding begins.
        keys: ``[B, H, S, D]`` keys as cached (rotated).
        values: ``[B, H, S, D]``.
        state: ``[B, H, K, S]`` history, or ``None`` when the policy does not read ``"history"``.
        last_query: ``[B, H, S]`` float32 mass that the latest query gave each slot (0 for one it could not see), or
            ``None`` when the policy does not read ``"last_query"``.
        static: ``[B, H, S, R]`` what :meth:`Policy.static` returned when each token was written, or ``None``.
        budget: slots per KV head that will be kept.
        block: queries per block.
        impl: implementation of kernels, for a policy that calls one.
        queries: the latest queries, or ``None`` when the policy does not read ``"queries"`` or none has come.
        plain: ``[B, H, S, D]`` keys before rotation, or ``None`` unless positions are those within the cache.
        layers: indices of all the layers, for a policy that ``joins`` them.
    """

    layer: int
    pos: Tensor
    length: Tensor
    prompt_length: Tensor
    keys: Tensor
    values: Tensor
    state: Tensor | None
    last_query: Tensor | None
    static: Tensor | None
    budget: int
    block: int
    impl: Impl = "auto"
    plain: Tensor | None = None
    queries: Queries | None = None
    layers: tuple[int, ...] = ()

    @property
    def valid(self) -> Tensor:
        """``[B, H, S]`` bool: slots that hold a token."""
        return self.pos >= 0

    @property
    def age(self) -> Tensor:
        """``[B, H, S]`` int64: queries that could have seen the slot, its own included."""
        return self.length.view(-1, 1, 1) - self.pos

    def field(self, name: str) -> Tensor:
        """``[B, H, S]`` float32: one field of the history (see :data:`kvlearn.history.FIELDS`)."""
        if self.state is None:
            raise RuntimeError(f"a policy read history field {name!r} without 'history' in its reads")
        return history.field(self.state, name)


@dataclass
class Policy:
    """Base of all policies.

    Class attributes:
        name: what the user types.
        summary: one line for ``kvlearn policies``.
        paper: arXiv id or definition.
        kind: role in comparisons.
        reads: what the cache must maintain for this policy; the less, the faster.
        joins: whether several layers can be scored as one with the heads of all of them: then no head may matter to
            another, nor its layer, except by :attr:`Slots.layers` and what :meth:`static` is told.
        query_window: how many of the latest queries the cache keeps, for a policy that reads ``"queries"``.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    kind: ClassVar[Kind] = "heuristic"
    reads: ClassVar[frozenset[Reads]] = frozenset()
    joins: ClassVar[bool] = False
    query_window = 0  # not annotated, so that it is no option

    @property
    def label(self) -> str:
        """What rows call this policy: its name and the options that are not at their default, as a user types them."""
        told = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if field.init
            and isinstance(getattr(self, field.name), int | float | str)
            and getattr(self, field.name) != field.default
        ]
        return ":".join([self.name, *told])

    @property
    def trained_with(self) -> tuple[int, GroupReduce] | None:
        """Block and group reduction of the attention that the policy was trained on; ``None``: any will do."""
        return None

    @property
    def layer_shares(self) -> Sequence[float] | None:
        """Slots of each full-attention layer relative to the mean, if the policy recommends any."""
        return None

    @property
    def pools_heads(self) -> bool:
        """Whether it recommends that the heads of a layer share its slots, where ``layer_shares`` are followed."""
        return False

    def of_layer(self, layer: int) -> Policy:
        """The policy that decides in a layer."""
        return self

    def bind(self, model: PreTrainedModel) -> None:
        """Check that this policy can serve ``model``; raise :class:`KvlearnError` if not. Called once per cache."""

    def static(self, layer: Layer, keys: Tensor, values: Tensor) -> Tensor | None:
        """Score inputs computed once per token, when it is written (``"static"`` in ``reads``).

        Args:
            layer: index of the layer in the model, or of several that the policy joins.
            keys: ``[B, H, C, D]`` before the rotary embedding.
            values: ``[B, H, C, D]``.

        Returns:
            ``[B, H, C, R]``, stored with the slot.
        """
        raise NotImplementedError

    def score(self, slots: Slots) -> Tensor:
        """``[B, H, S]`` float: higher is kept. Values at empty slots are ignored."""
        raise NotImplementedError


class Faults:
    """What selection found wrong, read without waiting for a GPU: there it may be reported a block late.

    Args:
        device: where scores are.
    """

    def __init__(self, device: torch.device) -> None:
        self.found = torch.zeros(1, dtype=torch.int32, device=device)
        self._seen = torch.zeros(1, dtype=torch.int32, pin_memory=True) if device.type == "cuda" else self.found

    def check(self, count: int, slots: int) -> None:
        """Raise :class:`KvlearnError` if a selection of ``count`` victims of ``slots`` slots went wrong."""
        self._seen.copy_(self.found, non_blocking=True)
        found = int(self._seen)
        if found:
            self.found.zero_()
        if found & NAN:
            raise KvlearnError("a policy returned NaN as a score; check its weights and the model's activations.")
        if found & INFEASIBLE:
            raise KvlearnError(
                f"protected slots leave fewer than the {count} slots of one block to evict in a budget of {slots}; "
                "raise the budget or protect less."
            )


def select_victims(
    score: Tensor, pos: Tensor, protected: Tensor, count: int, *, faults: Faults | None = None, impl: Impl = "auto"
) -> Tensor:
    """The slots to overwrite next, in the order in which they go; see :func:`kvlearn.kernels.select.select`.

    Args:
        score: ``[B, H, S]``; -inf and +inf are allowed and rank below and above all finite scores.
        pos: ``[B, H, S]`` int32, -1 for empty slots.
        protected: ``[B, H, S]`` bool.
        count: victims per row and head.
        faults: keeps faults between calls.
        impl: implementation of the kernel.

    Returns:
        ``[B, H, count]`` int64 slot indices.

    Raises:
        KvlearnError: a score is NaN, or protected slots leave fewer than ``count``.
    """
    faults = faults or Faults(score.device)
    order = select(score, pos, protected, count, fault=faults.found, impl=impl)
    faults.check(count, score.shape[-1])
    return order


def by_position(values: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    """Slots in order of position, for policies that pool over neighbouring tokens.

    Args:
        values: ``[B, H, S]``.
        pos: ``[B, H, S]``; empty slots come first.

    Returns:
        The values in order of position, and the ``[B, H, S]`` indices that bring them back by ``scatter``.
    """
    order = pos.argsort(dim=-1, stable=True)
    return values.gather(-1, order), order
