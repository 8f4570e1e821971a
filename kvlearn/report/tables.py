"""The table of a comparison in words: for the terminal and for Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlearn.cells import Cell
from kvlearn.rows import Metric, Row, metric_info
from kvlearn.stats import SummaryRow, summary

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

NOTHING = "-"
UNSOLVED = ", which the full cache does not solve"


@dataclass(frozen=True)
class Panel:
    """The lines of the table that share a chart: one model, task, metric and window, at all budgets."""

    title: str
    slug: str
    metric: Metric
    lines: tuple[SummaryRow, ...]

    @property
    def task(self) -> str:
        """Name of the task."""
        return self.lines[0].cell.task

    @property
    def is_part(self) -> bool:
        """Whether this is a part of another metric, as in ``nll/first-use``."""
        return "/" in self.lines[0].cell.metric

    @property
    def unsolved(self) -> bool:
        """Whether the full cache itself fails the task: nothing is concluded from it."""
        return any(line.unsolved for line in self.lines)

    @property
    def budgets(self) -> list[int]:
        """The budgets there are, ascending; 0 stands for none."""
        return sorted({line.cell.budget for line in self.lines})

    @property
    def notes(self) -> list[str]:
        """Every note once; the budget is named where there are several."""
        several = len(self.budgets) > 1
        told: dict[str, list[str]] = {}
        for line in self.lines:
            for note in line.notes:
                budgets = told.setdefault(note, [])
                if str(line.cell.budget) not in budgets:
                    budgets.append(str(line.cell.budget))
        everywhere = len(self.budgets)
        return [
            f"Budget {', '.join(budgets)}: {note}" if several and len(budgets) < everywhere else note
            for note, budgets in told.items()
        ]


def panels(lines: Iterable[SummaryRow]) -> list[Panel]:
    """Group the lines of a summary into panels; titles name the model and the window only where they differ."""
    grouped: dict[Cell, list[SummaryRow]] = {}
    for line in lines:
        cell = line.cell
        grouped.setdefault(Cell(cell.model, cell.task, cell.metric, cell.window, 0), []).append(line)
    models, windows = {cell.model for cell in grouped}, {cell.window for cell in grouped}
    found = []
    for cell, members in grouped.items():
        info = metric_info(cell.metric)
        _, _, part = cell.metric.partition("/")
        words = [cell.task, f"{info.title}, {part}" if part else info.title]
        words += [f"window {cell.window}"] if len(windows) > 1 else []
        words += [cell.model] if len(models) > 1 else []
        parts = [cell.task, cell.metric, *([str(cell.window)] if len(windows) > 1 else [])]
        parts += [cell.model] if len(models) > 1 else []
        slug = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-.")
        found.append(Panel(" · ".join(words), slug or "panel", info, tuple(members)))
    return found


def short_names(policies: Iterable[str]) -> dict[str, str]:
    """Names for charts: of a path, as many of its last parts as leave no two policies with one name."""
    names = list(dict.fromkeys(policies))

    def last(name: str, parts: int) -> str:
        path, variant, setting = name.partition(" (")  # a setting may have slashes of its own
        pieces = path.rstrip("/").split("/")
        return name if parts >= len(pieces) else "/".join(pieces[-parts:]) + variant + setting

    short: dict[str, str] = {}
    for parts in range(1, 2 + max((name.count("/") for name in names), default=0)):
        taken = [last(name, parts) for name in names]
        for name, told in zip(names, taken, strict=True):
            if taken.count(told) == 1:
                short.setdefault(name, told)
    return {name: short.get(name, name) for name in names}


def shortened(text: str, names: Mapping[str, str]) -> str:
    """A text with the short names of policies in the place of their paths."""
    for name, short in names.items():
        text = text.replace(name, short) if name != short else text
    return text


def render_table(rows: Iterable[Row]) -> Group:
    """The comparison for a terminal of 80 columns or more: one table per task and metric, budgets as sections.

    Parts of a metric are left to the page and the Markdown. Print it with ``rich.console.Console().print``.
    """
    from rich.console import Group
    from rich.text import Text

    found = panels(summary(rows))
    shown = [panel for panel in found if not panel.is_part] or found
    names = short_names(line.policy for panel in shown for line in panel.lines)
    parts: list[Table | Text] = []
    told: set[str] = set()  # what has been said of one table need not be said of the next
    for panel in shown:
        news = [shortened(note, names) for note in panel.notes if note not in told]
        told.update(panel.notes)
        parts += [_terminal_table(panel, names), Text("\n".join([*news, ""]), style="dim")]
    if shown:
        parts.append(Text(_caption({panel.metric.unit for panel in shown}), style="dim"))
    if len(shown) < len(found):
        parts.append(Text(f"{len(found) - len(shown)} tables of parts are on the page and in table.md.", style="dim"))
    return Group(*parts)


def _terminal_table(panel: Panel, names: Mapping[str, str]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    counts = sorted({line.n for line in panel.lines if line.n})
    documents = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0] if counts else 0)
    table = Table(
        title=Text(f"{panel.title} ({documents} documents){UNSOLVED if panel.unsolved else ''}"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("policy", overflow="fold", min_width=16)
    for name in ("loss [95%]", "gap closed", "saved", "slots", "memory", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for budget in panel.budgets:
        if budget:
            table.add_section()
            table.add_row(Text(f"budget {budget}", style="bold"))
        for line in panel.lines:
            if line.cell.budget == budget:
                style = {"learned": "bold green", "full": "dim", "oracle": "dim"}.get(line.kind, "")
                gap = (line.gap_lo, line.gap_hi) if line.kind == "learned" else (None, None)  # 80 columns are few
                table.add_row(
                    Text(names[line.policy] + (" *" if line.best_heuristic else ""), style=style),
                    with_interval(decimal, line.loss, line.lo, line.hi),
                    with_interval(percent, line.gap_closed, *gap),
                    percent(line.less_loss),
                    slots(line),
                    memory(line.bytes),
                    speed(line.tokens_per_s),
                )
    return table


def _caption(units: Iterable[str]) -> str:
    return (
        f"loss: {' or '.join(sorted(units))}, against the full cache on the same documents, lower is better · "
        "* best heuristic · gap closed: from the best heuristic (0%) to the oracle (100%) · saved: share of the best "
        "heuristic's loss · slots: per KV head, mean over layers · memory: bytes the cache allocated, scorer state "
        "included"
    )


MARKDOWN_COLUMNS = (
    "budget",
    "policy",
    "loss [95% interval]",
    "gap closed",
    "loss saved",
    "p (Holm)",
    "value",
    "slots",
    "memory",
    "full / memory",
    "tokens/s",
    "documents",
)


def markdown_table(rows: Iterable[Row]) -> str:
    """The comparison as Markdown: a heading, a table, what the columns mean and the notes for every task and metric."""
    lines = summary(rows)
    names = short_names(line.policy for line in lines)
    paths = [f"{_markdown(short)}: {_markdown(name)}\n" for name, short in names.items() if name != short]
    return "\n".join([*(_markdown_panel(panel, names) for panel in panels(lines)), *paths])


def _markdown_panel(panel: Panel, names: Mapping[str, str]) -> str:
    text = [f"### {_markdown(panel.title)}{UNSOLVED if panel.unsolved else ''}", "", _markdown_row(MARKDOWN_COLUMNS)]
    text.append(_markdown_row(["---:", ":---", *["---:"] * (len(MARKDOWN_COLUMNS) - 2)]))
    for line in panel.lines:
        name = _markdown(names[line.policy])
        cells = [
            whole(line.cell.budget or None),
            f"**{name}**" if line.kind == "learned" else name,
            with_interval(decimal, line.loss, line.lo, line.hi),
            with_interval(percent, line.gap_closed, line.gap_lo, line.gap_hi),
            with_interval(percent, line.less_loss, line.less_lo, line.less_hi),
            p_value(line.p),
            decimal(line.value),
            slots(line),
            memory(line.bytes),
            times(line.compression),
            speed(line.tokens_per_s),
            str(line.n),
        ]
        text.append(_markdown_row(cells))
    text += [
        "",
        f"Loss: {panel.metric.unit} against the full cache on the same documents, mean over them, lower is better. "
        "Gap closed: (best heuristic - policy) / (best heuristic - oracle). Loss saved: 1 - policy / best heuristic. "
        "p: against the best heuristic. Slots: per KV head, mean over layers. "
        "Memory: bytes the cache allocated, scorer state included. "
        "Full / memory: bytes of the full cache on the same documents, divided by that.",
        *(f"\n{_markdown(shortened(note, names))}" for note in panel.notes),
        "",
    ]
    return "\n".join(text)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", " ".join(text.split()))


# ---- numbers in words, the same on every surface


def decimal(value: float | None) -> str:
    """Three decimals; no minus before a zero."""
    return NOTHING if value is None else f"{round(value, 3) + 0.0:.3f}"


def percent(value: float | None) -> str:
    """A share as a whole percentage."""
    return NOTHING if value is None else f"{round(100 * value) + 0:d}%"


def whole(value: float | None) -> str:
    """A count, with thousands apart."""
    return NOTHING if value is None else f"{round(value):,}"


def slots(line: SummaryRow) -> str:
    """Slots per KV head: the mean over heads and layers where it is known, else the most."""
    return whole(line.slots if line.mean_slots is None else line.mean_slots)


def speed(value: float | None) -> str:
    """Tokens per second: whole, or one decimal where slow."""
    return NOTHING if value is None else whole(value) if value >= 10 else f"{value:.1f}"


def times(value: float | None) -> str:
    """A factor."""
    return NOTHING if value is None else f"{value:.1f}x"


def memory(value: float | None) -> str:
    """Bytes in the unit that leaves one to four digits before the point."""
    if value is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def p_value(value: float | None) -> str:
    """A p-value to three decimals."""
    return NOTHING if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"


def with_interval(words: Callable[[float | None], str], value: float | None, lo: float | None, hi: float | None) -> str:
    """``0.237 [0.192, 0.285]``; the number alone where the interval is unknown or of no width."""
    if lo is None or hi is None or words(lo) == words(hi) == words(value):
        return words(value)
    return f"{words(value)} [{words(lo).rstrip('%')}, {words(hi).rstrip('%')}]"
