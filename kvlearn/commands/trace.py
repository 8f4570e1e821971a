"""``kvlearn trace``: log what a model's attention does over a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvlearn.commands import options

if TYPE_CHECKING:
    from kvlearn.tracing import TraceReport


def trace(
    model: options.Model,
    data: Annotated[
        str,
        typer.Option(
            help="Text to read: built-in names (see `kvlearn corpora`), files, folders or data sets, comma-separated."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the trace; an unfinished one is continued.")],
    tokens: Annotated[int, typer.Option(help="Tokens to trace, rounded up to whole windows.")],
    window: Annotated[int, typer.Option(help="Tokens per window, a multiple of --block.")] = 2048,
    policy: Annotated[
        str | None, typer.Option(help="Also log what a cache under this policy sees; needs --budget.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Its slots: 256, a list 128,256 or a range 128-512 to draw from.")
    ] = None,
    split: Annotated[Literal["train", "validation", "test", "all"], typer.Option(help="Part of the text.")] = "train",
    seed: Annotated[int, typer.Option(help="Of the order of the text and of drawn budgets.")] = 0,
    block: Annotated[int, typer.Option(help="Queries per observed block.")] = 32,
    group_reduce: Annotated[
        Literal["mean", "max"], typer.Option(help="How the query heads of a KV head are reduced.")
    ] = "mean",
    dtype: options.ReadingDtype = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Log a model's attention over a text, for training.

    A run that was stopped goes on when the same command is given again, and a finished trace gets what it lacks. At the
    end it prints the speed beside the model's plain forward pass, and the size beside the model's KV cache of the same
    tokens.
    """
    import sys

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from kvlearn.tracing import trace as run

    loaded = options.load(model, dtype, device, threads)
    bar = Progress(
        TextColumn("tracing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("tracing", total=None)
        report = run(
            loaded,
            data,
            out,
            tokens=tokens,
            window=window,
            policy=policy,
            budget=budget,
            split=split,
            seed=seed,
            block=block,
            group_reduce=group_reduce,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    for line in describe(report, out, tokens):
        typer.echo(line)


def describe(report: TraceReport, out: Path, asked: int) -> list[str]:
    """The lines printed at the end."""
    from kvlearn.traces.projection import PROJECTION

    manifest = report.manifest
    held = manifest.windows * manifest.layout.window
    lines = [f"{out}: {manifest.windows} windows of {manifest.layout.window} tokens, {held:,} tokens in all"]
    if held < asked:
        lines.append(f"the text ended before the {asked:,} tokens asked for")
    if report.traced < held:
        lines.append(f"{held - report.traced:,} of them were there already")
    if report.seconds:
        lines.append(f"traced {report.traced:,} tokens at {report.traced / report.seconds:,.0f} tokens/s")
    if report.pairs:
        lines.append(
            f"speed, median of {len(report.pairs)} windows run both ways in turn: tracing {report.trace_rate:,.0f} "
            f"tokens/s, plain forward pass {report.plain_rate:,.0f} tokens/s (sdpa, no cache, all logits), "
            f"ratio {report.relative_speed:.2f}"
        )
    lines.append(
        f"size: {report.bytes:,} bytes, bf16 KV cache of the same tokens {report.cache_bytes:,} bytes, "
        f"ratio {report.bytes / report.cache_bytes:.2f}"
    )
    if not (out / PROJECTION).is_file():
        lines.append("this model's output projection was not found, so that no target can weigh what values write")
    return lines
