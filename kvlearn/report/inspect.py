"""The page of ``kvlearn inspect``: a text, and what each policy still holds of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvlearn.report import tables
from kvlearn.report.html import write_page

# Backgrounds of tokens by day and by night, from few heads to all; texts stand out from each (a test measures it).
SHADES = {
    "held1": ("#e4eefb", "#14253a"),
    "held2": ("#c9ddf7", "#1a3557"),
    "held3": ("#aacbf3", "#204677"),
    "held4": ("#8ab8ee", "#285894"),
    "less": ("#fbdcd3", "#4d2418"),
    "more": ("#d6efd8", "#183a22"),
}
_FIRST = "0"  # a count is written as one letter, counted from this one


@dataclass(frozen=True)
class Kept:
    """What one policy holds of the text.

    Attributes:
        policy: its label.
        counts: by managed layer and token, in how many KV heads the token is held.
        stats: what ``EvictingCache.stats()`` said.
    """

    policy: str
    counts: Sequence[Sequence[int]]
    stats: dict[str, Any]


@dataclass(frozen=True)
class Inspection:
    """A text under several policies.

    Attributes:
        model: its name.
        pieces: the text, token by token; empty where a token is only a part of a character.
        layers: indices of the managed layers.
        heads: KV heads of a layer.
        budget: the most slots a KV head may hold.
        how: how the text was fed, in words.
        kept: one for each policy.
    """

    model: str
    pieces: Sequence[str]
    layers: Sequence[int]
    heads: int
    budget: int | None
    how: str
    kept: Sequence[Kept]


@dataclass(frozen=True)
class Line:
    """A policy's line of the table."""

    policy: str
    slots: int
    mean_slots: float
    bytes: int
    somewhere: int
    everywhere: int
    forgotten: int


def lines(inspection: Inspection) -> list[Line]:
    """For every policy: tokens held by at least one head of some layer, by every head of all layers, and by none."""
    found = []
    most = inspection.heads * len(inspection.layers)
    for kept in inspection.kept:
        totals = [sum(column) for column in zip(*kept.counts, strict=True)]
        somewhere = sum(total > 0 for total in totals)
        everywhere = sum(total == most for total in totals)
        stats = kept.stats
        forgotten = len(totals) - somewhere
        found.append(
            Line(kept.policy, stats["slots"], stats["mean_slots"], stats["bytes"], somewhere, everywhere, forgotten)
        )
    return found


def write_inspection(inspection: Inspection, path: str | Path, *, commands: Sequence[str] = ()) -> Path:
    """Write the page, one file that needs nothing but a browser.

    Args:
        inspection: what to show.
        path: the file; an older one is replaced in one step.
        commands: what was typed to get here.

    Returns:
        The path.

    Raises:
        KvlearnError: the file cannot be written.
    """
    path = Path(path)
    names = tables.short_names(kept.policy for kept in inspection.kept)
    write_page(
        path,
        "inspect.html.j2",
        css=["page.css", "inspect.css"],
        js=["inspect.js"],
        colours=SHADES,
        title="What is still held",
        inspection=inspection,
        lines=lines(inspection),
        names=names,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        commands=commands,
        words=tables,
        data={
            "layers": list(inspection.layers),
            "heads": inspection.heads,
            "policies": [
                {
                    "name": names[kept.policy],
                    "counts": ["".join(chr(ord(_FIRST) + n) for n in layer) for layer in kept.counts],
                }
                for kept in inspection.kept
            ],
        },
    )
    return path
