"""Every kernel checked and timed in one call: ``python -m kvlearn.bench kernels``.

Checks each kernel against the reference and float64, times it at Llama-3-8B's sizes (8 KV heads of 4 query heads, head
dimension 128) and prints the bytes it must move per second beside the measured bandwidth of a copy; then times a whole
decode-attention step of the cache, with and without observing, scoring and evicting, next to PyTorch's attention over
the full context. ``--dry`` runs all of it at toy sizes in Triton's interpreter on a CPU; its times mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvlearn.bench.checks import Check, check_all
from kvlearn.errors import KvlearnError
from kvlearn.kernels import docs, launch, timing, traffic
from kvlearn.kernels.decode_attention.splits import split_count
from kvlearn.kernels.workloads import Workload

KERNELS = ("attend", "observe", "forecast", "select", "write", "settle")  # operations of a Workload
STEPS = ("attention", "streaming", "ema", "learned")  # see time_steps

Call = Callable[[], object]
Timer = Callable[[Sequence[Call]], float]


@dataclass(frozen=True)
class Sizes:
    """What is timed."""

    shape: traffic.Shape = field(default_factory=traffic.Shape)
    batches: tuple[int, ...] = (1, 8, 64)
    slots: tuple[int, ...] = (1024, 2048, 8192)
    contexts: tuple[int, ...] = (8192, 32768, 131072)
    step_batches: tuple[int, ...] = (1, 8)
    budget: int = 2048
    dtype: torch.dtype = torch.bfloat16


TOY = Sizes(
    shape=traffic.Shape(heads=1, group=2, dim=16, block=4, inputs=5, hidden=4),
    batches=(1,),
    slots=(40,),
    contexts=(64,),
    step_batches=(1,),
    budget=24,
    dtype=torch.float32,
)


@dataclass
class Report:
    """All that was measured, as it goes into the JSON file.

    Attributes:
        device: name of the card.
        versions: of torch and triton, and the date.
        copy: bytes read and written per second by a copy.
        checks: one per operation and type.
        kernels: rows of :func:`time_kernels`.
        steps: rows of :func:`time_steps`.
    """

    device: str
    versions: dict[str, str]
    copy: float
    checks: list[Check] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)


def must_move(shape: traffic.Shape, element: int) -> dict[str, traffic.Traffic]:
    """Traffic of each operation of a :class:`Workload`."""
    shape = replace(shape, element=element)
    target = launch.target()
    dim = launch.dim_family(shape.dim, torch.float32 if element == 4 else torch.float16)
    own = launch.parameters(target, "attend", f"few {dim}")
    splits = split_count(shape.batch * shape.heads, 1, shape.slots, own["programs"], 2 * own["slots"])
    return {
        "attend": traffic.attend(shape, own, splits),
        "observe": traffic.observe(shape, launch.parameters(target, "mass", dim)),
        "forecast": traffic.forecast(shape, launch.parameters(target, "forecast", "all")),
        "select": traffic.select(shape, shape.block),
        "write": traffic.write(shape),
        "settle": traffic.settle(shape),
    }


def workloads(sizes: Sizes, batch: int, slots: int, device: str) -> list[Workload]:
    """As many layers as keep the memory of each cold."""
    shape = replace(sizes.shape, batch=batch, slots=slots)
    first = Workload(shape, sizes.dtype, device, "triton")
    count = timing.copies(first.size) if device == "cuda" else 1
    return [first, *(Workload(shape, sizes.dtype, device, "triton", seed=i) for i in range(1, count))]


def time_kernels(sizes: Sizes, device: str, timer: Timer, copy: float) -> list[dict[str, Any]]:
    """Seconds and bytes per second of every operation, for every batch and number of slots."""
    rows = []
    for batch in sizes.batches:
        for slots in sizes.slots:
            loads = workloads(sizes, batch, slots, device)
            shape = loads[0].shape
            row: dict[str, Any] = {"batch": batch, "slots": slots}
            for name, moved in must_move(shape, sizes.dtype.itemsize).items():
                took = timer([getattr(load, name) for load in loads])
                row[name] = {"seconds": took, "rate": moved.must / took, "of_copy": moved.must / took / copy}
            block = sum(row[name]["seconds"] for name in ("observe", "forecast", "select", "settle"))
            row["overhead"] = (block / shape.block + row["write"]["seconds"]) / row["attend"]["seconds"]
            rows.append(row)
            print(kernel_line(row), flush=True)
    return rows


def kernel_line(row: dict[str, Any]) -> str:
    """One row of :func:`time_kernels` in words."""
    parts = [f"{name} {row[name]['seconds'] * 1e6:.1f} us ({row[name]['of_copy']:.0%} of copy)" for name in KERNELS]
    return f"batch {row['batch']} slots {row['slots']}: {', '.join(parts)}; upkeep {row['overhead']:.1%} of attention"


def step_seconds(sizes: Sizes, policy: Any, batch: int, device: str, timer: Timer) -> float:
    """Seconds of a layer's decode step, over a block of steps through as many full layers as keep memory cold."""
    from kvlearn.layer import EvictingLayer
    from kvlearn.shapes import Budget
    from kvlearn.slots import LayerConfig

    shape = sizes.shape
    budget = Budget.resolve(sizes.budget, shape.block)
    layer_bytes = 2 * batch * shape.heads * sizes.budget * shape.dim * sizes.dtype.itemsize
    count = timing.copies(layer_bytes) if device == "cuda" else 1
    config = LayerConfig(0, budget, policy, "mean", lambda keys, _: keys, None, "triton")
    layers = [EvictingLayer(config) for _ in range(count)]

    def random(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(batch, heads, tokens, shape.dim, device=device).to(sizes.dtype)

    def step(layer: EvictingLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        layer.attend(query, key, value, None, scale=shape.dim**-0.5, softcap=None, position_ids=None)

    query_heads = shape.heads * shape.group
    for layer in layers:  # the prompt fills the budget
        step(layer, random(query_heads, sizes.budget), *(random(shape.heads, sizes.budget) for _ in range(2)))
    token = random(query_heads, 1), random(shape.heads, 1), random(shape.heads, 1)

    def block() -> None:
        for _ in range(shape.block):
            for layer in layers:
                step(layer, *token)

    block()  # from here on every block begins with a selection
    return timer([block]) / (shape.block * count)


def time_steps(sizes: Sizes, device: str, timer: Timer) -> list[dict[str, Any]]:
    """Seconds of one layer's decode-attention step, and of attention over the full context.

    "attention" only attends to a full budget; "streaming" also writes and evicts, "ema" observes as well, and
    "learned" also scores with a network.
    """
    from kvlearn.policies import resolve

    rows = []
    for batch in sizes.step_batches:
        row: dict[str, Any] = {"batch": batch, "budget": sizes.budget, "steps": {}, "full": {}}
        alone = [load.attend for load in workloads(sizes, batch, sizes.budget, device)]
        row["steps"]["attention"] = timer(alone)
        for name, policy in (("streaming", "streaming"), ("ema", "ema"), ("learned", scorer(sizes, device))):
            row["steps"][name] = step_seconds(sizes, resolve(policy), batch, device, timer)
        for context in sizes.contexts:
            row["full"][context] = full_attention(sizes, batch, context, device, timer)
        row["times_faster"] = {c: took / row["steps"]["learned"] for c, took in row["full"].items()}
        rows.append(row)
        print(step_line(row), flush=True)
    return rows


def step_line(row: dict[str, Any]) -> str:
    """One row of :func:`time_steps` in words."""
    own = ", ".join(f"{name} {took * 1e6:.1f} us" for name, took in row["steps"].items())
    full = ", ".join(
        f"{context} tokens {took * 1e6:.1f} us ({row['times_faster'][context]:.1f} times learned)"
        for context, took in row["full"].items()
    )
    return f"a step, batch {row['batch']}, budget {row['budget']}: {own}; PyTorch's attention over {full}"


def scorer(sizes: Sizes, device: str) -> Any:
    """An untrained scorer of the size that is shipped: what it costs does not depend on its weights."""
    from kvlearn.scorers import Scorer, ScorerConfig

    shape = sizes.shape
    size: dict[str, Any] = {"heads": shape.heads, "head_dim": shape.dim, "hidden": shape.hidden}
    return Scorer(ScorerConfig(layers=(0,), key_rank=shape.inputs - 2, **size)).to(device).eval()


def full_attention(sizes: Sizes, batch: int, context: int, device: str, timer: Timer) -> float:
    """Seconds of one query's attention over ``context`` tokens by the fastest of PyTorch's own kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    shape = sizes.shape
    size = 2 * batch * shape.heads * context * shape.dim * sizes.dtype.itemsize

    def random(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(batch, heads, tokens, shape.dim, device=device).to(sizes.dtype)

    def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return random(shape.heads * shape.group, 1), random(shape.heads, context), random(shape.heads, context)

    count = timing.copies(size) if device == "cuda" else 1
    calls: list[Call] = [partial(scaled_dot_product_attention, *operands(), enable_gqa=True) for _ in range(count)]
    times = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(backend):
                times.append(timer(calls))
        except RuntimeError:  # this one does not serve these operands
            continue
    return min(times) if times else timer(calls)


def summary(report: Report) -> dict[str, str]:
    """The sections of docs/kernels.md that this command writes."""
    bad = [check for check in report.checks if not check.passed]
    head = (
        f"{report.device}, {report.versions['date']}, torch {report.versions['torch']}, triton "
        f"{report.versions['triton']}. A copy moves {report.copy / 1e9:.0f} GB/s. Checks: "
        f"{len(report.checks) - len(bad)} of {len(report.checks)} pass."
    )
    kernels = docs.table(
        ("batch", "slots", *(f"{name}, us (of copy)" for name in KERNELS), "upkeep / attention"),
        [
            (
                row["batch"],
                row["slots"],
                *(f"{row[n]['seconds'] * 1e6:.1f} ({row[n]['of_copy']:.0%})" for n in KERNELS),
                f"{row['overhead']:.1%}",
            )
            for row in report.kernels
        ],
    )
    contexts = list(report.steps[0]["full"]) if report.steps else []
    steps = docs.table(
        ("batch", *(f"{name}, us" for name in STEPS), *(f"full {c}, us (times learned)" for c in contexts)),
        [
            (
                row["batch"],
                *(f"{row['steps'][name] * 1e6:.1f}" for name in STEPS),
                *(f"{row['full'][c] * 1e6:.1f} ({row['times_faster'][c]:.1f})" for c in contexts),
            )
            for row in report.steps
        ],
    )
    budget = f"{report.steps[0]['budget']:,}" if report.steps else "none"
    parts = (head, kernels, f"One layer's decode-attention step, budget {budget}:", steps, targets(report))
    return {"measured": "\n\n".join(parts)}


def targets(report: Report) -> str:
    """What was aimed at, next to what was measured."""
    kernels, far = report.kernels, 32768
    attention = [row["attend"]["of_copy"] for row in kernels]
    upkeep = [row["overhead"] for row in kernels]
    faster = [row["times_faster"][far] for row in report.steps if far in row["times_faster"]]

    def line(what: str, found: list[float], met: Callable[[float], bool], form: str) -> tuple[str, str, str]:
        span = f"{min(found):{form}} to {max(found):{form}}" if found else "not measured"
        return what, span, f"{sum(map(met, found))} of {len(found)}"

    rows = [
        line("attention at 80% of a copy's bandwidth or more", attention, lambda share: share >= 0.8, ".0%"),
        line("upkeep at most 5% of attention's time", upkeep, lambda share: share <= 0.05, ".1%"),
        line(f"a learned step 8 times as fast as full attention over {far:,}", faster, lambda t: t >= 8, ".1f"),
    ]
    return docs.table(("target", "measured", "met"), rows)


def once(calls: Sequence[Call]) -> float:
    """Seconds of one pass, for a dry run."""
    begin = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begin) / len(calls)


def main(arguments: list[str]) -> int:
    """Command line; returns the exit status: 1 when a check fails."""
    parser = argparse.ArgumentParser(prog="python -m kvlearn.bench kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--dry", action="store_true", help="toy sizes in Triton's interpreter, on a CPU")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--docs", type=Path, help="rewrite the measured tables of this Markdown file")
    options = parser.parse_args(arguments)
    if options.dry:
        if "triton" in sys.modules and not launch.interpreted():
            raise KvlearnError("--dry needs a process in which triton has not been imported yet.")
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        raise KvlearnError("this machine has no GPU to measure; --dry runs the same at toy sizes in an interpreter.")
    if options.dry and options.docs:
        raise KvlearnError("the times of a dry run mean nothing; --docs needs a GPU.")
    report = run(options.dry)
    if options.json:
        text = json.dumps(asdict(report), indent=1)
        options.json.with_suffix(".tmp").write_text(text, encoding="utf-8")
        os.replace(options.json.with_suffix(".tmp"), options.json)
    if options.docs:
        docs.rewrite(options.docs, summary(report))
    print("\n" + summary(report)["measured"])
    if options.dry:
        print("\nA dry run: the checks count, the times do not.")
    return 0 if all(check.passed for check in report.checks) else 1


def run(dry: bool) -> Report:
    """Check and time everything."""
    import triton

    device, timer, sizes = ("cpu", once, TOY) if dry else ("cuda", timing.seconds, Sizes())
    copy = 1e9 if dry else timing.copy_bandwidth()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "date": datetime.date.today().isoformat()}
    name = "interpreter" if dry else torch.cuda.get_device_name()
    report = Report(name, versions, copy, checks=check_all(device, toy=dry))
    for check in report.checks:
        print(check.line())
    report.kernels = time_kernels(sizes, device, timer, copy)
    report.steps = time_steps(sizes, device, timer)
    return report
