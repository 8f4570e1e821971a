"""Progress bars: rich on a terminal, one line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOG_SECONDS = 30.0
"""Without a terminal, seconds between two lines."""


@contextmanager
def bar(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr.

    Yields:
        A function to call with what is being done now, how many steps are done, and how many there are.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _logger(title)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)

        def update(what: str, done: int, total: int) -> None:
            progress.update(task, description=f"{title}: {what}", completed=done, total=total)

        yield update


def _logger(title: str) -> Callable[[str, int, int], None]:
    started = last = time.monotonic()

    def log(what: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LOG_SECONDS:
            last = now
            left = f", about {(now - started) / done * (total - done):.0f} s left" if done else ""
            print(f"{title}: {done} of {total} ({what}), {now - started:.0f} s{left}", file=sys.stderr, flush=True)

    return log
