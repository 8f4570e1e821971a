"""``kvlearn report``: what a trace, or a comparison, has to say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvlearn.errors import KvlearnError


def report(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace's folder, or the rows of a comparison.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the page and its plots; beside the trace by default.")
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows to look at, evenly spread over the trace.")] = 8,
    moments: Annotated[int, typer.Option(help="Moments of each window at which the future is looked at.")] = 8,
) -> None:
    """Make a page of a trace: how a model attends, and what foretells it; or of the rows of a comparison."""
    typed = [" ".join(["kvlearn", *sys.argv[1:]])]
    if (path / "trace.json").is_file():
        _trace(path, path.with_name(f"{path.name}-report") if out is None else out, windows, moments, typed)
        return
    rows = path / "rows.jsonl" if path.is_dir() else path
    if not rows.is_file():
        raise KvlearnError(f"{path} is neither a trace's folder nor the rows of a comparison.")
    from kvlearn.commands.compare import show
    from kvlearn.rows import read_rows

    show(read_rows(rows), rows.parent if out is None else out, typed)


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
