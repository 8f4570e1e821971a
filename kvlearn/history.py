"""What a slot remembers of the attention it received: the definition of "historical attention".

Both the cache at run time and the trace reader offline call :func:`observe`; there is no other definition. An
observation is rounded to one byte (:func:`encode_mass`) before it enters the history. A trace stores exactly those
bytes, so a history rebuilt offline equals the one that generation saw, bit for bit.
"""

from __future__ import annotations

from functools import lru_cache

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
starting at 0. ``mean``: mean mass over all queries since the token was written. ``peak``: decayed maximum of block
maximum mass. ``hits``: decayed number of blocks with a hit. ``idle``: queries since the last hit, or since the token
was written. ``gap``: the longest ``idle`` that a hit ended (LazyEviction, arXiv 2506.15969, calls it the maximum
recurrence interval).
"""

DTYPE = torch.float16
"""Storage of history fields. Statistics are computed in float32 and rounded to this when stored."""

COUNT_MAX = 32768.0  # beyond it float16 cannot count in steps of one block
OCTAVE_STEPS = 14  # codes per factor of two: at most 2.6% error, and 18 octaves below 1 in 255 codes


def encode_mass(mass: Tensor) -> Tensor:
    """Round attention mass to a one-byte logarithmic code.

    Code 0 is mass below about 2**-18.2; code ``c > 0`` is mass ``2 ** ((c - 255) / 14)``, so 255 is 1.

    Args:
        mass: any shape, float, in [0, 1].

    Returns:
        uint8 tensor of the same shape.
    """
    code = torch.log2(mass.float()).mul_(OCTAVE_STEPS).add_(255.5)
    return code.clamp_(0, 255).to(torch.uint8)


@lru_cache(maxsize=8)
def _mass_table(device: torch.device) -> Tensor:
    exponents = (torch.arange(256, dtype=torch.float64) - 255) / OCTAVE_STEPS
    table = torch.exp2(exponents).float()
    table[0] = 0.0
    return table.to(device)


def decode_mass(code: Tensor) -> Tensor:
    """Mass that a code of :func:`encode_mass` stands for: float32, same shape."""
    return _mass_table(code.device)[code.long()]


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
    old = state.float()
    mean, peak = decode_mass(mean_code), decode_mass(peak_code)
    # Decays in float64: torch's vectorised and scalar float32 exp2 differ in the last bit, and bits must be equal.
    exact = queries.double().view(-1, 1, 1)
    n = exact.float()
    age = age.to(old.dtype).clamp(min=1.0)
    new = torch.empty_like(old)
    new[:, :, 0] = mean
    for i, half_life in enumerate(HALF_LIVES, start=1):
        decay = torch.exp2(-exact / half_life).float()
        new[:, :, i] = old[:, :, i] * decay + mean * (1 - decay)
    i = 1 + len(HALF_LIVES)
    new[:, :, i] = old[:, :, i] + (mean - old[:, :, i]) * torch.clamp(n / age, max=1.0)
    new[:, :, i + 1] = torch.maximum(old[:, :, i + 1] * torch.exp2(-exact / PEAK_HALF_LIFE).float(), peak)
    hit = peak >= HIT_MASS
    new[:, :, i + 2] = old[:, :, i + 2] * torch.exp2(-exact / HIT_HALF_LIFE).float() + hit
    idle = torch.minimum(old[:, :, i + 3] + n, age)
    new[:, :, i + 3] = torch.where(hit, 0.0, idle.clamp(max=COUNT_MAX))
    new[:, :, i + 4] = torch.where(hit, torch.maximum(old[:, :, i + 4], idle), old[:, :, i + 4]).clamp(max=COUNT_MAX)
    return torch.where((queries > 0).view(-1, 1, 1, 1), new.to(DTYPE), state)
