"""How much of a run goes into scoring."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvlearn.policies.base import Policy


@contextmanager
def scoring_time(policy: Policy, device: torch.device) -> Iterator[Callable[[], float]]:
    """Measure a policy's own work: its scores, and its static score inputs.

    On a GPU every call waits for it, so that the time is the work's own.

    Args:
        policy: its methods are measured for as long as the context lasts.
        device: where it runs.

    Yields:
        A function that gives the seconds so far.
    """
    spent = [0.0]

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def measured(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = now()
            try:
                return method(*args, **kwargs)
            finally:
                spent[0] += now() - started

        return call

    for name in ("score", "static"):
        policy.__dict__[name] = measured(getattr(policy, name))
    try:
        yield lambda: spent[0]
    finally:
        for name in ("score", "static"):
            del policy.__dict__[name]
