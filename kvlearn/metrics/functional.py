"""Measures of a score against the mass that tokens really received, one number per row of slots.

All take any leading axes (layers, heads, boundaries) and treat each row of ``S`` slots by itself. A row that says
nothing (no slots, no mass) gives NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlearn.errors import KvlearnError
from kvlearn.features import FLOOR


def keep_mask(score: Tensor, budget: int, *, held: Tensor | None = None, protected: Tensor | None = None) -> Tensor:
    """The slots that a policy with this score keeps.

    Ties go to the slot with the higher index, as they go to the younger token in the cache.

    Args:
        score: ``[..., S]`` higher is kept.
        budget: the most slots to keep, protected ones included.
        held: ``[..., S]`` bool, slots there are to choose from; by default all.
        protected: ``[..., S]`` bool, slots kept before all others; they count only where ``held``.

    Returns:
        ``[..., S]`` bool.

    Raises:
        KvlearnError: the shapes differ, the budget is below 1, or a score is NaN.
    """
    score, held, protected = _checked(score, budget, held, protected)
    # By score, then by kind: an infinite score must not be taken for protection or absence.
    kind = held.to(torch.int8) + protected.to(torch.int8)
    order = score.flip(-1).argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, kind.flip(-1).gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    first = torch.arange(score.shape[-1], device=score.device) < budget
    return torch.zeros_like(held).scatter_(-1, order, first.expand_as(order)).flip(-1) & held


def kept_mass(
    score: Tensor, mass: Tensor, budget: int, *, held: Tensor | None = None, protected: Tensor | None = None
) -> Tensor:
    """Share of the mass of all held slots that the kept ones receive.

    Args:
        score: see :func:`keep_mask`.
        mass: ``[..., S]`` true future mass, 0 or more.
        budget: see :func:`keep_mask`.
        held: see :func:`keep_mask`.
        protected: see :func:`keep_mask`; their mass counts as kept.

    Returns:
        ``[...]`` float32 in [0, 1]; NaN where no mass is left.

    Raises:
        KvlearnError: see :func:`keep_mask`.
    """
    mass = _mass(mass, score)
    kept = keep_mask(score, budget, held=held, protected=protected)
    total = (mass if held is None else mass * held).sum(-1)
    return ((mass * kept).sum(-1) / total).float()


def recall_at_budget(
    score: Tensor, mass: Tensor, budget: int, *, held: Tensor | None = None, protected: Tensor | None = None
) -> Tensor:
    """Share of the best slots, by true mass, that the score keeps.

    Among the unprotected slots, the best are as many as the budget leaves, those without mass excepted: nobody misses
    them. Where equal masses make the choice arbitrary, every choice of the score counts as right.

    Args:
        score: see :func:`keep_mask`.
        mass: ``[..., S]`` true future mass, 0 or more.
        budget: see :func:`keep_mask`.
        held: see :func:`keep_mask`.
        protected: see :func:`keep_mask`; they take their part of the budget and are not counted.

    Returns:
        ``[...]`` float32 in [0, 1]; NaN where there is nothing to choose.

    Raises:
        KvlearnError: see :func:`keep_mask`.
    """
    mass = _mass(mass, score)
    kept = keep_mask(score, budget, held=held, protected=protected)
    _, held, protected = _checked(score, budget, held, protected)
    mass = mass.masked_fill(~held | protected, 0.0)
    kept = kept & ~protected
    places = (budget - protected.sum(-1)).clamp(min=0).minimum((mass > 0).sum(-1))
    ranked = mass.sort(dim=-1, descending=True).values
    least = ranked.gather(-1, (places - 1).clamp(min=0).unsqueeze(-1))  # the smallest mass among the best
    above = mass > least
    tied = torch.minimum((kept & (mass == least)).sum(-1), places - above.sum(-1))
    found = (kept & above).sum(-1) + tied
    return torch.where(places > 0, found / places, torch.nan).float()


def rank_correlation(score: Tensor, mass: Tensor, *, held: Tensor | None = None) -> Tensor:
    """Spearman's rank correlation; equal values share the mean of their ranks.

    Args:
        score: ``[..., S]``.
        mass: ``[..., S]`` true future mass.
        held: ``[..., S]`` bool, slots that count; by default all.

    Returns:
        ``[...]`` float32 in [-1, 1]; NaN where all scores or all masses are equal.

    Raises:
        KvlearnError: the shapes differ or a score is NaN.
    """
    mass = _mass(mass, score)
    score, held, _ = _checked(score, 1, held, None)
    x, y = (_ranks(values, held) for values in (score, mass))
    count = held.sum(-1, keepdim=True).double()
    x, y = ((r - (r * held).sum(-1, keepdim=True) / count) * held for r in (x, y))
    return ((x * y).sum(-1) / ((x * x).sum(-1) * (y * y).sum(-1)).sqrt()).float()


def calibration_error(score: Tensor, mass: Tensor, *, bins: int = 10, held: Tensor | None = None) -> Tensor:
    """How far forecasts of log mass are off where they say the same: 0 for a calibrated scorer.

    The held slots of a row are cut into ``bins`` of equal size by rising score; the error is the mean over slots of
    the distance between a bin's mean score and its mean log mass.

    Args:
        score: ``[..., S]`` forecast of log future mass, in nats.
        mass: ``[..., S]`` true future mass; :data:`kvlearn.features.FLOOR` is added before the logarithm.
        bins: number of bins; some stay empty if there are fewer slots.
        held: ``[..., S]`` bool, slots that count; by default all.

    Returns:
        ``[...]`` float32 in nats; NaN where no slot is held.

    Raises:
        KvlearnError: the shapes differ, a score is NaN, or ``bins`` is below 1.
    """
    if bins < 1:
        raise KvlearnError(f"bins is {bins}; give a number that is 1 or more.")
    log_mass = torch.log(_mass(mass, score) + FLOOR)
    score, held, _ = _checked(score, 1, held, None)
    order = score.masked_fill(~held, torch.inf).argsort(dim=-1, stable=True)
    count = held.sum(-1, keepdim=True)
    place = torch.arange(score.shape[-1], device=score.device).expand_as(order)
    index = torch.where(place < count, place * bins // count.clamp(min=1), bins)
    off = (score.masked_fill(~held, 0.0).double() - log_mass.masked_fill(~held, 0.0)).gather(-1, order)
    summed = off.new_zeros(*off.shape[:-1], bins + 1).scatter_add_(-1, index, off)
    return (summed[..., :bins].abs().sum(-1) / count.squeeze(-1)).float()


def _ranks(values: Tensor, held: Tensor) -> Tensor:
    """Mean ranks ``[..., S]`` float64 among the held slots, from 0."""
    ordered = values.double().masked_fill(~held, torch.inf).sort(dim=-1).values
    values = values.double().contiguous()
    below = torch.searchsorted(ordered, values, right=False)
    up_to = torch.minimum(torch.searchsorted(ordered, values, right=True), held.sum(-1, keepdim=True))
    return (below + up_to - 1).double() / 2


def _mass(mass: Tensor, score: Tensor) -> Tensor:
    if mass.shape != score.shape:
        raise KvlearnError(
            f"scores have the shape {tuple(score.shape)} and masses {tuple(mass.shape)}; they must agree."
        )
    return mass.double()


def _checked(
    score: Tensor, budget: int, held: Tensor | None, protected: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    if budget < 1:
        raise KvlearnError(f"budget is {budget}; give a number of slots that is 1 or more.")
    held = torch.ones_like(score, dtype=torch.bool) if held is None else held
    protected = torch.zeros_like(held) if protected is None else protected
    for name, mask in (("held", held), ("protected", protected)):
        if mask.shape != score.shape or mask.dtype != torch.bool:
            raise KvlearnError(
                f"{name} is {mask.dtype} of shape {tuple(mask.shape)}; give bool of shape {tuple(score.shape)}, "
                "as the scores have."
            )
    if bool((score.isnan() & held).any()):
        raise KvlearnError("a score is NaN, so there is no ranking to measure.")
    return score, held, protected & held
