"""What a scorer reads: the one definition, used offline on traces and online on the cache.

A feature vector has two parts. :func:`dynamic_features` changes as attention is observed and is made when slots are
scored. The static part belongs to the token alone and is computed once, when the token is written; the cache stores it,
as :data:`STATIC_DTYPE`: :func:`static_scalars`, and whatever a scorer's encoder makes of the same vectors.

Keys and values are rounded by :func:`round_vectors` before anything is made of them, because a trace stores them so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvlearn import history
from kvlearn.history import HALF_LIVES

VERSION = 2
"""Raised whenever the meaning or order of a feature changes; a scorer of another version is refused."""

FLOOR = 2.0**-20
"""Added to mass before its logarithm."""

STATIC_DTYPE = torch.float16

LEVELS = 127
"""Steps from zero to the largest number of a vector: what one signed byte holds."""

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

_HITS = DYNAMIC.index("hits")
_MASSES = _HITS  # features, and fields of a history, that are masses: all before the hits, in the same order

STATIC_SCALARS: tuple[str, ...] = ("log_key_norm", "log_value_norm")
"""Names of the static features that need no weights, in order."""


def dynamic_features(state: Tensor, pos: Tensor, length: Tensor, out: Tensor | None = None) -> Tensor:
    """History and position as numbers of order one.

    The moving averages start at 0, so for a token of age ``a`` (queries since it was written) they are divided by
    ``1 - 2 ** (-a / half_life)``: a token is not thought unimportant for being young.

    Args:
        state: ``[B, H, K, S]`` history.
        pos: ``[B, H, S]`` logical positions, -1 for empty slots (their features are finite and meaningless).
        length: ``[B]`` tokens seen by each row.

        out: ``[B, H, F, S]`` float32 to write to.

    Returns:
        ``[B, H, S, F]`` float32 with ``F = len(DYNAMIC)``; in memory the slots lie together.
    """
    position = pos.float().clamp_(min=0)
    total = length.float().view(-1, 1, 1)
    age = (total - position).clamp_(min=1)
    if out is None:
        out = position.new_empty(*pos.shape[:2], len(DYNAMIC), pos.shape[2])  # one pass for several features
    masses = out[:, :, :_MASSES]
    masses.copy_(state[:, :, :_MASSES])
    first = history.FIELDS.index(f"ema{HALF_LIVES[0]}")
    rates = age.new_tensor([-0.6931471805599453 / half_life for half_life in HALF_LIVES])
    exposure = torch.expm1(age[:, :, None] * rates[:, None]).neg_()
    masses[:, :, first : first + len(HALF_LIVES)].div_(exposure)
    masses.add_(FLOOR).log_()
    out[:, :, _HITS] = state[:, :, history.FIELDS.index("hits")]
    spans = history.FIELDS.index("idle")  # and "gap"
    torch.log1p(state[:, :, spans:].float(), out=out[:, :, _HITS + 1 : _HITS + 3])
    torch.log(age, out=out[:, :, _HITS + 3])
    torch.log1p(position, out=out[:, :, _HITS + 4])
    out[:, :, _HITS + 5] = position < 4
    out[:, :, _HITS + 6] = total.clamp(min=1).log()
    return out.transpose(2, 3)


class Vectors(NamedTuple):
    """Keys or values as a trace stores them: one byte a number, and one scale a vector.

    Attributes:
        codes: ``[..., D]`` int8, multiples of the scale.
        scale: ``[...]`` float16, the largest number of the vector divided by :data:`LEVELS`.
    """

    codes: Tensor
    scale: Tensor

    def decode(self) -> Tensor:
        """``[..., D]`` float32."""
        return self.codes.float() * self.scale.float()[..., None]


def encode_vectors(vectors: Tensor) -> Vectors:
    """Round vectors ``[..., D]`` to what a trace stores."""
    steps, scale = _round(vectors)
    return Vectors(steps.to(torch.int8), scale.squeeze(-1).half())


def round_vectors(vectors: Tensor) -> Tensor:
    """``encode_vectors(vectors).decode()``: ``[..., D]`` float32, off by half a step, and half a bit of the scale."""
    steps, scale = _round(vectors)
    return steps.mul_(scale)


def _round(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scale, in float32."""
    vectors = vectors.float()
    largest = vectors.abs().amax(dim=-1, keepdim=True)  # vector_norm takes ten times as long for it
    scale = (largest / LEVELS).clamp_(max=torch.finfo(torch.float16).max).half().float()
    least = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps  # of a zero vector, say
    return (vectors / scale.clamp(min=least)).round_().clamp_(-LEVELS, LEVELS), scale


def layer_vectors(keys: Tensor, values: Tensor) -> Tensor:
    """All that static features are made of.

    Args:
        keys: ``[B, H, C, D]`` before the rotary embedding.
        values: ``[B, H, C, D]``.

    Returns:
        ``[B, 2 H, C, D]`` float32, rounded: the keys of all heads, then the values.
    """
    return round_vectors(torch.cat([keys, values], dim=1))


def stored_vectors(keys: Vectors, values: Vectors) -> Tensor:
    """:func:`layer_vectors` of tokens that were stored; in memory the vectors of a token lie together.

    Args:
        keys: of ``[L, H, T, D]``.
        values: likewise.

    Returns:
        ``[L, 2 H, T, D]`` float32.
    """
    layers, heads, tokens, dim = keys.codes.shape
    out = torch.empty(layers, tokens, 2, heads, dim, device=keys.codes.device)
    for layer in range(layers):  # a few MB at a time, which stay in the processor's cache
        for i, part in enumerate((keys, values)):
            out[layer, :, i] = Vectors(part.codes[layer], part.scale[layer]).decode().transpose(0, 1)
    return out.flatten(2, 3).transpose(1, 2)


def static_scalars(vectors: Tensor) -> Tensor:
    """:data:`STATIC_SCALARS` of tokens.

    Args:
        vectors: ``[B, 2 H, C, D]`` from :func:`layer_vectors`.

    Returns:
        ``[B, H, C, 2]`` float32.
    """
    norms = torch.linalg.vector_norm(vectors, dim=-1).add_(1e-6).log_()
    return norms.unflatten(1, (2, -1)).movedim(1, -1)
