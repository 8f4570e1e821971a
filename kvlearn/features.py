"""What a scorer reads: the one definition, used offline on traces and online on the cache.

A feature vector has two parts. :func:`dynamic_features` changes as attention is observed and is made when slots are
scored. :func:`static_features` belongs to the token alone and is computed once, when the token is written; the cache
stores it, as :data:`STATIC_DTYPE`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlearn import history
from kvlearn.history import HALF_LIVES

VERSION = 1
"""Raised whenever the meaning or order of a feature changes; a scorer of another version is refused."""

FLOOR = 2.0**-20
"""Added to mass before its logarithm."""

STATIC_DTYPE = torch.float16

KEY_DTYPE = torch.bfloat16
"""Keys are rounded to this before they are read, because a trace stores them so."""

NORM_DTYPE = torch.float16
"""Value norms are rounded to this before they are read, because a trace stores them so."""

DYNAMIC: tuple[str, ...] = (
    "log_last",
    *(f"log_ema{h}" for h in HALF_LIVES),
    "log_mean",
    "log_peak",
    "hits",
    "log_idle",
    "log_gap",
    "log_age",
    "log_position",
    "sink",
    "log_length",
)
"""Names of the dynamic features, in order."""

STATIC_SCALARS: tuple[str, ...] = ("log_key_norm", "log_value_norm")
"""Names of the static features that need no weights, in order."""


def dynamic_features(state: Tensor, pos: Tensor, length: Tensor) -> Tensor:
    """History and position as numbers of order one.

    The moving averages start at 0, so for a token of age ``a`` (queries since it was written) they are divided by
    ``1 - 2 ** (-a / half_life)``: a token is not thought unimportant for being young.

    Args:
        state: ``[B, H, K, S]`` history.
        pos: ``[B, H, S]`` logical positions, -1 for empty slots (their features are finite and meaningless).
        length: ``[B]`` tokens seen by each row.

    Returns:
        ``[B, H, S, F]`` float32 with ``F = len(DYNAMIC)``.
    """
    position = pos.float().clamp(min=0)
    total = length.float().view(-1, 1, 1)
    age = (total - position).clamp(min=1)
    columns = [torch.log(history.field(state, "last") + FLOOR)]
    for half_life in HALF_LIVES:
        exposure = -torch.expm1(age * (-0.6931471805599453 / half_life))
        columns.append(torch.log(history.field(state, f"ema{half_life}") / exposure + FLOOR))
    columns += [
        torch.log(history.field(state, "mean") + FLOOR),
        torch.log(history.field(state, "peak") + FLOOR),
        history.field(state, "hits"),
        torch.log1p(history.field(state, "idle")),
        torch.log1p(history.field(state, "gap")),
        torch.log(age),
        torch.log1p(position),
        (position < 4).float(),
        torch.log(total.clamp(min=1)).expand_as(position),
    ]
    return torch.stack(columns, dim=-1)


def value_norms(values: Tensor) -> Tensor:
    """Euclidean norms of values ``[..., D]``: ``[...]`` of :data:`NORM_DTYPE`, never infinite."""
    return _stored_norm(torch.linalg.vector_norm(values.float(), dim=-1))


def _stored_norm(norm: Tensor) -> Tensor:
    return norm.float().clamp(max=torch.finfo(NORM_DTYPE).max).to(NORM_DTYPE)


def static_features(keys: Tensor, value_norm: Tensor, projection: Tensor | None) -> Tensor:
    """What can be said of a token when it is written.

    Args:
        keys: ``[B, H, C, D]`` keys before the rotary embedding; rounded to :data:`KEY_DTYPE`.
        value_norm: ``[B, H, C]`` Euclidean norm of the values; rounded to :data:`NORM_DTYPE`.
        projection: ``[H, D, R]`` learned projection of the key, or ``None`` for the scalars alone.

    Returns:
        ``[B, H, C, R + 2]`` of :data:`STATIC_DTYPE`: :data:`STATIC_SCALARS`, then the projected key.
    """
    keys = keys.to(KEY_DTYPE).float()
    norms = _stored_norm(value_norm).float()
    scalars = torch.stack([torch.log(keys.norm(dim=-1) + 1e-6), torch.log(norms + 1e-6)], dim=-1)
    if projection is not None:
        scalars = torch.cat([scalars, keys @ projection.float()], dim=-1)
    return scalars.to(STATIC_DTYPE)
