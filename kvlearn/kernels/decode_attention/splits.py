"""How decode attention divides its slots among programs."""

from __future__ import annotations


def split_count(batch_heads: int, tiles: int, slots: int, programs: int, least: int) -> int:
    """How many splits fill the chip with ``programs`` programs, none with fewer than ``least`` slots."""
    wanted = -(-programs // max(1, batch_heads * tiles))
    return max(1, min(wanted, slots // least))
