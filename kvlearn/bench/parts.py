"""Where the time of a step goes, and how much memory it needs for a moment."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

PARTS = ("model", "attention", "observe", "score", "select", "replace", "bookkeeping")
"""Parts of a step. ``model`` is all that is not the cache's; ``bookkeeping`` is the rest of the cache's own."""

Place = tuple[Any, str, str]
"""An object, the name of a function it holds, and the part that this function's time belongs to."""


class Clock:
    """Seconds by part. A function's time is its own: what it spends in another timed function belongs to that one.

    Attributes:
        seconds: by part.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inner = [0.0]  # for every timed call that is open: seconds spent in timed calls below it

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is done inside."""
        self._inner.append(0.0)
        started = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - started
            self.seconds[name] += took - self._inner.pop()
            self._inner[-1] += took

    @contextmanager
    def watch(self, places: Iterable[Place]) -> Iterator[None]:
        """Time every call of the functions at ``places`` while inside."""
        undo: list[tuple[Any, str, Any]] = []
        try:
            for owner, name, part in places:
                undo.append((owner, name, vars(owner).get(name, _Absent)))
                setattr(owner, name, self._timed(part, getattr(owner, name)))
            yield
        finally:
            for owner, name, old in reversed(undo):
                if old is _Absent:
                    delattr(owner, name)
                else:
                    setattr(owner, name, old)

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return function(*args, **kwargs)

        return timed


class _Absent:
    """Stands for an attribute that an object did not have of its own."""


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that PyTorch's allocator held at any moment of ``run``, beyond what it held before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # PyTorch keeps no totals of the CPU's memory; its profiler sees every allocation and release.
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _quiet(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    held = most = 0
    events: Any = profile.profiler
    for event in events.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def bandwidth(device: str) -> float:
    """Bytes a second that memory gives to who reads it in order, the best of five sums over half a GiB."""
    data, best = torch.zeros(2**27, device=device), 0.0
    for _ in range(5):
        started = time.perf_counter()
        float(data.sum())
        best = max(best, data.nbytes / (time.perf_counter() - started))
    return best


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines that PyTorch's profiler writes to stderr, past Python, when it starts and stops."""
    sys.stderr.flush()
    own, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)
        os.close(nowhere)
