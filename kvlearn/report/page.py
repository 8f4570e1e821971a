"""The report page: one HTML file with everything in it, for any browser, offline, by day and by night."""

from __future__ import annotations

import base64
import gzip
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvlearn.cells import CellData, cells
from kvlearn.errors import KvlearnError
from kvlearn.report import tables
from kvlearn.report.html import write_page
from kvlearn.report.kept import pictures
from kvlearn.report.plots import Style, outliers, policy_styles
from kvlearn.report.tables import Panel, panels, short_names
from kvlearn.rows import Row, dump_rows, metric_info
from kvlearn.stats import FEW_DOCUMENTS, SummaryRow, summary

MOST_FAILURES = 200  # more are counted, not listed


@dataclass(frozen=True)
class Section:
    """A further section of the page.

    Attributes:
        title: Heading, plain text.
        html: Body, put in as it is: whoever writes it escapes what is not theirs. No network: the page forbids it.
    """

    title: str
    html: str


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        title: Heading.
        shows: A line of the summary in words.
        sorts: The same as a number or a string to sort by; None comes last.
        numeric: Whether it is set to the right.
    """

    title: str
    shows: Callable[[SummaryRow], str]
    sorts: Callable[[SummaryRow], float | str | None]
    numeric: bool = True


def write_report(
    rows: Iterable[Row],
    out_dir: str | Path,
    *,
    commands: Sequence[str] = (),
    versions: Mapping[str, str] | None = None,
    extra_sections: Sequence[Section] = (),
    title: str = "Cache policies compared",
) -> Path:
    """Write ``report.html``: charts, table, documents, what made it, and the rows themselves, in one file.

    Args:
        rows: See ``kvlearn.rows``.
        out_dir: Folder, made if need be; an older report is replaced in one step.
        commands: What was typed to get here, one string a line.
        versions: Name and version of what took part; versions that rows carry are added.
        extra_sections: Further sections, put after the documents.
        title: Heading of the page.

    Returns:
        The file's path.

    Raises:
        KvlearnError: there are no rows, or the folder cannot be written.
    """
    rows = list(rows)
    if not rows:
        raise KvlearnError("no rows to report: run kvlearn compare first, or name another file of rows.")
    lines = summary(rows)
    shown = panels(lines)
    styles = policy_styles(lines)
    names = short_names(styles)
    path = Path(out_dir) / "report.html"
    write_page(
        path,
        "template.html.j2",
        css=["page.css"],
        js=["page.js"],
        colours={f"p{number}": (style.light, style.dark) for number, style in enumerate(styles.values())},
        title=title,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        models=sorted({line.cell.model for line in lines}),
        documents=len({(row["domain"], row["doc"]) for row in rows}),
        row_count=len(rows),
        verdicts=_verdicts(shown),
        few_documents=FEW_DOCUMENTS,
        names=names,
        paths={short: name for name, short in names.items() if short != name},
        panels=shown,
        tasks=_by_task(shown),
        kept=pictures(rows),
        columns=_columns(lines),
        lines=[line for panel in shown for line in panel.lines],
        failures=[row for row in rows if row.get("error")],
        most_failures=MOST_FAILURES,
        commands=commands,
        versions=_versions(rows, versions or {}),
        sections=extra_sections,
        metrics={line.cell.metric: metric_info(line.cell.metric) for line in lines},
        data=_data(rows, shown, styles, names),
        words=tables,
    )
    return path


def _by_task(shown: Sequence[Panel]) -> dict[str, list[tuple[int, Panel]]]:
    """Panels with their numbers, by task; parts of a metric come after whole ones."""
    found: dict[str, list[tuple[int, Panel]]] = {}
    for number, panel in sorted(enumerate(shown), key=lambda pair: pair[1].is_part):
        found.setdefault(panel.task, []).append((number, panel))
    return found


def _verdicts(shown: Sequence[Panel]) -> list[dict[str, Any]]:
    """For every solved cell with a learned policy: the best of them beside the best heuristic."""
    found = []
    for panel in (panel for panel in shown if not panel.unsolved and not panel.is_part):
        for budget in panel.budgets:
            lines = [line for line in panel.lines if line.cell.budget == budget]
            learned = min((x for x in lines if x.kind == "learned" and x.loss is not None), key=_loss, default=None)
            best = next((line for line in lines if line.best_heuristic), None)
            if learned is not None and best is not None and learned.less_loss is not None:
                words = _verdict(learned)
                found.append({"panel": panel, "budget": budget, "line": learned, "best": best, "words": words})
    return found


def _verdict(line: SummaryRow) -> str:
    """What may be said aloud: a share only where its whole interval is on one side of 0, of enough documents."""
    share, lo, hi = line.less_loss, line.less_lo, line.less_hi
    if line.n < FEW_DOCUMENTS:
        return "Too few documents to say"
    if share is None or lo is None or hi is None or lo <= 0 <= hi:
        return "No clear difference"
    return f"{tables.percent(abs(share))} {'less' if share > 0 else 'more'} loss"


def _loss(line: SummaryRow) -> float:
    return math.inf if line.loss is None else line.loss


def _columns(lines: Sequence[SummaryRow]) -> list[Column]:
    """The table's columns after the policy; model and window only where they differ."""
    w = tables
    columns = [
        Column("Task", _task, _task, numeric=False),
        Column("Model", lambda x: x.cell.model, lambda x: x.cell.model, numeric=False),
        Column("Window", lambda x: w.whole(x.cell.window or None), lambda x: x.cell.window or None),
        Column("Budget", lambda x: w.whole(x.cell.budget or None), lambda x: x.cell.budget or None),
        Column("Loss [95%]", lambda x: w.with_interval(w.decimal, x.loss, x.lo, x.hi), lambda x: x.loss),
        Column(
            "Gap closed [95%]",
            lambda x: w.with_interval(w.percent, x.gap_closed, x.gap_lo, x.gap_hi),
            lambda x: x.gap_closed,
        ),
        Column(
            "Loss saved [95%]",
            lambda x: w.with_interval(w.percent, x.less_loss, x.less_lo, x.less_hi),
            lambda x: x.less_loss,
        ),
        Column("p (Holm)", lambda x: w.p_value(x.p), lambda x: x.p),
        Column("Value", lambda x: w.decimal(x.value), lambda x: x.value),
        Column("Full cache", lambda x: w.decimal(x.full_value), lambda x: x.full_value),
        Column("Most slots", lambda x: w.whole(x.slots), lambda x: x.slots),
        Column("Mean slots", lambda x: w.whole(x.mean_slots), lambda x: x.mean_slots),
        Column("Memory", lambda x: w.memory(x.bytes), lambda x: x.bytes),
        Column("of it state", lambda x: w.memory(x.state_bytes), lambda x: x.state_bytes),
        Column("Full / memory", lambda x: w.times(x.compression), lambda x: x.compression),
        Column("Tokens/s", lambda x: w.speed(x.tokens_per_s), lambda x: x.tokens_per_s),
        Column("Scoring", lambda x: w.percent(x.scorer_share), lambda x: x.scorer_share),
        Column("Documents", lambda x: str(x.n), lambda x: x.n),
        Column("Failed rows", lambda x: str(x.errors), lambda x: x.errors),
    ]
    same = {"Model": len({x.cell.model for x in lines}) == 1, "Window": len({x.cell.window for x in lines}) == 1}
    return [column for column in columns if not same.get(column.title)]


def _task(line: SummaryRow) -> str:
    return f"{line.cell.task}, {line.cell.metric}"


def _versions(rows: Sequence[Row], given: Mapping[str, str]) -> dict[str, str]:
    """Versions by name; where rows disagree, all of them."""
    found: dict[str, set[str]] = {name: {str(version)} for name, version in given.items()}
    for row in rows:
        if isinstance(row.get("versions"), Mapping):
            for name, version in row["versions"].items():
                found.setdefault(str(name), set()).add(str(version))
    return {name: ", ".join(sorted(found[name])) for name in sorted(found)}


def _data(
    rows: Sequence[Row], shown: Sequence[Panel], styles: Mapping[str, Style], names: Mapping[str, str]
) -> dict[str, Any]:
    """What the page's script draws: policies, charts, documents, and the rows (gzip, base64)."""
    number = {policy: place for place, policy in enumerate(styles)}
    by_cell = {data.cell: data for data in cells(rows)}
    return {
        "policies": [
            {"name": policy, "short": names[policy], "marker": style.marker, "dash": style.dash, "width": style.width}
            for policy, style in styles.items()
        ],
        "panels": [
            {
                "title": panel.title,
                "unit": panel.metric.unit,
                "budgets": panel.budgets,
                "outliers": sorted(number[policy] for policy in outliers(panel.lines)),
                "points": [_point(line, number) for line in panel.lines if line.loss is not None],
                "documents": {
                    cell.budget: _documents(by_cell[cell], number)
                    for cell in sorted({line.cell for line in panel.lines})
                },
            }
            for panel in shown
        ],
        "rows": base64.b64encode(gzip.compress(dump_rows(rows), mtime=0)).decode(),
    }


def _point(line: SummaryRow, number: Mapping[str, int]) -> dict[str, Any]:
    return {
        "policy": number[line.policy],
        "budget": line.cell.budget,
        "loss": _short(line.loss),
        "lo": _short(line.lo),
        "hi": _short(line.hi),
        "words": [
            f"loss {tables.with_interval(tables.decimal, line.loss, line.lo, line.hi)}",
            f"{tables.slots(line)} slots, {tables.memory(line.bytes)}",
            f"gap closed {tables.with_interval(tables.percent, line.gap_closed, line.gap_lo, line.gap_hi)}",
        ],
    }


def _documents(data: CellData, number: Mapping[str, int]) -> dict[str, Any]:
    return {
        "names": [f"{name} ({domain})" for domain, name in data.docs],
        "series": [
            {
                "policy": number[policy],
                "full": [_short(value) for value in data.column(policy, "full_value")],
                "own": [_short(value) for value in data.column(policy, "value")],
            }
            for policy in data.compared
            if data.kinds[policy] != "full"
        ],
    }


def _short(value: float | None) -> float | None:
    """Six digits are more than a screen shows; fewer bytes in the page."""
    return None if value is None else float(f"{value:.6g}")
