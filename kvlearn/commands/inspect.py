"""``kvlearn inspect``: what each policy still holds of a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvlearn.commands import options
from kvlearn.errors import KvlearnError


def inspect(
    model: options.Model,
    prompt_file: Annotated[Path, typer.Option(help="A UTF-8 text file.")],
    policy: Annotated[
        list[str], typer.Option(help="A policy's name or a scorer's folder; give it several times to compare.")
    ],
    budget: Annotated[int | None, typer.Option(help="The most slots each KV head of a layer may hold.")] = None,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("inspect.html"),
    chunk: Annotated[
        int | None, typer.Option(help="Tokens per call; by default the whole text at once, as a prompt.")
    ] = None,
    allocation: options.SharedOut = "uniform",
    block: Annotated[int | None, typer.Option(help="Queries per observed block; 32, less for small budgets.")] = None,
    sinks: options.Sinks = 4,
    recent: options.Recent = None,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Write a page that shows a text and, token by token, which heads and layers still hold it under each policy."""
    text = options.text_of(prompt_file)
    if out.is_dir():
        raise KvlearnError(f"--out {out} is a folder; give the name of a file, such as {out / 'inspect.html'}.")
    if out.exists() and out.samefile(prompt_file):
        raise KvlearnError(f"--out {out} is the prompt file, which the page would replace; give another name.")
    loaded = options.load(model, dtype, device, threads)

    from kvlearn.progress import bar
    from kvlearn.report.inspect import lines, write_inspection
    from kvlearn.report.tables import short_names
    from kvlearn.retention import inspect_text

    with bar("inspecting") as progress:
        found = inspect_text(
            loaded,
            text,
            policy,
            budget,
            chunk=chunk,
            allocation=allocation,
            progress=progress,
            block=block,
            protect=options.protection(sinks, recent),
        )
    path = write_inspection(found, out, commands=[" ".join(["kvlearn", *sys.argv[1:]])])
    shown = lines(found)
    names = short_names(line.policy for line in shown)
    for line in shown:
        held = f"{line.somewhere} of {len(found.pieces)} tokens held somewhere, {line.forgotten} forgotten"
        print(f"{names[line.policy]}: {held}")
    print(f"page {path}")
