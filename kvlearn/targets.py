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

Reduce = Literal["mean", "max", "peak"]
"""``"mean"``: mean mass per query. ``"max"``: largest block mean. ``"peak"``: largest mass that one query gave."""


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
        reduce: see :data:`Reduce`.

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
    if horizon is not None and (horizon < 1 or horizon % block):
        raise KvlearnError(f"horizon is {horizon} queries; give a multiple of the block of {block}, or None.")
    if reduce not in get_args(Reduce):
        raise KvlearnError(f"reduce is {reduce!r}; use one of {', '.join(get_args(Reduce))}.")
    span = blocks if horizon is None else min(horizon // block, blocks)
    codes = peak_code if reduce == "peak" else mean_code
    table = torch.empty(len(wanted), layers, heads, tokens, dtype=torch.float32, device=codes.device)
    for layer in range(layers):
        if reduce == "mean":
            table[:, layer] = _window_mean(history.decode_mass(codes[:, layer]), wanted, span)
        else:
            table[:, layer] = history.decode_mass(_window_max(codes[:, layer], span)[wanted])
    return table


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
