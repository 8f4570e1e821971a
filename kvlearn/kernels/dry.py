"""Launches without a GPU: what would run, and whether it compiles.

Inside :func:`recording` the public functions of :mod:`kvlearn.kernels` run with ``impl="triton"`` on CPU or meta
tensors up to the launch, which is recorded instead; outputs keep whatever their memory held.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvlearn.errors import KvlearnError
from kvlearn.kernels import launch


@dataclass(frozen=True)
class Launch:
    """One recorded launch.

    Attributes:
        kernel: the kernel's name.
        grid: programs along each axis.
        types: type of each argument that is passed at run time, such as ``"*bf16"`` or ``"i32"``.
        constants: arguments compiled into the kernel, those that are 1 included.
        aligned: arguments compiled as multiples of 16 (pointers: 16-byte aligned).
        options: ``num_warps`` and ``num_stages``.
        binary: what ``triton.compile`` returned, when compiling was asked for.
    """

    kernel: str
    grid: tuple[int, ...]
    types: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]
    options: dict[str, int]
    binary: Any = None

    @property
    def specialisation(self) -> tuple[Any, ...]:
        """What decides whether two launches share one compiled kernel; hashable."""
        items = (self.types, self.constants, self.options)
        return (self.kernel, *(tuple(sorted(item.items())) for item in items), self.aligned)


class _FakeDriver:
    """Answers only what a launch asks before it reaches the GPU."""

    def __init__(self, target: Any, device: int) -> None:
        self._target, self._device = target, device

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"a dry launch reached for the GPU driver's {name!r}")


def _gpu_target(name: str) -> Any:
    from triton.backends.compiler import GPUTarget

    backend, _, arch = name.partition(":")
    if backend == "cuda" and arch.isdecimal():
        return GPUTarget("cuda", int(arch), 32)
    if backend == "hip" and arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    raise KvlearnError(f"target {name!r} is not known; give one such as 'cuda:90' or 'hip:gfx942'.")


@contextmanager
def recording(target: str, compile: bool = False) -> Iterator[list[Launch]]:  # noqa: A002 - says it best
    """Record launches on ``target`` into the list that is returned.

    Args:
        target: ``"cuda:90"``, ``"hip:gfx942"``, ...
        compile: compile each launch (seconds each), so that what the compiler refuses raises here.

    Raises:
        KvlearnError: triton is missing or runs as an interpreter in this process, or the target is unknown.
    """
    if not launch.installed() or launch.interpreted():
        raise KvlearnError("a dry launch needs triton, and a process started without TRITON_INTERPRET.")
    from triton import knobs
    from triton.runtime import driver

    launches: list[Launch] = []
    compiled: list[dict[str, Any]] = []

    def on_compile(**event: Any) -> bool:
        compiled.append(event["compile"])
        return not compile  # True: go no further

    def record(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        kernel.device_caches.clear()  # so that every launch is seen
        binary = kernel.warmup(*args, grid=grid, **options)
        launches.append(_as_launch(kernel, grid, compiled.pop(), binary))

    previous = driver._active
    # Triton keeps what it knows of a kernel by device number, so each target gets its own.
    driver.set_active(_FakeDriver(_gpu_target(target), 1000 + zlib.crc32(target.encode()) % 10**6))
    launch.instead = record
    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = on_compile
        try:
            yield launches
        finally:
            launch.instead = None
            driver.set_active(previous)


def _as_launch(kernel: Any, grid: tuple[int, ...], compiled: dict[str, Any], binary: Any) -> Launch:
    names = kernel.arg_names
    constants = {names[path[0]]: value for path, value in compiled["constants"].items()}
    return Launch(
        kernel=kernel.__name__,
        grid=grid,
        types={name: str(kind) for name, kind in compiled["signature"].items() if name not in constants},
        constants=constants,
        aligned=tuple(names[path[0]] for path, attributes in compiled["configs"][0].items() if attributes),
        options={name: compiled[name] for name in ("num_warps", "num_stages")},
        binary=binary,
    )
