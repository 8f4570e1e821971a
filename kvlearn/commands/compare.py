"""``kvlearn compare``: policies side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlearn.commands import options

if TYPE_CHECKING:
    from kvlearn.compare import Comparison
    from kvlearn.rows import Row


def compare(
    model: options.Model,
    policies: Annotated[str, typer.Option(help="Names (see `kvlearn policies`) or folders of scorers, with commas.")],
    budgets: Annotated[str, typer.Option(help="Slots per KV head and layer, with commas.")] = "256,512",
    task: Annotated[str, typer.Option(help="Tasks, with commas.")] = "lm",
    data: Annotated[
        str, typer.Option(help="Texts: see `kvlearn corpora`; with commas.")
    ] = "transformers-code,chitchat",
    split: Annotated[str, typer.Option(help="Documents of train, validation, test or all.")] = "test",
    docs: Annotated[int, typer.Option(help="Documents, shared evenly among the texts.")] = 12,
    window: Annotated[int, typer.Option(help="Tokens per document.")] = 2048,
    seed: Annotated[
        str, typer.Option(help="Seeds of random choices, with commas; the first also orders documents.")
    ] = "0",
    out: Annotated[Path, typer.Option(help="Folder for rows.jsonl, report.html and plots.")] = Path("compare"),
    block: options.Block = 32,
    sinks: options.Sinks = 4,
    recent: options.Recent = None,
    allocation: Annotated[
        str, typer.Option(help="uniform, or a JSON list of shares per layer, or a scorer's folder that carries one.")
    ] = "uniform",
    batch: Annotated[int, typer.Option(help="Documents measured together.")] = 4,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Compare policies at equal slots on the same tokens; finished rows are not measured again."""
    from kvlearn.allocation import read_shares
    from kvlearn.compare import UNIFORM, Comparison, Settings, text_cases
    from kvlearn.rows import RowStore

    seeds = options.numbers(seed, "--seed")
    settings = Settings(
        policies=options.names(policies),
        budgets=options.numbers(budgets, "--budgets"),
        tasks=options.names(task),
        seeds=seeds,
        window=window,
        batch=batch,
        block=block,
        protect=options.protection(sinks, recent),
        shares=None if allocation == UNIFORM else read_shares(allocation),
        allocation=allocation,
    )
    loaded = options.load(model, dtype, device, threads)
    cases = {
        name: text_cases(loaded, data, docs=docs, window=window, split=split, seed=seeds[0]) for name in settings.tasks
    }
    with RowStore(out / "rows.jsonl") as store:
        comparison = Comparison(loaded, settings, cases, store)
        _run(comparison)
        rows = store.rows
    show(rows, out, [" ".join(["kvlearn", *sys.argv[1:]])])


def _run(comparison: Comparison) -> None:
    from kvlearn.progress import bar

    with bar("comparing") as progress:
        comparison.run(progress)


def show(rows: list[Row], out: Path, commands: list[str]) -> None:
    """Print the table, and write the page, the plots, and the table as Markdown and as JSON."""
    from rich.console import Console

    from kvlearn.report import markdown_table, plot_png, render_table, write_report, write_results
    from kvlearn.rows import write_atomically

    console = Console()
    console.print(render_table(rows))
    page = write_report(rows, out, commands=commands)
    plots = plot_png(rows, out)
    write_atomically(out / "table.md", markdown_table(rows).encode())
    write_results(rows, out / "results.json", "; ".join(commands))
    console.print(f"page {page}, plots {', '.join(plot.name for plot in plots)}, rows.jsonl, table.md, results.json")
