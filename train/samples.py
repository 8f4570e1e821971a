"""From a window of a trace to what one training step reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvlearn import features, targets
from kvlearn.errors import KvlearnError
from kvlearn.features import Vectors
from kvlearn.shapes import Protection
from kvlearn.traces.dataset import Trace, Window, replay

TOP_SHARE = 0.5  # of the slots drawn at a boundary, those with the largest target come first and always


class Sample(NamedTuple):
    """One window at ``N`` boundaries, ``n`` slots each. A slot that is not ranked has log weight -inf.

    Attributes:
        keys: of ``[L, H, T, D]``, before the rotary embedding.
        values: likewise.
        tokens: ``[L, H, N, n]`` int64 tokens that the slots hold.
        dynamic: ``[L, H, N, n, F]`` float32 dynamic features.
        target: ``[L, H, N, n]`` float32 future mass.
        log_weight: ``[L, H, N, n]`` float32 log of how many slots each one stands for.
    """

    keys: Vectors
    values: Vectors
    tokens: Tensor
    dynamic: Tensor
    target: Tensor
    log_weight: Tensor

    @property
    def vectors(self) -> Tensor:
        """``[L, 2 H, T, D]`` float32: all that static inputs are made of."""
        return features.stored_vectors(self.keys, self.values)

    @property
    def ranked(self) -> Tensor:
        """``[L, H, N, n]`` bool: slots that a policy may evict."""
        return self.log_weight > -torch.inf


@dataclass(frozen=True)
class Target:
    """What is forecast.

    Args:
        horizon: future queries, each a multiple of the block, 0 for all to the end; several targets are averaged.
        reduce: over the horizon, see :data:`kvlearn.targets.Reduce`.
        value_power: the target is multiplied by the weight of the value to this power; 0 forecasts plain mass.
        value: what that weight is, see :data:`kvlearn.targets.Value`.
        sharpness: of reduce "soft-max".

    Raises:
        KvlearnError: ``reduce`` or ``value`` is unknown, a number is out of range, or a ``reduce`` that has no horizon
            was given one.
    """

    horizon: tuple[int, ...] = (256,)
    reduce: targets.Reduce = "mean"
    value_power: float = 0.0
    value: targets.Value = "norm"
    sharpness: float = targets.SHARPNESS

    def __post_init__(self) -> None:
        for horizon in self.horizon:
            targets.check(self.reduce, horizon or None, 1, self.sharpness)

    @property
    def reads_projection(self) -> bool:
        """Whether the model's output projection must be known."""
        return self.value != "norm" and self.value_power != 0

    def check(self, trace: Trace) -> None:
        """Refuse a trace that does not hold what this is made of.

        Raises:
            KvlearnError: it does not keep the output projection.
        """
        if self.reads_projection and trace.projection is None:
            raise KvlearnError(
                f"trace {trace.path} does not keep the model's output projection, which data.value {self.value!r} "
                "needs; the `kvlearn trace` command that made it, given again, adds it without tracing again."
            )

    def table(self, window: Window, boundaries: Sequence[int]) -> Tensor:
        """``[N, L, H, T]`` float32: what is forecast at ``N`` boundaries, for the tokens that exist there.

        Raises:
            KvlearnError: a horizon is no multiple of the trace's block, or the window lacks what values are weighed by.
        """

        def future(horizon: int, reduce: targets.Reduce) -> Tensor:
            return targets.future_table(
                window.mean_code,
                window.peak_code,
                boundaries,
                block=window.block,
                horizon=horizon or None,
                reduce=reduce,
                sharpness=self.sharpness,
            )

        tables = [future(horizon, self.reduce) for horizon in self.horizon]
        table = tables[0] if len(tables) == 1 else torch.stack(tables).mean(0)
        if self.value_power:
            mass = future(0, "mean") if self.value == "deviation" else None
            weights = targets.value_weights(self.value, window.values.decode(), window.projection, mass)
            table *= weights**self.value_power
        return table


@dataclass(frozen=True)
class SampleOptions:
    """How windows become samples; see :class:`train.data.TraceDataModule` for the fields."""

    boundaries: int
    slots: int | None
    target: Target
    protect: Protection
    min_tokens: int
    min_future: int
    seed: int
    random: bool


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
    parts, wanted = [], sorted(set(boundaries))
    table = target.table(window, wanted)
    for future, (_, state, held) in zip(table, replay(window, wanted), strict=True):
        shape, tokens = state.shape[:2], state.shape[-1]
        mass = future[..., :tokens]
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
    return Sample(window.keys, window.values, index, dynamic, mass, log_weight)


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
