"""What has changed since a baseline, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlearn.baseline import Change
from kvlearn.report.tables import decimal, short_names, with_interval

if TYPE_CHECKING:
    from rich.console import Group


def render_changes(changes: Sequence[Change]) -> Group:
    """Everything that fell, everything that rose, and how many stayed; see :func:`kvlearn.baseline.changes`."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    names = short_names(change.policy for change in changes)
    several = len({change.settings for change in changes}) > 1
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    table.add_column("policy", overflow="fold")
    table.add_column("task", overflow="fold")
    for heading in ("budget", "before", "now", "worse by [95%]", "documents"):
        table.add_column(heading, justify="right")
    for change in changes:
        if not (change.fell or change.rose):
            continue
        told = [Text(f"{change.task}, {change.metric}")]
        told += [Text(change.settings, style="dim")] if several else []
        failed = f", {change.failed} failed" if change.failed else ""
        table.add_row(
            Text(names[change.policy], style="bold red" if change.fell else "green"),
            Text("\n").join(told),
            "-" if change.budget is None else str(change.budget),
            decimal(change.before),
            decimal(change.after),
            with_interval(decimal, change.worse, change.lo, change.hi),
            f"{change.n}{failed}",
        )
    fell, rose = sum(change.fell for change in changes), sum(change.rose for change in changes)
    verdict = Text(
        f"{fell} of {len(changes)} fell behind the baseline, {rose} rose above it.",
        style="bold red" if fell else "bold green",
    )
    return Group(*([table] if table.row_count else []), verdict)
