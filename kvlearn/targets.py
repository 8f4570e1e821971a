"""What a scorer forecasts: the attention mass that each token will still receive, and what it weighs, from a trace.

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

Reduce = Literal["mean", "soft-max", "max", "peak", "discounted", "discounted-peak"]
"""How the mass of future blocks becomes one number.

``"mean"``: mean mass per query. ``"max"``: largest block mean. ``"soft-max"``: power mean of the block means, between
the two: ``mean(mass ** sharpness) ** (1 / sharpness)``, which is a log-sum-exp of their logarithms. ``"peak"``: largest
mass that one query gave.
``"discounted"``: largest block mean, each block counting :data:`MAX_DISCOUNT` times the one before it, plus
:data:`SUM_WEIGHT` times the sum of block means, discounted by :data:`SUM_DISCOUNT`. ``"discounted-peak"``: largest mass
that one query gave, discounted by :data:`MAX_DISCOUNT` a block.
"""

DISCOUNTED: tuple[Reduce, ...] = ("discounted", "discounted-peak")
"""Those that have no horizon: what comes later counts less and less, to the end of the window."""

PEAKS: tuple[Reduce, ...] = ("peak", "discounted-peak")
"""Those that read block maxima."""

Value = Literal["norm", "output", "deviation"]
"""What a token's mass can be weighed by, since mass alone does not say what the output loses with the token.

``"norm"``: norm of the value, ``||v||``. ``"output"``: ``||W v||``, where ``W`` stacks the slices of the layer's output
projection that the query heads of the KV head are read by (:mod:`kvlearn.models.projection`). If those heads give the
token the masses ``a``, what it adds to the output is ``sum_h a_h W_h v``, whose norm is at most ``||a|| ||W v||``, and
is about that where the heads write in unrelated directions. ``"deviation"``: ``||W (v - o)||``, where ``o`` is the mean
output of the queries to come: evicting a token of mass ``a`` changes the output by ``a / (1 - a) (v - o)``, since the
others take over its mass (CAOTE, arXiv:2504.14051).
"""

MAX_DISCOUNT, SUM_DISCOUNT, SUM_WEIGHT = 0.985, 0.97, 0.1
"""Found by what oracles lose in language modelling at 256 of 2,048 slots, with blocks of 32 queries."""

SHARPNESS = 4.0
"""Of ``"soft-max"``, unless something else is said: one hit in a hundred blocks counts a third of what the maximum
says, and thirty times what the mean says."""

SHARPEST = 32.0
"""Largest sharpness: ``2 ** -18``, about the least mass that a trace tells from none, to this power is a float64."""


def future_mass(
    mean_code: Tensor,
    peak_code: Tensor,
    boundary: int,
    *,
    block: int,
    horizon: int | None = None,
    reduce: Reduce = "mean",
    sharpness: float = SHARPNESS,
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
        sharpness: of ``"soft-max"``, between 1 (the mean) and :data:`SHARPEST` (nearly the maximum).

    Returns:
        ``[L, H, t]`` float32 with ``t = boundary * block``; 0 where no future is left.

    Raises:
        KvlearnError: an argument is out of range.
    """
    table = future_table(
        mean_code, peak_code, [boundary], block=block, horizon=horizon, reduce=reduce, sharpness=sharpness
    )
    return table[0, ..., : boundary * block]


def future_table(
    mean_code: Tensor,
    peak_code: Tensor,
    boundaries: Sequence[int] | None = None,
    *,
    block: int,
    horizon: int | None = None,
    reduce: Reduce = "mean",
    sharpness: float = SHARPNESS,
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
        sharpness: see :func:`future_mass`.

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
    check(reduce, horizon, block, sharpness)
    span = blocks if horizon is None else min(horizon // block, blocks)
    codes = peak_code if reduce in PEAKS else mean_code
    table = torch.empty(len(wanted), layers, heads, tokens, dtype=torch.float32, device=codes.device)
    for layer in range(layers):
        if reduce == "mean":
            table[:, layer] = _window_mean(history.decode_mass(codes[:, layer]), wanted, span)
        elif reduce == "soft-max":
            table[:, layer] = _power_mean(codes[:, layer], wanted, span, sharpness)
        elif reduce in DISCOUNTED:
            table[:, layer] = _discounted(history.decode_mass(codes[:, layer]), wanted, reduce == "discounted")
        else:
            table[:, layer] = history.decode_mass(_window_max(codes[:, layer], span)[wanted])
    return table


def value_weights(value: Value, values: Tensor, projection: Tensor | None = None, mass: Tensor | None = None) -> Tensor:
    """How much a unit of mass on each token matters; see :data:`Value`.

    Args:
        value: what to weigh by.
        values: ``[L, H, T, D]`` float32.
        projection: ``[L, H, D, D]`` float32 from :func:`kvlearn.models.projection.output_projection`; not read for
            ``"norm"``.
        mass: ``[N, L, H, T]`` float32, mean mass of all tokens from the queries after ``N`` boundaries, which
            ``"deviation"`` takes the mean output from; else not read.

    Returns:
        ``[L, H, T]`` float32, or ``[N, L, H, T]`` for ``"deviation"``.

    Raises:
        KvlearnError: ``value`` is unknown, or what it reads is not there.
    """
    if value not in get_args(Value):
        raise KvlearnError(f"value is {value!r}; use one of {', '.join(get_args(Value))}.")
    if value == "norm":
        return torch.linalg.vector_norm(values, dim=-1)
    if projection is None:
        raise KvlearnError(f"value is {value!r}, which needs the model's output projection; this trace has none.")
    written = values @ projection.mT
    if value == "output":
        return torch.linalg.vector_norm(written, dim=-1)
    if mass is None:
        raise KvlearnError("value is 'deviation', which needs the mean mass of the queries to come.")
    share = mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
    mean = torch.einsum("nlht,lhtd->lhnd", share, written)
    # Not by products of norms: a token whose value is near the mean would be lost in the rounding.
    distance = torch.cdist(mean, written, compute_mode="donot_use_mm_for_euclid_dist")
    return distance.movedim(2, 0)


def check(reduce: Reduce, horizon: int | None, block: int, sharpness: float = SHARPNESS) -> None:
    """Raise :class:`KvlearnError` unless this can be read from blocks of ``block`` queries."""
    if reduce not in get_args(Reduce):
        raise KvlearnError(f"reduce is {reduce!r}; use one of {', '.join(get_args(Reduce))}.")
    if not 1 <= sharpness <= SHARPEST:
        raise KvlearnError(f"sharpness is {sharpness}; give a number from 1 to {SHARPEST:g}.")
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


def _power_mean(codes: Tensor, wanted: list[int], span: int, power: float) -> Tensor:
    """``mean(mass[n : n + span] ** power) ** (1 / power)`` for each wanted ``n``; 0 for none."""
    powers = history.decode_mass(torch.arange(256, dtype=torch.uint8, device=codes.device)).double().pow(power)
    blocks = codes.shape[0]
    # Sums of 1, 2, 4, ... blocks, each twice the one before. Differences of running sums, as in the mean, would lose
    # most of what a power makes small.
    part = torch.cat([powers[codes.int()], powers.new_zeros(1, *codes.shape[1:])])
    sums, done, width = torch.zeros_like(part), 0, 1
    while width <= span:
        if span & width:
            sums[: blocks + 1 - done] += part[done:]
            done += width
        part[: blocks + 1 - width] += part[width:].clone()
        width *= 2
    count = (blocks - torch.tensor(wanted, device=codes.device)).clamp(1, max(1, span))
    return (sums[wanted] / count.view(-1, *[1] * (codes.ndim - 1))).pow(1 / power).float()


def _window_max(codes: Tensor, span: int) -> Tensor:
    """``[N + 1, ...]``: maximum of ``codes[n : n + span]``; 0 for none. Doubles the width it covers in each step."""
    widest = torch.cat([codes, codes.new_zeros(1, *codes.shape[1:])])
    width = 1
    while width < span:
        step = min(width, span - width)
        widest = torch.cat([torch.maximum(widest[:-step], widest[step:]), widest[-step:]])
        width += step
    return widest
