"""A comparison in several processes: each loads the model and takes one group of cases after the other.

Rows go through the process that began it, which alone writes them, so that a run that was killed goes on as if it had
been one process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from kvlearn.compare import Comparison, Notify, Settings
from kvlearn.errors import KvlearnError
from kvlearn.rows import Row, RowStore, row_key

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvlearn.models import LoadedModel
    from kvlearn.tasks.base import Case

OVERHEAD = 1 << 30
"""Bytes that a process takes beside its model: PyTorch itself, logits, caches."""

Load = Callable[[], "LoadedModel"]


def spare_workers(model: PreTrainedModel) -> int:
    """Processes for a comparison on this machine: one for each core, as long as models and caches fit into memory.

    One where the model is on another device: its copies would take each other's time and memory there.
    """
    if model.device.type != "cpu":
        return 1
    weights = sum(parameter.nbytes for parameter in model.parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, memory // (3 * weights + OVERHEAD)))


def run_in_processes(
    load: Load,
    comparison: Comparison,
    store: RowStore,
    *,
    workers: int,
    notify: Notify | None = None,
) -> None:
    """Measure every cell that has no row yet, several groups at a time, each on one thread.

    Args:
        load: loads the model; every process calls it once.
        comparison: what is measured; its own model does not run.
        store: where rows go.
        workers: processes.
        notify: called before each cell.

    Raises:
        KvlearnError: what a process raised, or that one stopped; rows so far are kept.
    """
    context = multiprocessing.get_context("spawn")
    finished = {row_key(row) for row in store.rows if not row.get("error")}
    groups = comparison.groups
    waiting, done, cells = deque(range(len(groups))), 0, sum(len(group.cells) for group in groups)
    work = (load, comparison.settings, comparison.cases_by_name, finished)
    processes: dict[Connection, Any] = {}
    try:
        for _ in range(min(workers, len(groups))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, *work), daemon=True)
            process.start()
            theirs.close()
            processes[ours] = process
        while processes:
            for connection in wait(list(processes)):
                assert isinstance(connection, Connection)
                kind, content = _receive(connection, processes[connection])
                if kind == "rows":
                    store.append(*content)
                elif kind == "cell":
                    if notify is not None:
                        notify(content, done, cells)
                    done += 1
                elif kind == "error":
                    raise KvlearnError(content)
                elif waiting:
                    connection.send(waiting.popleft())
                else:
                    connection.send(None)
                    processes.pop(connection).join()
    finally:
        for process in processes.values():
            process.terminate()


def _receive(connection: Connection, process: Any) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = connection.recv()
        return message
    except EOFError:
        process.join()
        code = process.exitcode
        raise KvlearnError(
            f"a worker process stopped (exit code {code}{', perhaps for want of memory' if code == -9 else ''}); run "
            "the command again to go on, with fewer --workers if it happens again."
        ) from None


class _Sent:
    """Rows on their way to the process that writes them."""

    def __init__(self, connection: Connection, finished: set[tuple[Any, ...]]) -> None:
        self._connection, self._finished = connection, finished

    def done(self, *keys: Mapping[str, Any]) -> bool:
        """Whether all of these were finished when the run began; no other process measures them."""
        return all(row_key(key) in self._finished for key in keys)

    def append(self, *rows: Row) -> None:
        """Send rows."""
        self._connection.send(("rows", rows))


def _work(
    connection: Connection,
    load: Load,
    settings: Settings,
    cases: Mapping[str, Sequence[Case]],
    finished: set[tuple[Any, ...]],
) -> None:
    """What a process does: ask for a group, measure it, ask again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the first process ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    try:
        comparison = Comparison(load(), settings, cases, _Sent(connection, finished))
        connection.send(("ready", None))
        while (number := connection.recv()) is not None:
            comparison.run_group(comparison.groups[number], lambda what, *_: connection.send(("cell", what)))
            connection.send(("ready", None))
    except KvlearnError as error:
        connection.send(("error", str(error)))


def _end_with_parent() -> None:
    """Stop at once when the first process is gone, however it went: nobody would take the rows."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
