"""What a scorer forecasts: the attention mass that each token will still receive, read from a trace.

Blocks and boundaries are numbered as in :mod:`kvlearn.traces.dataset`: boundary ``n`` comes after ``n`` observed
blocks, and its future begins with block ``n``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from kvlearn import history
from kvlearn.errors import KvlearnError

Reduce = Literal["mean", "max", "peak", "discounted", "discounted-peak"]
"""How the mass of future blocks becomes one number.

``"mean"``: mean mass per query. ``"max"``: largest block mean. ``"peak"``: largest mass that one query gave.
``"discounted"``: largest block mean, each block counting :data:`MAX_DISCOUNT` times the one before it, plus
:data:`SUM_WEIGHT` times the sum of block means, discounted by :data:`SUM_DISCOUNT`. ``"discounted-peak"``: largest mass
that one query gave, discounted by :data:`MAX_DISCOUNT` a block.
"""

DISCOUNTED: tuple[Reduce, ...] = ("discounted", "discounted-peak")
"""Those that have no horizon: what comes later counts less and less, to the end of the window."""

PEAKS: tuple[Reduce, ...] = ("peak", "discounted-peak")
"""Those that read block maxima."""

MAX_DISCOUNT, SUM_DISCOUNT, SUM_WEIGHT = 0.985, 0.97, 0.1
"""Found by what oracles lose in language modelling at 256 of 2,048 slots, with blocks of 32 queries."""


def future_mass(
    mean_code: Tensor,
    peak_code: Tensor,
    boundary: int,
    *,
    block: int,
    horizon: int | None = None,
    reduce: Reduce = "mean",
) -> Tensor:
    """Mass that the tokens existing at one boundary receive from the queries after it.

    Args:
        mean_code: ``[N, L, H, T]`` uint8, encoded block mean mass of a full-cache run.
        peak_code: ``[N, L, H, T]`` uint8, encoded block maximum mass.
        boundary: ``n`` in ``0..N``.
        block: queries per block, ``W``.
        horizon: how many future queries count, a multiple of ``block``; ``None`` means to the end of the window. Near
            the end it covers what is there.
        reduce: see :data:`Reduce`; those in :data:`DISCOUNTED` have no horizon.

    Returns:
        ``[L, H, t]`` float32 with ``t = boundary * block``; 0 where no future is left.

    Raises:
        KvlearnError: an argument is out of range.
    """
    table = future_table(mean_code, peak_code, [boundary], block=block, horizon=horizon, reduce=reduce)
    return table[0, ..., : boundary * block]


def future_table(
    mean_code: Tensor,
    peak_code: Tensor,
    boundaries: Sequence[int] | None = None,
    *,
    block: int,
    horizon: int | None = None,
    reduce: Reduce = "mean",
) -> Tensor:
    """:func:`future_mass` at many boundaries in one pass over the window.

    Takes ``len(boundaries) * L * H * T * 4`` bytes: 47 MB for all boundaries of 2,048 tokens of a model with 30 layers
    and 3 KV heads. Work space is that of one layer.

    Args:
        mean_code: see :func:`future_mass`.
        peak_code: see :func:`future_mass`.
        boundaries: each in ``0..N``; ``None`` means all, in order.
        block: see :func:`future_mass`.
        horizon: see :func:`future_mass`.
        reduce: see :data:`Reduce`.

    Returns:
        ``[len(boundaries), L, H, T]`` float32. The mass of tokens that do not exist yet at a boundary (columns from
        ``boundary * block`` on) is there too; ignore it.

    Raises:
        KvlearnError: an argument is out of range.
    """
    blocks, layers, heads, tokens = mean_code.shape
    wanted = list(range(blocks + 1)) if boundaries is None else list(boundaries)
    if wanted and not 0 <= min(wanted) <= max(wanted) <= blocks:
        raise KvlearnError(f"boundaries are {wanted}; this window has 0 to {blocks}.")
    check(reduce, horizon, block)
    span = blocks if horizon is None else min(horizon // block, blocks)
    codes = peak_code if reduce in PEAKS else mean_code
    table = torch.empty(len(wanted), layers, heads, tokens, dtype=torch.float32, device=codes.device)
    for layer in range(layers):
        if reduce == "mean":
            table[:, layer] = _window_mean(history.decode_mass(codes[:, layer]), wanted, span)
        elif reduce in DISCOUNTED:
            table[:, layer] = _discounted(history.decode_mass(codes[:, layer]), wanted, reduce == "discounted")
        else:
            table[:, layer] = history.decode_mass(_window_max(codes[:, layer], span)[wanted])
    return table


def check(reduce: Reduce, horizon: int | None, block: int) -> None:
    """Raise :class:`KvlearnError` unless this can be read from blocks of ``block`` queries."""
    if reduce not in get_args(Reduce):
        raise KvlearnError(f"reduce is {reduce!r}; use one of {', '.join(get_args(Reduce))}.")
    if horizon is None:
        return
    if reduce in DISCOUNTED:
        raise KvlearnError(
            f"horizon is {horizon} queries, and {reduce!r} mass has none: it is read to the end of the text."
        )
    if horizon < 1 or horizon % block:
        raise KvlearnError(f"horizon is {horizon} queries; give a multiple of the block of {block}, or None.")


def _discounted(mass: Tensor, wanted: list[int], with_sum: bool) -> Tensor:
    """Discounted maximum of ``mass[n:]`` for each wanted ``n``, and if asked for a little of the discounted sum."""
    out = mass.new_zeros(len(wanted), *mass.shape[1:])
    rows: dict[int, list[int]] = {}
    for row, n in enumerate(wanted):
        rows.setdefault(n, []).append(row)
    largest, total = torch.zeros_like(mass[0]), torch.zeros_like(mass[0])
    for n in range(mass.shape[0] - 1, min(wanted, default=0) - 1, -1):
        largest = torch.maximum(mass[n], largest.mul_(MAX_DISCOUNT))
        if with_sum:
            total.mul_(SUM_DISCOUNT).add_(mass[n])
        for row in rows.get(n, ()):
            torch.add(largest, total, alpha=SUM_WEIGHT, out=out[row])
    return out


def _window_mean(mass: Tensor, wanted: list[int], span: int) -> Tensor:
    """Mean of ``mass[n : n + span]`` for each wanted ``n``; 0 for none."""
    # float64: differences of running sums must not lose the small masses that follow a large one.
    sums = torch.zeros(mass.shape[0] + 1, *mass.shape[1:], dtype=torch.float64, device=mass.device)
    sums[1:] = mass.double().cumsum(0)
    start = torch.tensor(wanted, dtype=torch.int64, device=mass.device)
    end = (start + span).clamp(max=mass.shape[0])
    count = (end - start).clamp(min=1).view(-1, *[1] * (mass.ndim - 1))
    return ((sums[end] - sums[start]) / count).float()


def _window_max(codes: Tensor, span: int) -> Tensor:
    """``[N + 1, ...]``: maximum of ``codes[n : n + span]``; 0 for none. Doubles the width it covers in each step."""
    widest = torch.cat([codes, codes.new_zeros(1, *codes.shape[1:])])
    width = 1
    while width < span:
        step = min(width, span - width)
        widest = torch.cat([torch.maximum(widest[:-step], widest[step:]), widest[-step:]])
        width += step
    return widest
