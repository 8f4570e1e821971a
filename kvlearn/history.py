"""What a slot remembers of the attention it received: the definition of "historical attention".

Both the cache at run time and the trace reader offline call :func:`observe`; there is no other definition. An
observation is rounded to one byte (:func:`encode_mass`) before it enters the history. A trace stores exactly those
bytes, so a history rebuilt offline equals the one that generation saw, bit for bit.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

HALF_LIVES: tuple[int, ...] = (16, 64, 256, 1024)
"""Half-lives of the moving averages of block mean mass, in queries."""

PEAK_HALF_LIFE = 512
"""Half-life of the decayed maximum of block maximum mass, in queries."""

HIT_HALF_LIFE = 256
"""Half-life of the decayed count of hits, in queries."""

HIT_MASS = 1 / 128
"""A block is a hit for a slot when one of its queries gave the slot at least this mass (attention probability)."""

FIELDS: tuple[str, ...] = ("last", *(f"ema{h}" for h in HALF_LIVES), "mean", "peak", "hits", "idle", "gap")
"""History fields, in the order of the K axis.

``last``: mean mass of the last observed block. ``emaN``: moving average of block mean mass with half-life N queries,
starting at 0. ``mean``: mean mass over all queries since the token was written, its own included. ``peak``: decayed
maximum of block maximum mass. ``hits``: decayed number of blocks with a hit. ``idle``: queries since the last hit, or
since the token was written. ``gap``: the longest ``idle`` that a hit ended (LazyEviction, arXiv 2506.15969, calls it
the maximum recurrence interval).
"""

# How each field fades: its half-life in queries, or None where it does not.
_FADES = (None, *HALF_LIVES, None, PEAK_HALF_LIFE, HIT_HALF_LIFE, None, None)

DTYPE = torch.float16
"""Storage of history fields. Statistics are computed in float32 and rounded to this when stored."""

COUNT_MAX = 32768.0  # beyond it float16 cannot count in steps of one block
_LEAST_MASS = 2.0**-20  # code 0, as all below
OCTAVE_STEPS = 14  # codes per factor of two: at most 2.6% error, and 18 octaves below 1 in 255 codes


def encode_mass(mass: Tensor) -> Tensor:
    """Round attention mass to a one-byte logarithmic code.

    Code 0 is mass below about 2**-18.2; code ``c > 0`` is mass ``2 ** ((c - 255) / 14)``, so 255 is 1.

    Args:
        mass: any shape, float, in [0, 1].

    Returns:
        uint8 tensor of the same shape.
    """
    code = mass.float().clamp(min=_LEAST_MASS).log2_()  # the logarithm of 0 takes ten times as long
    code = code.mul_(OCTAVE_STEPS).add_(255.5)
    return code.clamp_(0, 255).to(torch.uint8)


@lru_cache(maxsize=8)
def _mass_table(device: torch.device) -> Tensor:
    exponents = (torch.arange(256, dtype=torch.float64) - 255) / OCTAVE_STEPS
    table = torch.exp2(exponents).float()
    table[0] = 0.0
    return table.to(device)


def decode_mass(code: Tensor) -> Tensor:
    """Mass that a code of :func:`encode_mass` stands for: float32, same shape."""
    return _mass_table(code.device).index_select(0, code.flatten().int()).view(code.shape)


def empty(shape: tuple[int, int, int], device: torch.device | str = "cpu") -> Tensor:
    """History of slots that were never observed: ``[B, H, K, S]`` of :data:`DTYPE`, all zero.

    Args:
        shape: ``(B, H, S)``.
    """
    batch, heads, slots = shape
    return torch.zeros(batch, heads, len(FIELDS), slots, dtype=DTYPE, device=device)


def field(state: Tensor, name: str) -> Tensor:
    """One field of a history ``[B, H, K, S]`` as float32 ``[B, H, S]``."""
    return state[:, :, FIELDS.index(name)].float()


class Decay(NamedTuple):
    """What one block's number of queries does to a history; see :func:`decays`.

    Attributes:
        keep: ``[B, 1, K, 1]`` float32 factor on what is stored.
        gain: ``[B, 1, E, 1]`` float32 factor on the block's mean mass, for the first ``E`` fields: ``last`` and EMAs.
        queries: ``[B, 1, 1]`` float32 number of queries.
        active: ``[B, 1, 1, 1]`` bool rows with any query; ``None`` when all have.
    """

    keep: Tensor
    gain: Tensor
    queries: Tensor
    active: Tensor | None


def decays(queries: Tensor) -> list[Decay]:
    """How the history fades over blocks.

    Args:
        queries: ``[N, B]`` number of queries of each block in each row; 0 leaves the row's history as it is.
    """
    if len(queries) == 1 and queries.device.type == "cpu":  # decoding, where every layer and block asks the same
        return _decays_of(tuple(queries[0].tolist()), torch.is_inference_mode_enabled())
    return _decays(queries)


@lru_cache(maxsize=16)
def _decays_of(queries: tuple[int, ...], _: bool) -> list[Decay]:
    return _decays(torch.tensor([queries]))  # what is made in inference mode is not used outside of it


def _decays(queries: Tensor) -> list[Decay]:
    # In float64: torch's vectorised and scalar float32 exp2 differ in the last bit, and bits must be equal.
    exact = queries.double()[..., None]
    half_lives = exact.new_tensor([math.inf if h is None else h for h in _FADES])
    keep = torch.exp2(-exact / half_lives).float()
    keep[..., 0] = 0.0  # the last block's mass takes the place of the one before
    gain = 1 - keep[..., : 1 + len(HALF_LIVES)]
    active = queries > 0
    idle = queries.is_cuda or not bool(active.all())  # a GPU is not waited for
    return [
        Decay(
            keep[n, :, None, :, None],
            gain[n, :, None, :, None],
            queries[n].float().view(-1, 1, 1),
            active[n].view(-1, 1, 1, 1) if idle else None,
        )
        for n in range(len(queries))
    ]


def observe(state: Tensor, mean_code: Tensor, peak_code: Tensor, queries: Tensor, age: Tensor) -> Tensor:
    """Fold one observed block into a history.

    Args:
        state: ``[B, H, K, S]`` of :data:`DTYPE`; not modified.
        mean_code: ``[B, H, S]`` uint8, encoded mean mass over the block's queries (0 for a query that came before the
            token).
        peak_code: ``[B, H, S]`` uint8, encoded maximum mass over the block's queries.
        queries: ``[B]`` number of queries of the block in each row; 0 leaves the row's history as it is.
        age: ``[B, H, S]`` queries that could have seen the slot so far, those of this block included; ignored where
            it is below 1.

    Returns:
        The new history, ``[B, H, K, S]`` of :data:`DTYPE`.
    """
    new = state.clone()
    fold(new, decode_mass(torch.stack([mean_code, peak_code])), decays(queries[None])[0], age)
    return new


def fold(state: Tensor, mass: Tensor, decay: Decay, age: Tensor) -> None:
    """:func:`observe` in place.

    Args:
        state: ``[B, H, K, S]`` of :data:`DTYPE`; overwritten.
        mass: ``[2, B, H, S]`` decoded mean and maximum.
        decay: of the block.
        age: ``[B, H, S]``.
    """
    mean, peak = mass
    old, n = state.float(), decay.queries
    age = age.to(old.dtype).clamp_(min=1.0)
    new = old * decay.keep
    i = 1 + len(HALF_LIVES)
    new[:, :, :i].add_(mean[:, :, None] * decay.gain)
    # A token's first block has queries that came before it: its mean over them all is spread over its own age.
    share = n / age
    new[:, :, i].mul_(1 - share.clamp(max=1.0)).add_(mean * share)
    torch.maximum(new[:, :, i + 1], peak, out=new[:, :, i + 1])
    hit = (peak >= HIT_MASS).to(old.dtype)
    new[:, :, i + 2].add_(hit)
    idle = torch.minimum(old[:, :, i + 3] + n, age)
    ended = idle * hit  # the stretch that a hit ends, 0 where none does
    torch.sub(idle, ended, out=new[:, :, i + 3])
    torch.maximum(new[:, :, i + 4], ended, out=new[:, :, i + 4])
    new[:, :, i + 3 :].clamp_(max=COUNT_MAX)
    state.copy_(new if decay.active is None else torch.where(decay.active, new, old))
