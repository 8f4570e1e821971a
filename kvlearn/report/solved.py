"""What the full cache itself solves: only there can a comparison say who forgets."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlearn.report.grids import html_grid, markdown_grid, terminal_grid
from kvlearn.report.page import Section
from kvlearn.report.tables import percent
from kvlearn.rows import Row, number
from kvlearn.stats import SOLVED

if TYPE_CHECKING:
    from rich.console import Group

TITLE = "What the full cache solves"
COLUMNS = ("task", "variant", "window", "documents", "questions answered")
FIRM = 0.9
"""From this share of right answers on, what a policy loses is its own doing."""


@dataclass(frozen=True)
class Solved:
    """One variant of a task.

    Attributes:
        task, variant: names.
        window: tokens of a case; 0 where cases bring their own length.
        documents: how many cases.
        share: of their questions, those that the full cache answers, each case counted once.
    """

    task: str
    variant: str
    window: int
    documents: int
    share: float


def solved(rows: Iterable[Row]) -> list[Solved]:
    """By model, task, window and variant, from whatever policy was measured there; empty for tasks that ask nothing."""
    shares: dict[tuple[str, str, int, str], dict[str, float]] = {}
    for row in rows:
        share = number(row.get("solved"))
        if math.isfinite(share):
            key = (row["model"], row["task"], row.get("window") or 0, row["domain"])
            shares.setdefault(key, {})[row["doc"]] = share
    return [
        Solved(task, variant, window, len(cases), sum(cases.values()) / len(cases))
        for (_, task, window, variant), cases in shares.items()
    ]


def _lines(found: Iterable[Solved]) -> list[list[str]]:
    return [
        [each.task, each.variant, str(each.window or "-"), str(each.documents), percent(each.share) + _mark(each.share)]
        for each in found
    ]


def _mark(share: float) -> str:
    return "" if share >= FIRM else " (partly)" if share >= SOLVED else " (not solved)"


CAPTION = (
    f"from {percent(FIRM)} on, what a policy loses is its own doing; below {percent(SOLVED)} a task says nothing about "
    "policies"
)


def render_solved(rows: Iterable[Row]) -> Group:
    """The table for a terminal; empty without tasks that ask."""
    from rich.console import Group
    from rich.text import Text

    lines = _lines(solved(rows))
    return Group(terminal_grid(TITLE, COLUMNS, lines), Text(CAPTION, style="dim")) if lines else Group()


def solved_markdown(rows: Iterable[Row]) -> str:
    """The table as Markdown; empty without tasks that ask."""
    lines = _lines(solved(rows))
    return f"\n### {TITLE}\n\n{markdown_grid(COLUMNS, lines)}\n\n{CAPTION.capitalize()}.\n" if lines else ""


def solved_sections(rows: Iterable[Row]) -> list[Section]:
    """The section of the page; none without tasks that ask."""
    lines = _lines(solved(rows))
    return [Section(TITLE, html_grid(f"{TITLE}: {CAPTION}", COLUMNS, lines))] if lines else []
