"""The tables of docs/kernels.md that can be counted: bytes of each kernel, and launches of a decode step."""

from __future__ import annotations

from dataclasses import replace

from kvlearn.kernels import docs, dry, launch, traffic
from kvlearn.kernels.decode_attention.splits import split_count
from kvlearn.kernels.traffic import Shape, Traffic
from kvlearn.kernels.workloads import Workload

TARGET = "cuda:90"
BUDGET, FULL = 2048, 32768  # slots of a step, and tokens of full attention next to it
SIZES = ((1, BUDGET), (64, BUDGET), (1, 8192))  # batch and slots
L2 = 50e6  # bytes of the second-level cache of an H100
TILES = ("D", "GROUP", "ROWS", "SLOTS", "FEW", "PART", "SPLITS", "STATIC", "UNITS", "MASK")


def _size(count: float) -> str:
    for unit, size in (("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def _by_kernel(shape: Shape) -> dict[str, tuple[Traffic, float]]:
    """Traffic of each kernel, and how often it runs in a step."""
    dim = "d128 16bit"
    attend = launch.parameters(TARGET, "attend", f"few {dim}")
    splits = split_count(shape.batch * shape.heads, 1, shape.slots, attend["programs"], 2 * attend["slots"])
    block = 1 / shape.block
    return {
        f"attend, join ({splits} splits)": (traffic.attend(shape, attend, splits), 1.0),
        "write": (traffic.write(shape), 1.0),
        "write, when the block ends": (traffic.settle(shape), block),
        "fold (observe)": (traffic.observe(shape, launch.parameters(TARGET, "mass", dim)), block),
        "forecast (score)": (traffic.forecast(shape, launch.parameters(TARGET, "forecast", "all")), block),
        "smallest (select)": (traffic.select(shape, shape.block), block),
    }


def _upkeep(kernels: dict[str, tuple[Traffic, float]]) -> float:
    """Bytes a step must move beside attention's."""
    _attention, *others = kernels.values()
    return sum(moved.must * often for moved, often in others)


def target_table() -> str:
    """What is aimed at, as far as bytes tell."""
    ratios, upkeep, faster = [], [], []
    for batch, slots in SIZES:
        kernels = _by_kernel(Shape(batch=batch, slots=slots))
        attention = next(iter(kernels.values()))[0]
        ratios.append(attention.ratio)
        upkeep.append(_upkeep(kernels) / attention.must)
        if slots == BUDGET:
            full = traffic.attend(Shape(batch=batch, slots=FULL), {"rows": 16}, 1)
            faster.append(full.must / (attention.moves + _upkeep(kernels)))
    rows = [
        (
            "attention at 80% of a copy's bandwidth",
            f"its code moves {min(ratios):.2f} to {max(ratios):.2f} times what it must",
        ),
        ("upkeep at most 5% of attention's time", f"{min(upkeep):.1%} to {max(upkeep):.1%} of attention's bytes"),
        (
            f"a step with {BUDGET:,} slots 8 times as fast as full attention over {FULL:,}",
            f"{min(faster):.1f} to {max(faster):.1f} times fewer bytes",
        ),
    ]
    return docs.table(("target", "in bytes"), rows)


def traffic_table() -> str:
    """Bytes of one layer's decode step at Llama-3-8B's shape, for some batches and budgets."""
    rows: list[tuple[object, ...]] = []
    for batch, slots in SIZES:
        shape = Shape(batch=batch, slots=slots)
        kernels = _by_kernel(shape)
        attention = next(iter(kernels.values()))[0]
        for name, (moved, often) in kernels.items():
            share = f"{moved.must * often / attention.must:.2%}" if moved is not attention else ""
            rows.append(
                (
                    batch,
                    slots,
                    name,
                    _size(moved.must),
                    _size(moved.moves),
                    f"{moved.ratio:.2f}",
                    _size(moved.must * often),
                    share,
                )
            )
        extra = {"all but attention": _upkeep(kernels)}
        if attention.must < L2:
            extra["fold, keys still in the second-level cache"] = traffic.observe_cached(shape) / shape.block
        extra["instead of fold: mass gathered in every step"] = traffic.accumulating(shape)
        for what, added in extra.items():
            rows.append((batch, slots, what, "", "", "", _size(added), f"{added / attention.must:.2%}"))
    header = ("batch", "slots", "kernel", "must move", "code moves", "ratio", "must move a step", "of attention")
    return docs.table(header, rows)


def launch_table() -> str:
    """What a decode step launches, recorded by a dry launch at Llama-3-8B's shape."""
    import torch

    load = Workload(replace(Shape(), slots=2048), torch.bfloat16, "cpu", "triton")
    rows: list[tuple[object, ...]] = []
    for when, calls in (
        ("when a block begins", (load.forecast, load.select)),
        ("every step", (load.write, load.attend)),
        ("when a block ends", (load.settle, load.observe)),
    ):
        with dry.recording(TARGET) as launches:
            for call in calls:
                call()
        for one in launches:
            fixed = ", ".join(f"{name} {one.constants[name]}" for name in TILES if name in one.constants)
            options = one.options["num_warps"], one.options["num_stages"]
            rows.append((when, one.kernel, " x ".join(map(str, one.grid)), *options, fixed))
    return docs.table(("when", "kernel", "programs", "warps", "stages", "compiled for (among others)"), rows)
