"""From a window of a trace to what one training step reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvlearn import features, targets
from kvlearn.errors import KvlearnError
from kvlearn.shapes import Protection
from kvlearn.traces.dataset import Window, replay

TOP_SHARE = 0.5  # of the slots drawn at a boundary, those with the largest target come first and always


class Sample(NamedTuple):
    """One window at ``N`` boundaries, ``n`` slots each. A slot that is not ranked has log weight -inf.

    Attributes:
        keys: ``[L, H, T, D]`` before the rotary embedding.
        value_norm: ``[L, H, T]``.
        tokens: ``[L, H, N, n]`` int64 tokens that the slots hold.
        dynamic: ``[L, H, N, n, F]`` float32 dynamic features.
        target: ``[L, H, N, n]`` float32 future mass.
        log_weight: ``[L, H, N, n]`` float32 log of how many slots each one stands for.
    """

    keys: Tensor
    value_norm: Tensor
    tokens: Tensor
    dynamic: Tensor
    target: Tensor
    log_weight: Tensor

    @property
    def ranked(self) -> Tensor:
        """``[L, H, N, n]`` bool: slots that a policy may evict."""
        return self.log_weight > -torch.inf


@dataclass(frozen=True)
class Target:
    """What is forecast.

    Args:
        horizon: future queries, each a multiple of the block, 0 for all to the end; several targets are averaged.
        reduce: over the horizon: ``"mean"`` mass per query, ``"max"`` of block means, ``"peak"``: max of block maxima.
        value_power: the target is multiplied by the value norm to this power; 0 forecasts plain mass.
    """

    horizon: tuple[int, ...] = (256,)
    reduce: targets.Reduce = "mean"
    value_power: float = 0.0

    def at(self, window: Window, boundary: int) -> Tensor:
        """``[L, H, t]`` float32 for the ``t`` tokens that exist at a boundary."""
        tokens = boundary * window.block
        total: Tensor | None = None
        for horizon in self.horizon:
            if horizon % window.block:
                raise KvlearnError(
                    f"horizon is {horizon} queries; give multiples of the trace's block, {window.block}."
                )
            end = boundary + horizon // window.block if horizon else None
            # Only the codes that matter are decoded: tokens that exist, blocks of the horizon.
            mean, peak = (codes[boundary:end, ..., :tokens] for codes in (window.mean_code, window.peak_code))
            mass = targets.future_table(mean, peak, [0], block=window.block, reduce=self.reduce)[0]
            total = mass if total is None else total + mass
        assert total is not None
        total = total / len(self.horizon)
        if self.value_power:
            total = total * window.value_norm[..., :tokens].float() ** self.value_power
        return total


def make_sample(
    window: Window,
    boundaries: Sequence[int],
    *,
    target: Target,
    protect: Protection,
    slots: int | None,
    generator: torch.Generator | None = None,
) -> Sample:
    """Histories, features and targets of a window at some boundaries.

    Args:
        window: of a trace.
        boundaries: numbers of observed blocks.
        target: what is forecast.
        protect: slots that no policy may evict; they are not ranked.
        slots: how many to draw at each boundary, the half with the largest targets and the rest at random; ``None``
            takes all.
        generator: of the draw.
    """
    parts = []
    for n, state, held in replay(window, boundaries):
        shape, tokens = state.shape[:2], state.shape[-1]
        mass = target.at(window, n)
        pos = torch.arange(tokens, dtype=torch.int32).expand(*shape, tokens)
        length = torch.full((shape[0],), tokens)
        log_weight = torch.zeros(pos.shape).masked_fill_(protect.mask(pos, length, length), -torch.inf)
        if held is not None:
            log_weight = log_weight.masked_fill(~held, -torch.inf)
        index = pos.long()
        if slots is not None and slots < tokens:
            index, log_weight = draw(mass, log_weight, slots, generator)
            mass, pos = mass.gather(-1, index), pos.gather(-1, index)
            state = state.gather(-1, index[:, :, None].expand(-1, -1, state.shape[2], -1))
        parts.append((index, features.dynamic_features(state, pos, length), mass, log_weight))
    most = max(index.shape[-1] for index, *_ in parts)
    index, dynamic, mass, log_weight = (
        torch.stack([_pad(part[i], most, fill) for part in parts], dim=2)
        for i, fill in enumerate((0.0, 0.0, 0.0, -torch.inf))
    )
    return Sample(window.keys, window.value_norm, index, dynamic, mass, log_weight)


def draw(mass: Tensor, log_weight: Tensor, slots: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Choose slots: those with the largest target, and others at random that stand for all the rest.

    Args:
        mass: ``[L, H, t]`` targets.
        log_weight: ``[L, H, t]``, 0 where a slot is ranked and -inf elsewhere.
        slots: how many, less than ``t``.
        generator: of the draw.

    Returns:
        ``[L, H, slots]`` indices, and the log weights of the slots chosen.
    """
    ranked = log_weight > -torch.inf
    top = int(slots * TOP_SHARE)
    order = torch.rand(mass.shape, generator=generator)
    first = mass.masked_fill(~ranked, -1.0).topk(top, dim=-1, sorted=False).indices
    order.scatter_(-1, first, 2.0)
    order.masked_fill_(~ranked, -1.0)
    value, index = order.topk(slots, dim=-1)
    count = ranked.sum(-1, keepdim=True)
    drawn = (value >= 0).sum(-1, keepdim=True)
    share = (count - top).clamp(min=1) / (drawn - top).clamp(min=1)
    weight = torch.where(value > 1.5, torch.zeros_like(value), share.log().expand_as(value))
    return index, weight.masked_fill(value < 0, -torch.inf)


def _pad(tensor: Tensor, most: int, fill: float) -> Tensor:
    """Lengthen the slot axis (2) to ``most``."""
    missing = most - tensor.shape[2]
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_full((*tensor.shape[:2], missing, *tensor.shape[3:]), fill)], dim=2)
