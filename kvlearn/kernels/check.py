"""Compile every kernel for every target, with no GPU: ``python -m kvlearn.kernels.check``.

Exit status 1 when a kernel does not compile, spills registers, takes more shared memory than its target has, or lacks
matrix instructions where it multiplies matrices.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from kvlearn.errors import KvlearnError
from kvlearn.kernels import docs

TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")

# Bytes of shared memory that one program may take. The table of cuda:80 also serves the cards with 99 KB.
SHARED = {"cuda:80": 101376, "cuda:90": 232448, "cuda:100": 232448, "hip:gfx942": 65536}


@dataclass(frozen=True)
class Result:
    """What the compiler made of one kernel of one family for one target.

    Attributes:
        registers: per thread (NVIDIA) or vector registers per lane (AMD).
        spills: registers kept in memory for want of room, in 32-bit words.
        shared: bytes of shared memory per program.
        warps: per program.
        matrix: matrix instructions in the binary.
        faults: what is wrong, in words.
    """

    family: str
    target: str
    kernel: str
    registers: int = 0
    spills: int = 0
    shared: int = 0
    warps: int = 0
    matrix: int = 0
    faults: tuple[str, ...] = ()


def cuda_resources(cubin: bytes) -> dict[str, int]:
    """Registers, spills and matrix instructions of a CUDA binary, by the tools in triton's wheel."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def ask(tool: str, option: str) -> str:
            return subprocess.run([tools / tool, option, file.name], check=True, capture_output=True, text=True).stdout

        usage = ask("cuobjdump", "--dump-resource-usage")
        code = ask("nvdisasm", "-c")
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": found["REG"],
        "spills": max(found["LOCAL"], found["STACK"]) // 4,
        "matrix": len(re.findall(r"\b(?:[HIDQ]G?MMA|UTC[A-Z]*MMA)\b", code)),
    }


def hip_resources(assembly: str) -> dict[str, int]:
    """Registers, spills and matrix instructions of AMD assembly."""

    def number(key: str) -> int:
        match = re.search(rf"\.{key}:\s*(\d+)", assembly)
        if match is None:
            raise ValueError(f"AMD assembly without .{key}")
        return int(match[1])

    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count") + number("sgpr_spill_count"),
        "matrix": len(re.findall(r"\bv_(?:s?mfmac?|wmma)_", assembly)),
    }


def judge(result: Result, dot: bool) -> tuple[str, ...]:
    """What is wrong with a compiled kernel."""
    faults = []
    if result.spills:
        faults.append(f"spills {result.spills} registers")
    if result.shared > SHARED.get(result.target, sys.maxsize):
        faults.append(f"takes {result.shared} bytes of shared memory of {SHARED[result.target]}")
    if dot and not result.matrix:
        faults.append("has no matrix instructions")
    return tuple(faults)


def compile_family(index: int, target: str) -> list[Result]:
    """Compile family number ``index``; one result per kernel that it launches."""
    from dataclasses import replace

    from kvlearn.kernels.dry import recording
    from kvlearn.kernels.families import families

    family = families()[index]
    try:
        with recording(target, compile=True) as launches:
            family.call()
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises is the finding
        said = (str(error).strip() or "no message").splitlines()[-1]
        return [Result(family.name, target, "?", faults=(f"{type(error).__name__}: {said}",))]
    results = []
    for i, launch in enumerate(launches):
        binary: Any = launch.binary
        own = cuda_resources(binary.asm["cubin"]) if "cubin" in binary.asm else hip_resources(binary.asm["amdgcn"])
        result = Result(
            family.name,
            target,
            launch.kernel,
            registers=own["registers"],
            spills=own["spills"],
            matrix=own["matrix"],
            shared=binary.metadata.shared,
            warps=binary.metadata.num_warps,
        )
        results.append(replace(result, faults=judge(result, family.dot and i == 0)))
    return results


def compile_all(targets: tuple[str, ...], only: str, workers: int) -> Iterator[Result]:
    """Compile every family whose name contains ``only``, in that order, for each target."""
    from kvlearn.kernels.families import families

    jobs = [(i, target) for i, family in enumerate(families()) if only in family.name for target in targets]
    with tempfile.TemporaryDirectory(prefix="kvlearn-check-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # nothing compiled before may pass for a result
        os.environ["OMP_NUM_THREADS"] = "1"
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            for results in pool.map(compile_family, *zip(*jobs, strict=True)):
                yield from results


def sections(results: list[Result]) -> dict[str, str]:
    """The tables of docs/kernels.md that this command writes."""
    from kvlearn.kernels import tables

    found: dict[tuple[str, str], dict[str, Result]] = {}
    for result in results:
        if result.kernel != "join" or result.family == "attend bf16 128":
            found.setdefault((result.family, result.kernel), {})[result.target] = result
    targets = sorted({result.target for result in results}, key=[*TARGETS, *(r.target for r in results)].index)
    rows = [
        (f"`{family}`", kernel, *(cell(own[target]) if target in own else "" for target in targets))
        for (family, kernel), own in found.items()
    ]
    registers = docs.table(("family", "kernel", *targets), rows)
    counted = {"targets": tables.target_table(), "bytes": tables.traffic_table(), "launches": tables.launch_table()}
    return {"registers": registers, **counted}


def cell(result: Result) -> str:
    """Registers, shared memory and matrix instructions of one kernel, or what is wrong with it."""
    if result.faults:
        return "; ".join(result.faults)
    return f"{result.registers} / {result.shared / 1024:.0f} KB / {result.matrix}"


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvlearn.kernels.check", description=__doc__.split("\n")[0])
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="default: %(default)s")
    parser.add_argument("--only", default="", help="families whose name contains this")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1), help="processes")
    parser.add_argument("--docs", type=Path, help="rewrite the tables of this Markdown file")
    options = parser.parse_args(arguments)
    if options.docs and (options.only or tuple(options.targets) != TARGETS):
        raise KvlearnError("--docs writes the tables of every family and target; leave out --only and --targets.")
    os.environ.pop("TRITON_INTERPRET", None)
    start, results = time.monotonic(), []
    for result in compile_all(tuple(options.targets), options.only, options.workers):
        results.append(result)
        print(
            f"{result.target:11} {result.family:46} {result.kernel:9} registers {result.registers:3} "
            f"shared {result.shared:6} matrix {result.matrix:4} {'; '.join(result.faults) or 'ok'}",
            flush=True,
        )
    bad = sum(bool(result.faults) for result in results)
    print(f"{len(results) - bad} kernels pass, {bad} fail, in {time.monotonic() - start:.0f} s")
    if not results:
        print(f"no family has {options.only!r} in its name", file=sys.stderr)
        return 2
    if options.docs:
        docs.rewrite(options.docs, sections(results))
    return 1 if bad else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KvlearnError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
