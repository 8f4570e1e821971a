"""``kvlearn report``: what a trace, or a comparison, has to say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvlearn.errors import KvlearnError

SHOWN = 20
"""Differences that are listed."""


def report(
    path: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help="A trace's folder, or the rows of a comparison (their file or folder)."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the page and its plots; by default TRACE-report beside a trace, and where rows are."
        ),
    ] = None,
    same_as: Annotated[
        Path | None,
        typer.Option(
            help="Rows of another comparison: exit with 1 unless all rows are the same, but for what a clock decides."
        ),
    ] = None,
    windows: Annotated[int, typer.Option(help="Of a trace: windows to look at, evenly spread over it.")] = 8,
    moments: Annotated[
        int, typer.Option(help="Of a trace: moments of each window at which the future is looked at.")
    ] = 8,
) -> None:
    """Make a page of a trace: how a model attends, and what foretells it; or of the rows of a comparison.

    A trace becomes study.html with its plots, for each layer and head: how concentrated attention is, sinks, how far
    back it looks, when tokens are attended to again, and how well each history statistic predicts the future. Rows, or
    the --out folder of `kvlearn compare`, become report.html with plots and tables again, with nothing measured.

    With --same-as nothing is written: two comparisons are held beside each other, row by row.
    """
    typed = [" ".join(["kvlearn", *sys.argv[1:]])]
    if same_as is None and (path / "trace.json").is_file():
        _trace(path, path.with_name(f"{path.name}-report") if out is None else out, windows, moments, typed)
        return
    rows = _rows_at(path)
    if same_as is not None:
        _same(rows, _rows_at(same_as))
        return
    from kvlearn.commands.compare import show
    from kvlearn.rows import read_rows

    show(read_rows(rows), rows.parent if out is None else out, typed)


def _rows_at(path: Path) -> Path:
    rows = path / "rows.jsonl" if path.is_dir() else path
    if not rows.is_file():
        raise KvlearnError(
            f"{path} is neither a trace's folder (trace.json) nor the rows of a comparison (rows.jsonl)."
        )
    return rows


def _same(first: Path, second: Path) -> None:
    """Print in which rows two files differ, and exit with 1 if they do in any."""
    from kvlearn.rows import differences, read_rows

    one, other = read_rows(first), read_rows(second)
    found = differences(one, other)
    for line in found[:SHOWN]:
        print(line)
    if len(found) > SHOWN:
        print(f"and {len(found) - SHOWN} more")
    if found:
        raise typer.Exit(1)
    print(f"the same {len(one)} rows, but for what a clock decides")


def _trace(path: Path, out: Path, windows: int, moments: int, commands: list[str]) -> None:
    from rich.console import Console

    from kvlearn.progress import bar
    from kvlearn.report.study import parts, write_study
    from kvlearn.study import study
    from kvlearn.traces import Trace

    trace = Trace(path)
    with bar("studying") as progress:
        found = study(trace, windows=windows, moments=moments, progress=progress)
    page = write_study(found, out, commands=commands)
    console = Console()
    for part in parts(found):
        console.print(f"[bold]{part.title}.[/bold] {part.about}\n")
    console.print(f"page {page}, and its plots beside it")
