"""Timing several ways to do the same thing in one process: rounds in which each has its turn."""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvlearn.bench.contenders import Contender
from kvlearn.bench.parts import Clock, peak_bytes


@dataclass
class Result:
    """What one contender did.

    Attributes:
        seconds: of a step, in each round.
        steps: in a turn.
        parts: seconds of a step by part, from a turn of its own with clocks in it.
        bytes: of the cache when a turn ends.
        peak_bytes: the most that were held at any moment of a turn: the cache, and what came and went beside it.
    """

    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    peak_bytes: int = 0


@torch.inference_mode()
def race(
    contenders: Sequence[Contender],
    rounds: int,
    turn_seconds: float,
    block: int,
    notify: Callable[[str, int, int], None] | None = None,
) -> list[Result]:
    """Time the steps of all contenders, turn by turn.

    A machine's speed drifts while other programs come and go. Within a round all contenders see the same machine, so
    ratios are taken within rounds; which of them goes first changes with every round.

    Args:
        contenders: who takes part.
        rounds: how many turns each has.
        turn_seconds: how long a turn takes at least; whole periods are run in any case.
        block: the most steps of a turn of a contender without a period.
        notify: called before each turn with the contender's name, the turn's number, and how many there are.
    """
    results = [Result() for _ in contenders]
    total, number = len(contenders) * (rounds + 2), 0

    def tell(who: Contender) -> None:
        nonlocal number
        if notify is not None:
            notify(who.name, number, total)
        number += 1

    growing = any(contender.growing for contender in contenders)
    for contender, result in zip(contenders, results, strict=True):
        tell(contender)
        steps = contender.period if contender.period > 1 else 1
        _turn(contender, steps)  # the first one sets things up
        took = _turn(contender, 1) if contender.period == 1 else _turn(contender, steps) / steps
        wanted = math.ceil(turn_seconds / took / contender.period) * contender.period
        result.steps = max(contender.least, contender.period, min(wanted, block))
        if growing:  # all must pass through the same lengths
            result.steps = block
    order = list(zip(contenders, results, strict=True))
    for _ in range(rounds):
        for contender, result in order:
            tell(contender)
            result.seconds.append(_turn(contender, result.steps) / result.steps)
        order.append(order.pop(0))
    for contender, result in zip(contenders, results, strict=True):
        tell(contender)
        _dissect(contender, result)
    return results


def _turn(contender: Contender, steps: int) -> float:
    gc.collect()
    device = contender.model.device
    with contender.turn(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the text is")  # longer than the model was made for: no matter for its speed
        _synchronize(device)
        started = time.perf_counter()
        for _ in range(steps):
            contender.step()
        _synchronize(device)
        return time.perf_counter() - started


def _dissect(contender: Contender, result: Result) -> None:
    """Parts and memory, in turns that are not raced because looking costs time."""
    clock = Clock()
    with contender.turn(), clock.watch(contender.places):
        for _ in range(result.steps):
            with clock.part("model"):
                contender.step()
    result.parts = {part: seconds / result.steps for part, seconds in clock.seconds.items()}
    with contender.turn():
        for _ in range(contender.period - 1):
            contender.step()
        before = contender.bytes

        def steps() -> None:  # the last of a period, which observes, and the first of the next, which selects
            for _ in range(min(contender.period, 2)):
                contender.step()

        result.peak_bytes = before + peak_bytes(steps, contender.model.device)
        result.bytes = contender.bytes


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
