"""The tables of docs/kernels.md that can be counted: bytes of each kernel, and launches of a decode step."""

from __future__ import annotations

from dataclasses import replace

from kvlearn.kernels import docs, dry, launch, traffic
from kvlearn.kernels.decode_attention.splits import split_count
from kvlearn.kernels.traffic import Shape, Traffic
from kvlearn.kernels.workloads import Workload

TARGET = "cuda:90"
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
        "fold (observe)": (traffic.observe(shape, launch.parameters(TARGET, "mass", dim)), block),
        "forecast (score)": (traffic.forecast(shape, launch.parameters(TARGET, "forecast", "all")), block),
        "smallest (select)": (traffic.select(shape, shape.block), block),
    }


def traffic_table() -> str:
    """Bytes of one layer's decode step at Llama-3-8B's shape, for some batches and budgets."""
    rows: list[tuple[object, ...]] = []
    for batch, slots in ((1, 2048), (64, 2048), (1, 8192)):
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
        upkeep = sum(moved.must * often for moved, often in kernels.values()) - attention.must
        rows.append((batch, slots, "all but attention", "", "", "", _size(upkeep), f"{upkeep / attention.must:.2%}"))
        added = traffic.accumulating(shape)
        what = "instead of fold: mass gathered in every step"
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
        ("when a block ends", (load.observe,)),
    ):
        with dry.recording(TARGET) as launches:
            for call in calls:
                call()
        for one in launches:
            fixed = ", ".join(f"{name} {one.constants[name]}" for name in TILES if name in one.constants)
            options = one.options["num_warps"], one.options["num_stages"]
            rows.append((when, one.kernel, " x ".join(map(str, one.grid)), *options, fixed))
    return docs.table(("when", "kernel", "programs", "warps", "stages", "compiled for (among others)"), rows)
