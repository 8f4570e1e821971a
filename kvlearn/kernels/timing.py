"""Timing of launches on a GPU, by events."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

COLD = 256 * 2**20  # bytes of operands in a round: several times any second-level cache, so that reads reach memory
_ROUNDS = 5


def copies(size: int, most: int = 64) -> int:
    """How many sets of operands of ``size`` bytes a round should pass over, for none to stay in a cache."""
    return max(1, min(most, -(-COLD // max(1, size))))


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median GPU time of one call, in seconds.

    The calls are captured in one CUDA graph, so that the time to launch from Python does not count; work that cannot be
    captured raises, as it would in a serving engine.

    Args:
        calls: the same work on different operands; see :func:`copies`.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:  # compiles, and fills the allocator
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(_ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / len(calls))
    return statistics.median(times)


def copy_bandwidth(size: int = 2**30) -> float:
    """Bytes read and written per second by a copy of ``size`` bytes on the current GPU."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / seconds([lambda: target.copy_(source)] * 4)
