"""``kvlearn demo``: the whole job in a few minutes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kvlearn.commands import options


def demo(
    out: Annotated[Path, typer.Option(help="Folder for what the demo writes.")] = Path("kvlearn-demo"),
    threads: options.Threads = None,
) -> None:
    """Trace, train, load, compare and generate on SmolLM2-135M, in a few minutes on a CPU."""
    from rich.console import Console
    from rich.table import Table

    from kvlearn import attention
    from kvlearn.commands.compare import show
    from kvlearn.demo import HELD_OUT, MODEL, TRAIN_DATA, Demo, Sizes
    from kvlearn.progress import bar

    console = Console()
    started = time.monotonic()

    def step(number: int, title: str) -> None:
        console.print(f"[bold]{number} of 6[/] ({time.monotonic() - started:.0f} s) {title}")

    sizes = Sizes()
    step(1, f"load {MODEL} and the scorer that comes with kvlearn")
    loaded = options.load(MODEL, None, "cpu", threads)
    attention.enable(loaded.model)
    out.mkdir(parents=True, exist_ok=True)
    job = Demo(loaded, out, sizes)
    scorer = job.load_shipped()
    console.print(f"  {job.shipped_scorer}: {sum(p.numel() for p in scorer.parameters()):,} weights")

    step(2, f"trace {sizes.trace_tokens:,} tokens of {TRAIN_DATA}")
    with bar("tracing") as notify:
        report = job.trace(notify)
    console.print(
        f"  {report.manifest.windows} windows, {report.bytes / 2**20:.0f} MiB "
        f"(the KV cache of these tokens: {report.cache_bytes / 2**20:.0f} MiB)"
    )

    step(3, f"train a small scorer on that trace, for {sizes.train_seconds} s at the most")
    with bar("training") as notify:
        figures = job.train(notify)
    console.print(f"  {job.fresh_scorer}: " + ", ".join(f"{k} {v}" for k, v in figures.items() if k.startswith("val")))

    step(4, f"compare at {sizes.budget} slots on {sizes.docs} documents of {HELD_OUT}, {sizes.window:,} tokens each")
    with bar("comparing") as notify:
        rows = job.compare(notify)

    step(5, f"continue a held-out text of {sizes.window:,} tokens")
    ids, tail = job.prompt()
    console.print(f"  the text ends: {tail!r}", markup=False)
    table = Table("cache", "slots per KV head", "MiB", "what the model writes", show_lines=True)
    for name, policy in (("full", "full"), ("shipped scorer", str(job.shipped_scorer))):
        text, held = job.generate(ids, policy)
        table.add_row(name, str(held["slots"]), f"{held['bytes'] / 2**20:.1f}", repr(text))
    console.print(table)

    step(6, "results")
    show(rows, out, ["kvlearn demo"])
