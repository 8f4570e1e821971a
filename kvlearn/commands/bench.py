"""``kvlearn bench``: speed and memory, measured side by side in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlearn.commands import options
from kvlearn.errors import KvlearnError

if TYPE_CHECKING:
    from kvlearn.bench.speed import Bench, Group, Notify

app = typer.Typer(help="Speed and memory beside the stock cache, in one process.", no_args_is_help=True)

Contexts = Annotated[str, typer.Option(help="Tokens fed before, with commas.")]
Batches = Annotated[str, typer.Option(help="Rows, with commas.")]
Budgets = Annotated[str, typer.Option(help="Slots per KV head and layer, with commas.")]
Policies = Annotated[
    str | None,
    typer.Option(help="Names and folders of scorers, with commas; by default full,streaming,h2o and a shipped scorer."),
]
Out = Annotated[Path, typer.Option(help="Folder for speed.jsonl, report.html, the plot and the tables.")]
Rounds = Annotated[int, typer.Option(help="Turns of every contender.")]
Seconds = Annotated[float, typer.Option(help="Least duration of a turn.")]


@app.command()
def decode(
    model: options.Model,
    contexts: Contexts = "512,2048,8192",
    batches: Batches = "8",
    budgets: Budgets = "256",
    policies: Policies = None,
    preset: Annotated[
        str | None, typer.Option(help="small: the races behind the project's targets, a prompt and tracing; minutes.")
    ] = None,
    data: Annotated[str, typer.Option(help="With --preset small: text to trace.")] = "stdlib",
    out: Out = Path("bench"),
    rounds: Rounds = 3,
    seconds: Seconds = 0.5,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Race decode steps: tokens/s, milliseconds by part, bytes; a race that is done is not run again.

    Beside policies, `stock-at-budget` is the stock cache with as many tokens as there are slots, and `kvpress-snapkv`
    is kvpress's DecodingPress over SnapKVPress at the same slots, where kvpress is installed.
    """
    from kvlearn.bench.speed import small, small_prompt

    if preset not in (None, "small"):
        raise KvlearnError(f"unknown preset {preset!r}; there is small.")
    if preset and policies is not None and len(options.names(policies)) != 1:
        raise KvlearnError(f"--policies is {policies!r}; with --preset name the one scorer to race, or none.")
    learned = policies or _learned(model) if preset else ""
    wanted = small(learned) if preset else _groups(model, contexts, batches, budgets, policies)

    def work(bench: Bench, notify: Notify) -> None:
        bench.decode(wanted, notify)
        if preset:
            bench.prefill(small_prompt(learned), notify)
            bench.trace(data, rounds, 2048, notify)

    _run(model, out, rounds, seconds, dtype, device, threads, work)


@app.command()
def growth(
    model: options.Model,
    longest: Annotated[int, typer.Option(help="The longest context, in tokens.")] = 32768,
    rows: Annotated[int, typer.Option(help="The most rows, at a context of 2,048.")] = 32,
    budget: Annotated[int, typer.Option(help="Slots per KV head and layer.")] = 256,
    policy: Annotated[str | None, typer.Option(help="Beside the full cache; by default a shipped scorer.")] = None,
    out: Out = Path("bench-growth"),
    rounds: Rounds = 3,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Race decode steps over contexts and rows, and draw how time and bytes grow: growth.png.

    Dashed lines are the cost model's bytes at the memory bandwidth that is measured first. A context may be longer
    than the model reads: a step's time does not depend on what keys say.
    """
    from kvlearn.bench.parts import bandwidth
    from kvlearn.bench.speed import ROWS_AT
    from kvlearn.bench.speed import growth as races
    from kvlearn.report.speed_growth import growth_png
    from kvlearn.rows import write_atomically

    wanted = races(policy or _learned(model), longest, rows, budget)
    _run(model, out, rounds, 0.3, dtype, device, threads, lambda bench, notify: bench.decode(wanted, notify))
    speed = bandwidth(device)
    write_atomically(out / "growth.png", growth_png(out, ROWS_AT, speed))
    typer.echo(f"growth.png in {out}; {speed / 1e9:.1f} GB/s were measured")


@app.command()
def prefill(
    model: options.Model,
    contexts: Contexts = "512,2048",
    batches: Batches = "1",
    budgets: Budgets = "256",
    policies: Policies = None,
    out: Out = Path("bench"),
    rounds: Rounds = 5,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Race whole prompts, from an empty cache to one that is cut to its budget."""
    wanted = _groups(model, contexts, batches, budgets, policies)
    _run(model, out, rounds, 0.0, dtype, device, threads, lambda bench, notify: bench.prefill(wanted, notify))


@app.command()
def trace(
    model: options.Model,
    data: Annotated[str, typer.Option(help="Text to trace: see `kvlearn corpora`.")] = "stdlib",
    window: Annotated[int, typer.Option(help="Tokens per window.")] = 2048,
    rounds: Rounds = 5,
    out: Out = Path("bench"),
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Time tracing beside the plain forward pass (sdpa, no cache, all logits) of the same windows."""
    _run(model, out, 1, 0.0, dtype, device, threads, lambda bench, notify: bench.trace(data, rounds, window, notify))


@app.command()
def layer(
    model: options.Model,
    policies: Policies = None,
    batches: Batches = "1,8",
    budgets: Budgets = "256,512",
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Print what a decoded token and a prompt of 2,048 cost a layer, beside the stock cache at the same slots."""
    from kvlearn.attention import enable
    from kvlearn.bench.layer import COLUMNS, table
    from kvlearn.report.grids import markdown_grid

    names = options.names(policies) if policies is not None else ["streaming", "h2o", _learned(model)]
    loaded = enable(options.load(model, dtype, device, threads).model)
    sizes = [options.numbers(text, name) for text, name in ((batches, "--batches"), (budgets, "--budgets"))]
    typer.echo(markdown_grid(COLUMNS, table(loaded, names, sizes[0], sizes[1])))


@app.command()
def cost(
    contexts: Contexts = "8192,131072,1048576",
    batches: Batches = "1,8",
    budget: Annotated[int, typer.Option(help="Slots per KV head and layer.")] = 2048,
    bandwidth: Annotated[float, typer.Option(help="GB/s of the memory that holds weights and cache.")] = 3350.0,
) -> None:
    """Print what a step must move and compute on paper, for three sizes of model; nothing is measured.

    The default bandwidth is that of an H100 SXM.
    """
    from kvlearn.bench.cost import COLUMNS, table
    from kvlearn.report.grids import markdown_grid

    sizes = [tuple(options.numbers(text, name)) for text, name in ((contexts, "--contexts"), (batches, "--batches"))]
    typer.echo(markdown_grid(COLUMNS, table(sizes[0], sizes[1], budget, bandwidth * 1e9)))


def _groups(model: str, contexts: str, batches: str, budgets: str, policies: str | None) -> list[Group]:
    from kvlearn.bench.speed import groups

    names = options.names(policies) if policies is not None else ["full", "streaming", "h2o", _learned(model)]
    return groups(
        options.numbers(contexts, "--contexts"),
        options.numbers(batches, "--batches"),
        options.numbers(budgets, "--budgets"),
        names,
    )


def _learned(model: str) -> str:
    from kvlearn.shipped import shipped

    return str(shipped("checkpoints", model))


def _run(
    model: str,
    out: Path,
    rounds: int,
    seconds: float,
    dtype: str,
    device: str,
    threads: int | None,
    work: Callable[[Bench, Notify], None],
) -> None:
    from rich.console import Console

    from kvlearn.bench.speed import Bench
    from kvlearn.progress import bar
    from kvlearn.report.speed import speed_store
    from kvlearn.report.speed_views import speed_table, write_speed

    loaded = options.load(model, dtype, device, threads)
    with speed_store(out) as store:
        with bar("bench") as progress:
            work(Bench(loaded, store, rounds, seconds), progress)
        rows = store.rows
    console = Console()
    console.print(speed_table(rows))
    files = write_speed(rows, out, [" ".join(["kvlearn", *sys.argv[1:]])])
    console.print(f"page {files[0]}, {', '.join(file.name for file in files[1:])}, speed.jsonl")
