"""Axis legend, budgets and protection: the words every other module uses.

Axes (shapes in comments and docstrings use these letters and no others):

| letter | axis |
|---|---|
| B | batch row |
| L | layer |
| H | KV head |
| G | query heads per KV head (query head ``h * G + g`` belongs to KV head ``h``) |
| S | slots |
| C | queries in one call |
| T | tokens of a text |
| W | queries of a full block |
| D | head dimension |
| K | history fields |
| R | static score inputs, computed once when a token is written |
| F | features |
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kvlearn.errors import KvlearnError

GroupReduce = Literal["mean", "max"]
Layer = int | tuple[int, ...]  # index in the model; or those of several layers, as one with the heads of all

DEFAULT_BLOCK = 32
DEFAULT_SINKS = 4


def whole_number(value: Any, name: str, unit: str, least: int) -> int:
    """``value`` as an int, whatever type of whole number it is.

    Raises:
        KvlearnError: it is no whole number, below ``least``, or more than positions can count.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    most = torch.iinfo(torch.int32).max
    if isinstance(value, bool) or not least <= number <= most:
        raise KvlearnError(f"{name} is {value!r}; give a whole number of {unit} from {least} to {most}.")
    return number


@dataclass(frozen=True)
class Protection:
    """Slots that no policy may evict.

    Args:
        sinks: the first tokens of each row, in tokens.
        recent: the last tokens of each row, in tokens. ``None`` means one block.
        prompt: protect ``"none"`` of the prompt, the ``"whole"`` first prompt, or its two ``"ends"``.
        prompt_ends: with ``prompt="ends"``, how many tokens at each end.
        tokens: any tokens of your own, by logical position (padding not counted): positions for all rows,
            ``[7, 8, 9]``, or a list of them for each row; or a bool mask, ``[T]`` for all rows or ``[B, T]``.

    Raises:
        KvlearnError: a count or a position is negative, or ``prompt`` is not one of the three words.
    """

    sinks: int = DEFAULT_SINKS
    recent: int | None = None
    prompt: Literal["none", "whole", "ends"] = "none"
    prompt_ends: int = 32
    tokens: Any = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _positions_by_row(self.tokens))
        for field in ("sinks", "recent", "prompt_ends"):
            value = getattr(self, field)
            if field != "recent" or value is not None:
                object.__setattr__(self, field, whole_number(value, f"protect: {field}", "tokens", 0))
        if self.prompt not in ("none", "whole", "ends"):
            raise KvlearnError(f"protect: prompt is {self.prompt!r}; use 'none', 'whole' or 'ends'.")

    def own_mask(self, rows: int, device: torch.device) -> Tensor | None:
        """``[rows, T]`` bool, which logical positions ``tokens`` names; ``None`` if it names none.

        Raises:
            KvlearnError: ``tokens`` is given for another number of rows; each may have been repeated, as for beams.
        """
        if not any(self.tokens):
            return None
        if rows % len(self.tokens):
            raise KvlearnError(
                f"protect: tokens lists positions for {len(self.tokens)} rows and the batch has {rows}; give one list "
                "for each row, or one for all."
            )
        mask = torch.zeros(len(self.tokens), max(max(row, default=0) for row in self.tokens) + 1, dtype=torch.bool)
        for i, row in enumerate(self.tokens):
            mask[i, list(row)] = True
        return mask.repeat_interleave(rows // len(self.tokens), dim=0).to(device)

    def mask(self, pos: Tensor, length: Tensor, prompt_length: Tensor, own: Tensor | None = None) -> Tensor:
        """Which slots are protected. The one rule, applied before scoring, for all policies.

        Args:
            pos: ``[B, H, S]`` int32 logical position of each slot's token, -1 where the slot is empty.
            length: ``[B]`` tokens seen by each row.
            prompt_length: ``[B]`` tokens of each row's first prompt.
            own: ``[B, T]`` what :meth:`own_mask` gave, in the order that rows have now.

        Returns:
            ``[B, H, S]`` bool. Empty slots are never protected.
        """
        if self.recent is None:
            raise KvlearnError("protect: recent is not resolved; the cache sets it to one block.")
        age = length.view(-1, 1, 1) - pos
        protected = (pos < self.sinks) | (age <= self.recent)
        first_prompt = prompt_length.view(-1, 1, 1)
        if self.prompt == "whole":
            protected |= pos < first_prompt
        elif self.prompt == "ends":
            protected |= pos < self.prompt_ends
            protected |= (pos < first_prompt) & (pos >= first_prompt - self.prompt_ends)
        if own is not None:
            at = pos.clamp(0, own.shape[1] - 1).long()
            named = own[:, None].expand(-1, pos.shape[1], -1).gather(-1, at)
            protected |= named & (pos < own.shape[1])
        return protected & (pos >= 0)


@dataclass(frozen=True)
class Budget:
    """The hard bound of one KV head of one layer, with what it must at least hold.

    Args:
        slots: the most slots one KV head of one layer may hold at any moment, or ``None`` for no bound
            (only the ``full`` policy, which never evicts, may do without).
        block: queries per observed block, ``W``. Victims are chosen once per block. ``None`` means 32, less for a
            budget below 128.
        protect: which slots no policy may evict.

    Raises:
        KvlearnError: the budget is below protection plus one block.
    """

    slots: int | None
    block: int
    protect: Protection

    @classmethod
    def resolve(cls, slots: int | None, block: int | None = None, protect: Protection | None = None) -> Budget:
        """Fill the defaults that depend on each other and check that they fit."""
        if slots is not None:
            slots = whole_number(slots, "budget", "slots", 1)
        if block is None:
            block = DEFAULT_BLOCK if slots is None else max(1, min(DEFAULT_BLOCK, slots // 4))
        block = whole_number(block, "block", "queries", 1)
        protect = Protection() if protect is None else protect
        if not isinstance(protect, Protection):
            raise KvlearnError(f"protect is {protect!r}; give kvlearn.Protection(sinks=4), or leave it out.")
        if protect.recent is None:
            protect = replace(protect, recent=block)
        assert protect.recent is not None
        budget = cls(slots, block, protect)
        if slots is not None and slots < budget.least:
            raise KvlearnError(
                f"budget is {slots} slots, below the {budget.least} that protection ({protect.sinks} sinks, "
                f"{protect.recent} recent, {budget.prompt_slots} prompt, {budget.own_slots} own) plus one block of "
                f"{block} take; raise the budget, or lower protect or block."
            )
        return budget

    def check_prompt(self, tokens: int) -> None:
        """Refuse a prompt of so many tokens if it is protected whole and does not fit.

        Raises:
            KvlearnError: it does not fit, beside what else is protected and one block.
        """
        if self.slots is None or self.protect.prompt != "whole":
            return
        first = max(tokens, self.protect.sinks)
        room = self.slots - (self.protect.recent or 0) - self._own_from(first) - self.block
        if first > room:
            raise KvlearnError(
                f"the prompt has {tokens} tokens and is protected whole, and a budget of {self.slots} slots holds at "
                f"most {max(room, 0)} beside recent tokens, your own and one block of {self.block}; raise the budget "
                "or protect less."
            )

    @property
    def prompt_slots(self) -> int:
        """Slots that the two ends of the prompt take, where they are protected."""
        return 2 * self.protect.prompt_ends if self.protect.prompt == "ends" else 0

    @property
    def own_slots(self) -> int:
        """Slots that the caller's own tokens take beyond the sinks, in the row that names the most."""
        return self._own_from(self.protect.sinks)

    def _own_from(self, first: int) -> int:
        return max((sum(p >= first for p in row) for row in self.protect.tokens), default=0)

    @property
    def least(self) -> int:
        """The smallest budget that can hold what is protected and still turn over one block."""
        return self.protect.sinks + (self.protect.recent or 0) + self.prompt_slots + self.own_slots + self.block


def _positions_by_row(tokens: Any) -> tuple[tuple[int, ...], ...]:
    """What a caller may give as ``tokens``, as sorted positions of each row; one row stands for all."""
    if isinstance(tokens, Tensor):
        if tokens.dtype != torch.bool or tokens.ndim not in (1, 2):
            raise KvlearnError(f"protect: tokens is {tokens.dtype} of shape {list(tokens.shape)}; give a bool [B, T].")
        tokens = [row.nonzero()[:, 0].tolist() for row in (tokens if tokens.ndim == 2 else tokens[None])]
    told = KvlearnError(f"protect: tokens is {tokens!r}; give positions that are whole numbers, 0 or more.")
    try:
        one_row = not any(isinstance(p, Iterable) for p in tokens)
        rows = [list(row) for row in ([tokens] if one_row else tokens)]
        if isinstance(tokens, str) or any(isinstance(p, bool) or operator.index(p) < 0 for row in rows for p in row):
            raise told
    except TypeError:
        raise told from None
    return tuple(tuple(sorted({operator.index(p) for p in row})) for row in rows)
