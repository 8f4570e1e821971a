"""``kvlearn compare``: policies side by side."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlearn.commands import options
from kvlearn.errors import KvlearnError

if TYPE_CHECKING:
    from kvlearn.rows import Row


def compare(
    model: options.Model,
    policies: Annotated[
        str | None, typer.Option(help="Names (see `kvlearn policies`) or folders of scorers, with commas.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="small: every policy and every task of kvlearn's own, at two budgets. evidence: what a model card "
            "rests on, hours. Other options change them."
        ),
    ] = None,
    budgets: Annotated[
        str | None, typer.Option(help="Slots per KV head and layer, with commas; by default 256,512.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Tasks (see `kvlearn tasks`), with commas; by default lm.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Texts for lm: see `kvlearn corpora`; with commas; by default transformers-code,chitchat."),
    ] = None,
    filler: Annotated[str, typer.Option(help="Texts that the other tasks hide things in.")] = "torch-docs",
    split: Annotated[str, typer.Option(help="Documents of train, validation, test or all.")] = "test",
    docs: Annotated[
        int | None,
        typer.Option(help="Documents per task, shared evenly among its texts or variants; by default 12."),
    ] = None,
    window: Annotated[int | None, typer.Option(help="Tokens per document; 2048 unless a task says otherwise.")] = None,
    seed: Annotated[
        str, typer.Option(help="Seeds of random choices, with commas; the first also orders documents.")
    ] = "0",
    out: Annotated[Path, typer.Option(help="Folder for rows.jsonl, report.html and plots.")] = Path("compare"),
    block: options.Block = 32,
    sinks: options.Sinks = 4,
    recent: options.Recent = None,
    allocation: Annotated[
        str | None,
        typer.Option(
            help="How slots are shared, the same for every policy: uniform, the default; pooled, among the heads of a "
            "layer; pyramid; a JSON file of shares per layer, or the folder of a scorer that has them; or pooled:FILE."
        ),
    ] = None,
    blame: Annotated[
        str,
        typer.Option(
            help="layers, layers:WIDTH or heads: also try each policy in one band of layers (one KV head), with the "
            "oracle everywhere else."
        ),
    ] = "",
    batch: Annotated[int | None, typer.Option(help="Documents measured together; by default 4.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes, each with one thread and a model of its own; by default 1, with a preset one per core, as "
            "far as memory goes."
        ),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(help="Rows of an earlier run: exit with 1 if a policy has become worse than there."),
    ] = None,
    tolerance: Annotated[float, typer.Option(help="With --check: by how much a mean may be worse.")] = 0.001,
    dtype: options.ReadingDtype = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Compare policies at equal slots on the same tokens; finished rows are not measured again."""
    from kvlearn.compare import Comparison, Settings, make_cases
    from kvlearn.presets import preset as preset_of
    from kvlearn.progress import bar
    from kvlearn.rows import RowStore, read_rows
    from kvlearn.workers import run_in_processes, spare_workers

    chosen = preset_of(preset, model)
    named = chosen.policies if policies is None else options.names(policies)
    if named is None:
        raise KvlearnError("name what to compare: --policies ema,snapkv (`kvlearn policies` lists them), or --preset.")
    if workers is not None and workers < 1:
        raise KvlearnError(f"--workers is {workers}; give a number of processes that is 1 or more.")
    before = None if check is None else read_rows(check)  # a missing file is found now, not when all is measured
    seeds = options.numbers(seed, "--seed")
    parts = chosen.narrowed(
        None if task is None else options.names(task),
        budgets=None if budgets is None else tuple(options.numbers(budgets, "--budgets")),
        window=window,
        docs=docs,
        batch=batch,
    )
    shared = functools.partial(
        Settings,
        policies=named,
        seeds=seeds,
        block=block,
        protect=options.protection(sinks, recent),
        allocation=allocation or chosen.allocation,
        blame=blame,
    )
    settings = [shared(budgets=part.budgets, tasks=part.tasks, window=part.window, batch=part.batch) for part in parts]
    loaded = options.load(model, dtype, device, threads)
    if workers is None:
        workers = spare_workers(loaded.model) if preset is not None and threads is None else 1
    texts = {"split": split, "data": data or chosen.data, "filler": filler}
    cases = [make_cases(loaded, own, docs=part.docs, **texts) for own, part in zip(settings, parts, strict=True)]
    with RowStore(out / "rows.jsonl") as store:
        comparisons = [Comparison(loaded, *own, store) for own in zip(settings, cases, strict=True)]
        if check is not None and len(store):
            print(
                f"{len(store)} rows of an earlier run are checked as they are; use an empty --out to measure anew.",
                file=sys.stderr,
            )
        for reason in dict.fromkeys(reason for comparison in comparisons for reason in comparison.skipped):
            print(reason, file=sys.stderr)
        for comparison in comparisons:
            with bar("comparing") as progress:
                if workers == 1:
                    comparison.run(progress)
                else:
                    load = functools.partial(options.load, model, dtype, device, 1)
                    run_in_processes(load, comparison, store, workers=workers, notify=progress)
        rows = store.rows
    show(rows, out, [" ".join(["kvlearn", *sys.argv[1:]])])
    if before is not None:
        _check(rows, before, tolerance)


def _check(rows: list[Row], before: list[Row], tolerance: float) -> None:
    """Print what has changed since a baseline, and exit with 1 if something fell."""
    from rich.console import Console

    from kvlearn.baseline import changes
    from kvlearn.report.changes import render_changes

    found = changes(rows, before, tolerance=tolerance)
    Console().print(render_changes(found))
    if any(change.fell for change in found):
        raise typer.Exit(1)


def show(rows: list[Row], out: Path, commands: list[str]) -> None:
    """Print the table, and write the page, the plots, and the table as Markdown and as JSON."""
    from rich.console import Console

    from kvlearn.report import markdown_table, plot_png, render_table, write_report, write_results
    from kvlearn.report.blame import blame_markdown, blame_sections, render_blame, write_blame
    from kvlearn.report.overall import overall_markdown, overall_sections, render_overall
    from kvlearn.report.solved import render_solved, solved_markdown, solved_sections
    from kvlearn.report.speed_views import speed_sections
    from kvlearn.rows import write_atomically

    console = Console()
    console.print(render_table(rows))
    console.print(render_overall(rows))
    console.print(render_blame(rows))
    console.print(render_solved(rows))
    sections = [*overall_sections(rows), *solved_sections(rows), *blame_sections(rows), *speed_sections(out)]
    page = write_report(rows, out, commands=commands, extra_sections=sections)
    plots = [*plot_png(rows, out), *write_blame(rows, out)]
    told = [part(rows) for part in (markdown_table, overall_markdown, solved_markdown, blame_markdown)]
    write_atomically(out / "table.md", "".join(told).encode())
    write_results(rows, out / "results.json", "; ".join(commands))
    console.print(f"page {page}, plots {', '.join(plot.name for plot in plots)}, rows.jsonl, table.md, results.json")
