"""The oracle: scores by the attention that tokens will really receive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.policies.base import Policy, Slots
from kvlearn.targets import Reduce, future_table

Foresight = Literal["sum", Reduce]
"""How the future is read: see :data:`kvlearn.targets.Reduce`; ``"sum"`` is the mean times the blocks to come."""


class Observed(NamedTuple):
    """Blocks that one call observed: slot positions ``[B, H, S]``, codes ``[N, B, H, S]``, queries ``[N, B]``."""

    pos: Tensor
    mean_code: Tensor
    peak_code: Tensor
    queries: Tensor


class FutureRecorder:
    """Keeps the block mass of a full run, for :meth:`Oracle.from_recorder`.

    Give it to ``EvictingCache(model, "full", recorder=..., block=...)`` and run the tokens through the model; a decoded
    block counts once it is complete. It keeps two bytes per token, KV head, layer and block. Implements
    :class:`kvlearn.slots.Recorder`.

    Attributes:
        observed: what each layer observed, in order of time.
    """

    def __init__(self) -> None:
        self.observed: dict[int, list[Observed]] = {}

    def tokens(self, layer: int, pos: Tensor, keys: Tensor, values: Tensor) -> None:
        """Nothing: the future is in the attention."""

    def blocks(self, layer: int, pos: Tensor, mean_code: Tensor, peak_code: Tensor, queries: Tensor) -> None:
        """Keep the mass of some blocks."""
        self.observed.setdefault(layer, []).append(Observed(pos.clone(), mean_code, peak_code, queries))


@dataclass(frozen=True)
class Future:
    """What the tokens of one layer will receive.

    Attributes:
        mass: ``[N + 1, B, H, T]`` float16, by position: row ``n`` is the mass still to come when ``n`` blocks have been
            observed (:func:`kvlearn.targets.future_table`).
        ends: ``[N, B]`` int64, tokens that each row had seen when each block ended.
    """

    mass: Tensor
    ends: Tensor

    @classmethod
    def of(cls, observed: list[Observed], reduce: Foresight) -> Future:
        """The future of one layer of a :class:`FutureRecorder`.

        Raises:
            KvlearnError: some token was evicted while it was recorded, so its future was not seen.
        """
        ends = torch.cat([one.queries for one in observed]).cumsum(0)
        batch, heads, _ = observed[-1].pos.shape
        tokens = int(ends[-1].max())
        codes = torch.zeros(2, len(ends), batch, heads, tokens + 1, dtype=torch.uint8, device=ends.device)
        first = 0
        for one in observed:
            last = first + len(one.queries)
            if not torch.equal((one.pos >= 0).sum(-1), ends[last - 1][:, None].expand(batch, heads)):
                raise KvlearnError(
                    "the oracle's recording has gaps: tokens were evicted or came before it began; record with policy "
                    "'full', from the first token on."
                )
            # By position; what lies in empty slots goes to one column more, which is dropped.
            index = one.pos.long().masked_fill(one.pos < 0, tokens).expand(one.mean_code.shape)
            codes[0, first:last].scatter_(-1, index, one.mean_code)
            codes[1, first:last].scatter_(-1, index, one.peak_code)
            first = last
        mean_code, peak_code = codes[..., :tokens]
        table = future_table(mean_code, peak_code, block=1, reduce="mean" if reduce == "sum" else reduce)
        if reduce == "sum":
            table *= torch.arange(len(ends), -1, -1, device=ends.device).view(-1, 1, 1, 1)  # blocks to come
        return cls(table.half(), ends)

    @classmethod
    def any_of(cls, futures: Sequence[Future]) -> Future:
        """What any of several futures of the same beginning will need: the most that one of them gives."""
        blocks = max(len(future.ends) for future in futures)
        tokens = max(future.mass.shape[-1] for future in futures)
        mass = futures[0].mass.new_zeros(blocks + 1, *futures[0].mass.shape[1:3], tokens)
        ends = torch.zeros_like(futures[0].ends[:1]).expand(blocks, -1)
        for future in futures:
            part = mass[: len(future.mass), ..., : future.mass.shape[-1]]
            part.copy_(torch.maximum(part, future.mass))
            over = future.ends[-1:].expand(blocks - len(future.ends), -1)  # a shorter one has ended by then
            ends = torch.maximum(ends, torch.cat([future.ends, over]))
        return cls(mass, ends)


@dataclass
class Oracle(Policy):
    """The attention that each token will receive in the full-cache run of the same tokens.

    The future of a slot at row length ``n`` is every recorded block with a query after the first ``n`` tokens; a block
    that straddles ``n`` counts whole. Built by :meth:`from_recorder`.

    Args:
        future: the future of each layer.
        reduce: how the future is read, see :data:`kvlearn.targets.Reduce`: ``"discounted"`` loses least. Besides them
            there is ``"sum"``, which ranks as the mean does.

    Raises:
        KvlearnError: no future is given.
    """

    future: dict[int, Future] | None = None
    reduce: Foresight = "discounted"

    name = "oracle"
    summary = "what will be attended to, read ahead: the ceiling"
    paper = "a full run of the same tokens"
    kind = "oracle"

    def __post_init__(self) -> None:
        if self.reduce not in get_args(Foresight):
            raise KvlearnError(f"oracle: reduce is {self.reduce!r}; use one of {', '.join(get_args(Foresight))}.")
        if self.future is None:
            raise KvlearnError(
                "the oracle needs the future of the same tokens: only kvlearn compare knows it (in Python: "
                "Oracle.from_recorder)."
            )

    @classmethod
    def from_recorder(
        cls, recorder: FutureRecorder | Sequence[FutureRecorder], reduce: Foresight = "discounted"
    ) -> Oracle:
        """An oracle for the tokens that ``recorder`` saw.

        Args:
            recorder: one; or several that saw the same tokens first and then each its own, as copies of a cache do: the
                oracle then keeps what any of them will need.
            reduce: see the class.

        Raises:
            KvlearnError: a recorder saw nothing, or not every token.
        """
        recorders = [recorder] if isinstance(recorder, FutureRecorder) else recorder
        if not all(one.observed for one in recorders):
            raise KvlearnError("the oracle's recorder saw no attention; run the tokens through the full cache first.")
        layers = recorders[0].observed
        return cls(
            {layer: Future.any_of([Future.of(one.observed[layer], reduce) for one in recorders]) for layer in layers},
            reduce,
        )

    def score(self, slots: Slots) -> Tensor:
        """Mass still to come.

        Raises:
            KvlearnError: the cache has seen other tokens than were recorded.
        """
        assert self.future is not None
        future = self.future[slots.layer]
        if slots.length.shape != future.ends[-1].shape or bool((slots.length > future.ends[-1]).any()):
            raise KvlearnError(
                f"the oracle knows rows of {future.ends[-1].tolist()} tokens and the cache has seen "
                f"{slots.length.tolist()}; record a full run of the same tokens."
            )
        done = (future.ends <= slots.length).sum(0)
        rest = future.mass[done, torch.arange(len(done), device=done.device)]
        return rest.gather(-1, slots.pos.long().clamp(min=0)).float()
