"""``kvlearn calibrate``: which layers need the slots."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvlearn.commands import options

if TYPE_CHECKING:
    from rich.table import Table


def calibrate(
    model: options.Model,
    policy: Annotated[str, typer.Option(help="A policy's name, or a scorer's folder.")],
    budget: Annotated[int, typer.Option(help="Slots per KV head and layer: the mean of what is shared out.")] = 256,
    data: Annotated[str, typer.Option(help="Texts to measure on: see `kvlearn corpora`; with commas.")] = "stdlib",
    docs: Annotated[int, typer.Option(help="Documents, shared evenly among the texts.")] = 4,
    split: Annotated[str, typer.Option(help="Documents of train, validation, test or all.")] = "validation",
    window: Annotated[int, typer.Option(help="Tokens per document.")] = 2048,
    slots: Annotated[
        str | None, typer.Option(help="Slots to measure every band at, with commas; four by default.")
    ] = None,
    width: Annotated[int, typer.Option(help="Neighbouring layers that are measured as one band.")] = 5,
    metric: Annotated[
        Literal["kl", "nll"], typer.Option(help="The cost: divergence from the full cache, or loss of likelihood.")
    ] = "kl",
    out: Annotated[Path, typer.Option(help="The allocation; measurements go to a file beside it.")] = Path(
        "allocation.json"
    ),
    into: Annotated[Path | None, typer.Option(help="A scorer's folder, which is to recommend the allocation.")] = None,
    allocation: Annotated[
        Literal["uniform", "pooled"], typer.Option(help="How heads of a bounded layer share its slots.")
    ] = "uniform",
    seed: Annotated[int, typer.Option(help="Of random choices, and of the order of documents.")] = 0,
    block: options.Block = 32,
    sinks: options.Sinks = 4,
    recent: options.Recent = None,
    batch: Annotated[int, typer.Option(help="Documents fed together.")] = 4,
    dtype: options.ReadingDtype = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Measure what bounding each band of layers costs, and share a budget out where slots save most.

    The result is a file for `kvlearn compare --allocation`, or goes into a scorer's folder. A run that was stopped goes
    on when the same command is given again; another budget needs no new measurements.
    """
    from rich.console import Console

    from kvlearn.calibration import Calibration, scorer_for, write_allocation, write_into
    from kvlearn.calibration import calibrate as run
    from kvlearn.progress import bar
    from kvlearn.tasks.lm import text_cases

    settings = Calibration(
        policy=policy,
        budget=budget,
        slots=None if slots is None else options.numbers(slots, "--slots"),
        width=width,
        metric=metric,
        window=window,
        batch=batch,
        block=block,
        protect=options.protection(sinks, recent),
        seed=seed,
        allocation=allocation,
    )
    loaded = options.load(model, dtype, device, threads)
    scorer = None if into is None else scorer_for(into, loaded)  # a mistake shows before anything is measured
    cases = text_cases(loaded.tokenizer, data, docs=docs, window=window, split=split, seed=seed)
    with bar("calibrating") as progress:
        found = run(loaded, settings, cases, out.with_suffix(".rows.jsonl"), progress=progress)
    found |= {"data": data, "split": split, "command": " ".join(["kvlearn", *sys.argv[1:]])}
    write_allocation(out, found)
    console = Console()
    console.print(_table(found))
    cost = found["cost"]
    console.print(
        f"sum of costs at {budget} slots: {cost['equal']:.4f} with equal shares, {cost['allocated']:.4f} with these; "
        f"written to {out}"
    )
    if scorer is not None and into is not None:
        write_into(scorer, into, found)
        console.print(f"{into} recommends them now: EvictingCache(model, scorer, {budget}, allocation='scorer')")


def _table(allocation: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"{allocation['policy']}: {allocation['cost']['metric']} in nats/token with only these layers bounded",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("layers")
    for count in allocation["measured_at"]:
        table.add_column(f"{count} slots", justify="right")
    table.add_column("slots given", justify="right")
    for band in allocation["bands"]:
        first, last = band["layers"][0], band["layers"][-1]
        costs = [f"{cost:.4f}" for cost in band["cost"]]
        table.add_row(str(first) if first == last else f"{first}-{last}", *costs, f"{band['slots']:.0f}")
    return table
