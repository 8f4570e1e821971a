"""The figures of a comparison as data: what ``python -m train export --metrics`` puts into a model card."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvlearn.report.overall import CAPTION, COLUMNS, overall_tables
from kvlearn.report.tables import panels, percent, short_names, with_interval
from kvlearn.rows import Row, write_atomically
from kvlearn.stats import SummaryRow, summary


def results(rows: Iterable[Row], command: str) -> list[dict[str, Any]]:
    """One section per task and metric: title, command, notes, and a table with a flat row per policy and budget.

    What each scorer does over all cells of a task comes after them.

    Args:
        rows: see :mod:`kvlearn.rows`.
        command: what was typed to measure them.
    """
    rows = list(rows)
    sections = []
    for panel in panels(summary(rows)):
        names = short_names(line.policy for line in panel.lines)
        domains = sorted({str(row["domain"]) for row in rows if row["task"] == panel.lines[0].cell.task})
        sections.append(
            {
                "title": panel.title,
                "command": command,
                "notes": [
                    f"Loss: mean rise over the full cache on the same tokens, in {panel.metric.unit}, with the 95% "
                    f"bootstrap interval over documents; domains: {', '.join(domains)}. Less loss: 1 - loss / loss of "
                    "the best heuristic. Gap closed: share of the way from the best heuristic to the oracle. "
                    "Slots are per KV head and layer.",
                    *panel.notes,
                ],
                "table": [_line(line, names[line.policy]) for line in panel.lines],
            }
        )
    for title, lines in overall_tables(rows):
        table = [dict(zip(COLUMNS, line, strict=True)) for line in lines]
        sections.append({"title": title, "command": command, "notes": [f"{CAPTION.capitalize()}."], "table": table})
    return sections


def _line(line: SummaryRow, name: str) -> dict[str, Any]:
    return {
        "budget": line.cell.budget,
        "policy": name,
        "loss": with_interval(_loss, line.loss, line.lo, line.hi),
        "less loss": with_interval(percent, line.less_loss, line.less_lo, line.less_hi),
        "gap closed": with_interval(percent, line.gap_closed, line.gap_lo, line.gap_hi),
        "slots": None if line.slots is None else round(line.slots),
        "KiB": None if line.bytes is None else round(line.bytes / 1024),
        "documents": line.n,
    }


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def write_results(rows: Iterable[Row], path: Path, command: str) -> None:
    """Write :func:`results` as JSON, atomically."""
    write_atomically(path, json.dumps(results(rows, command), indent=1).encode() + b"\n")
