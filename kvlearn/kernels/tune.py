"""Choose launch parameters on this machine's GPU: ``python -m kvlearn.kernels.tune``.

Rewrites the GPU's table in ``launch.json``. Each family of shapes is measured at Llama-3-8B's sizes (8 KV heads of 4
query heads), one parameter at a time, twice over. Run ``python -m kvlearn.kernels.check`` afterwards: parameters that
are fast here must also fit the smaller cards that share a table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvlearn.errors import KvlearnError
from kvlearn.kernels import launch, timing
from kvlearn.kernels.traffic import Shape
from kvlearn.kernels.workloads import Workload

Call = Callable[[], object]
Timer = Callable[[Sequence[Call]], float]

# Values tried for each parameter; of one kernel, where its name comes first.
OPTIONS: dict[str, tuple[int, ...]] = {
    "slots": (16, 32, 64, 128, 256),
    "smallest slots": (256, 512, 1024, 2048),
    "rows": (16, 32, 64, 128),
    "queries": (16, 32),
    "others": (16, 32, 64),
    "units": (16, 32, 64),
    "inputs": (16, 32, 64),
    "pairs": (2048, 4096, 8192),
    "splits": (4, 8, 16, 32),
    "programs": (64, 128, 192, 256, 384, 512, 768, 1024),
    "num_warps": (1, 2, 4, 8),
    "num_stages": (1, 2, 3, 4),
}
_PASSES = 2
_RANKED = 1024  # victims: enough for the ranking kernel


def workload(kernel: str, family: str, device: str, seed: int) -> tuple[Workload, Call]:
    """Operands of one family, and the call that launches its kernel."""
    dims = {"d64": 64, "d128": 128, "d256": 256}
    words = family.split()
    dim = next((dims[word] for word in words if word in dims), 128)
    dtype = torch.float32 if "32bit" in words else torch.float16
    shape = Shape(dim=dim, element=dtype.itemsize)
    many = "many" in words
    own = Workload(
        replace(shape, slots=8192) if kernel == "rank" else shape, dtype, device, "triton", 32 if many else 1, seed
    )
    calls: dict[str, Call] = {
        "attend": own.attend,
        "join": own.attend,
        "mass": own.observe,
        "forecast": own.forecast,
        "smallest": own.select,
        "rank": lambda: own.select(_RANKED),
        "write": own.write,
    }
    return own, calls[kernel]


def options(kernel: str, name: str) -> tuple[int, ...]:
    """Values tried for a parameter of a kernel."""
    return OPTIONS.get(f"{kernel} {name}", OPTIONS[name])


def tune_family(
    target: str, kernel: str, family: str, calls: Sequence[Call], timer: Timer
) -> tuple[launch.Parameters, float]:
    """The fastest parameters found for one family, and their seconds; leaves them in the table in memory."""
    families = launch.table()[target][kernel]

    def measure(candidate: launch.Parameters) -> float:
        families[family] = candidate
        launch.parameters.cache_clear()
        try:
            return timer(calls)
        except Exception:  # noqa: BLE001 - parameters that do not compile or do not fit are merely not chosen
            return float("inf")

    best = families[family]
    least = measure(best)
    for _ in range(_PASSES):
        before = best
        for name in before:
            for value in options(kernel, name):
                candidate = {**best, name: value}
                if candidate == best:
                    continue
                took = measure(candidate)
                if took < least:
                    best, least = candidate, took
        if best == before:
            break
    families[family] = best
    launch.parameters.cache_clear()
    return best, least


def save(table: dict[str, Any], path: Path) -> None:
    """Write the table in place of ``path``, whole or not at all."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as file:
        file.write(as_text(table))
        file.flush()
        os.fsync(file.fileno())
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def as_text(table: dict[str, Any]) -> str:
    """The table as JSON with one family on a line."""
    targets = []
    for target, kernels in table.items():
        parts = []
        for kernel, families in kernels.items():
            lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(values)}" for name, values in families.items())
            parts.append(f"  {json.dumps(kernel)}: {{\n{lines}\n  }}")
        targets.append(f" {json.dumps(target)}: {{\n" + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(targets) + "\n}\n"


def tune(only: str, timer: Timer, device: str, path: Path) -> int:
    """Tune every family whose ``kernel family`` contains ``only``; returns how many."""
    target = launch.target()
    tables = launch.table()
    if target not in tables:
        tables[target] = json.loads(json.dumps(tables[launch.nearest(target, list(tables))]))
    count = 0
    for kernel, families in tables[target].items():
        for family in list(families):
            if only not in f"{kernel} {family}":
                continue
            own, _ = workload(kernel, family, device, 0)
            copies = timing.copies(own.size, most=8) if device == "cuda" else 1
            calls = [workload(kernel, family, device, seed)[1] for seed in range(copies)]
            before = families[family]
            best, took = tune_family(target, kernel, family, calls, timer)
            change = "unchanged" if best == before else f"was {before}"
            print(f"{target} {kernel:9} {family:18} {took * 1e6:8.1f} us {best} {change}", flush=True)
            save(tables, path)
            count += 1
    return count


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvlearn.kernels.tune", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="families whose 'kernel family' contains this, such as 'attend few'")
    given = parser.parse_args(arguments)
    try:
        if not torch.cuda.is_available():
            raise KvlearnError(
                "launch parameters are measured, and this machine has no GPU; run this where there is one."
            )
        count = tune(given.only, timing.seconds, "cuda", launch.TABLE)
        if count == 0:
            raise KvlearnError(f"no family's name contains {given.only!r}.")
    except KvlearnError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{launch.TABLE}: {count} families; now run python -m kvlearn.kernels.check")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
